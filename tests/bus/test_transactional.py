"""Transactional handlers: what they write, what they publish and the event's end are stored together, or not at all."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import apsw
import pytest

from postbus import Breaker, Discard, Event, EventBus, InvalidRequest, RetryLater, RetryPolicy, Status
from postbus.observe import set_probe
from postbus.store.contract import Transaction
from postbus.store.sqlite.connection import Database
from postbus.testing import FrozenClock, drain
from tests.kinds import on_sqlite

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
ONCE = RetryPolicy(max_retries=0)
SOON = RetryPolicy(base_delay=0.01, max_delay=0.01)


@pytest.fixture
def gate() -> Any:
    """Give something to hang on, let go at the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture(autouse=True)
def _effects(bus: EventBus) -> None:
    """Have a table of one's own."""
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE effects (event_id INTEGER)")


def add(tx: Transaction, number: int) -> None:
    """Have an effect."""
    tx.execute(f"INSERT INTO effects VALUES ({number:d})")  # noqa: S608  a number, in any dialect


def effects(bus: EventBus) -> list[int]:
    """Return what was done."""
    with bus.transaction() as tx:
        return [row[0] for row in tx.execute("SELECT event_id FROM effects ORDER BY event_id")]


def actions(bus: EventBus, event: Event) -> list[str]:
    """Return what the audit log tells of an event."""
    return [row.action.value for row in bus.get(event.id, include_logs=True).logs]


# ── registering ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def awaited(event: Event, tx: Transaction) -> None:
    """Take an event, some time."""


def with_tx(event: Event, tx: Transaction) -> None:
    """Take an event and the transaction."""


def with_context(event: Event, ctx: Any) -> None:
    """Take an event and its context."""


def with_more(event: Event, tx: Transaction, other: Any) -> None:
    """Take what nobody gives."""


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (awaited, {"transactional": True}, "async"),
        (with_tx, {}, "transactional=True"),
        (with_tx, {"transactional": False}, "transactional=True"),
        (lambda _: None, {"transactional": True}, "parameter tx"),
        (with_context, {"transactional": True}, "parameter tx"),
        (print, {"transactional": True}, "parameter tx"),
        (with_more, {"transactional": True}, r"\(event, ctx, tx\)"),
        (with_tx, {"transactional": True, "on_error": "record"}, "record"),
        (with_tx, {"transactional": True, "timeout": None}, "timeout"),
    ],
)
def test_what_cannot_be_transactional_is_refused(bus: EventBus, function: Any, options: Any, reason: str):
    """When registering, with the reason: not at the first event, when nobody looks (S1.3)."""
    with pytest.raises(InvalidRequest, match=reason):
        bus.subscribe("*", function, **options)
    assert bus.handlers == ()


def test_it_is_called_the_way_it_is_written(bus: EventBus):
    """With ctx or without, in any order, by name (S1.3)."""
    seen: list[Any] = []
    for function in (
        lambda event, tx: seen.append((event.payload, type(tx).__name__)),
        lambda _, ctx, tx: seen.append((ctx.attempt, type(tx).__name__)),
        lambda _, tx, ctx: seen.append((ctx.attempt, type(tx).__name__)),
        lambda _, *, tx, ctx: seen.append((ctx.attempt, type(tx).__name__)),
    ):
        bus.subscribe("*", function, transactional=True)
    bus.publish("a", 7)
    drain(bus)
    assert [first for first, _ in seen] == [7, 1, 1, 1]
    assert {kind for _, kind in seen} == {"CallersTransaction"}


# ── together, or not at all ──────────────────────────────────────────────────────────────────────────────────────────


def test_effect_event_and_end_are_stored_together(bus: EventBus):
    """Once each, with one audit row for the end (S4.6, I9, I13)."""

    @bus.on("a", transactional=True)
    def handle(event: Event, tx: Transaction) -> None:
        add(tx, event.id)
        bus.publish("after", event.id, connection=tx)
        assert bus.list(type="after").total == 0

    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert event.status is Status.COMPLETED
        assert effects(bus) == [event.id]
        assert [each.payload for each in bus.list(type="after")] == [event.id]
        assert actions(bus, event) == ["PICKED", "COMPLETED"]


