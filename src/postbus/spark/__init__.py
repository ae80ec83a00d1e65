"""The pipeline on Spark: the log as a source and a sink, the lake, facts, reports, archive and replay.

`import postbus` never comes here: Spark is wanted only where it is used, `pip install 'postbus[spark]'`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postbus.spark.handling import handle
    from postbus.spark.lake import Lake
    from postbus.spark.launch import session
    from postbus.spark.sink import check

__all__ = ["Lake", "check", "handle", "session"]

_HOMES = {"Lake": "lake", "check": "sink", "handle": "handling", "session": "launch"}


def __getattr__(name: str) -> Any:
    """Find a public name in its module when it is first used: executors need not load what only drivers do."""
    if name in _HOMES:
        return getattr(import_module(f"postbus.spark.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
