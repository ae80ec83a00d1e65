"""What an overview is made of: a search that ends in time, what dead letters died of, what happened when."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from postbus.model import Action, Status, Stream
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, RETRY, Operator

LONG = timedelta(seconds=30)
NO_TIME = timedelta(0)


def found(op: Operator, within: timedelta, after: object = None, **asked: Any) -> tuple[list[int], object]:
    """Search, three at a time; return the ids and where to go on."""
    page = op.list(limit=3, after=after, within=within, **asked)
    return [each.id for each in page], page.next


def test_a_search_with_time_enough_finds_all_and_says_where_to_go_on(op: Operator):
    """Page after page, newest first; the last one says that there is no more."""
    ids = [each.id for each in op.publish_all(*[{"type": "a"}] * 3, {"type": "b"}, *[{"type": "a"}] * 2)]
    wanted = [each for each in reversed(ids) if each != ids[3]]
    first, then = found(op, LONG, type="a")
    assert (first, then) == (wanted[:3], wanted[2])
    assert found(op, LONG, then, type="a") == (wanted[3:], None)
    assert found(op, LONG, status=Status.PENDING)[0] == ids[:-4:-1]
    assert found(op, LONG, status=Status.COMPLETED) == ([], None)


def test_a_search_that_runs_out_of_time_says_how_far_it_looked(op: Operator):
    """Nothing between that and where it began is passed over by looking on."""
    rare = op.publish("rare").id
    others = [each.id for each in op.publish_all(*[{"type": "common"}] * 4)]
    looked: list[object] = []
    ids, then = found(op, NO_TIME, type="rare")
    while not ids and then is not None:
        looked.append(then)
        ids, then = found(op, NO_TIME, then, type="rare")
    assert (ids, looked) == ([rare], others[::-1])


def test_faults_tell_what_the_newest_dead_letters_died_of(op: Operator, clock: FrozenClock):
    """The last error of each, by subscription, as many as are wanted."""
    op.subscription("side", ["a"])
    made = [op.publish("a").id for _ in range(3)]
    for _ in made:
        op.settle(op.take(), DEAD)
        clock.advance(1)
    op.publish("b")
    assert op.store.faults(0) == []
    newest, older = op.store.faults(2)
    assert (newest.event_id, older.event_id) == (made[2], made[1])
    assert (newest.subscription, newest.type) == ("default", "a")
    assert newest.error is not None
    assert newest.error.type == DEAD.error.type
    assert newest.died_at - older.died_at == timedelta(seconds=1)


@pytest.mark.parametrize("every", [timedelta(seconds=10), timedelta(minutes=1)])
def test_activity_counts_each_row_once_in_its_slot(op: Operator, clock: FrozenClock, every: timedelta):
    """Published events and audit rows by action and status; slots add up to the whole, whatever the cut."""
    for outcome in (DONE, RETRY, DEAD):
        op.publish("a")
        op.settle(op.take(), outcome)
        clock.advance(25)
    for stream in Stream:
        head = op.store.span(stream).head
        whole = op.store.activity(stream, 0, head, every)
        parts = [*op.store.activity(stream, 0, head - 2, every), *op.store.activity(stream, head - 2, head, every)]
        assert sum(each.times for each in whole) == sum(each.times for each in parts)
        assert all(each.start.timestamp() % every.total_seconds() == 0 for each in whole)
    counts = Counter[tuple[Action | None, Status | None]]()
    for each in op.store.activity(Stream.AUDIT, 0, op.store.span(Stream.AUDIT).head, every):
        counts[each.action, each.status] += each.times
    assert counts[Action.COMPLETED, Status.COMPLETED] == 1
    assert counts[Action.FAILED, Status.PENDING] == 1
    assert counts[Action.FAILED, Status.FAILED] == 1
    published = op.store.activity(Stream.EVENTS, 0, op.store.span(Stream.EVENTS).head, every)
    assert {(each.action, each.status) for each in published} == {(None, None)}
    assert sum(each.times for each in published) == 3
