"""Following the log: who reads an ordered subscription, how far it has come, and what it leaves behind."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import pytest

from postbus.errors import Conflict, InvalidRequest, LeaseLost, NotFound, UnsafeStore
from postbus.model import AttemptError, Checkpoint, Event, Mode, State, Status, Stream
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.store import Store
from postbus.store.contract import Burial, DeadFilter, Lead, Rewound, Step
from postbus.store.following import Following
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, OOPS, Operator, Site, ids, wanting
from tests.kinds import on_sqlite

HELD = timedelta(seconds=10)
ALL = wanting("*")
on_postgres = pytest.mark.parametrize("kind", ["postgres"])
"""For what one writer at a time rules out."""


@pytest.fixture
def events(op: Operator) -> list[Event]:
    """Give eight events, and a subscription `s` that begins before them."""
    op.subscription("s", mode=Mode.ORDERED, start="beginning")
    return op.publish_all(*[{"type": "a", "key": "AB"[number % 2], "payload": number} for number in range(8)])


def lead(store: Store, who: str = "one", name: str = "s", **how: bool) -> Lead:
    """Take a lead that must be free."""
    found = store.lead(name, who, f"host:{who}", HELD, **how)
    assert found is not None
    return found


def standby(store: Store, who: str = "two", **how: bool) -> Lead | None:
    """Ask for the lead."""
    return store.lead("s", who, f"host:{who}", HELD, **how)


def step(lead: Lead, event: Event | int, **left: Any) -> Step:
    """Return a step to an event."""
    return Step(lead.subscription, lead.epoch, event if isinstance(event, int) else event.id, "host:one", **left)


def burial(event: Event, attempts: int = 1) -> Burial:
    """Return the end of an event that failed so many times, each time differently."""
    errors = [AttemptError("ValueError", f"no {number}", number, "host:one") for number in range(1, attempts + 1)]
    return Burial(event, errors, 1.5)


def stand(store: Store, name: str = "s") -> Checkpoint:
    """Return how a subscription's checkpoint stands."""
    return next(each for each in store.checkpoints() if each.subscription == name)


def rows(op: Operator, event: Event) -> list[tuple[str, Status | None, int | None]]:
    """Return what the audit log tells of an event in `s`."""
    return [(row.action.value, row.status, row.attempt) for row in op.logs(event, "s")]


def left(store: Store) -> list[tuple[int, State]]:
    """Return what is left behind, and how."""
    return [(event_id, state) for event_id, _, state in store.standing("s")]


# ── who leads ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_one_leads(site: Site, store: Store, events: list[Event]):
    """The other gets nothing, from any process, until the first resigns (S4.7)."""
    other = site.open()
    first = lead(store)
    assert (first.subscription, first.position, first.crashes) == ("s", 0, 0)
    assert standby(other) is None
    assert stand(other).epoch == first.epoch
    store.resign(first)
    assert lead(other, "two").epoch > first.epoch


def test_of_many_who_ask_at_once_one_leads(site: Site, events: list[Event]):
    """Whatever the timing (S4.7, I7)."""
    stores = [site.open() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda pair: standby(pair[1], f"w{pair[0]}"), enumerate(stores)))
    assert sum(each is not None for each in found) == 1


def test_a_lease_that_ran_out_passes(store: Store, clock: FrozenClock, events: list[Event]):
    """At its end, not a microsecond before (S4.7, I10)."""
    lead(store)
    clock.advance(HELD - timedelta(microseconds=1))
    assert standby(store) is None
    clock.advance(timedelta(microseconds=1))
    assert standby(store) is not None


def test_a_lease_that_is_kept_does_not_run_out(store: Store, clock: FrozenClock, events: list[Event]):
    """Each time it runs anew from then on (S4.7)."""
    first = lead(store)
    for _ in range(3):
        clock.advance(HELD - timedelta(seconds=1))
        assert store.keep(first, HELD)
        assert standby(store) is None
    clock.advance(HELD)
    assert standby(store) is not None


def test_who_is_late_and_not_deposed_goes_on(store: Store, clock: FrozenClock, events: list[Event]):
    """Nobody has taken over: the lease only allows it (I8)."""
    first = lead(store)
    clock.advance(HELD * 2)
    store.move(step(first, events[0]))
    assert store.keep(first, HELD)
    assert standby(store) is None


def test_a_lock_that_is_free_passes_the_lead_at_once(store: Store, events: list[Event]):
    """Whoever led by the lock is gone when another holds it: no waiting for the lease (S4.7)."""
    lead(store, locked=True)
    assert standby(store, locked=True) is not None


def test_who_is_known_to_be_dead_is_not_waited_for(store: Store, events: list[Event], monkeypatch: pytest.MonkeyPatch):
    """Where that can be told, without any lock (S4.7)."""
    lead(store)
    assert standby(store) is None
    monkeypatch.setattr(store, "is_dead", lambda owner: owner == "one")
    found = standby(store)
    assert found is not None
    assert found.crashes == 1
    assert standby(store, "three") is None


@pytest.mark.parametrize(("leader", "other"), [(False, True), (True, False), (False, False)])
def test_without_the_lock_on_both_sides_the_lease_decides(
    store: Store, clock: FrozenClock, events: list[Event], *, leader: bool, other: bool
):
    """A leader that never had the lock is not deposed by one who gets it, nor one that has it by one without (S4.7)."""
    first = lead(store, locked=leader)
    assert standby(store, locked=other) is None
    store.move(step(first, events[0]))
    clock.advance(HELD)
    assert standby(store, locked=other) is not None


