"""Exceptions that come from outside, at a chosen line: Ctrl-C, or what a signal handler raises."""

import contextlib
import dis
import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any


class Interrupted(Exception):  # noqa: N818  what a signal handler raises
    """An alarm went off."""


@lru_cache
def ends_with_block(code: CodeType, offset: int) -> bool:
    """Return whether a line event stands for the end of a `with` block, before its lock is released.

    Python runs no signal handler there: from the last call inside the block to the lock's release nothing is checked.
    """
    ahead = [each for each in dis.get_instructions(code) if each.offset >= offset and each.opname != "SWAP"]
    return all(each.opname == "LOAD_CONST" and each.argval is None for each in ahead[:3])


def interrupted_at(
    line: int, error: type[BaseException], call: Callable[[], object], *modules: ModuleType
) -> tuple[bool, BaseException | None]:
    """Run a call, and raise at the given line of these modules and of contextlib, counted as this thread runs them.

    Return whether it got so far, and what it raised, as a console keeps that: with all its traceback leads to.
    """
    files = {each.__file__ for each in (contextlib, *modules)}
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if (event == "line" and not ends_with_block(frame.f_code, frame.f_lasti)) or (
            event == "return" and frame.f_code.co_name == "__enter__"  # a signal that came within the last call
        ):
            left -= 1
            if left == 0:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except (error, ArithmeticError) as caught:
        return left <= 0, caught
    finally:
        sys.settrace(before)
    return left <= 0, None