def test_what_fails_leaves_nothing_and_is_retried(bus: EventBus):
    """The failed attempts wrote and published; only the one that worked has left anything (S1.7, S4.6, I2)."""

    @bus.on("a", transactional=True, retry=SOON)
    def handle(event: Event, ctx: Any, tx: Transaction) -> None:
        add(tx, event.id)
        bus.publish("after", connection=tx)
        if ctx.attempt < 3:
            raise ValueError("not yet")

    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert (event.status, event.retry_count, event.last_error) == (Status.COMPLETED, 2, "not yet")
        assert effects(bus) == [event.id]
        assert bus.list(type="after").total == 1
        assert actions(bus, event) == ["PICKED", "FAILED", "PICKED", "FAILED", "PICKED", "COMPLETED"]


@pytest.mark.parametrize("error", [ValueError("no"), Discard("no"), RetryLater(0, "no"), SystemExit("no")], ids=repr)
def test_a_dead_letter_has_had_no_effect(bus: EventBus, error: BaseException):
    """After its last attempt the error is kept, and nothing else (S1.10, S4.6)."""

    @bus.on("a", transactional=True, retry=ONCE)
    def handle(event: Event, tx: Transaction) -> None:
        add(tx, event.id)
        raise error

    event = bus.publish("a")
    drain(bus)
    (letter,) = bus.dlq.list()
    assert (letter.event.id, letter.errors[0].message) == (event.id, "no")
    assert effects(bus) == []


def test_cancellation_is_undone_and_given_back(still: EventBus, clock: FrozenClock):
    """No attempt is burnt (S0.7)."""
    errors = iter([asyncio.CancelledError()])

    @still.on("a", transactional=True)
    def handle(event: Event, ctx: Any, tx: Transaction) -> None:
        add(tx, ctx.attempt)
        for error in errors:
            raise error

    event = still.publish("a")
    drain(still)
    assert effects(still) == [1]
    assert actions(still, event) == ["PICKED", "RELEASED", "PICKED", "COMPLETED"]


def test_transactional_handlers_run_last_and_share_one_transaction(bus: EventBus):
    """In order of registration; if the second fails, the first is undone, and what ran outside is not (S1.7, I2)."""
    ran: list[str] = []

    def inside(name: str, *, fails: bool = False) -> Callable[..., None]:
        def handle(event: Event, ctx: Any, tx: Transaction) -> None:
            ran.append(name)
            add(tx, event.id)
            if fails and ctx.attempt == 1:
                raise ValueError

        return handle

    async def between(_: Event) -> None:
        await asyncio.sleep(0)
        ran.append("async")

    bus.subscribe("a", inside("first"), transactional=True, retry=SOON)
    bus.subscribe("a", lambda _: ran.append("plain"))
    bus.subscribe("a", inside("second", fails=True), transactional=True, retry=SOON)
    bus.subscribe("a", between)
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert event.status is Status.COMPLETED
        assert effects(bus) == [event.id, event.id]
    assert ran == ["plain", "async", "first", "second"] * 2


def test_no_transaction_is_open_while_others_run(bus: EventBus):
    """A handler that does not take part may publish and wait for nobody, whatever was registered before it (I10)."""
    bus.subscribe("a", lambda event, tx: add(tx, event.id), transactional=True)
    bus.subscribe("a", lambda event: bus.publish("b", event.id), retry=ONCE)
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert event.status is Status.COMPLETED
        assert bus.list(type="b").total == 1


def test_recorded_errors_are_settled_with_the_transaction(bus: EventBus):
    """COMPLETED_WITH_ERRORS beside the effect (S2.4, S4.6)."""

    @bus.on("a", on_error="record")
    def complain(_: Event) -> None:
        raise ValueError("noted")

    bus.subscribe("a", lambda event, tx: add(tx, event.id), transactional=True)
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert (event.status, event.last_error) == (Status.COMPLETED_WITH_ERRORS, "noted")
        assert effects(bus) == [event.id]