def test_single_always_takes(store: Store, events: list[Event]):
    """Nobody is asked; of two that run all the same, the first one's writes are refused (S4.8, I8)."""
    first = lead(store, single=True)
    second = lead(store, "two", single=True)
    assert second.epoch > first.epoch
    with pytest.raises(LeaseLost):
        store.move(step(first, events[0]))
    store.move(step(second, events[0]))


def test_epochs_only_rise(store: Store, clock: FrozenClock, events: list[Event]):
    """At every take-over, also one's own, and at a rewind; never one that was there before (I7)."""
    epochs = [lead(store).epoch, lead(store).epoch]
    clock.advance(HELD)
    epochs.append(lead(store, "two").epoch)
    store.rewind("s", 0, "ops")
    epochs += [stand(store).epoch, lead(store, "three").epoch]
    store.delete_subscription("s", "ops")
    Operator(store, clock).subscription("s", mode=Mode.ORDERED)
    epochs.append(lead(store).epoch)
    assert epochs == sorted(set(epochs))


def test_who_leads_again_begins_under_a_new_epoch(store: Store, events: list[Event]):
    """A process that stepped down without a word is not in its own way; what it began before counts no more (I8)."""
    first = lead(store)
    again = lead(store)
    with pytest.raises(LeaseLost):
        store.move(step(first, events[0]))
    store.move(step(again, events[0]))


def test_resigning_after_another_has_taken_over_changes_nothing(store: Store, clock: FrozenClock, events: list[Event]):
    """The heir still leads (I8)."""
    first = lead(store)
    clock.advance(HELD)
    heir = lead(store, "two")
    store.resign(first)
    assert standby(store, "three") is None
    assert store.keep(heir, HELD)


def test_a_lead_begins_where_the_last_one_stopped(store: Store, events: list[Event]):
    """The position is that of the last move (S4.2, S4.3)."""
    first = lead(store)
    store.move(step(first, events[3]))
    store.resign(first)
    assert lead(store, "two").position == events[3].id


def test_what_is_no_ordered_subscription_has_no_lead(store: Store, clock: FrozenClock):
    """A queue, a Spark stream, or nothing at all."""
    store.consumer("lake", Stream.EVENTS, 0)
    for name in ("default", "lake"):
        with pytest.raises(InvalidRequest, match="no ordered subscription"):
            store.lead(name, "one", "w", HELD)
    with pytest.raises(NotFound):
        store.lead("nowhere", "one", "w", HELD)


def test_a_pause_is_told_to_whoever_leads_and_to_nobody_else(store: Store, clock: FrozenClock, events: list[Event]):
    """LeaseLost to one who was deposed, NotFound once the subscription is gone (I8)."""
    first = lead(store)
    assert store.is_paused(first) is False
    store.pause_subscription("s", paused=True)
    assert store.is_paused(first) is True
    store.pause_subscription("s", paused=False)
    assert store.is_paused(first) is False
    clock.advance(HELD)
    heir = lead(store, "two")
    with pytest.raises(LeaseLost):
        store.is_paused(first)
    store.delete_subscription("s", "ops")
    with pytest.raises(NotFound):
        store.is_paused(heir)


# ── where going on would lose something ──────────────────────────────────────────────────────────────────────────────


def test_a_position_of_another_log_is_refused(store: Store, clock: FrozenClock, events: list[Event]):
    """Loudly, with the way out; a rewind is that way (I5)."""
    store.move(step(lead(store), events[3]))
    store.restore_mark("ops")
    clock.advance(HELD)
    with pytest.raises(UnsafeStore, match=r"'s' stands at 4 of another log.*subscriptions rewind s"):
        standby(store)
    assert store.rewind("s", events[1].id, "ops").position == events[1].id
    assert lead(store, "two").position == events[1].id


def test_a_position_beyond_the_head_is_refused(op: Operator, kind: str, events: list[Event]):
    """As after an old backup that nobody marked (I5)."""
    first = lead(op.store)
    op.store.move(step(first, events[7]))
    op.store.resign(first)
    with op.store.transaction() as tx:
        tx.execute(f"DELETE FROM {'postbus.' if kind == 'postgres' else ''}events WHERE id > 5")  # noqa: S608  two dialects
    with pytest.raises(UnsafeStore, match="stands at 8, beyond the head at 5"):
        standby(op.store)
    op.store.rewind("s", "now", "ops")
    assert lead(op.store, "two").position == 5


def test_a_position_in_what_was_pruned_is_refused(op: Operator, events: list[Event]):
    """What follows it is no longer there: replay it from the lake (I5)."""
    first = lead(op.store)
    op.store.move(step(first, events[1]))
    op.store.resign(first)
    op.store.prune(Stream.EVENTS, after=0, through=events[3].id, past={"s"})
    with pytest.raises(UnsafeStore, match="stands at 2, and everything up to 4 was pruned"):
        standby(op.store)
    op.store.rewind("s", "beginning", "ops")
    assert lead(op.store, "two").position == events[3].id


