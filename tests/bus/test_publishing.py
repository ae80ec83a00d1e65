"""Publishing through the bus: refused input, waiting, and the caller's own transaction."""

import math
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postbus import EventBus, InvalidEventError, InvalidPayloadError, InvalidRequest, NewEvent, Status
from postbus.testing import FrozenClock, drain
from tests.conftest import Crew


def deep(levels: int) -> Any:
    """Return lists inside lists."""
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


BAD_PAYLOADS: dict[str, Any] = {
    "NaN": math.nan,
    "infinity": [math.inf],
    "NUL": {"a": "\0"},
    "lone surrogate": "\ud800",
    "number as key": {1: 1},
    "depth 1,000": deep(1_000),
    "2 MB": "x" * 2_000_000,
    "set": {1},
    "datetime": datetime(2026, 1, 1, tzinfo=UTC),
    "tuple": (1,),
    "5,000-digit integer": 10**5_000,
    "bytes": b"x",
}
BAD_EVENTS: dict[str, dict[str, Any]] = {
    "empty type": {"type": ""},
    "300-character type": {"type": "x" * 300},
    "tag with a comma": {"tags": ["a,b"]},
    "tags as text": {"tags": "a"},
    "at without a zone": {"at": datetime(2026, 1, 1)},  # noqa: DTZ001  the point of the test
    "delay and at": {"delay": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)},
    "priority 11": {"priority": 11},
    "metadata of numbers": {"metadata": {"a": 1}},
}


@pytest.mark.parametrize("payload", BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)
def test_a_payload_that_is_not_json_is_refused_and_nothing_is_stored(bus: EventBus, payload: Any):
    """By publish, by publish_many with good ones around it, and in a transaction (S1.16, I2)."""
    with pytest.raises(InvalidPayloadError):
        bus.publish("a", payload)
    with pytest.raises(InvalidPayloadError):
        bus.publish_many([{"type": "good"}, {"type": "bad", "payload": payload}, {"type": "good"}])
    with bus.transaction() as tx, pytest.raises(InvalidPayloadError):
        bus.publish("a", payload, connection=tx)
    assert bus.list().total == 0


