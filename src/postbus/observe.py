"""What the bus tells about itself: log entries, and probes that tests can hold on to.

postbus logs through the standard library, under `postbus`: a constant event name, and fields both in `extra` and in the
text shown. It never touches the root logger; an application that sets up no logging still sees warnings and errors.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar

__all__ = ["Told", "bind_events", "bound", "logger", "probe", "set_probe", "tell"]

logger = logging.getLogger("postbus")


class Told(str):
    """The name of something that happened; shown, it is followed by the fields that tell more."""

    __slots__ = ("fields",)
    fields: Mapping[str, object]

    def __str__(self) -> str:
        """Return the name and the fields that are known."""
        told = " ".join(f"{name}={value!r}" for name, value in self.fields.items() if value is not None)
        return f"{str.__str__(self)}: {told}"


def tell(level: int, name: str, /, error: BaseException | None = None, **fields: object) -> None:
    """Log something that happened, under a constant name; `error` adds its traceback."""
    told = Told(name)
    told.fields = fields
    logger.log(level, told, extra=fields, exc_info=error)


handling: ContextVar[Callable[[], Mapping[str, object]] | None] = ContextVar("postbus_handling", default=None)
"""Tells of the event whose handler runs in this context."""
binding = False
"""Whether anybody wants to know."""


def bind_events() -> None:
    """From now on, have `bound` tell of the event at hand; `postbus worker` does so for its own log."""
    global binding  # noqa: PLW0603  one process, one log
    binding = True


def bound() -> Mapping[str, object]:
    """Return what to log beside whatever a handler logs: event, type, attempt, subscription and trace, if known.

    Outside of handlers, and before `bind_events`, that is nothing.
    """
    fields = handling.get()
    return {} if fields is None else fields()


_hook: Callable[[str], None] | None = None


def set_probe(hook: Callable[[str], None] | None) -> None:
    """Have `hook` called at every named step of the bus in this process: crash tests end the process there."""
    global _hook  # noqa: PLW0603  one process, one hook
    _hook = hook


def probe(name: str) -> None:
    """Mark a step: publishing, committing, claimed, handled, settling, settled. Does nothing in production."""
    if _hook is not None:
        _hook(name)