def test_nothing_is_pruned_that_a_follower_has_not_passed(store: Store, events: list[Event]):
    """Unless it is named (I14)."""
    store.move(step(lead(store), events[3]))
    with pytest.raises(Conflict, match="'s'"):
        store.prune(Stream.EVENTS, after=0, through=events[4].id)
    store.prune(Stream.EVENTS, after=0, through=events[3].id)


# ── moving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_move_is_seen_by_all(site: Site, store: Store, clock: FrozenClock, events: list[Event]):
    """Position, time and epoch, in every process (S4.2)."""
    first = lead(store)
    clock.advance(3)
    store.move(step(first, events[2]))
    found = stand(site.open())
    assert (found.stream, found.position, found.moved_at, found.epoch) == (
        Stream.EVENTS, events[2].id, clock.now(), first.epoch,
    )  # fmt: skip
    assert found.log_id == store.span(Stream.EVENTS).log_id
    assert store.position("s") == events[2].id


def test_a_position_is_that_of_somebody(op: Operator):
    """Of an ordered subscription or a Spark stream; a queue has none (S4.2)."""
    events = op.publish_all(*[{"type": "a"}] * 3)
    op.store.consumer("lake", Stream.EVENTS, events[1].id)
    assert op.store.position("lake") == events[1].id
    for name in ("default", "nowhere"):
        with pytest.raises(NotFound, match=name):
            op.store.position(name)


def act(store: Store, step: Step, *, then: type[Exception] | None = None) -> None:
    """Publish something and move, in one transaction."""
    with store.transaction() as tx:
        tx.publish([draft({"type": "after"})])
        tx.move(step)
        if then is not None:
            raise then


def depose(store: Store, clock: FrozenClock, how: str) -> None:
    """Have whoever leads deposed."""
    match how:
        case "lease":
            clock.advance(HELD)
            lead(store, "two")
        case "single":
            lead(store, "two", single=True)
        case "rewind":
            store.rewind("s", 1, "ops")
        case _:
            store.delete_subscription("s", "ops")


@pytest.mark.parametrize("how", ["lease", "single", "rewind", "delete"])
@pytest.mark.parametrize("leaves", ["nothing", "dead", "parked"])
def test_a_deposed_reader_moves_nothing(op: Operator, clock: FrozenClock, events: list[Event], how: str, leaves: str):
    """Neither the position nor what it would leave behind, and it is told so (S4.7, I8)."""
    first = lead(op.store)
    depose(op.store, clock, how)
    before = op.store.checkpoints()
    behind = {"nothing": {}, "dead": {"buried": [burial(events[1])]}, "parked": {"parked": [events[1]]}}[leaves]
    with pytest.raises(LeaseLost, match="nothing changed"):
        op.store.move(step(first, events[1], **behind))
    assert op.store.keep(first, HELD) is False
    assert op.store.checkpoints() == before
    assert op.dead(subscription="s").total == 0
    assert left(op.store) == rows(op, events[1]) == []


@pytest.mark.parametrize("how", ["lease", "single", "rewind", "delete"])
def test_a_deposed_readers_transaction_changes_nothing(op: Operator, clock: FrozenClock, events: list[Event], how: str):
    """What it wrote beside the move is rolled back with it (S4.6, I8)."""
    first = lead(op.store)
    depose(op.store, clock, how)
    before = op.store.checkpoints()
    with pytest.raises(LeaseLost):
        act(op.store, step(first, events[1], buried=[burial(events[1])]))
    assert op.store.checkpoints() == before
    assert op.dead().total == op.list(type="after").total == 0


@pytest.mark.parametrize("behind", [False, True])
def test_a_move_backwards_does_nothing(op: Operator, events: list[Event], *, behind: bool):
    """A checkpoint goes forwards, whoever asks; to where it stands already is no harm (I6)."""
    first = lead(op.store)
    op.store.move(step(first, events[4]))
    with suppress(LeaseLost):
        op.store.move(step(first, events[2], **({"buried": [burial(events[2])]} if behind else {})))
    assert stand(op.store).position == events[4].id
    assert left(op.store) == []
    op.store.move(step(first, events[4]))
    op.store.move(step(first, events[5]))
    assert stand(op.store).position == events[5].id


def test_a_move_counts_once_its_transaction_commits(site: Site, store: Store, events: list[Event]):
    """Until then another process sees neither it nor the dead letter; rolled back, it was never made (S4.6, I6)."""
    other = Operator(site.open(), site.clock)
    first = lead(store)
    with pytest.raises(ZeroDivisionError):
        act(store, step(first, events[0]), then=ZeroDivisionError)
    assert stand(store).position == 0
    with store.transaction() as tx:
        tx.move(step(first, events[1], buried=[burial(events[1])]))
        assert stand(other.store).position == 0
        assert other.dead().total == 0
    assert stand(other.store).position == events[1].id
    assert [letter.event.id for letter in other.dead()] == [events[1].id]


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_buried_event_is_a_dead_letter_with_the_error_of_each_attempt(
    op: Operator, clock: FrozenClock, events: list[Event]
):
    """Unique to the subscriber, with all that a dead letter tells; other subscriptions are not concerned (S4.5)."""
    first = lead(op.store)
    clock.advance(60)
    op.store.move(step(first, events[1], buried=[burial(events[1], 3)]))
    (letter,) = op.dead()
    assert (letter.event.id, letter.event.payload, letter.subscription) == (events[1].id, 1, "s")
    assert (letter.attempts, letter.died_at, letter.last_retry_at) == (3, clock.now(), None)
    assert list(letter.errors) == list(burial(events[1], 3).errors)
    assert (op.status(events[1], "s"), op.status(events[1])) == (Status.FAILED, Status.PENDING)
    assert left(op.store) == [(events[1].id, State.DEAD)]


