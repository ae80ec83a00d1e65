"""What the processes of a trial did, as they saw it: a line before each call and one after it, as JSON.

A call that was begun and never answered (its process was killed) may have happened or not, and so may one whose answer
says so (`unknown`). `ok` and `fail` are certain.
"""

import json
import os
import re
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from postbus.errors import OutcomeUnknown, PostbusError, StoreUnavailable

__all__ = ["FAIL", "INVOKE", "OK", "UNKNOWN", "Abort", "Entry", "History", "answers", "read"]

INVOKE: Final = "invoke"
OK: Final = "ok"
FAIL: Final = "fail"
UNKNOWN: Final = "unknown"
CALLS: Final = frozenset({"publish", "settle"})
"""What asks the bus for something, and so has an answer."""
_BEGINS: Final = re.compile(r'\{"at": [0-9.e+-]+, "who": ')


class Entry(NamedTuple):
    """One line: when (on the machine's steady clock), who, what, how it stands, and what else there is to tell."""

    at: float
    who: str
    pid: int
    op: str
    kind: str
    told: dict[str, Any]


class History:
    """Writes one process's part: a line is one write to the end of the file, and outlives the process."""

    def __init__(self, path: str | Path, who: str) -> None:
        """Write to a file, which others may write to as well."""
        self.path = Path(path)
        self.who = who

    def note(self, op: str, kind: str, **told: Any) -> None:
        """Write a line down."""
        entry = {"at": round(time.monotonic(), 6), "who": self.who, "pid": os.getpid(), "op": op, "kind": kind, **told}
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(handle)

    @contextmanager
    def calling(self, op: str, **told: Any) -> Generator[dict[str, Any]]:
        """Write down a call and how it ended; what is put into the dictionary is told with its answer.

        The error is raised again. Only OutcomeUnknown leaves open whether a publish happened; of other calls nobody is
        told that they did not where the store is away.
        """
        self.note(op, INVOKE, **told)
        answer: dict[str, Any] = {}
        try:
            yield answer
        except StoreUnavailable as error:
            known = op == "publish" and not isinstance(error, OutcomeUnknown)
            self.note(op, FAIL if known else UNKNOWN, **told, error=str(error))
            raise
        except (PostbusError, Abort) as error:
            self.note(op, FAIL, **told, error=f"{type(error).__name__}: {error}")
            raise
        self.note(op, OK, **told, **answer)


class Abort(Exception):  # noqa: N818  not an error: somebody changed his mind
    """Raised in a transaction that is to be undone."""


def read(files: Iterable[Path]) -> list[Entry]:
    """Return what was written down, in the order of time."""
    return sorted(_entries(files), key=lambda entry: entry.at)


def answers(history: Iterable[Entry]) -> list[Entry]:
    """Return how each call ended; one that nobody answered, for its process was killed, is `unknown` when it began."""
    ended: list[Entry] = []
    begun: dict[tuple[str, int, str, str], Entry] = {}
    for entry in history:
        if entry.op not in CALLS:
            if entry.kind != INVOKE:
                ended.append(entry)
            continue
        key = (entry.who, entry.pid, entry.op, str(entry.told.get("uids") or entry.told.get("epoch")))
        if entry.kind == INVOKE:
            begun[key] = entry
        else:
            begun.pop(key, None)
            ended.append(entry)
    return sorted([*ended, *(each._replace(kind=UNKNOWN) for each in begun.values())], key=lambda entry: entry.at)


def _entries(files: Iterable[Path]) -> Iterator[Entry]:
    for file in files:
        if not file.exists():
            continue
        for line in file.read_text().splitlines(keepends=True):
            # A process can die within its last line, and another's follows on it, where several write to one file: what
            # it would have told is then not known.
            if line.endswith("\n"):
                *_, begins = _BEGINS.finditer(line)
                told = json.loads(line[begins.start() :])
                at, who, pid, op, kind = (told.pop(name) for name in ("at", "who", "pid", "op", "kind"))
                yield Entry(at, who, pid, op, kind, told)
