"""Moving a checkpoint, and what is left behind: dead and parked."""

from contextlib import suppress
from datetime import timedelta

import pytest

from postbus.errors import LeaseLost, NotFound
from postbus.model import Event, Mode, State, Status, Stream
from postbus.payload import draft
from postbus.store import Log
from postbus.store.contract import DeadFilter, Step
from postbus.testing import FrozenClock
from tests.contract.following import HELD, burial, lead, left, rows, stand, step
from tests.contract.stores import Operator, Site, wanting

# ── moving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_move_is_seen_by_all(site: Site, store: Log, clock: FrozenClock, events: list[Event]):
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


def act(store: Log, step: Step, *, then: type[Exception] | None = None) -> None:
    """Publish something and move, in one transaction."""
    with store.transaction() as tx:
        tx.publish([draft({"type": "after"})])
        tx.move(step)
        if then is not None:
            raise then


def depose(store: Log, clock: FrozenClock, how: str) -> None:
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


def test_a_move_counts_once_its_transaction_commits(site: Site, store: Log, events: list[Event]):
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


def test_a_move_that_is_made_again_leaves_nothing_twice(op: Operator, events: list[Event]):
    """As after an answer that was lost: one dead letter, one parked event, and their entries once (I9, I13)."""
    again = step(lead(op.store), events[2], buried=[burial(events[1], 2)], parked=[events[2]])
    op.store.move(again)
    op.store.move(again)
    assert left(op.store) == [(events[1].id, State.DEAD), (events[2].id, State.PARKED)]
    assert op.actions(events[1], "s") == ["FAILED", "FAILED"]
    assert op.actions(events[2], "s") == ["PARKED"]


def test_position_and_dead_letter_are_one_transaction(
    op: Operator, events: list[Event], monkeypatch: pytest.MonkeyPatch
):
    """What fails in the midst of a move leaves the checkpoint before the event (I6)."""
    first = lead(op.store)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("postbus.store.deliveries.add_entries", fail)
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
    assert [each.parked for each in op.get(events[1]).deliveries] == [False, True]
    clock.advance(timedelta(days=1))
    assert op.claim(10, "s") == []
    assert op.status(events[1], "s") is Status.PENDING
    assert op.store.unpark("s", [events[1].id], "host:two") == 1
    assert left(op.store) == [(events[1].id, State.PENDING), (events[3].id, State.PARKED)]
    assert not any(each.parked for each in op.get(events[1]).deliveries)
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


def test_figures_count_what_is_left_behind(op: Operator, events: list[Event]):
    """Dead letters of a follower are counted with those of queues, and what is parked beside them."""
    op.kill()
    op.store.move(step(lead(op.store), events[3], buried=[burial(events[1])], parked=[events[2], events[3]]))
    stats = op.store.stats()
    assert (stats.dead, stats.parked) == ({"default": 1, "s": 1}, {"s": 2})


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
