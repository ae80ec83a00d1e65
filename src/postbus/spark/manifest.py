"""What a lake holds: a file of JSON for each segment, written last. What no entry names is not in the lake.

Needs no Spark: DuckDB and pyarrow read a lake through `Manifest(…).files()` too.
"""

# pyright: basic
# Arrow comes without types.
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from pyarrow import dataset, fs

from postbus.errors import Conflict, InvalidRequest, UnsafeStore
from postbus.model import Span, Stream

__all__ = ["Entry", "Folder", "Manifest"]

DATA: Final = "data"
ENTRIES: Final = "manifest"
MODULUS: Final = 1 << 64
DRAFTS: Final = (".spark-staging-", "_temporary")
"""How the folders begin in which Spark keeps what it has not finished writing."""
LOOKS: Final = 5
"""How often the entries are read anew when one of them goes meanwhile."""
_PATTERN: Final = re.compile(r"[*?\[\]{}\\]")
_PLACE: Final = re.compile(r".*/seg=s(\d+)[^/]*")
_SECRET: Final = re.compile(r"[\w+.-]+://[^/@]*:(?!\d+/).*@")


@dataclass(frozen=True, slots=True)
class Entry:
    """A segment: the rows with `after < id <= through`, in these files and no others."""

    segment: str
    log_id: str
    after: int
    through: int
    rows: int
    checksum: int
    """The sum of the rows' hashes: whatever their order, and additive when segments are joined."""
    files: tuple[str, ...]
    """Below the stream's folder."""
    bytes: int
    written_at: str
    generation: int = 0
    """How often it was rewritten; of two entries that cover the same rows, the higher one counts."""
    replaced: tuple[str, ...] = ()
    """Files that nobody needs any more but those who began to read before: removed later."""

    @property
    def days(self) -> tuple[str, ...]:
        """The days whose rows it holds."""
        return tuple(sorted({part[3:] for file in self.files for part in file.split("/") if part.startswith("dt=")}))

    @classmethod
    def read(cls, text: str) -> "Entry":
        """Read what `write` wrote; raise UnsafeStore for anything else."""
        try:
            found = json.loads(text)
            return cls(**{**found, "files": tuple(found["files"]), "replaced": tuple(found["replaced"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UnsafeStore(f"an entry of the lake's manifest makes no sense ({error!r:.80})") from None


class Folder:
    """A folder on this machine, on S3, on HDFS, wherever Arrow can go: `/data/lake`, `s3://bucket/lake`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name a folder; nothing is made until something is written."""
        text = os.fspath(path)
        if _SECRET.match(text):
            raise InvalidRequest(
                "a lake's URL holds no secret: give it by AWS_SECRET_ACCESS_KEY or such, and to Spark by its settings"
            )
        self.local = "://" not in text or text.startswith("file://")
        text = str(Path(text.removeprefix("file://")).absolute()) if self.local else text.rstrip("/")
        if _PATTERN.search(text):
            raise InvalidRequest(
                f"{text!r:.200}: Spark takes * ? [ ] {{ }} \\ for a pattern: name the folder without them"
            )
        self.url = text
        """As Spark takes it."""
        try:
            self._fs, self.path = fs.FileSystem.from_uri(text.replace("s3a://", "s3://", 1))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{text!r:.200} is no folder that can be reached ({error})") from None

    @property
    def is_there(self) -> bool:
        """Whether there is something of this name already."""
        return self._fs.get_file_info(self.path).type is not fs.FileType.NotFound

    def names(self, below: str) -> list[str]:
        """Return the names in a folder below, none if it is not there."""
        found = self._fs.get_file_info(fs.FileSelector(f"{self.path}/{below}", allow_not_found=True))
        return sorted(each.base_name for each in found)

    def walk(self, below: str) -> list[str]:
        """Return every file in a folder below and in those within it, none if it is not there."""
        selector = fs.FileSelector(f"{self.path}/{below}", allow_not_found=True, recursive=True)
        found = [each.path for each in self._fs.get_file_info(selector) if each.type is fs.FileType.File]
        return [path.removeprefix(f"{self.path}/") for path in found]

    def sizes(self, below: Sequence[str]) -> list[int]:
        """Return how large files are; raise UnsafeStore if one is not there."""
        found = self._fs.get_file_info([f"{self.path}/{each}" for each in below])
        for each in found:
            if each.type is not fs.FileType.File:
                raise UnsafeStore(f"{each.path} is gone from the lake: restore it from a backup")
        return [each.size or 0 for each in found]

    def read(self, below: str) -> bytes:
        """Return what a file holds."""
        with self._fs.open_input_stream(f"{self.path}/{below}") as stream:
            return stream.read()

    def write(self, below: str, text: str, *, new: bool = False) -> None:
        """Write a file that is there whole or not at all, on disk when this returns; `new`: raise Conflict if it is."""
        if not self.local:
            if new and self._fs.get_file_info(f"{self.path}/{below}").type is not fs.FileType.NotFound:
                raise Conflict(f"{self.url}/{below} was written by another process")
            with self._fs.open_output_stream(f"{self.path}/{below}") as stream:
                stream.write(text.encode())
            return
        path = Path(self.path) / below
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if new:
                try:
                    path.hardlink_to(draft)
                except FileExistsError:
                    raise Conflict(f"{path} was written by another process") from None
            else:
                draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        sync(path.parent)

    def remove(self, below: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.delete_file(f"{self.path}/{below}")

    def remove_folder(self, below: str) -> None:
        """Remove a folder and all in it, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.delete_dir(f"{self.path}/{below}")

    def flush(self, below: Sequence[str]) -> None:
        """Have files on disk, and the names of all folders on the way to them, up to where the lake's own lies.

        Elsewhere than on this machine they are when they are written.
        """
        if not self.local:
            return
        paths, root = [Path(self.path) / each for each in below], Path(self.path).parent.parent
        for each in paths:
            sync(each)
        for each in {folder for path in paths for folder in path.parents if folder.is_relative_to(root)}:
            with suppress(PermissionError):  # what we may not list, we have not made
                sync(each)

    def dataset(self, below: Sequence[str]) -> Any:
        """Return files as a pyarrow Dataset."""
        return dataset.dataset([f"{self.path}/{each}" for each in below], filesystem=self._fs)


class Manifest:
    """The segments of one stream of a lake."""

    def __init__(self, lake: str | os.PathLike[str], stream: Stream | str) -> None:
        """Look at a stream of a lake; one that was never written to is empty."""
        self.stream = Stream(stream)
        self.folder = Folder(f"{os.fspath(lake).rstrip('/')}/{self.stream}")

    def entries(self) -> list[Entry]:
        """Return the segments in order, each row in one of them; raise UnsafeStore where a range is missing."""
        found = sorted(self.all(), key=lambda each: (each.after, -each.generation))
        chain: list[Entry] = []
        for each in found:
            if not chain or each.after >= chain[-1].through:
                if chain and each.after != chain[-1].through:
                    raise UnsafeStore(
                        f"{self.folder.url} lacks the rows from {chain[-1].through + 1:,} to {each.after:,}: an entry "
                        "of its manifest is gone"
                    )
                chain.append(each)
            elif each.through > chain[-1].through:
                raise UnsafeStore(f"{self.folder.url}: segments {chain[-1].segment} and {each.segment} overlap")
        return chain

    def all(self) -> list[Entry]:
        """Return every entry, also those whose rows a later generation holds."""
        for _ in range(LOOKS):
            # A compaction beside this removes what it has joined: then what was read before is out of date too.
            with suppress(FileNotFoundError):
                return self._all()
        return self._all()

    def _all(self) -> list[Entry]:
        names = [each for each in self.folder.names(ENTRIES) if each.endswith(".json") and not each.startswith(".")]
        return [Entry.read(self.folder.read(f"{ENTRIES}/{each}").decode()) for each in names]

    @property
    def through(self) -> int | None:
        """How far the lake goes; None: it is empty."""
        entries = self.entries()
        return entries[-1].through if entries else None

    def files(self, *, since: str | None = None, until: str | None = None) -> list[str]:
        """Return the files that hold the lake's rows, whole paths; of some days (`2026-05-01`) only, if said."""
        return [f"{self.folder.path}/{each}" for each in self.chosen(since=since, until=until)]

    def chosen(self, *, since: str | None = None, until: str | None = None) -> list[str]:
        """Return the same below the stream's folder."""
        return [
            file
            for entry in self.entries()
            for file in entry.files
            if (since is None or _day(file) >= since) and (until is None or _day(file) <= until)
        ]

    def dataset(self) -> Any:
        """Return the lake's rows as a pyarrow Dataset."""
        return self.folder.dataset([file for entry in self.entries() for file in entry.files])

    def add(self, entry: Entry) -> None:
        """Let a new segment be part of the lake; raise Conflict if another process has added it."""
        self.folder.write(f"{ENTRIES}/{entry.segment}.json", _text(entry), new=True)

    def replace(self, entry: Entry) -> None:
        """Let a rewritten segment count instead of the one of its name, and of all that it covers."""
        self.folder.write(f"{ENTRIES}/{entry.segment}.json", _text(entry))

    def forget(self, entry: Entry) -> None:
        """Remove the entry of a segment whose rows another holds."""
        self.folder.remove(f"{ENTRIES}/{entry.segment}.json")

    def sweep(self, entry: Entry) -> None:
        """Remove the files that an entry has replaced."""
        for file in entry.replaced:
            self.folder.remove(file)
        if entry.replaced:
            self.replace(replace(entry, replaced=()))

    def tidy(self, span: Span | None = None) -> None:
        """Remove what killed writers left: Spark's drafts, and segments that no entry names.

        A segment goes if entries hold its rows, or the store whose `span` this is: any other may be the only copy.
        Whoever calls this holds the lake, or it takes away what another is just writing.
        """
        for name in self.folder.names(DATA):
            if name.startswith(DRAFTS):
                self.folder.remove_folder(f"{DATA}/{name}")
        entries, there = self.entries(), set(self.folder.walk(DATA))
        if not there.issuperset(file for each in entries for file in each.files):
            return  # part of the lake was lost: what no entry names may be what it is restored from
        named = {_place(file) for each in self.all() for file in (*each.files, *each.replaced)}
        for place in {_place(file) for file in there} - named:
            found = _PLACE.fullmatch(place)
            if found and _is_held(int(found[1]), entries, span):
                self.folder.remove_folder(place)


def _place(file: str) -> str:
    return file.rpartition("/")[0]


def _is_held(after: int, entries: Sequence[Entry], span: Span | None) -> bool:
    """Return whether the rows behind a position are in entries, or in the store still."""
    if entries and entries[0].after <= after < entries[-1].through:
        return True
    return span is not None and span.pruned <= after < span.head and {each.log_id for each in entries} <= {span.log_id}


def _text(entry: Entry) -> str:
    return json.dumps(asdict(entry), indent=1)


def _day(file: str) -> str:
    return file.partition("dt=")[2].partition("/")[0]


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
