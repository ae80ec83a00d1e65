"""Reading on by position, and going back."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from postbus.errors import InvalidRequest, LeaseLost, NotFound
from postbus.model import Event, Mode, State, Status, Stream
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.store import Log, unfinished
from postbus.store.contract import Rewound, Settled
from postbus.testing import FrozenClock
from tests.contract.following import ALL, HELD, burial, lead, left, on_postgres, rows, stand, step
from tests.contract.stores import DEAD, RETRY, Operator, Site, ids, wanting
from tests.kinds import on_sqlite

# ── rewinding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rewind_goes_to_an_id_the_beginning_or_now(op: Operator, events: list[Event]):
    """And tells how many come again, or forwards, how many are passed over (S4.3)."""
    op.store.move(step(lead(op.store), events[5]))
    assert op.store.rewind("s", events[2].id, "ops") == Rewound(events[2].id, 3, 0, before=events[5].id)
    assert stand(op.store).position == events[2].id
    assert op.store.rewind("s", "beginning", "ops") == Rewound(0, 3, 0, before=events[2].id)
    assert op.store.rewind("s", "now", "ops") == Rewound(events[7].id, 0, 0, skipped=8, before=0)
    assert op.store.rewind("s", 0, "ops") == Rewound(0, 8, 0, before=events[7].id)
    assert lead(op.store).position == 0


def test_a_rewind_to_a_moment_has_all_of_it_and_later_come_again(op: Operator, clock: FrozenClock, events: list[Event]):
    """What was published at the moment itself comes too (S4.3)."""
    clock.advance(60)
    moment: datetime = clock.now()
    later = op.publish_all(*[{"type": "a"}] * 3)
    op.store.move(step(lead(op.store), later[2]))
    assert op.store.rewind("s", moment, "ops") == Rewound(events[7].id, 3, 0, before=later[2].id)
    assert op.store.rewind("s", moment - timedelta(days=1), "ops").position == 0
    assert op.store.rewind("s", moment + timedelta(days=1), "ops").position == later[2].id


@pytest.mark.parametrize(("patterns", "tags", "again"), [("a", (), 3), ("*", ["eu"], 2), ("a", ["eu", "uk"], 1)])
@pytest.mark.parametrize("part", [2, unfinished.COUNTED])
def test_a_rewind_counts_what_is_wanted(
    op: Operator, monkeypatch: pytest.MonkeyPatch, patterns: str, tags: Sequence[str], again: int, part: int
):
    """Events of other types, or with none of the tags, do not come again (S4.3); of a long log, part after part."""
    monkeypatch.setattr("postbus.store.unfinished.COUNTED", part)
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
    assert op.store.rewind("s", events[1].id, "ops") == Rewound(events[1].id, 5, 4, before=events[6].id)
    assert left(op.store) == [(events[0].id, State.DEAD)]
    for event in (events[2], *events[4:7]):
        assert op.actions(event, "s")[-1] == "DISCARDED"
        assert op.logs(event, "s")[-1].worker_id == "ops"
    assert op.actions(events[0], "s") == ["FAILED"]
    assert op.settle(running).value == "lost"


def test_more_than_a_chunk_is_discarded(op: Operator, monkeypatch: pytest.MonkeyPatch, events: list[Event]):
    """All of it (I9)."""
    monkeypatch.setattr("postbus.store.unfinished.CHUNK", 3)
    op.store.move(step(lead(op.store), events[7], parked=events))
    assert op.store.rewind("s", 0, "ops") == Rewound(0, 8, 8, before=events[7].id)
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
    assert told == Rewound(events[2].id, 2, 1, before=events[4].id)
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
def test_what_has_no_order_is_not_rewound(store: Log, clock: FrozenClock, *, dry_run: bool):
    """A Spark stream, or nothing at all."""
    store.consumer("lake", Stream.EVENTS, 0)
    with pytest.raises(InvalidRequest, match="'lake' is"):
        store.rewind("lake", 0, "ops", dry_run=dry_run)
    with pytest.raises(NotFound):
        store.rewind("nowhere", 0, "ops", dry_run=dry_run)


def test_a_rewind_deposes_whoever_leads(store: Log, events: list[Event]):
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


# ── rewinding a queue ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_queue_goes_back_and_everything_after_the_position_comes_again(op: Operator):
    """Completed ones too, whatever they waited for; what lies before the position is left alone (S4.3, I11)."""
    events = op.publish_all(*[{"type": "a"}] * 4)
    done, dead, retried, leased = op.claim(4)
    events += op.publish_all(*[{"type": "a"}] * 2)
    op.settle(done)
    op.settle(dead, DEAD)
    op.settle(retried, RETRY)
    assert op.store.rewind("default", events[0].id, "ops") == Rewound(events[0].id, 3, 3, before=leased.id)
    assert op.settle(leased) is Settled.LOST
    assert op.dead().total == 0
    assert [op.status(each) for each in events] == [Status.COMPLETED, *[Status.PENDING] * 5]
    assert [(each.id, each.attempt) for each in op.take_all()] == [(each.id, 1) for each in events[1:]]


def test_one_entry_tells_of_a_queues_rewind(op: Operator):
    """On the event at the position: from, to, how many, and who did it (I11, I13)."""
    events = op.publish_all(*[{"type": "a"}] * 5)
    for delivery in op.take_all():
        op.settle(delivery)
    before = {each.id: op.actions(each) for each in events}
    op.store.rewind("default", events[1].id, "ops")
    assert {each.id: op.actions(each) for each in events} == {
        **before,
        events[1].id: [*before[events[1].id], "REPLAYED"],
    }
    told = op.logs(events[1])[-1]
    assert (told.subscription, told.worker_id, told.status) == ("default", "ops", None)
    assert told.error_message == "rewound from 5 to 2: 3 events come again"
    assert op.status(events[1]) is Status.COMPLETED


def test_what_a_queues_rewind_counts_in_its_entry_is_capped(op: Operator, monkeypatch: pytest.MonkeyPatch):
    """Other writers wait for it; the answer has the whole number."""
    monkeypatch.setattr("postbus.store.followers.MOST_COUNTED", 3)
    monkeypatch.setattr("postbus.store.unfinished.MOST_COUNTED", 3)
    event, *_ = op.publish_all(*[{"type": "a"}] * 6)
    op.take_all()
    assert op.store.rewind("default", event.id, "ops").again == 5
    assert str(op.logs(event)[-1].error_message).endswith("3 or more events come again")


def test_what_was_taken_out_of_turn_comes_again_once(op: Operator):
    """An urgent event, handed out before those that the cursor stands at, goes back with them (I11)."""
    plain = op.publish_all(*[{"type": "a"}] * 3)
    urgent = op.publish("a", priority=5)
    first = op.take()
    op.settle(first)
    op.settle(op.take())
    assert first.id == urgent.id
    for _ in range(2):
        op.store.rewind("default", 0, "ops")
        assert ids([op.take(), *op.take_all()]) == ids([urgent, *plain])


def test_an_erased_event_does_not_come_again(op: Operator):
    """Nor is it counted (P.5)."""
    events = op.publish_all(*[{"type": "a"}] * 3)
    for delivery in op.take_all():
        op.settle(delivery)
    op.store.erase(ids=[events[1].id], actor="privacy")
    assert op.store.rewind("default", 0, "ops") == Rewound(0, 2, 0, before=events[2].id)
    assert ids(op.take_all()) == [events[0].id, events[2].id]


def test_a_queues_rewind_counts_what_is_wanted_and_a_dry_run_only_tells(op: Operator):
    """The same figures as the rewind itself, and nothing changes (S4.3)."""
    op.subscription("s", ["a"])
    events = op.publish_all({"type": "a"}, {"type": "b"}, {"type": "a"})
    held = op.claim(2, "s")
    op.publish("a")
    told = op.store.rewind("s", events[0].id, "ops", dry_run=True)
    assert told == Rewound(events[0].id, 1, 1, before=held[1].id)
    assert op.logs(events[0], "s")[-1].action == "PICKED"
    assert op.store.extend([each.lease for each in held], HELD) == set()
    assert op.store.rewind("s", events[0].id, "ops") == told
    assert op.store.extend([each.lease for each in held], HELD) == {held[1].lease}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("to", [-1, 1, 6, "now", "yesterday"])
def test_a_queue_goes_back_only_and_not_into_what_was_pruned(op: Operator, to: Any, *, dry_run: bool):
    """Forwards it would pass over what nobody has seen (I5, I10)."""
    op.publish_all(*[{"type": "a"}] * 5)
    for delivery in op.claim(5):
        op.settle(delivery)
    op.publish_all(*[{"type": "a"}] * 2)
    op.store.prune(Stream.EVENTS, after=0, through=2)
    with pytest.raises(InvalidRequest, match="rewind to"):
        op.store.rewind("default", to, "ops", dry_run=dry_run)
    assert len(op.take_all()) == 2
    assert op.store.rewind("default", "beginning", "ops", dry_run=True).position == 2


def test_a_block_keeps_what_lies_before_the_position(op: Operator):
    """Of events that one worker leased together, those after it are lost, the others are not (I8)."""
    events = op.publish_all(*[{"type": "a"}] * 4)
    held = op.claim(4, shared=True)
    op.store.rewind("default", events[1].id, "ops")
    assert [op.settle(each) for each in held] == [*[Settled.APPLIED] * 2, *[Settled.LOST] * 2]
    assert ids(op.take_all()) == ids(events[2:])


# ── reading on ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_reading_on_gives_what_comes_next_in_order(store: Log, events: list[Event]):
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
def test_a_damaged_event_is_told_apart(store: Log, events: list[Event], damage: str):
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