def test_a_late_worker_leaves_no_effect(
    make_bus: Callable[..., EventBus], caplog: pytest.LogCaptureFixture, eventually: Any
):
    """Its delivery was reset before its transaction began: all it wrote is undone, the heir's stays (S4.6, I8, I9)."""
    late, heir = make_bus(worker_id="late"), make_bus(worker_id="heir")
    entered, go_on = threading.Event(), threading.Event()

    @late.on("a")
    def wait(_: Event) -> None:
        entered.set()
        go_on.wait(10)

    late.subscribe("a", lambda _, tx: (add(tx, -1), late.publish("stale", connection=tx)), transactional=True)
    heir.subscribe("a", lambda event, tx: add(tx, event.id), transactional=True)
    late.start()
    event = late.publish("a")
    assert entered.wait(10)
    late.subscriptions.pause("default")
    late.reset(event.id, "it hangs")
    with caplog.at_level(logging.WARNING, "postbus"):
        go_on.set()
        eventually(lambda: "lease_lost" in [record.msg for record in caplog.records])
        late.shutdown()
    heir.subscriptions.resume("default")
    assert drain(heir) == 1
    assert effects(heir) == [event.id]
    assert heir.list(type="stale").total == 0
    assert actions(heir, event) == ["PICKED", "RESET", "PICKED", "COMPLETED"]


# ── time and locks ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_past_its_timeout_it_is_undone_and_others_can_write(bus: EventBus, gate: threading.Event):
    """At the timeout, not when the thread comes back; what that does later is refused (S1.8, S4.6, I10)."""
    late: list[BaseException] = []
    threads: list[threading.Thread] = []

    @bus.on("a", transactional=True, timeout=0.2, retry=ONCE)
    def hang(event: Event, tx: Transaction) -> None:
        threads.append(threading.current_thread())
        add(tx, event.id)
        bus.publish("after", connection=tx)
        gate.wait(30)
        try:
            add(tx, event.id)
        except InvalidRequest as error:
            late.append(error)

    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert (event.status, event.errors[0].type) == (Status.FAILED, "TimeoutError")
        bus.publish("b")
        gate.set()
        threads[0].join(10)
        assert "ended" in str(late[0])
        assert effects(bus) == []
        assert bus.list(type="after").total == 0
        assert actions(bus, event) == ["PICKED", "FAILED"]


def test_a_statement_past_the_timeout_is_cut_off(bus: EventBus):
    """Nothing hangs on in the database (S1.8, I10)."""

    @bus.on("a", transactional=True, timeout=0.2, retry=ONCE)
    def hang(event: Event, tx: Transaction) -> None:
        add(tx, event.id)
        tx.execute(ENDLESS)

    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert event.errors[0].type == "TimeoutError"
        assert effects(bus) == []
        assert bus.publish("b").id


def test_waiting_for_the_lock_is_not_the_handlers_time(make_bus: Callable[..., EventBus]):
    """Eight that queue for longer than any of them may take all work at the first attempt (S1.8)."""
    bus = make_bus(concurrency=8, retry=ONCE)

    @bus.on("a", transactional=True, timeout=0.5)
    def handle(event: Event, tx: Transaction) -> None:
        add(tx, event.id)
        threading.Event().wait(0.15)

    events = bus.publish_many([{"type": "a"}] * 8)
    with bus:
        bus.wait_idle(timeout=20)
        assert effects(bus) == [event.id for event in events]
        told = [bus.get(event.id, include_logs=True).logs[-1] for event in events]
        assert {row.action.value for row in told} == {"COMPLETED"}
        assert max(row.execution_time_ms or 0 for row in told) < 500


