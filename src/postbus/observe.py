"""What the bus tells about itself: log entries, and probes that tests can hold on to.

postbus logs through the standard library, under `postbus`: a constant event name and fields in `extra`. It never
touches the root logger; an application that does nothing special sees warnings and errors.
"""

import logging
from collections.abc import Callable

__all__ = ["logger", "probe", "set_probe"]

logger = logging.getLogger("postbus")

_hook: Callable[[str], None] | None = None


def set_probe(hook: Callable[[str], None] | None) -> None:
    """Have `hook` called at every named step of the bus in this process: crash tests end the process there."""
    global _hook  # noqa: PLW0603  one process, one hook
    _hook = hook


def probe(name: str) -> None:
    """Mark a step: publishing, committing, claimed, handled, settling, settled. Does nothing in production."""
    if _hook is not None:
        _hook(name)
