"""What an attacker found: each of these once lost, stranded or doubled an event."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus import Event, EventBus, InvalidRequest, NotFound, RetryLater, Status, StoreUnavailable
from postbus.breaker import Breaker
from postbus.model import Done
from postbus.store.contract import Settled, Settlement
from postbus.store.sqlite.watch import FileWatch
from tests.kinds import on_sqlite


@pytest.mark.parametrize("statement", ["SAVEPOINT s", " rollback", "COMMIT;", "begin"])
def test_a_transaction_is_ended_by_its_block_alone(bus: EventBus, statement: str):
    """A savepoint taken back would leave a route that only memory knows, and events nobody could claim (I1)."""
    with pytest.raises(InvalidRequest, match="the block commits"), bus.transaction() as tx:
        tx.execute(statement)
    bus.publish("x.y")
    assert bus.poll() is not None


@on_sqlite
def test_a_statement_that_rolls_back_is_noticed(bus: EventBus):
    """What follows an automatic rollback is not stored one by one, outside any transaction (I2)."""
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE t (x PRIMARY KEY)")
        tx.execute("INSERT INTO t VALUES (1)")

    def publish_and_roll_back() -> None:
        with bus.transaction() as tx:
            bus.publish("x.y", connection=tx)
            tx.execute("INSERT OR ROLLBACK INTO t VALUES (1)")

    with pytest.raises((StoreUnavailable, apsw.ConstraintError)):
        publish_and_roll_back()
    assert bus.list().total == 0
    event = bus.publish("x.y")
    assert (bus.poll() or pytest.fail("it cannot be claimed")).id == event.id


def test_a_transaction_that_has_ended_takes_nothing(bus: EventBus):
    """Its connection belongs to others by then."""
    with bus.transaction() as tx:
        bus.publish("a", connection=tx)
    with pytest.raises(InvalidRequest, match="ended"):
        bus.publish("a", connection=tx)
    assert bus.list().total == 1


def test_a_slow_store_does_not_count_as_a_slow_handler(make_bus: Callable[..., EventBus]):
    """The handler returned in time; while its breaker waits for the store, the next handler is not skipped (S1.7)."""
    bus, other = make_bus(), make_bus()
    ran: list[str] = []
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with other.transaction():
            held.set()
            go_on.wait(10)

    holder = threading.Thread(target=hold)

    def fails(_: Event) -> None:
        ran.append("A")
        holder.start()
        held.wait(10)
        threading.Timer(0.8, go_on.set).start()
        raise ValueError("recorded")

    bus.subscribe("*", fails, timeout=0.3, breaker=Breaker(), on_error="record")
    bus.subscribe("*", lambda _: ran.append("B"))
    with bus:
        event = bus.publish("a", wait=True, timeout=20)
    holder.join(10)
    assert ran == ["A", "B"]
    assert event.status is Status.COMPLETED_WITH_ERRORS
    assert [error.type for error in event.errors] == ["ValueError"]


def test_a_delay_without_end_is_cut_to_a_century(bus: EventBus):
    """It is stored, shown, and holds up nobody (I10)."""

    @bus.on("*")
    def later(event: Event) -> None:
        if event.payload == "later":
            raise RetryLater(timedelta.max)

    with bus:
        far = bus.publish("a", "later")
        near = bus.publish("a", "now", wait=True, timeout=10)
        assert near.status is Status.COMPLETED
    with EventBus(bus.store.url) as again:
        found = again.get(far.id)
    assert (found.status, found.retry_count) == (Status.PENDING, 1)


@on_sqlite
def test_an_unreadable_event_dies_alone(bus: EventBus, tmp_path: Path):
    """Its neighbours in the batch run, it becomes a dead letter that says why, and the page still shows (I16)."""
    events = bus.publish_many([{"type": "a", "payload": number, "max_retries": 0} for number in range(5)])
    (path,) = tmp_path.glob("*.db")
    outside = apsw.Connection(str(path))
    outside.execute("UPDATE events SET payload = '7' WHERE id = ?", (events[2].id,))
    outside.close()
    ran: list[int] = []
    bus.subscribe("*", lambda event: ran.append(event.payload))
    with bus:
        bus.wait_idle(timeout=10)
        (letter,) = bus.dlq.list()
        assert sorted(ran) == [0, 1, 3, 4]
        assert (letter.event.id, letter.errors[0].type) == (events[2].id, "UnsafeStore")
        assert "damaged" in letter.event.metadata
        assert bus.list(status="COMPLETED").total == 4


@on_sqlite
def test_a_look_that_fails_does_not_end_the_worker(bus: EventBus, monkeypatch: pytest.MonkeyPatch):
    """One error while waiting is told and survived: events are claimed afterwards (I10)."""
    seen = FileWatch._version
    failures = iter([apsw.BusyError("now and then")])

    def sometimes(watch: FileWatch) -> int:
        for error in failures:
            raise error
        return seen(watch)

    bus.subscribe("*", lambda _: None)
    with bus:
        bus.publish("a", wait=True, timeout=10)
        monkeypatch.setattr(FileWatch, "_version", sometimes)
        assert bus.publish("a", wait=True, timeout=10).status is Status.COMPLETED


def test_shutting_down_from_within_a_shutdown_does_not_wait_for_itself(bus: EventBus):
    """A signal handler may ask for it a second time on the same thread (S1.14)."""
    answers: list[Any] = []
    close = bus.store.close

    def closing() -> None:
        answers.append(bus.shutdown())
        close()

    bus.store.close = closing  # type: ignore[method-assign]
    assert bus.shutdown() is True
    assert answers == [False]


def test_an_outcome_that_cannot_be_stored_becomes_a_dead_letter(bus: EventBus, monkeypatch: pytest.MonkeyPatch):
    """Its neighbours complete, also when the store is away in the midst of it: that alone buries nobody (I9, I10)."""
    settle = bus.store.settle
    away = iter([StoreUnavailable("away for a moment")])

    def picky(told: Sequence[Settlement]) -> list[Settled]:
        if len(told) == 1 and told[0].lease.event_id != 2 and (error := next(away, None)):
            raise error
        if any(each.lease.event_id == 2 and isinstance(each.outcome, Done) for each in told):
            raise OverflowError("no store can keep this")
        return settle(told)

    monkeypatch.setattr(bus.store, "settle", picky)
    events = bus.publish_many([{"type": "a"}] * 4)
    bus.subscribe("*", lambda _: None)
    with bus:
        bus.wait_idle(timeout=20)
        assert [bus.get(event.id).status for event in events] == [
            Status.COMPLETED,
            Status.FAILED,
            Status.COMPLETED,
            Status.COMPLETED,
        ]
        assert bus.get(2).last_error == "no store can keep this"


@pytest.mark.parametrize("options", [{"lease": -5}, {"lease": timedelta(days=3_600_000)}, {"tags": "abc"}])
def test_a_subscription_that_could_not_work_is_refused(bus: EventBus, options: dict[str, Any]):
    """Nothing is made."""
    with pytest.raises(InvalidRequest):
        bus.subscriptions.create("s", **options)
    assert [each.name for each in bus.subscriptions.list()] == ["default"]


def test_numbers_beyond_any_event_are_clean_errors(bus: EventBus):
    """Not an overflow from inside."""
    with pytest.raises(NotFound):
        bus.get(2**70)
    with pytest.raises(InvalidRequest):
        bus.dlq.list(limit=2**63)
    with pytest.raises(InvalidRequest):
        bus.dlq.list(after=str(2**63 - 1))
    with pytest.raises(NotFound):
        bus.list(subscription="nope")


def test_a_set_of_tags_makes_the_same_event_again(bus: EventBus):
    """A set has no order: two processes must not take a retry for another event (I3)."""
    tags = ["b", "a", "d", "c"]
    assert bus.publish("a", tags=set(tags), uid="u").id == bus.publish("a", tags=tags, uid="u").id  # type: ignore[arg-type]


def test_a_batch_too_large_for_memory_is_taken_in_parts(bus: EventBus):
    """What would take too much at once is handed back, with its attempt, and comes with the next claim (I10)."""
    bus.publish_many([{"type": "a", "payload": "x" * 900_000}] * 9)
    first = bus.poll_many(9)
    assert len(first) == 5
    assert [delivery.attempt for delivery in bus.poll_many(9)] == [1] * 4


def test_a_number_that_no_event_has_is_told_so_by_every_verb(bus: EventBus):
    """Beyond 64 bits too: an error of ours, the same on both stores, and nothing is made."""
    beyond = 1 << 70
    bus.publish("a")
    with pytest.raises(NotFound, match="there is no event"):
        bus.get(beyond)
    with pytest.raises(NotFound, match="there is no event"):
        bus.reset(beyond, "by hand")
    for verb in (bus.dlq.retry, bus.dlq.get):
        with pytest.raises(NotFound, match="not a dead letter"):
            verb(beyond)
    with pytest.raises(InvalidRequest, match="beyond the calendar"):
        bus.dlq.purge(beyond)
    for start in (beyond, -1, 2):
        with pytest.raises(InvalidRequest, match=r"start (at|is)"):
            bus.subscriptions.create("s", "*", start=start)
    assert [each.name for each in bus.subscriptions.list()] == ["default"]
    assert len(bus.poll_many(beyond)) == 1
