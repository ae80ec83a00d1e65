"""Context managers whose block ends even if the exception that cut it off is kept, as a console or a debugger does."""

import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def owned(function: Callable[P, Generator[R]]) -> Callable[P, AbstractContextManager[R]]:
    """Make a context manager of a generator, as contextmanager does, but one that no kept exception holds open.

    An interrupt within `__enter__` or `__exit__`, even before their first line, leaves the generator suspended. The
    traceback leads through their frames to a contextmanager's generator, which therefore does not end before the
    exception is dropped. Here the `with` statement alone refers to it: cut off, it drops it, and Python closes it at
    once, so that its `finally` runs. While anything can still end the block (a suspended function, a greenlet, an
    ExitStack), it is referred to, and stays open.
    """
    make = contextmanager(function)

    @wraps(function)
    def block(*args: P.args, **kwargs: P.kwargs) -> _Owned[R]:
        return _Owned(make(*args, **kwargs))

    return block


class _Exit(partial[bool | None]):
    """The bound `__exit__` that a `with` statement refers to until it returns; as it is C, no frame refers to it."""

    owns: Generator[Any] | None = None


class _BoundExit:
    """Makes an `__exit__` that can own the generator of its block."""

    def __get__(self, block: "_Owned[Any] | None", of: "type[_Owned[Any]]") -> Callable[..., bool | None]:
        if block is None:  # an ExitStack looks it up in the class, and refers to the block
            return of.leave
        bound = _Exit(block.manager.__exit__)
        block.exit = weakref.ref(bound)
        return bound


class _Owned(AbstractContextManager[R]):
    """One block; it owns its generator itself if it is not a `with` statement that enters it."""

    __exit__: Any = _BoundExit()

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.exit: Callable[[], _Exit | None] = lambda: None

    def __enter__(self) -> R:
        self._hand_over()
        return self.manager.__enter__()

    def _hand_over(self) -> None:
        """Give the generator, which has not begun, to the `with` statement: it looks up `__exit__` before it enters."""
        if (bound := self.exit()) is not None:  # a local variable here, for a traceback keeps those of `__enter__`
            bound.owns = self.manager.gen
            self.manager.gen = weakref.proxy(self.manager.gen)

    def leave(self, *error: Any) -> bool | None:
        """End the block."""
        return self.manager.__exit__(*error)
