"""The streams by position: how far they go, and how far Spark streams have come in them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from postbus.errors import Conflict
from postbus.model import Mode, Stream
from postbus.store import Log
from postbus.store.contract import Settlement
from postbus.testing import FrozenClock
from tests.contract.stores import DONE, Operator, Site, ids


@pytest.mark.parametrize("stream", list(Stream))
def test_an_empty_stream_has_nothing_to_read(store: Log, stream: Stream):
    """Its head is where it begins (P.1)."""
    span = store.span(stream)
    assert (span.pruned, span.head) == (0, 0)
    assert store.ahead(stream, 0, 10) == 0


def test_the_head_is_the_last_row_that_is_there(op: Operator):
    """Of the events, and of what happened to them (P.1, I5)."""
    events = op.publish_all(*[{"type": "a"}] * 5)
    assert op.store.span(Stream.EVENTS).head == events[-1].id
    assert op.store.span(Stream.AUDIT).head == 0
    op.settle(op.take())
    (picked, completed) = op.store.logs(events[0].id)
    assert op.store.span(Stream.AUDIT).head == completed.id > picked.id
    assert op.store.span(Stream.EVENTS).log_id == op.store.span(Stream.AUDIT).log_id


def test_a_step_ahead_counts_rows_and_stops_at_the_last(op: Operator):
    """So that a batch holds as many as were asked for, whatever ids were never used (P.1)."""
    events = ids(op.publish_all(*[{"type": "a"}] * 5))
    assert [op.store.ahead(Stream.EVENTS, events[0], count) for count in (1, 3, 4, 9)] == [
        events[1],
        events[3],
        events[4],
        events[4],
    ]
    assert op.store.ahead(Stream.EVENTS, events[4], 3) == events[4]


def test_a_moment_is_found_by_position(op: Operator, clock: FrozenClock):
    """Everything written then or later lies behind it, nothing earlier does (P.1)."""
    moments = []
    events: list[int] = []
    for _ in range(20):
        clock.advance(timedelta(seconds=10))
        moments.append(clock.now())
        events += ids(op.publish_all({"type": "a"}, {"type": "a"}))
    for number, moment in enumerate(moments):
        position = op.store.before(Stream.EVENTS, moment)
        assert [event for event in events if event > position] == events[2 * number :]
    assert op.store.before(Stream.EVENTS, moments[0] - timedelta(days=1)) < events[0]
    assert op.store.before(Stream.EVENTS, moments[-1] + timedelta(seconds=1)) == events[-1]


def test_a_consumer_is_a_subscription_that_remembers_where_it_began(op: Operator, clock: FrozenClock):
    """Asked again, wherever it would begin now, it is where it was; it moves forwards only (P.1, I6)."""
    events = ids(op.publish_all(*[{"type": "a"}] * 5))
    made = op.store.consumer("lake", Stream.EVENTS, events[1])
    assert op.store.consumer("lake", Stream.EVENTS, events[4]) == made
    assert {each.name: each.mode for each in op.store.subscriptions()} == {"default": Mode.QUEUE, "lake": Mode.SPARK}
    clock.advance(timedelta(seconds=1))
    op.store.advance("lake", events[3], made.log_id)
    op.store.advance("lake", events[2], made.log_id)
    op.store.advance("lake", events[4], "another log")
    (found,) = op.store.checkpoints()
    assert (found.subscription, found.position, found.moved_at) == ("lake", events[3], clock.now())
    assert op.store.stats().checkpoints == (found,)
    assert op.claim(10, "lake") == []


def test_a_consumer_of_something_else_is_refused(op: Operator):
    """A queue, the other stream, or a position in a log that was since restored (I5)."""
    with pytest.raises(Conflict, match="mode queue"):
        op.store.consumer("default", Stream.EVENTS, 0)
    op.store.consumer("lake", Stream.EVENTS, 0)
    with pytest.raises(Conflict, match="reads events"):
        op.store.consumer("lake", Stream.AUDIT, 0)
    op.store.restore_mark("ops")
    with pytest.raises(Conflict, match="another log"):
        op.store.consumer("lake", Stream.EVENTS, 0)
    op.store.delete_subscription("lake", "ops")
    assert op.store.checkpoints() == ()
    assert op.store.consumer("lake", Stream.AUDIT, 0).position == 0


def test_of_many_who_begin_as_the_same_consumer_all_agree(site: Site):
    """Whoever is first says where it begins (P.1)."""
    stores = [site.open() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda pair: pair[1].consumer("lake", Stream.EVENTS, pair[0]), enumerate(stores)))
    assert len({each.position for each in made}) == 1


def test_one_at_a_time_holds_a_name(site: Site):
    """Another is refused, until the first lets go; other names are free (P.3)."""
    one, other = site.open(), site.open()
    with one.hold("lake") as check:
        check()
        with pytest.raises(Conflict, match="holds 'lake'"), other.hold("lake"):
            pass
        with other.hold("another"):
            pass
    with other.hold("lake") as check:
        check()


def recorded(op: Operator) -> list[int]:
    """Return the ids of the entries of some events, many of which were recorded together."""
    events = op.publish_all(*[{"type": "a"}] * 6)
    op.store.settle([Settlement(each.lease, DONE, "w", None, 1.0) for each in op.claim(4, shared=True)])
    op.settle(op.take())
    return sorted(row.id for event in events for row in op.store.logs(event.id))


def test_entries_are_counted_wherever_they_are_recorded_together(op: Operator):
    """A position may be that of any entry: steps ahead, figures and lag go by entries (P.1)."""
    entries = recorded(op)
    assert len(entries) == 10
    head = op.store.span(Stream.AUDIT).head
    assert head == entries[-1]
    lake = op.store.consumer("lake", Stream.AUDIT, 0)
    for place, position in enumerate([0, *entries]):
        rest = entries[place:]
        for count in (1, 2, 5, 100):
            assert op.store.ahead(Stream.AUDIT, position, count) == (rest[:count] or [position])[-1]
        counted = op.store.activity(Stream.AUDIT, position, head, timedelta(seconds=1))
        assert sum(each.times for each in counted) == len(rest)
        op.store.advance("lake", position, lake.log_id)
        (found,) = op.store.checkpoints()
        assert (found.lag, found.waiting) == (len(rest), timedelta(0) if rest else None)


def test_a_long_lag_is_estimated(op: Operator, monkeypatch: pytest.MonkeyPatch):
    """By what the first rows hold: the rest is not read for it."""
    monkeypatch.setattr("postbus.store.followers.MOST_ROWS", 2)
    entries = recorded(op)
    op.store.consumer("lake", Stream.AUDIT, 0)
    (found,) = op.store.checkpoints()
    assert len(entries) <= found.lag <= 20


def test_a_moment_is_found_among_entries(op: Operator, clock: FrozenClock):
    """Everything recorded then or later lies behind it, nothing earlier does (P.1)."""
    moments = [clock.now()]
    entries = [recorded(op)]
    for _ in range(3):
        clock.advance(10)
        moments.append(clock.now())
        entries.append(recorded(op))
    for number, moment in enumerate(moments):
        position = op.store.before(Stream.AUDIT, moment)
        behind = [each for some in entries for each in some if each > position]
        assert behind == [each for some in entries[number:] for each in some]
