"""Facts about the machine, without which no figure means anything."""

import os
import platform
import sqlite3
import statistics
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import apsw

__all__ = ["facts", "fsync_seconds"]

PAGE: Final = b"\0" * 4096
TRIES: Final = 200
_PACKAGES: Final = (
    *("postbus", "apsw", "persist-queue", "huey", "litequeue"),
    *("psycopg", "pgqueuer", "procrastinate", "asyncpg", "uvloop", "eventsourcing"),
)


def facts(folder: Path, postgres: str | None, node: Mapping[str, str]) -> dict[str, Any]:
    """Return what the figures of this run depend on; `folder` is where the databases will be."""
    return {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "sqlite_of_apsw": apsw.sqlite_lib_version(),
        "sqlite_of_python": sqlite3.sqlite_version,
        "postgres": postgres,
        "packages": {name: version(name) for name in _PACKAGES} | dict(node),
        "fsync_ms": fsync_seconds(folder) * 1000,
    }


def fsync_seconds(folder: Path) -> float:
    """Return the median time to append 4 KiB to a file and have them on disk, as a commit must."""
    path = folder / "fsync"
    took: list[float] = []
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        for number in range(TRIES):
            began = time.perf_counter()
            os.pwrite(file, PAGE, number * len(PAGE))
            os.fdatasync(file)
            took.append(time.perf_counter() - began)
    finally:
        os.close(file)
        path.unlink()
    return statistics.median(took)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