def test_the_audit_log_tells_of_each_attempt_and_of_one_end(op: Operator, events: list[Event]):
    """Earlier attempts FAILED and pending, the last FAILED for good, all by the reader's epoch (S4.5, I9, I13)."""
    first = lead(op.store)
    op.store.move(step(first, events[1], buried=[burial(events[1], 3)]))
    assert rows(op, events[1]) == [
        ("FAILED", Status.PENDING, 1), ("FAILED", Status.PENDING, 2), ("FAILED", Status.FAILED, 3),
    ]  # fmt: skip
    told = op.logs(events[1], "s")
    assert {(row.epoch, row.worker_id) for row in told} == {(first.epoch, "host:one")}
    assert [row.error_message for row in told] == ["no 1", "no 2", "no 3"]
    assert [row.execution_time_ms for row in told] == [None, None, 1.5]
    assert op.logs(events[0], "s") == []


def test_position_and_dead_letter_are_one_transaction(
    op: Operator, events: list[Event], monkeypatch: pytest.MonkeyPatch
):
    """What fails in the midst of a move leaves the checkpoint before the event (I6)."""
    first = lead(op.store)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Following, "_park", fail)
    with pytest.raises(ZeroDivisionError):
        op.store.move(step(first, events[3], buried=[burial(events[1]), burial(events[3])]))
    assert stand(op.store).position == 0
    assert op.dead().total == 0
    assert rows(op, events[1]) == []


def test_a_retried_dead_letter_is_claimed_and_settled_like_any(op: Operator, events: list[Event]):
    """With all its attempts before it, and without a word to the checkpoint (S4.5, I11)."""
    first = lead(op.store)
    op.store.move(step(first, events[1], buried=[burial(events[1], 2)]))
    assert op.claim(10, "s") == []
    assert op.store.retry_dead(DeadFilter(event_id=events[1].id, subscription="s"), "ops") == 1
    assert left(op.store) == [(events[1].id, State.PENDING)]
    delivery = op.take("s")
    assert (delivery.id, delivery.attempt) == (events[1].id, 1)
    assert left(op.store) == [(events[1].id, State.LEASED)]
    op.settle(delivery)
    assert left(op.store) == []
    assert op.actions(events[1], "s") == ["FAILED", "FAILED", "RETRIED", "PICKED", "COMPLETED"]
    assert op.status(events[1], "s") is Status.COMPLETED
    assert stand(op.store).position == events[1].id


def test_a_purged_dead_letter_is_gone(op: Operator, events: list[Event]):
    """Its event stays in the log, and its history with it (S4.5, I13)."""
    op.store.move(step(lead(op.store), events[1], buried=[burial(events[1])]))
    assert op.store.purge_dead(DeadFilter(subscription="s"), "ops") == 1
    assert left(op.store) == []
    assert op.actions(events[1], "s") == ["FAILED", "PURGED"]
    assert op.get(events[1]).payload == 1


def test_a_dead_letter_outlives_the_pruning_of_what_lies_around_it(op: Operator, events: list[Event]):
    """There is no need of a foreign key: the event stays as long as it is dead somewhere (S4.5, P.5)."""
    first = lead(op.store)
    op.store.move(step(first, events[7], buried=[burial(events[1])]))
    for delivery in op.take_all():
        op.settle(delivery)
    op.store.prune(Stream.EVENTS, after=0, through=events[7].id)
    (letter,) = op.dead()
    assert (letter.event.id, letter.event.payload) == (events[1].id, 1)
    with pytest.raises(NotFound):
        op.get(events[2])


def test_a_dead_letter_keeps_the_events_own_number_of_retries(op: Operator):
    """It holds when it is retried, too (I12)."""
    op.subscription("s", mode=Mode.ORDERED, start="beginning")
    event = op.publish(max_retries=7, priority=5, tags=["eu"])
    op.store.move(step(lead(op.store), event, buried=[burial(event)]))
    op.store.retry_dead(DeadFilter(), "ops")
    delivery = op.take("s", interests=wanting("order.*", tags=["eu"]))
    assert (delivery.id, delivery.max_retries, delivery.event.priority) == (event.id, 7, 5)


# ── parked events ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_parked_event_waits_until_it_is_freed(op: Operator, clock: FrozenClock, events: list[Event]):
    """Nobody can claim it before; each change is in the audit log (S4.5, I6, I13)."""
    first = lead(op.store)
    op.store.move(step(first, events[3], parked=[events[1], events[3]]))
    assert stand(op.store).position == events[3].id
    assert left(op.store) == [(events[1].id, State.PARKED), (events[3].id, State.PARKED)]
    clock.advance(timedelta(days=1))
    assert op.claim(10, "s") == []
    assert op.status(events[1], "s") is Status.PENDING
    assert op.store.unpark("s", [events[1].id], "host:two") == 1
    assert left(op.store) == [(events[1].id, State.PENDING), (events[3].id, State.PARKED)]
    delivery = op.take("s")
    assert (delivery.id, delivery.attempt) == (events[1].id, 1)
    op.settle(delivery)
    assert op.claim(10, "s") == []
    assert rows(op, events[1])[:2] == [("PARKED", Status.PENDING, 0), ("RELEASED", Status.PENDING, 0)]
    assert op.actions(events[1], "s") == ["PARKED", "RELEASED", "PICKED", "COMPLETED"]
    assert [row.worker_id for row in op.logs(events[1], "s")][:2] == ["host:one", "host:two"]
    assert op.logs(events[1], "s")[0].epoch == first.epoch


