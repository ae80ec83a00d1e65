"""Followers and their checkpoints: in the transaction of the handler's writes, or some at a time."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from postbus import (
    CheckpointMode,
    Context,
    Discard,
    Event,
    EventBus,
    InstanceMode,
    Status,
)
from postbus.store.contract import Claim, Claimed, Transaction
from tests.bus.following import (
    LONG,
    ONCE,
    QUICK,
    Eventually,
    Make,
    actions,
    collect,
    publish,
    stand,
)

pytestmark = pytest.mark.usefixtures("brisk")


# ── effects and checkpoints in one transaction ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def effects(bus: EventBus) -> Callable[[], list[int]]:
    """Have a table of one's own, and give what stands in it."""
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE effects (event_id INTEGER)")

    def look() -> list[int]:
        with bus.transaction() as tx:
            return [row[0] for row in tx.execute("SELECT event_id FROM effects ORDER BY event_id")]

    return look


def add(tx: Transaction, event: Event) -> None:
    """Have an effect."""
    tx.execute(f"INSERT INTO effects VALUES ({event.id:d})")  # noqa: S608  a number, in any dialect


def ids(events: Sequence[Event]) -> list[int]:
    """Return the events' ids."""
    return [each.id for each in events]


def test_effects_and_checkpoint_commit_together(
    bus: EventBus, make_bus: Make, effects: Callable[[], list[int]], probes: Any
):
    """Until the end of its transaction nobody sees that the event is passed (S4.6, I6)."""
    other, positions = make_bus(), list[int]()
    events = publish(bus, 0, 1, 2)

    @bus.follow("s")
    def handle(event: Event, tx: Transaction) -> None:
        add(tx, event)
        bus.publish("after", event.id, connection=tx)

    probes(lambda step: positions.append(stand(other).position) if step == "checkpointing" else None)
    bus.start()
    bus.wait_for("s", events[-1].id, timeout=LONG)
    bus.subscriptions.pause("s")
    assert positions[:3] == [0, events[0].id, events[1].id]
    assert effects()[:3] == ids(events)


def test_a_failure_undoes_what_was_written(bus: EventBus, effects: Callable[[], list[int]]):
    """Of each event, only the attempt that worked has left anything; of a dead one, none (S4.6, I2)."""

    @bus.follow("s", "a", retry=QUICK)
    def handle(event: Event, ctx: Context, tx: Transaction) -> None:
        add(tx, event)
        bus.publish("after", event.id, connection=tx)
        if event.payload == "dies" or ctx.attempt < 3:
            raise ValueError

    events = publish(bus, "lives", "dies", "lives")
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == [events[0].id, events[2].id]
        assert sorted(each.payload for each in bus.list(type="after")) == [events[0].id, events[2].id]
        assert [letter.event.id for letter in bus.dlq.list(subscription="s")] == [events[1].id]


def test_a_checkpoint_that_fails_undoes_the_effect(bus: EventBus, effects: Callable[[], list[int]], probes: Any):
    """It is done again, and stands once (S4.6, I6)."""
    errors = iter([OSError("the moment before the commit")])

    def fail(step: str) -> None:
        if step == "checkpointing":
            for error in errors:
                raise error

    bus.follow("s", retry=QUICK)(lambda event, tx: add(tx, event))
    events = publish(bus, 0, 1)
    probes(fail)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == ids(events)
        assert next(errors, None) is None
        assert bus.dlq.list(subscription="s").total == 0


def test_a_deposed_reader_leaves_no_effect(bus: EventBus, effects: Callable[[], list[int]], probes: Any):
    """It was deposed after it had read: what it writes is undone, and stands once in the end (S4.6, S4.7, I8)."""
    rewinds = iter([0])
    ran: list[int] = []

    def depose(step: str) -> None:
        if step == "read" and stand(bus).position < stand(bus).position + stand(bus).lag:
            for position in rewinds:
                bus.subscriptions.rewind("s", position)

    @bus.follow("s")
    def handle(event: Event, tx: Transaction) -> None:
        ran.append(event.id)
        add(tx, event)

    events = publish(bus, 0, 1, 2)
    probes(depose)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == ids(events)
    assert ran == [events[0].id, *ids(events)]


def test_two_that_both_believe_to_lead_have_one_effect(
    bus: EventBus, make_bus: Make, effects: Callable[[], list[int]], eventually: Eventually
):
    """Nobody is asked with SINGLE, so both run: the epoch decides, each effect stands once (S4.7, S4.8, I8)."""
    other = make_bus()
    for each in (bus, other):
        each.follow("s", instance=InstanceMode.SINGLE, retry=ONCE)(lambda event, tx: add(tx, event))
    events = publish(bus, *range(30))
    bus.start()
    other.start()
    eventually(lambda: stand(bus).position >= events[-1].id)
    assert effects() == ids(events)
    assert bus.dlq.list(subscription="s").total == 0


