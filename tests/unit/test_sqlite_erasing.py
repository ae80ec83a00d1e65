"""What is pruned or erased is gone from the bytes of the file too, not only from what SQLite shows."""

import logging
from datetime import timedelta
from pathlib import Path

import pytest

from postbus.model import AttemptError, Done, Retry, Stream
from postbus.payload import draft
from postbus.store.contract import Claim, Settlement
from postbus.store.sqlite import store as store_module
from postbus.store.sqlite.store import SqliteStore
from postbus.testing import FrozenClock

MARKER = "Ada-Lovelace"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a place for a file."""
    return tmp_path / "bus.db"


def worked(path: Path, size: int) -> SqliteStore:
    """Publish hundreds of events of somebody, each failing once with an error that quotes it, among those of others."""
    store = SqliteStore(path, FrozenClock())
    for number in range(0, 400, 20):
        store.publish(
            [
                draft({"type": "a", "key": "ada", "payload": MARKER + size * "x", "title": MARKER}),
                draft({"type": "a", "key": "bob", "payload": {"number": number}}),
            ]
            * 10
        )
    quoting = Retry(timedelta(0), AttemptError("ValueError", f"no such {MARKER}", traceback=MARKER * 9))
    while found := store.claim(Claim("default", "w", "o", limit=50)).deliveries:
        outcomes = (quoting if each.event.key == "ada" and each.attempt == 1 else Done() for each in found)
        store.settle([Settlement(each.lease, how, "w") for each, how in zip(found, outcomes, strict=True)])
    return store


def prune(store: SqliteStore, part: float) -> None:
    """Prune the first part of both streams."""
    for stream in Stream:
        store.prune(stream, after=0, through=int(part * store.span(stream).head))


def left(path: Path) -> int:
    """Count how often the marker stands in the files as they are now, whoever has them open."""
    files = (path, path.with_name(path.name + "-wal"))
    return sum(file.read_bytes().count(MARKER.encode()) for file in files)


@pytest.mark.parametrize("size", [10, 900, 9_000], ids=["cells", "pages", "overflow"])
@pytest.mark.parametrize("part", [0, 0.5], ids=["live", "archived"])
def test_no_byte_of_what_was_erased_is_left(path: Path, size: int, part: float):
    """Not in free pages, not in the slack of others, not in the WAL; archived before or not (P.5)."""
    store = worked(path, size)
    assert left(path)
    prune(store, part)
    store.erase(key="ada", ids=range(1, int(400 * part) + 1), actor="privacy")
    assert left(path) == 0
    store.close()


def test_no_byte_of_what_was_pruned_is_left(path: Path):
    """A pruned row is gone although nothing asked for it to be erased (P.5)."""
    store = worked(path, 900)
    prune(store, 1)
    assert left(path) == 0
    store.close()


def test_what_a_reader_holds_goes_when_it_is_done_again(path: Path):
    """Whoever reads on keeps the WAL for its time; nobody waits for it for long (P.5)."""
    store = worked(path, 900)
    with store._glance() as reader, reader.snapshot():
        reader.value("store_bytes")
        store.erase(key="ada", actor="privacy")
        assert left(path)
    store.erase(key="ada", actor="privacy")
    assert left(path) == 0
    store.close()


def test_a_large_file_is_not_rewritten(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Nobody could write meanwhile; that is said, and what was erased is still written over (P.5)."""
    monkeypatch.setattr(store_module, "LARGEST_REWRITTEN", 1_000)
    store = worked(path, 900)
    with caplog.at_level(logging.WARNING, "postbus"):
        store.erase(key="ada", actor="privacy")
    assert [record.msg for record in caplog.records] == ["file_not_rewritten"]
    assert left(path) == 0
    store.close()