def test_only_what_is_parked_is_freed(op: Operator, events: list[Event]):
    """Not what is dead, freed already, in another subscription, or was never there (I13)."""
    op.subscription("other", mode=Mode.ORDERED, start="beginning")
    op.store.move(step(lead(op.store), events[3], buried=[burial(events[1])], parked=[events[3]]))
    assert op.store.unpark("other", [events[3].id], "ops") == 0
    assert op.store.unpark("s", [events[0].id, events[1].id, events[3].id, 404], "ops") == 1
    assert op.store.unpark("s", [events[3].id], "ops") == 0
    assert op.store.unpark("s", [], "ops") == 0
    assert left(op.store) == [(events[1].id, State.DEAD), (events[3].id, State.PENDING)]
    assert op.actions(events[3], "s") == ["PARKED", "RELEASED"]
    assert op.actions(events[1], "s") == ["FAILED"]


def test_a_parked_event_is_no_dead_letter(op: Operator, events: list[Event]):
    """It is not listed, retried or purged as one (S4.5)."""
    op.store.move(step(lead(op.store), events[1], parked=[events[1]]))
    assert op.dead().total == 0
    assert op.store.retry_dead(DeadFilter(), "ops") == 0
    assert op.store.purge_dead(DeadFilter(), "ops") == 0
    assert left(op.store) == [(events[1].id, State.PARKED)]


def test_what_is_left_is_told_by_id_with_its_key(op: Operator, events: list[Event]):
    """Dead, parked, due and leased, whatever their priority; of this subscription alone (S4.5)."""
    op.subscription("other", mode=Mode.ORDERED, start="beginning")
    late = op.publish("late", priority=9, tags=["eu"])
    first, second = lead(op.store), lead(op.store, name="other")
    op.store.move(step(second, events[0], buried=[burial(events[0])]))
    op.store.move(step(first, late, buried=[burial(events[2])], parked=[late, events[1], events[3]]))
    op.store.unpark("s", [events[1].id, late.id], "ops")
    op.take("s")
    assert list(op.store.standing("s")) == [
        (events[1].id, "B", State.PENDING), (events[2].id, "A", State.DEAD), (events[3].id, "B", State.PARKED),
        (late.id, None, State.LEASED),
    ]  # fmt: skip
    assert list(op.store.standing("other")) == [(events[0].id, "A", State.DEAD)]


def test_deleting_discards_what_was_left(op: Operator, events: list[Event]):
    """Dead and parked, each with its audit row; the checkpoint goes too (I13)."""
    op.store.move(step(lead(op.store), events[3], buried=[burial(events[1])], parked=[events[3]]))
    assert op.store.delete_subscription("s", "ops") == 2
    assert op.actions(events[1], "s") == ["FAILED", "DISCARDED"]
    assert op.actions(events[3], "s") == ["PARKED", "DISCARDED"]
    assert op.store.checkpoints() == ()


# ── rewinding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rewind_goes_to_an_id_the_beginning_or_now(op: Operator, events: list[Event]):
    """And tells how many come again, or forwards, how many are passed over (S4.3)."""
    op.store.move(step(lead(op.store), events[5]))
    assert op.store.rewind("s", events[2].id, "ops") == Rewound(events[2].id, 3, 0)
    assert stand(op.store).position == events[2].id
    assert op.store.rewind("s", "beginning", "ops") == Rewound(0, 3, 0)
    assert op.store.rewind("s", "now", "ops") == Rewound(events[7].id, 0, 0, skipped=8)
    assert op.store.rewind("s", 0, "ops") == Rewound(0, 8, 0)
    assert lead(op.store).position == 0


def test_a_rewind_to_a_moment_has_all_of_it_and_later_come_again(op: Operator, clock: FrozenClock, events: list[Event]):
    """What was published at the moment itself comes too (S4.3)."""
    clock.advance(60)
    moment: datetime = clock.now()
    later = op.publish_all(*[{"type": "a"}] * 3)
    op.store.move(step(lead(op.store), later[2]))
    assert op.store.rewind("s", moment, "ops") == Rewound(events[7].id, 3, 0)
    assert op.store.rewind("s", moment - timedelta(days=1), "ops").position == 0
    assert op.store.rewind("s", moment + timedelta(days=1), "ops").position == later[2].id