def test_a_list_and_its_checkpoint_are_one_transaction(bus: EventBus, effects: Callable[[], list[int]]):
    """The list that fails is undone whole, then each alone: all but the culprit stand once (S4.6, I2)."""
    calls: list[int] = []

    @bus.follow("s", batch=4, retry=ONCE)
    def handle(events: list[Event], tx: Transaction) -> None:
        calls.append(len(events))
        for event in events:
            add(tx, event)
            if event.payload == 5:
                raise ValueError

    events = publish(bus, *range(8))
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == ids([*events[:5], *events[6:]])
    assert calls == [4, 4, 1, 1, 1, 1]


def test_a_retried_letter_and_its_end_are_one_transaction(
    bus: EventBus, effects: Callable[[], list[int]], eventually: Eventually
):
    """Its failed attempts leave nothing, the one that works stands once (S4.6, I9)."""

    @bus.follow("s", retry=QUICK)
    def handle(event: Event, ctx: Context, tx: Transaction) -> None:
        add(tx, event)
        if not ctx.redelivered or ctx.attempt < 2:
            raise ValueError

    (event,) = publish(bus, 1)
    with bus:
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: bus.get(event.id, subscription="s").status is Status.COMPLETED)
        assert effects() == [event.id]
        assert actions(bus, event)[3:] == ["RETRIED", "PICKED", "FAILED", "PICKED", "COMPLETED"]


def test_a_retried_letter_taken_away_leaves_no_effect(
    bus: EventBus, effects: Callable[[], list[int]], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
):
    """Its lease was reset before it was handled: what it wrote is undone, the next one's stands (S4.6, I8, I9)."""
    claim, ran, resets = bus.store.claim, list[bool](), iter([1])

    def claiming(terms: Claim) -> Claimed:
        got = claim(terms)
        for delivery in got.deliveries:
            for _ in resets:
                bus.store.reset(delivery.id, "s", "taken away", "ops")
        return got

    @bus.follow("s", retry=QUICK)
    def handle(event: Event, ctx: Context, tx: Transaction) -> None:
        add(tx, event)
        ran.append(ctx.redelivered)
        if not ctx.redelivered:
            raise Discard

    monkeypatch.setattr(bus.store, "claim", claiming)
    (event,) = publish(bus, 1)
    with bus:
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: bus.get(event.id, subscription="s").status is Status.COMPLETED)
        assert effects() == [event.id]
        assert actions(bus, event) == ["FAILED", "RETRIED", "PICKED", "RESET", "PICKED", "COMPLETED"]
    assert ran == [False, True, True]


# ── batched checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batched_checkpoint_moves_after_so_many_events(make_bus: Make, eventually: Eventually):
    """What is not saved yet is saved at the shutdown (S4.8, S1.14)."""
    bus, other = make_bus(), make_bus()
    seen = collect(bus, checkpoint=CheckpointMode.batched(10, 60))
    events = publish(bus, *range(25))
    bus.start()
    eventually(lambda: len(seen) == 25)
    assert stand(other).position == events[19].id
    assert bus.shutdown(timeout=5)
    assert stand(other).position == events[24].id
    again = collect(other)
    with other:
        other.wait_for("s", publish(other, 25)[-1].id, timeout=LONG)
    assert again == [25]


def test_a_batched_checkpoint_moves_after_a_while(bus: EventBus):
    """Also when nothing more comes (S4.8)."""
    seen = collect(bus, checkpoint=CheckpointMode.batched(1_000, 0.1))
    with bus:
        began = time.monotonic()
        bus.wait_for("s", publish(bus, 1, 2, 3)[-1].id, timeout=LONG)
        assert time.monotonic() - began >= 0.1
    assert seen == [1, 2, 3]


def test_a_dead_letter_takes_the_checkpoint_along(bus: EventBus, eventually: Eventually):
    """What was done before it is never behind it (I6)."""
    seen: list[Any] = []

    @bus.follow("s", checkpoint=CheckpointMode.batched(1_000, 60), retry=ONCE)
    def handle(event: Event) -> None:
        if event.payload == 2:
            raise ValueError
        seen.append(event.payload)

    events = publish(bus, *range(5))
    with bus:
        eventually(lambda: seen == [0, 1, 3, 4])
        assert stand(bus).position == events[2].id