def test_leases_are_kept_while_handlers_wait_for_the_lock(
    make_bus: Callable[..., EventBus], caplog: pytest.LogCaptureFixture
):
    """Ten queue for three times their lease; the other bus, which looks on, gets none (S2.5, I7, I11)."""
    one, two = make_bus(lease=0.6, concurrency=10, prefetch=10), make_bus(lease=0.6)
    ran: list[int] = []

    def handle(event: Event, tx: Transaction) -> None:
        ran.append(event.id)
        add(tx, event.id)
        threading.Event().wait(0.15)

    one.subscribe("a", handle, transactional=True)
    two.subscribe("a", handle, transactional=True)
    events = one.publish_many([{"type": "a"}] * 10)
    with caplog.at_level(logging.WARNING, "postbus"), one:
        while not ran:
            threading.Event().wait(0.01)
        with two:
            one.wait_idle(timeout=20)
        assert effects(one) == [event.id for event in events]
        assert all(actions(one, event) == ["PICKED", "COMPLETED"] for event in events)
    assert sorted(ran) == [event.id for event in events]
    assert [record.msg for record in caplog.records] == []


def test_a_heartbeat_does_not_miss_what_was_just_settled(bus: EventBus, caplog: pytest.LogCaptureFixture):
    """Between the commit and the worker's notice of it the lease is gone, and not lost (I8)."""
    beats: list[float] = []

    def beat(step: str) -> None:
        if step == "settled" and bus._worker is not None and not beats:
            beats.append(bus._worker._heartbeat_turn())

    bus.subscribe("a", lambda event, tx: add(tx, event.id), transactional=True)
    set_probe(beat)
    try:
        with bus, caplog.at_level(logging.WARNING, "postbus"):
            assert bus.publish("a", wait=True, timeout=10).status is Status.COMPLETED
    finally:
        set_probe(None)
    assert len(beats) == 1
    assert [record.msg for record in caplog.records] == []


@pytest.mark.parametrize(
    "use",
    [
        lambda bus, _: bus.publish("b"),
        lambda bus, _: bus.publish("b", wait=True),
        lambda bus, _: bus.transaction().__enter__(),
        lambda bus, ctx: bus.extend(ctx.delivery),
        lambda bus, ctx: bus.finalize(ctx.delivery),
        lambda _, ctx: ctx.extend(),
    ],
    ids=["publish", "wait", "transaction", "extend", "finalize", "ctx.extend"],
)
def test_what_would_wait_for_its_own_lock_is_refused(bus: EventBus, use: Any):
    """At once and with the reason: nobody waits for himself (I10)."""

    @bus.on("a", transactional=True, retry=ONCE)
    def handle(event: Event, ctx: Any, tx: Transaction) -> None:
        add(tx, event.id)
        use(bus, ctx)

    began = time.monotonic()
    with bus:
        event = bus.publish("a", wait=True, timeout=10)
        assert event.errors[0].type == "InvalidRequest"
        assert effects(bus) == []
        assert bus.list(type="b").total == 0
    assert time.monotonic() - began < 5


def test_a_shutdown_in_the_middle_undoes_and_hands_back(make_bus: Callable[..., EventBus], gate: threading.Event):
    """One hangs in its transaction, others wait for it: all are given back at once, none has an effect (S1.14, I10)."""
    bus, other = make_bus(concurrency=4, prefetch=6), make_bus()
    entered = threading.Event()

    @bus.on("a", transactional=True)
    def hang(event: Event, tx: Transaction) -> None:
        add(tx, event.id)
        entered.set()
        gate.wait(30)

    events = bus.publish_many([{"type": "a"}] * 6)
    bus.start()
    assert entered.wait(10)
    began = time.monotonic()
    bus.shutdown(timeout=0.3)
    assert time.monotonic() - began < 5
    assert effects(other) == []
    assert {actions(other, event)[-1] for event in events} == {"RELEASED"}
    other.subscribe("a", lambda event, tx: add(tx, event.id), transactional=True)
    drain(other)
    assert effects(other) == [event.id for event in events]
    assert {other.get(event.id).deliveries[0].attempt for event in events} <= {0, 1}


def test_a_shutdown_lets_a_running_transaction_finish(bus: EventBus):
    """Within its time, what has begun is stored (S1.14)."""
    entered = threading.Event()

    @bus.on("a", transactional=True)
    def slow(event: Event, tx: Transaction) -> None:
        entered.set()
        threading.Event().wait(0.3)
        add(tx, event.id)

    event = bus.publish("a")
    bus.start()
    assert entered.wait(10)
    assert bus.shutdown(timeout=10)
    again = EventBus(bus.store.url)
    assert effects(again) == [event.id]
    assert again.get(event.id).status is Status.COMPLETED
    again.shutdown()


