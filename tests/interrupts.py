"""Exceptions that come from outside, at a chosen line: Ctrl-C, or what a signal handler raises."""

import dis
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
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


@contextmanager
def interrupted_at(line: int, error: type[BaseException], *modules: ModuleType) -> Generator[Callable[[], bool]]:
    """Raise at the given line of these modules, counted as this thread runs them; tell whether it got so far."""
    files = {each.__file__ for each in modules}
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and not ends_with_block(frame.f_code, frame.f_lasti):
            left -= 1
            if left == 0:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: left <= 0
    finally:
        sys.settrace(before)
