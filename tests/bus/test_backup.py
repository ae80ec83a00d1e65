"""A real backup, taken while the bus is at work, restored beside it and marked: both worlds tell each other apart."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus import EventBus, LeaseLost
from postbus.errors import NotFound
from postbus.store import log_of
from tests.postgres.server import server

MULTIPLE = 1_000_000_000


@contextmanager
def restored(kind: str, url: str, folder: Path) -> Generator[str]:
    """Back the bus up by its database's own means, while it is in use, and give the address of the restored one."""
    if kind == "sqlite":
        source, copy = apsw.Connection(url.removeprefix("sqlite:///")), apsw.Connection(str(folder / "restored.db"))
        with copy.backup("main", source, "main") as backup:
            backup.step()
        copy.close()
        source.close()
        yield f"sqlite:///{folder / 'restored.db'}"
        return
    dump = folder / "bus.dump"
    server().tool("pg_dump", "--format=custom", f"--file={dump}", url)
    with server().database(empty=True) as fresh:
        server().tool("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={fresh}", str(dump))
        yield fresh


@pytest.fixture
def at_work(make_bus: Callable[..., EventBus]) -> EventBus:
    """Give a bus with 50 events: 20 done, 1 leased, the others waiting."""
    bus = make_bus()
    bus.publish_many([{"type": "order.placed", "payload": n, "uid": f"o{n}"} for n in range(50)])
    for delivery in bus.poll_many(20):
        bus.finalize(delivery)
    return bus


def drained(bus: EventBus) -> list[Any]:
    """Handle all there is, and return the payloads."""
    payloads: list[Any] = []
    while (delivery := bus.poll()) is not None:
        payloads.append(delivery.event.payload)
        bus.finalize(delivery)
    return payloads


def open_marked(url: str) -> EventBus:
    """Open a restored bus and mark it."""
    bus = EventBus(url)
    log_of(bus.store).restore_mark("admin")
    return bus


def test_nothing_published_before_the_backup_is_lost(kind: str, url: str, at_work: EventBus, tmp_path: Path):
    """What was not finished is handled in the restored world, what was is not, and its history is there (I1, I9)."""
    held = at_work.poll()
    assert held is not None
    with restored(kind, url, tmp_path) as copy:
        bus = open_marked(copy)
        assert sorted(drained(bus)) == list(range(20, 50))
        assert [bus.get(n).status for n in range(1, 51)] == ["COMPLETED"] * 50
        assert [row.action for row in bus.get(held.id, include_logs=True).logs] == [
            "PICKED", "RESET", "PICKED", "COMPLETED",
        ]  # fmt: skip
        assert bus.publish("order.placed", 7, uid="o7").id == 8
        bus.shutdown()


def test_ids_given_after_the_backup_are_not_given_again(kind: str, url: str, at_work: EventBus, tmp_path: Path):
    """Events of the old world that the backup missed keep their ids to themselves (I4)."""
    with restored(kind, url, tmp_path) as copy:
        late = [event.id for event in at_work.publish_many([{"type": "late"}] * 200)]
        bus = open_marked(copy)
        mine = [event.id for event in bus.publish_many([{"type": "mine"}] * 200)]
        assert not set(late) & set(mine)
        assert min(mine) == MULTIPLE + 1
        for event_id in late[:3]:
            with pytest.raises(NotFound):
                bus.get(event_id)
        bus.shutdown()


def test_a_worker_of_the_old_world_cannot_settle_in_the_restored_one(
    kind: str, url: str, at_work: EventBus, tmp_path: Path
):
    """Neither with a lease from before the backup nor with one from after it, though all is claimed anew (I7, I8)."""
    before = at_work.poll()
    assert before is not None
    with restored(kind, url, tmp_path) as copy:
        after = at_work.poll_many(5)
        bus = open_marked(copy)
        claimed = bus.poll_many(100)
        assert {each.id for each in claimed} >= {before.id, *(each.id for each in after)}
        for stale in (before, *after):
            with pytest.raises(LeaseLost):
                bus.finalize(stale)
            with pytest.raises(LeaseLost):
                bus.extend(stale)
        assert {bus.get(each.id).status for each in claimed} == {"PROCESSING"}
        for delivery in claimed:
            bus.finalize(delivery)
        bus.shutdown()
    at_work.finalize(before)


def test_without_the_mark_an_old_lease_could_settle(kind: str, url: str, at_work: EventBus, tmp_path: Path):
    """The mark is what protects: a copy that was not marked takes the old world's word (I8)."""
    before = at_work.poll()
    assert before is not None
    with restored(kind, url, tmp_path) as copy:
        bus = EventBus(copy)
        bus.finalize(before)
        assert bus.publish("mine").id == at_work.publish("late").id
        bus.shutdown()


def test_marking_a_bus_that_is_at_work_loses_nothing(make_bus: Callable[..., EventBus], crew: Any):
    """Should somebody forget to stop the workers: each event still ends once, and who ran twice was reset (I9, I11)."""
    worker, publisher, admin = make_bus(concurrency=4), make_bus(), make_bus()
    ran: list[int] = []
    worker.subscribe("*", lambda event: ran.append(event.id))
    with worker:
        crew.start(lambda: [publisher.publish("a").id for _ in range(60)], count=4)
        for _ in range(3):
            log_of(admin.store).restore_mark("admin")
        ids = [event_id for published in crew.join(within=60) for event_id in published]
        worker.wait_idle(timeout=60)
    assert len(set(ids)) == 240
    for event_id in ids:
        actions = [row.action.value for row in admin.store.logs(event_id)]
        assert actions.count("COMPLETED") == 1
        assert ran.count(event_id) <= 1 + actions.count("RESET")
