"""A disk that forgets: an apsw VFS that records what SQLite asks of the disk, and what a power cut leaves of it.

One run through `Recorder` gives the whole trace. `surviving` then tells, for a cut before any step of it, what a
disk may hold: all that was synced, and of the rest nothing (`DROP`), or an arbitrary part of it, down to single
sectors of a write (`TEAR`). The assumptions are those of a POSIX file system that promises no more than it must:

- data reaches the disk with an xSync of its own file, and may reach it sooner, in any order;
- a directory entry (a file made or removed) reaches the disk with the xSync of a journal or WAL, for which SQLite
  syncs the directory too, or with an xDelete that asks for it; it may reach it sooner;
- a sector of 512 bytes is written whole or not at all;
- the -shm file is memory, and gone.
"""

import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

__all__ = ["DROP", "KEEP", "TEAR", "Recorder", "Step", "surviving"]

SECTOR: Final = 512
DROP, TEAR, KEEP = "drop", "tear", "keep"


class Step(NamedTuple):
    """One thing asked of the disk: create, write, truncate, sync or delete."""

    verb: str
    file: str
    offset: int = 0
    data: bytes = b""
    sync_folder: bool = False


# ── recording ────────────────────────────────────────────────────────────────────────────────────────────────────


class Recorder(apsw.VFS):
    """Passes everything on to the real disk, and keeps a trace of it in `steps`."""

    def __init__(self, name: str = "recorder") -> None:
        """Register under a name that `apsw.Connection(vfs=…)` takes; `unregister` ends that."""
        self.steps: list[Step] = []
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> "RecordedFile":  # noqa: N802  SQLite's name
        """Open a file; one that is not there yet is made."""
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        if not path.exists():
            self.steps.append(Step("create", path.name))
        return RecordedFile(self.steps, path.name, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: FBT001, N802  SQLite's signature
        """Remove a file."""
        self.steps.append(Step("delete", Path(filename).name, sync_folder=bool(syncdir)))
        super().xDelete(filename, syncdir)


class RecordedFile(apsw.VFSFile):
    """A real file whose writes are recorded."""

    def __init__(self, steps: list[Step], file: str, name: Any, flags: list[int]) -> None:
        """Open it."""
        self._steps = steps
        self._file = file
        super().__init__("", name, flags)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802  SQLite's name
        """Write."""
        self._steps.append(Step("write", self._file, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802  SQLite's name
        """Cut the file short."""
        self._steps.append(Step("truncate", self._file, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802  SQLite's name
        """Bring the file to the disk."""
        super().xSync(flags)
        self._steps.append(Step("sync", self._file))


@contextmanager
def recording() -> Generator[Recorder]:
    """Give a recorder that is known to SQLite until the end of the block."""
    recorder = Recorder()
    try:
        yield recorder
    finally:
        recorder.unregister()


# ── the cut ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _File:
    """A file's content on the disk, and what was asked of it since it was last brought there."""

    durable: bytes = b""
    waiting: list[Step] = field(default_factory=list[Step])

    def sync(self) -> None:
        self.durable, self.waiting = _applied(self.durable, self.waiting), []


@dataclass
class _Disk:
    """Files by name, as programs see them and as the directory on the disk has them."""

    seen: dict[str, _File] = field(default_factory=dict[str, _File])
    entries: dict[str, _File] = field(default_factory=dict[str, _File])

    def take(self, step: Step) -> None:
        match step.verb:
            case "create":
                self.seen[step.file] = _File()
            case "delete":
                self.seen.pop(step.file, None)
                if step.sync_folder:
                    self.entries = dict(self.seen)
            case "sync":
                self.seen[step.file].sync()
                if step.file.endswith(("-wal", "-journal")):
                    self.entries = dict(self.seen)
            case _:
                self.seen[step.file].waiting.append(step)


class Disk:
    """Replays a trace step by step and tells at any point what a power cut would leave."""

    def __init__(self) -> None:
        """Begin with an empty disk."""
        self._disk = _Disk()

    def take(self, step: Step) -> None:
        """Carry out one step."""
        self._disk.take(step)

    def left(self, how: str, chance: random.Random) -> dict[str, bytes]:
        """Return the files after a cut now."""
        disk = self._disk
        if how == DROP:
            return {name: file.durable for name, file in disk.entries.items()}
        if how == KEEP:
            return {name: _applied(file.durable, file.waiting) for name, file in disk.seen.items()}
        names = sorted(disk.seen.keys() | disk.entries.keys())
        chosen = {name: _either(disk.entries.get(name), disk.seen.get(name), chance) for name in names}
        return {
            name: _applied(file.durable, list(_some(file.waiting, chance)))
            for name, file in chosen.items()
            if file is not None
        }


def surviving(steps: Sequence[Step], how: str, seed: str = "") -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield, for a cut before each step and after the last, how many steps were asked for and what is left."""
    disk = Disk()
    for count, step in enumerate((*steps, None)):
        yield count, disk.left(how, random.Random(f"{seed} {count}"))
        if step is not None:
            disk.take(step)


def _either(entry: _File | None, seen: _File | None, chance: random.Random) -> _File | None:
    return entry if entry is seen else chance.choice((entry, seen))


def _some(waiting: Sequence[Step], chance: random.Random) -> Iterator[Step]:
    """Yield an arbitrary part of what was asked for: whole writes, none, or some of their sectors."""
    for step in waiting:
        fate = chance.random()
        if fate < 0.4 or (step.verb == "truncate" and fate < 0.7):
            yield step
        elif fate < 0.7:
            yield from (each for each in _sectors(step) if chance.random() < 0.5)


def _sectors(step: Step) -> Iterator[Step]:
    position = step.offset
    end = step.offset + len(step.data)
    while position < end:
        following = min(end, (position // SECTOR + 1) * SECTOR)
        yield step._replace(offset=position, data=step.data[position - step.offset : following - step.offset])
        position = following


def _applied(content: bytes, steps: Sequence[Step]) -> bytes:
    if not steps:
        return content
    image = bytearray(content)
    for step in steps:
        if step.verb == "truncate":
            del image[step.offset :]
        else:
            if len(image) < step.offset:
                image.extend(bytes(step.offset - len(image)))
            image[step.offset : step.offset + len(step.data)] = step.data
    return bytes(image)