@pytest.mark.parametrize(("patterns", "tags", "again"), [("a", (), 3), ("*", ["eu"], 2), ("a", ["eu", "uk"], 1)])
def test_a_rewind_counts_what_is_wanted(op: Operator, patterns: str, tags: Sequence[str], again: int):
    """Events of other types, or with none of the tags, do not come again (S4.3)."""
    op.subscription("s", [patterns], mode=Mode.ORDERED, start="beginning", tags=tags)
    published = op.publish_all(
        {"type": "a", "tags": ["eu", "uk"]}, {"type": "a"}, {"type": "a"}, {"type": "b", "tags": ["eu"]}, {"type": "b"}
    )
    op.store.move(step(lead(op.store), published[4]))
    assert op.store.rewind("s", "beginning", "ops", dry_run=True).again == again
    assert op.store.rewind("s", "beginning", "ops").again == again
    assert op.store.rewind("s", "now", "ops").skipped == again


def test_a_rewind_discards_what_comes_again_and_nothing_else(op: Operator, events: list[Event]):
    """Dead, parked and leased ones after the position go, with their audit rows; those before it stay (I9, I13)."""
    first = lead(op.store)
    op.store.move(step(first, events[6], buried=[burial(events[0]), burial(events[2])], parked=events[4:7]))
    op.store.unpark("s", [events[4].id], "ops")
    running = op.take("s")
    assert op.store.rewind("s", events[1].id, "ops") == Rewound(events[1].id, 5, 4)
    assert left(op.store) == [(events[0].id, State.DEAD)]
    for event in (events[2], *events[4:7]):
        assert op.actions(event, "s")[-1] == "DISCARDED"
        assert op.logs(event, "s")[-1].worker_id == "ops"
    assert op.actions(events[0], "s") == ["FAILED"]
    assert op.settle(running).value == "lost"


def test_more_than_a_chunk_is_discarded(op: Operator, monkeypatch: pytest.MonkeyPatch, events: list[Event]):
    """All of it (I9)."""
    monkeypatch.setattr("postbus.store.following.CHUNK", 3)
    op.store.move(step(lead(op.store), events[7], parked=events))
    assert op.store.rewind("s", 0, "ops") == Rewound(0, 8, 8)
    assert left(op.store) == []


def test_an_event_that_comes_again_can_die_again(op: Operator, events: list[Event]):
    """After a rewind it is a dead letter anew, not one for ever (I9)."""
    op.store.move(step(lead(op.store), events[1], buried=[burial(events[1], 2)]))
    op.store.rewind("s", 0, "ops")
    assert op.dead().total == 0
    op.store.move(step(lead(op.store), events[1], buried=[burial(events[1])]))
    (letter,) = op.dead()
    assert (letter.event.id, letter.attempts) == (events[1].id, 1)


def test_a_dry_run_only_tells(op: Operator, events: list[Event]):
    """The same figures as the rewind itself, and whoever leads goes on (S4.3)."""
    first = lead(op.store)
    op.store.move(step(first, events[4], buried=[burial(events[1])], parked=[events[3]]))
    before = (op.store.checkpoints(), left(op.store), rows(op, events[1]))
    told = op.store.rewind("s", events[2].id, "ops", dry_run=True)
    assert told == Rewound(events[2].id, 2, 1)
    assert (op.store.checkpoints(), left(op.store), rows(op, events[1])) == before
    op.store.move(step(first, events[4]))
    assert op.store.rewind("s", events[2].id, "ops") == told


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("to", [-1, 3, 9, 1 << 40, "yesterday", None, 1.5])
def test_a_rewind_out_of_the_log_is_refused(op: Operator, events: list[Event], to: Any, *, dry_run: bool):
    """Before what was pruned, beyond the head, or what is no position at all; a preview says so too (I5)."""
    op.store.move(step(lead(op.store), events[5]))
    op.store.prune(Stream.EVENTS, after=0, through=4)
    before = op.store.checkpoints()
    with pytest.raises(InvalidRequest, match="rewind to"):
        op.store.rewind("s", to, "ops", dry_run=dry_run)
    assert op.store.checkpoints() == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_has_no_order_is_not_rewound(store: Store, clock: FrozenClock, *, dry_run: bool):
    """A queue, a Spark stream, or nothing at all."""
    store.consumer("lake", Stream.EVENTS, 0)
    for name in ("default", "lake"):
        with pytest.raises(InvalidRequest, match="no ordered subscription"):
            store.rewind(name, 0, "ops", dry_run=dry_run)
    with pytest.raises(NotFound):
        store.rewind("nowhere", 0, "ops", dry_run=dry_run)


def test_a_rewind_deposes_whoever_leads(store: Store, events: list[Event]):
    """It learns so at whatever it does next, and may lead again at once, from there (I7, I8)."""
    first = lead(store)
    store.move(step(first, events[5]))
    store.rewind("s", events[1].id, "ops")
    assert store.keep(first, HELD) is False
    with pytest.raises(LeaseLost):
        store.is_paused(first)
    with pytest.raises(LeaseLost):
        store.move(step(first, events[6]))
    assert stand(store).worker_id is None
    again = lead(store, "two")
    assert (again.position, again.crashes) == (events[1].id, 0)
    assert again.epoch > first.epoch


# ── reading on ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reading_on_gives_what_comes_next_in_order(store: Store, events: list[Event]):
    """As it was published; `reached` is the last looked at, `more` that the limit cut it off (S4.1, S4.9)."""
    ahead = store.read_on(events[1].id, 3, ALL)
    assert ids(ahead.events) == ids(events[2:5])
    assert [(each.uid, each.type, each.payload, each.key, each.created_at) for each in ahead.events] == [
        (each.uid, each.type, each.payload, each.key, each.created_at) for each in events[2:5]
    ]
    assert (ahead.reached, ahead.more, ahead.damaged) == (events[4].id, True, {})
    ahead = store.read_on(ahead.reached, 100, ALL)
    assert (ids(ahead.events), ahead.reached, ahead.more) == (ids(events[5:]), events[7].id, False)
    ahead = store.read_on(ahead.reached, 100, ALL)
    assert (list(ahead.events), ahead.reached, ahead.more) == ([], events[7].id, False)


