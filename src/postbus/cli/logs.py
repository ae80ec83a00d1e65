"""How worker processes log: lines for people on a terminal, JSON otherwise, always on stderr."""

import logging
import os
import sys

import structlog

from postbus.observe import Told, bind_events, bound, logger

__all__ = ["log_to_stderr"]


def log_to_stderr() -> None:
    """Have what postbus logs, from INFO up, written to stderr; the root logger is the application's own.

    What is logged while a handler runs says at which event, and in which trace.
    """
    bind_events()
    terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        _bound,
        structlog.stdlib.ExtraAdder(),
        _name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(terminal=terminal)],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _bound(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Tell of the event at hand; what is logged explicitly goes before it."""
    return {**bound(), **entry}


def _name(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Have what postbus tells go by its constant name: the fields stand beside it anyway."""
    told = entry["_record"].msg
    return {**entry, "event": told[:]} if isinstance(told, Told) else entry


def _rendering(*, terminal: bool) -> list[structlog.typing.Processor]:
    if terminal:
        # Unasked, structlog would have rich show the local variables of every frame: URLs, tokens, payloads.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR"), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
