"""A WAL gets its room before it is needed, and what is written meanwhile stays what it is."""

import _thread
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus.payload import draft
from postbus.store.sqlite import connection, wal_size
from postbus.store.sqlite.connection import CHECKPOINT_PAGES
from postbus.store.sqlite.store import SqliteStore
from postbus.store.sqlite.wal_size import FRAME, IN_USE, grow
from postbus.testing import FrozenClock
from tests.conftest import Crew

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a WAL grows as it is needed")
SIZE = CHECKPOINT_PAGES * FRAME
Eventually = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    """Give an open store."""
    store = SqliteStore(tmp_path / "bus.db", FrozenClock())
    yield store
    store.close()


@pytest.fixture
def wal(tmp_path: Path, store: SqliteStore) -> Path:
    """Give its WAL."""
    del store
    return tmp_path / "bus.db-wal"


def publish(store: SqliteStore, count: int) -> None:
    """Publish events one at a time, of more than a page each."""
    for _ in range(count):
        store.publish([draft({"type": "a", "payload": "x" * 5_000})])


def after_a_crash(wal: Path) -> tuple[int, str]:
    """Return how many events whoever opens the files anew would find, as they are now, and what is wrong with them."""
    folder = wal.parent / "crashed"
    folder.mkdir()
    for name in ("bus.db", "bus.db-wal"):
        shutil.copy(wal.with_name(name), folder)
    survivor = apsw.Connection(str(folder / "bus.db"))
    found = survivor.execute("SELECT count(*) FROM events").get, survivor.execute("PRAGMA integrity_check").get
    survivor.close()
    return found


def test_a_wal_in_use_is_given_its_room_and_keeps_its_size(store: SqliteStore, wal: Path, eventually: Eventually):
    """From then on no commit makes the file larger; a crash finds behind the last one nothing that counts (I2)."""
    publish(store, IN_USE // 2)
    eventually(lambda: wal.stat().st_size >= SIZE, within=30)
    size = wal.stat().st_size
    publish(store, 100)
    assert wal.stat().st_size == size
    assert after_a_crash(wal) == (IN_USE // 2 + 100, "ok")


def test_a_wal_of_a_few_pages_is_left_small(
    store: SqliteStore, wal: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
):
    """A file that is opened for an event or two does not cost sixteen megabytes."""
    grown: list[Path] = []
    monkeypatch.setattr(wal_size, "begin_to_grow", lambda wal, _: grown.append(wal))
    publish(store, 10)
    assert wal.stat().st_size < IN_USE * FRAME
    publish(store, IN_USE // 2)
    assert grown == [wal]


def test_room_is_made_behind_whatever_is_written_meanwhile(
    store: SqliteStore, wal: Path, crew: Crew, monkeypatch: pytest.MonkeyPatch
):
    """Zeros and commits meet at the end of the file again and again, and no commit is written over (I2)."""
    monkeypatch.setattr(connection, "CHECKPOINT_PAGES", 1_000_000)
    monkeypatch.setattr(wal_size, "IN_USE", 1_000_000)
    monkeypatch.setattr(wal_size, "PIECE", bytes(64))
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    done = threading.Event()

    def crowd() -> int:
        made = 0
        while not done.is_set():
            before = wal.stat().st_size
            grow(wal, before + 1)
            made += wal.stat().st_size > before
        return made

    crew.start(crowd)
    publish(store, 1_500)
    done.set()
    assert crew.join(30)[0] > 1_000
    assert after_a_crash(wal) == (1_500, "ok")


def test_a_wal_that_is_cut_off_meanwhile_stays_so(wal: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever empties it wants it small."""

    def cut(file: int) -> None:
        if os.fstat(file).st_size > SIZE // 2:
            os.truncate(wal, 0)

    monkeypatch.setattr(os, "fdatasync", cut)
    grow(wal, SIZE)
    assert wal.stat().st_size == 0


def test_no_room_is_made_where_the_disk_has_little_left(wal: Path, monkeypatch: pytest.MonkeyPatch):
    """It must not take the last that others need."""
    before = wal.stat().st_size
    monkeypatch.setattr(wal_size, "SPARE", 1 << 60)
    grow(wal, SIZE)
    assert wal.stat().st_size == before


def test_no_room_is_made_where_the_file_is_gone(tmp_path: Path):
    """It makes no file of its own."""
    grow(tmp_path / "gone-wal", SIZE)
    assert not list(tmp_path.iterdir())


def test_a_file_that_goes_meanwhile_is_not_written_to_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last one to close the store removes its WAL."""
    kept = tmp_path / "kept-wal"
    kept.touch()
    pieces: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda _: pieces.append(1) or kept.unlink(missing_ok=True))
    grow(kept, SIZE)
    assert len(pieces) == 1


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_commit_holds_where_no_thread_is_to_be_had(
    store: SqliteStore, wal: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    """Room is a kindness: what was committed is told to be."""
    asked: list[Path] = []

    def refuse(_: Callable[..., None], arguments: tuple[Path, int]) -> None:
        asked.append(arguments[0])
        raise error

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    publish(store, IN_USE // 2)
    assert asked == [wal]
    assert after_a_crash(wal) == (IN_USE // 2, "ok")


LAST_WORDS = """
import sys
from postbus import EventBus

class Farewell:
    def __init__(self):
        self.bus = EventBus(sys.argv[1])
        self.bus.publish("hello")

    def __del__(self):
        self.bus.publish("farewell", "x" * 1_040_000)
        self.bus.shutdown()

sys.modules["farewell"] = Farewell()
"""


def test_what_is_published_at_a_program_s_end_is_stored_and_the_program_ends(tmp_path: Path):
    """No thread runs any more by then, so none is waited for."""
    url = f"sqlite:///{tmp_path}/bus.db"
    ended = subprocess.run([sys.executable, "-c", LAST_WORDS, url], capture_output=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    survivor = apsw.Connection(f"{tmp_path}/bus.db")
    assert survivor.execute("SELECT count(*) FROM events").get == 2
    survivor.close()
