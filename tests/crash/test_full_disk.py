"""A full disk: refused with a clear error, nothing half stored, and on again once there is room."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus import EventBus, NewEvent, StoreUnavailable
from tests.crash.processes import Trial


@pytest.mark.parametrize("limit", [400_000, 1_000_000])
def test_a_process_at_its_file_size_limit_acknowledges_only_what_it_stores(file_trial: Trial, limit: int):
    """The kernel refuses a write: StoreUnavailable, all acknowledged readable, and on once lifted (I1, I2, I16)."""
    child = file_trial.start("fill", name="big", limit=limit)
    told = child.hear()
    assert child.wait() == 0, child.errors()
    assert told["refused"] == ["StoreUnavailable", "StoreUnavailable"]
    assert told["resumed"] < 10
    journal = file_trial.journal()
    assert len(journal.acknowledged) > 12
    assert told["readable"] == len(journal.acknowledged) - 10
    assert file_trial.verdicts(drained=False) == []
    assert sorted(file_trial.database().events.values()) == sorted(journal.acknowledged), "a refused event was stored"


class Crowded(apsw.VFS):
    """A disk with so many bytes left, as SQLite sees it: ENOSPC after the first part of a write."""

    def __init__(self) -> None:
        """Register."""
        self.left = 1 << 40
        super().__init__("crowded", "")

    def xOpen(self, name: Any, flags: list[int]) -> "CrowdedFile":  # noqa: N802  SQLite's name
        """Open a file on this disk."""
        return CrowdedFile(self, name, flags)


class CrowdedFile(apsw.VFSFile):
    """A real file that may grow only as far as its disk allows."""

    def __init__(self, disk: Crowded, name: Any, flags: list[int]) -> None:
        """Open it."""
        self._disk = disk
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802  SQLite's name
        """Write what there is room for; refuse the rest."""
        growth = max(0, offset + len(data) - self.xFileSize())
        if growth > self._disk.left:
            super().xWrite(data[: len(data) // 2], offset)
            raise apsw.FullError("no space left on device")
        self._disk.left -= growth
        super().xWrite(data, offset)


@contextmanager
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowded]:
    """Let every connection that is opened within the block use a disk of limited size."""
    disk = Crowded()
    monkeypatch.setattr(apsw, "Connection", functools.partial(apsw.Connection, vfs="crowded"))
    try:
        yield disk
    finally:
        monkeypatch.undo()
        disk.unregister()


@pytest.mark.parametrize("room", range(0, 40_000, 1_900))
def test_a_full_disk_refuses_every_verb_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int):
    """ENOSPC in the middle of any write: StoreUnavailable, nothing changed, reading goes on, then on (I1, I2, I16)."""
    with crowded(monkeypatch) as disk:
        bus = EventBus(f"sqlite:///{tmp_path / 'bus.db'}")
        known = [bus.publish("trial.event", {"number": number}).uid for number in range(20)]
        held = bus.poll_many(5)
        disk.left = room
        known += publish_until_refused(bus)
        assert stored(bus) == known
        with pytest.raises(StoreUnavailable, match="full"):
            bus.publish_many([NewEvent(type="trial.batch", payload="x" * 3_000) for _ in range(20)])
        assert stored(bus) == known

        disk.left = 1 << 40
        for delivery in held:
            bus.finalize(delivery, success=True)
        known.append(bus.publish("trial.event").uid)
        assert stored(bus) == known
        assert [each.id for each in bus.poll_many(1)] == [6]
        assert bus.stats().subscriptions[0].completed == 5
        bus.shutdown()
    check = apsw.Connection(str(tmp_path / "bus.db"))
    assert check.pragma("integrity_check") == "ok"
    check.close()


def publish_until_refused(bus: EventBus) -> list[str]:
    """Publish until the disk is full; return the uids that were acknowledged."""
    uids: list[str] = []
    try:
        while len(uids) < 100:
            uids.append(bus.publish("trial.event", "x" * 700).uid)
    except StoreUnavailable:
        assert stored(bus)[-len(uids) :] == uids or not uids
    assert len(uids) < 100, "it was never refused"
    return uids


def stored(bus: EventBus) -> list[str]:
    """Return the uids in the log, oldest first."""
    return [event.uid for event in bus.list(limit=1_000)][::-1]