@pytest.mark.parametrize("fields", BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_a_wrong_event_is_refused_and_nothing_is_stored(bus: EventBus, fields: dict[str, Any]):
    """Each with an error of its own kind (S1.16, I2)."""
    with pytest.raises(InvalidEventError):
        bus.publish(**{"type": "a", **fields})
    with pytest.raises(InvalidEventError):
        bus.publish_many([{"type": "good"}, {"type": "a", **fields}])
    assert bus.list().total == 0


def test_publish_returns_the_stored_event(bus: EventBus):
    """With its id, uid and status, readable at once (S0.1, S1.2, S2.1)."""
    event = bus.publish("order.placed", {"order_id": 7}, tags=["eu"], key="k", metadata={"a": "b"}, priority=2)
    stored = bus.get(event.id)
    assert (stored.id, stored.uid, stored.payload, stored.tags) == (event.id, event.uid, {"order_id": 7}, ("eu",))
    assert (event.status, event.retry_count) == (Status.PENDING, 0)


def test_publish_needs_no_payload(bus: EventBus):
    """None is kept as None."""
    assert bus.get(bus.publish("ping").id).payload is None


def test_publish_many_takes_events_and_mappings(bus: EventBus):
    """From any iterable, in order, each with its own options (I2)."""
    events = bus.publish_many(
        each for each in (NewEvent(type="a", payload=1), {"type": "b", "payload": 2, "tags": ["x"]})
    )
    assert [(event.type, event.payload) for event in events] == [("a", 1), ("b", 2)]
    assert bus.publish_many([]) == []


def test_publish_many_with_one_that_clashes_stores_none(bus: EventBus):
    """A uid that stands for another body takes all down (I2, I3)."""
    bus.publish("a", 1, uid="u")
    with pytest.raises(InvalidEventError):
        bus.publish_many([{"type": "b"}, {"type": "a", "payload": 2, "uid": "u"}])
    assert bus.list().total == 1


def test_the_same_uid_again_returns_the_first_event(bus: EventBus):
    """A producer may try again (I3)."""
    first = bus.publish("a", {"n": 1}, uid="order-7")
    assert bus.publish("a", {"n": 1}, uid="order-7").id == first.id
    assert bus.list().total == 1


def test_a_delay_and_a_moment_are_kept(still: EventBus, clock: FrozenClock):
    """Nothing is handled before its time, all of it afterwards (S2.2)."""
    ran: list[str] = []
    still.subscribe("*", lambda event: ran.append(event.type))
    still.publish("delayed", delay=timedelta(seconds=30))
    still.publish("at", at=clock.now() + timedelta(seconds=60))
    assert drain(still) == 0
    clock.advance(30)
    drain(still)
    clock.advance(30)
    drain(still)
    assert ran == ["delayed", "at"]


def test_higher_priority_goes_first(still: EventBus):
    """Ten before zero before minus ten."""
    ran: list[int] = []
    still.subscribe("*", lambda event: ran.append(event.priority))
    for priority in (0, -10, 10, 3):
        still.publish("a", priority=priority)
    drain(still)
    assert ran == [10, 3, 0, -10]


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_wait_returns_when_the_event_is_settled(bus: EventBus):
    """The answer tells how it ended (S1.2)."""
    bus.subscribe("good", lambda _: None)

    @bus.on("bad", retry={"max_retries": 0})
    def fail(_: object) -> None:
        raise ValueError("no")

    with bus:
        assert bus.publish("good", wait=True, timeout=10).status is Status.COMPLETED
        assert bus.publish("bad", wait=True, timeout=10).status is Status.FAILED


def test_wait_covers_every_subscription_handled_here(bus: EventBus):
    """It returns after the slower one (S1.2)."""
    ended: list[str] = []
    gate = threading.Event()
    bus.subscribe("*", lambda _: ended.append("default"))

    @bus.on("*", subscription="slow")
    def slow(_: object) -> None:
        gate.wait(10)
        ended.append("slow")

    with bus:
        crew = Crew()
        crew.start(lambda: bus.publish("a", wait=True, timeout=10))
        threading.Timer(0.2, gate.set).start()
        crew.join()
    assert sorted(ended) == ["default", "slow"]


def test_wait_gives_up_after_its_timeout_and_the_event_stays(bus: EventBus):
    """TimeoutError, and the event is handled all the same (S1.2)."""
    gate, done = threading.Event(), threading.Event()

    @bus.on("*")
    def slow(_: object) -> None:
        gate.wait(10)
        done.set()

    with bus:
        with pytest.raises(TimeoutError, match="stays published"):
            bus.publish("a", wait=True, timeout=0.1)
        gate.set()
        assert done.wait(10)


@pytest.mark.parametrize("handled", [False, True])
def test_wait_without_anybody_to_handle_it_is_refused_and_nothing_is_stored(bus: EventBus, *, handled: bool):
    """With no handler, or with a bus that is not started, it could never return (S1.2)."""
    if handled:
        bus.subscribe("*", lambda _: None)
    with pytest.raises(InvalidRequest):
        bus.publish("a", wait=True)
    assert bus.list().total == 0


def test_wait_cannot_be_had_inside_a_transaction(bus: EventBus):
    """The event does not exist before the commit."""
    bus.subscribe("*", lambda _: None)
    with bus:
        with bus.transaction() as tx, pytest.raises(InvalidRequest):
            bus.publish("a", wait=True, connection=tx)
        assert bus.list().total == 0


# ── the caller's transaction ─────────────────────────────────────────────────────────────────────────────────────────


OWN = {
    "sqlite": ("INSERT INTO orders VALUES (1, ?)", "SELECT item FROM orders WHERE id = :id"),
    "postgres": ("INSERT INTO orders VALUES (1, %s)", "SELECT item FROM orders WHERE id = %(id)s"),
}


def test_events_and_ones_own_rows_commit_together(bus: EventBus, kind: str):
    """An outbox without an outbox; placeholders are those of the database's driver (I2)."""
    insert, select = OWN[kind]
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    with bus.transaction() as tx:
        tx.execute(insert, ("book",))
        event = bus.publish("order.placed", {"item": "book"}, connection=tx)
        many = bus.publish_many([{"type": "a"}, {"type": "b"}], connection=tx)
    assert bus.get(event.id).type == "order.placed"
    assert [each.id for each in many] == [event.id + 1, event.id + 2]
    with bus.transaction() as tx:
        assert tx.execute(select, {"id": 1}) == [("book",)]


def test_neither_events_nor_rows_stay_if_it_raises(bus: EventBus):
    """And the bus goes on working (I2)."""
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")

    def fail() -> None:
        with bus.transaction() as tx:
            tx.execute("INSERT INTO orders VALUES (1)")
            bus.publish("order.placed", connection=tx)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert bus.list().total == 0
    with bus.transaction() as tx:
        assert tx.execute("SELECT id FROM orders") == []
    bus.publish("after")


def test_a_running_worker_takes_up_what_a_transaction_published(bus: EventBus):
    """It is woken by the commit, not by the next poll."""
    done = threading.Event()
    bus.subscribe("*", lambda _: done.set())
    with bus:
        with bus.transaction() as tx:
            bus.publish("a", connection=tx)
            assert not done.is_set()
        assert done.wait(10)


def test_forgetting_to_pass_the_transaction_is_told(bus: EventBus, crew: Crew):
    """Not hung: the message says what to pass."""

    def forget() -> None:
        with bus.transaction():
            bus.publish("a")

    crew.start(forget)
    with pytest.raises(InvalidRequest, match="connection=tx"):
        crew.join()


def test_a_statement_that_is_wrong_is_the_callers_error(bus: EventBus):
    """What SQLite says of the caller's own SQL reaches the caller, and nothing stays (I2)."""

    def wrong() -> None:
        with bus.transaction() as tx:
            bus.publish("a", connection=tx)
            tx.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(Exception, match="nowhere"):
        wrong()
    assert bus.list().total == 0


def test_two_buses_on_one_file_share_everything(make_bus: Callable[..., EventBus]):
    """What one publishes, the other handles, at once and not at the next poll (S1.2)."""
    one, two = make_bus(), make_bus(poll_interval=30)
    done = threading.Event()
    two.subscribe("*", lambda _: done.set())
    with two:
        one.publish("a")
        assert done.wait(5)
