"""Makes the recordings, area by area, and writes and reads their files."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.golden.code import record_logs, record_python, record_sql
from tests.golden.commands import record_commands
from tests.golden.normal import merged, of_store, written
from tests.golden.server import record_server
from tests.golden.shop import place
from tests.kinds import KINDS

__all__ = ["AREAS", "file_of", "read", "record", "write_all"]

HERE: Final = Path(__file__).parent


def _server(kind: str) -> dict[str, Any]:
    with place(kind) as site:
        return record_server(site)


def _commands(kind: str) -> dict[str, Any]:
    with place(kind) as site:
        return {"commands": record_commands(site)}


def _sql(kind: str) -> dict[str, Any]:
    with place(kind) as site:
        return {"sql": record_sql(site)}


def _code(_: str) -> dict[str, Any]:
    return {"python": record_python(), "logs": record_logs()}


RECORDERS: Final[Mapping[Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    _server: ("http", "openapi", "dashboard", "metrics"),
    _commands: ("commands",),
    _sql: ("sql",),
    _code: ("python", "logs"),
}
AREAS: Final = {
    **{area: KINDS for recorder in (_server, _commands) for area in RECORDERS[recorder]},
    "sql": ("postgres",),
    "python": ("sqlite",),
    "logs": ("sqlite",),
}
"""Each area, and on which kinds of store it is recorded: of the code itself, once is enough."""


@cache
def _recorded(recorder: Callable[[str], dict[str, Any]], kind: str) -> dict[str, Any]:
    return recorder(kind)


def record(area: str, kind: str) -> str:
    """Return an area of the present code on a kind of store, as text."""
    recorder = next(recorder for recorder, areas in RECORDERS.items() if area in areas)
    return written(_recorded(recorder, kind)[area])


def file_of(area: str) -> Path:
    """Return the file of an area."""
    return HERE / f"{area}.json"


def read(area: str, kind: str) -> str:
    """Return what an area's file says of a kind of store, as text."""
    return written(of_store(json.loads(file_of(area).read_text(encoding="utf-8")), kind))


def write_all() -> None:
    """Record every area anew, and write the files."""
    for area, kinds in AREAS.items():
        first, *others = (json.loads(record(area, kind)) for kind in kinds)
        whole = merged(first, *others) if others else first
        file_of(area).write_text(written(whole) + "\n", encoding="utf-8")