@pytest.mark.parametrize(
    ("interests", "expected"),
    [
        (wanting("order.*"), [0, 1, 2]),
        (wanting("*", tags=["eu"]), [1, 2, 4]),
        (wanting("order.*", tags=["uk", "fr"]), [2]),
        (wanting("order.paid", "user.*"), [2, 3, 4]),
        ((Interest("order.paid"), Interest("*", frozenset({"us"}))), [0, 2]),
        (wanting("nothing"), []),
    ],
)
def test_reading_on_filters_by_pattern_and_tags(op: Operator, interests: tuple[Interest, ...], expected: list[int]):
    """Any of the tags will do; what is not wanted is passed over, not waited for (S4.4)."""
    published = op.publish_all(
        {"type": "order.placed", "tags": ["us"]},
        {"type": "order.placed", "tags": ["eu"]},
        {"type": "order.paid", "tags": ["eu", "uk"]},
        {"type": "user.made"},
        {"type": "user.made", "tags": ["eu"]},
    )
    ahead = op.store.read_on(0, 5, interests)
    assert ids(ahead.events) == [published[number].id for number in expected]
    assert (ahead.reached, ahead.more) == (published[4].id, True)


def test_an_event_comes_with_all_its_parts(op: Operator):
    """Payload, tags, metadata and the rest, and no subscription's say in how it stands (S4.1)."""
    event = op.publish(
        payload={"n": [1, None]}, tags=["b", "a"], key="k", title="t", description="d", metadata={"m": "1"}, priority=3,
        max_retries=2,
    )  # fmt: skip
    (found,) = op.store.read_on(0, 1, ALL).events
    for part in ("id", "uid", "type", "payload", "tags", "key", "title", "description", "metadata", "created_at",
                 "priority", "max_retries"):  # fmt: skip
        assert getattr(found, part) == getattr(event, part)
    assert (found.status, found.errors) == (None, ())


@on_postgres
def test_nothing_appears_later_below_what_was_read(site: Site, op: Operator):
    """An event that commits after a higher one holds the reader back until then, in its place (S4.4, I5)."""
    other = Operator(site.open(), site.clock)
    first = op.publish()
    with op.store.transaction() as tx:
        (late,) = tx.publish([draft({"type": "late"})])
        early = other.publish("early")
        assert early.id > late.id
        assert ids(other.store.read_on(0, 10, ALL).events) == [first.id]
        assert other.store.read_on(first.id, 10, ALL).reached == first.id
    assert ids(other.store.read_on(first.id, 10, ALL).events) == [late.id, early.id]


@on_sqlite
@pytest.mark.parametrize("damage", ["payload = '99'", "type = 'b'", "metadata = '{'", "created_at = 'x'"])
def test_a_damaged_event_is_told_apart(store: Store, events: list[Event], damage: str):
    """With the reason, in its place, its payload withheld, whatever it claims to be; its neighbours are whole (I16)."""
    with store.transaction() as tx:
        tx.execute(f"UPDATE events SET {damage} WHERE id = ?", (events[2].id,))  # noqa: S608  written above
    ahead = store.read_on(0, 100, wanting("a"))
    assert ids(ahead.events) == ids(events)
    assert list(ahead.damaged) == [events[2].id]
    assert ahead.damaged[events[2].id]
    assert [each.payload for each in ahead.events] == [0, 1, None, 3, 4, 5, 6, 7]
    store.move(step(lead(store), events[2], buried=[burial(ahead.events[2])]))
    assert left(store) == [(events[2].id, State.DEAD)]


# ── making one, and looking at it ────────────────────────────────────────────────────────────────────────────────────


def test_an_ordered_subscription_begins_where_it_is_told_to(op: Operator, clock: FrozenClock):
    """Now, at the beginning of what there is, or after an id (S4.2, S4.3)."""
    published = op.publish_all(*[{"type": "a"}] * 5)
    op.store.prune(Stream.EVENTS, after=0, through=published[1].id)
    for name, start in (("now", "now"), ("all", "beginning"), ("id", published[2].id), ("last", published[4].id)):
        op.subscription(name, mode=Mode.ORDERED, start=start)
    found = {each.subscription: each for each in op.store.checkpoints()}
    assert {name: each.position for name, each in found.items()} == {
        "now": published[4].id, "all": published[1].id, "id": published[2].id, "last": published[4].id,
    }  # fmt: skip
    assert (found["now"].moved_at, found["now"].stream, found["now"].worker_id) == (clock.now(), Stream.EVENTS, None)