# ── the store's faults ───────────────────────────────────────────────────────────────────────────────────────────────


@on_sqlite
@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored, but nobody heard"])
def test_a_commit_that_fails_burns_no_attempt_and_doubles_nothing(
    still: EventBus, monkeypatch: pytest.MonkeyPatch, *, stored: bool
):
    """Handed back: if the commit went through after all, that changes nothing (S1.17, S4.6, I9, I11)."""
    commit, failures = Database.commit, iter([apsw.FullError("database or disk is full")])
    ran: list[int] = []

    def failing(db: Database) -> None:
        for error in failures if ran else ():
            if stored:
                commit(db)
            raise error
        commit(db)

    @still.on("a", transactional=True, retry=ONCE)
    def handle(event: Event, ctx: Any, tx: Transaction) -> None:
        ran.append(ctx.attempt)
        add(tx, event.id)

    event = still.publish("a")
    monkeypatch.setattr(Database, "commit", failing)
    drain(still)
    assert effects(still) == [event.id]
    assert ran == ([1] if stored else [1, 1])
    expected = ["PICKED", "COMPLETED"] if stored else ["PICKED", "RELEASED", "PICKED", "COMPLETED"]
    assert actions(still, event) == expected


def test_what_the_commit_refuses_is_a_failed_attempt(bus: EventBus, kind: str):
    """A broken rule of the handler's own tables that is checked at the end: a dead letter that says so (S1.10)."""
    if kind == "sqlite":
        bus.store._database.pragma("foreign_keys", 1)  # pyright: ignore[reportAttributeAccessIssue]
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY)")
        tx.execute("CREATE TABLE orders (customer INTEGER REFERENCES customers DEFERRABLE INITIALLY DEFERRED)")

    @bus.on("a", transactional=True, retry=ONCE)
    def handle(_: Event, tx: Transaction) -> None:
        tx.execute("INSERT INTO orders VALUES (7)")

    event = bus.publish("a")
    drain(bus)
    assert bus.get(event.id).status is Status.FAILED
    assert "foreign key" in (bus.get(event.id).last_error or "").lower()
    with bus.transaction() as tx:
        assert tx.execute("SELECT count(*) FROM orders") == [(0,)]


def test_a_handler_that_hides_a_rollback_has_failed(bus: EventBus, kind: str):
    """Its transaction is gone: it is not completed, and does not come again for ever (I9, I12)."""
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE once (id INTEGER PRIMARY KEY)")
        tx.execute("INSERT INTO once VALUES (1)")

    @bus.on("a", transactional=True, retry=ONCE)
    def handle(event: Event, tx: Transaction) -> None:
        add(tx, event.id)
        with pytest.raises(Exception, match=r"(?i)unique"):
            tx.execute(f"INSERT {'OR ROLLBACK' if kind == 'sqlite' else ''} INTO once VALUES (1)")  # noqa: S608  two dialects

    event = bus.publish("a")
    drain(bus)
    assert bus.get(event.id).status is Status.FAILED
    assert kind != "sqlite" or "rolled back" in (bus.get(event.id).last_error or "")
    assert effects(bus) == []


def test_a_breaker_counts_transactional_handlers_too(still: EventBus, clock: FrozenClock):
    """It opens at a failure and closes when the probe has worked, though the store is theirs meanwhile (S1.20)."""
    answers = iter([False, True, True])

    @still.on("a", transactional=True, breaker=Breaker(failures=1, reset_after=30))
    def handle(event: Event, tx: Transaction) -> None:
        add(tx, event.id)
        if not next(answers):
            raise ConnectionError

    one, two = still.publish_many([{"type": "a"}] * 2)
    drain(still)
    assert (still.get(one.id).retry_count, still.get(two.id).retry_count) == (1, 0)
    assert effects(still) == []
    clock.advance(30)
    drain(still)
    assert effects(still) == [one.id, two.id]