@pytest.mark.parametrize("start", [-1, 1, 6, "yesterday", "5"])
def test_a_start_out_of_the_log_makes_nothing(op: Operator, start: Any):
    """Before what was pruned, beyond the head, or what is no position: refused, and the name stays free (I5)."""
    op.publish_all(*[{"type": "a"}] * 5)
    op.store.prune(Stream.EVENTS, after=0, through=2)
    with pytest.raises(InvalidRequest, match="an id from 2 to 5"):
        op.subscription("s", mode=Mode.ORDERED, start=start)
    assert [each.name for each in op.store.subscriptions()] == ["default"]
    assert op.store.checkpoints() == ()
    assert op.publish().id == 6


def test_an_ordered_subscription_gets_no_deliveries(op: Operator, events: list[Event]):
    """It reads the log: a publish writes nothing for it (S4.1)."""
    assert op.claim(10, "s") == []
    assert left(op.store) == []
    assert {each.subscription for each in op.get(events[0]).deliveries} == {"default"}


def test_what_it_wants_can_be_set_anew(site: Site, op: Operator, events: list[Event]):
    """Seen by every process; nothing else of it changes."""
    op.store.move(step(lead(op.store), events[2]))
    op.store.set_interests("s", ["order.*"], ["eu", "uk"])
    found = next(each for each in site.open().subscriptions() if each.name == "s")
    assert (found.mode, found.patterns, found.tags) == (Mode.ORDERED, ("order.*",), ("eu", "uk"))
    assert stand(op.store).position == events[2].id


def test_a_checkpoint_tells_who_reads_and_how_far_behind(op: Operator, clock: FrozenClock, events: list[Event]):
    """Lag in positions and in time, the reader and until when it leads (S4.2)."""
    clock.advance(5)
    op.publish()
    found = stand(op.store)
    assert (found.lag, found.waiting, found.worker_id, found.held_until) == (9, timedelta(seconds=5), None, None)
    first = lead(op.store)
    found = stand(op.store)
    assert (found.worker_id, found.held_until, found.epoch) == ("host:one", clock.now() + HELD, first.epoch)
    op.store.move(step(first, events[7]))
    clock.advance(2)
    found = stand(op.store)
    assert (found.lag, found.waiting) == (1, timedelta(seconds=2))
    op.store.move(step(first, 9))
    found = stand(op.store)
    assert (found.lag, found.waiting) == (0, None)
    assert op.store.stats().checkpoints == (found,)


def test_nobody_is_told_to_read_who_does_not(store: Store, clock: FrozenClock, events: list[Event]):
    """Not one whose lease has run out, nor one who has resigned (S4.7)."""
    lead(store)
    clock.advance(HELD)
    assert (stand(store).worker_id, stand(store).held_until) == (None, None)
    second = lead(store, "two")
    assert stand(store).worker_id == "host:two"
    store.resign(second)
    assert stand(store).worker_id is None


# ── readers that end without a word ──────────────────────────────────────────────────────────────────────────────────


def test_readers_that_ended_without_a_word_are_counted(store: Store, clock: FrozenClock, events: list[Event]):
    """By the lock or by the lease, as long as the position does not move (S0.8, I12)."""
    lead(store, "one", locked=True)
    assert lead(store, "two", locked=True).crashes == 1
    clock.advance(HELD)
    third = lead(store, "three")
    assert third.crashes == 2
    store.move(step(third, events[0]))
    clock.advance(HELD)
    assert lead(store, "four").crashes == 1


def test_a_move_that_buries_ends_the_count_too(op: Operator, clock: FrozenClock, events: list[Event]):
    """The next event is not suspected for the one before it (I12)."""
    lead(op.store)
    clock.advance(HELD)
    second = lead(op.store, "two")
    assert second.crashes == 1
    op.store.move(step(second, events[0], buried=[burial(events[0])]))
    clock.advance(HELD)
    assert lead(op.store, "three").crashes == 1


def test_who_resigns_comes_back_or_is_deposed_alive_has_not_crashed(
    store: Store, clock: FrozenClock, events: list[Event]
):
    """Nor is one counted that had nothing to do (I12)."""
    first = lead(store)
    store.resign(first)
    assert lead(store, "two").crashes == 0
    assert lead(store, "two").crashes == 0
    last = lead(store, "three", single=True)
    assert last.crashes == 0
    store.move(step(last, events[7]))
    clock.advance(HELD)
    assert lead(store, "four").crashes == 0


def test_an_orderly_end_does_not_clear_an_event_of_suspicion(store: Store, clock: FrozenClock, events: list[Event]):
    """It is still the next one, and nobody has got past it (I12)."""
    lead(store)
    clock.advance(HELD)
    store.resign(lead(store, "two"))
    assert lead(store, "three").crashes == 1


def test_a_rewind_ends_the_count(store: Store, clock: FrozenClock, events: list[Event]):
    """It begins anew from another place (I12)."""
    lead(store)
    clock.advance(HELD)
    assert lead(store, "two").crashes == 1
    store.rewind("s", 0, "ops")
    assert lead(store, "three").crashes == 0


def test_the_dead_of_a_queue_are_none_of_a_followers(op: Operator, events: list[Event]):
    """One event can be dead in one and done in the other (I9)."""
    op.settle(op.take(), DEAD)
    assert left(op.store) == []
    op.store.move(step(lead(op.store), events[0], buried=[Burial(events[0], [OOPS])]))
    assert sorted(letter.subscription for letter in op.dead()) == ["default", "s"]
    assert op.store.retry_dead(DeadFilter(subscription="default"), "ops") == 1
    assert left(op.store) == [(events[0].id, State.DEAD)]
