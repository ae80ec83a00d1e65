"""Pruning: what is done with goes, what somebody needs stays, and nobody is cut off unawares."""

import threading
from collections.abc import Callable
from datetime import timedelta
from random import Random

import pytest

from postbus.errors import Conflict, InvalidEventError, InvalidRequest, NotFound
from postbus.model import Mode, Pruned, Status, Stream
from postbus.payload import draft
from postbus.store import Log
from postbus.store.contract import DeadFilter, Settlement
from postbus.testing import FrozenClock
from tests.conftest import Crew
from tests.contract.stores import DEAD, DONE, RETRY, Operator, Site, ids, wanting


def prune(store: Log, through: int, stream: Stream = Stream.EVENTS, limit: int = 10_000) -> list[Pruned]:
    """Take steps until it is done."""
    steps = [store.prune(stream, after=0, through=through, limit=limit)]
    while not steps[-1].done:
        steps.append(store.prune(stream, after=steps[-1].reached, through=through, limit=limit))
    return steps


def prune_all(store: Log) -> None:
    """Prune both streams as far as they go."""
    for stream in Stream:
        prune(store, store.span(stream).head, stream)


def worked(op: Operator, count: int = 5) -> list[int]:
    """Publish events and finish them."""
    events = op.publish_all(*[{"type": "a", "payload": number} for number in range(count)])
    for delivery in op.take_all():
        op.settle(delivery)
    return ids(events)


def there(op: Operator) -> list[int]:
    """Return the ids of the events in the log, the oldest first."""
    return sorted(ids(op.list(limit=1_000).items))


# ── what goes, and what stays ────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_finished_goes(op: Operator):
    """Up to the bound and not beyond; the audit log is pruned on its own (P.5, S3.14)."""
    events = worked(op)
    assert prune(op.store, events[2]) == [Pruned(3, 0, events[2], done=True)]
    assert there(op) == events[3:]
    with pytest.raises(NotFound):
        op.get(events[0])
    assert op.store.span(Stream.EVENTS).pruned == events[2]
    assert op.store.span(Stream.AUDIT).pruned == 0
    assert op.actions(events[0]) == ["PICKED", "COMPLETED"]
    last = op.store.span(Stream.AUDIT).head
    assert prune(op.store, last - 1, Stream.AUDIT) == [Pruned(9, 0, last - 1, done=True)]
    assert [op.actions(event) for event in events] == [[], [], [], [], ["COMPLETED"]]


def test_what_is_unfinished_or_dead_stays_and_holds_nothing_else_back(op: Operator):
    """Pending, scheduled, leased, retrying and dead keep event and audit rows, in any subscription (P.5, I14)."""
    op.subscription("other", ["mine"])
    events = ids(op.publish_all(*[{"type": "a"}] * 6, {"type": "mine"}, {"type": "a"}))
    outcomes = (DONE, DEAD, DONE, RETRY, DONE, None, DONE, DONE)
    for delivery, outcome in zip(op.claim(8, shared=False), outcomes, strict=True):
        if outcome is not None:
            op.settle(delivery, outcome)
    events += ids(op.publish_all({"type": "a"}, {"type": "a", "delay": 3_600}))
    done, kept = [events[i] for i in (0, 2, 4, 7)], [events[i] for i in (1, 3, 5, 6, 8, 9)]
    before = {event: op.actions(event) for event in kept}
    assert prune(op.store, events[-1]) == [Pruned(4, 6, events[-1], done=True)]
    prune(op.store, op.store.span(Stream.AUDIT).head, Stream.AUDIT)
    assert there(op) == kept
    assert {event: op.actions(event) for event in kept} == before
    assert [op.actions(event) for event in done] == [[]] * 4


def test_what_waits_for_its_worker_stays_and_the_rest_goes(op: Operator):
    """Events that no worker handles, and those of an idle subscription: all of theirs stay, nothing else (P.5, I14)."""
    op.subscription("idle", ["mine"])
    kinds = ["a", "orphan", "mine", "a"] * 25
    events = ids(op.publish_all(*[{"type": kind} for kind in kinds]))
    orphans, mine = events[1::4], events[2::4]
    while taken := op.claim(30, interests=wanting("a")):
        op.store.settle([Settlement(each.lease, DONE, "w", None, 1.0) for each in taken])
    assert op.store.prunable(Stream.EVENTS, events[-1]) == 50
    assert sum(step.removed for step in prune(op.store, events[-1], limit=7)) == 50
    assert there(op) == sorted(orphans + mine)

    for delivery in op.take_all(interests=wanting("orphan", "mine")):
        op.settle(delivery)
    assert sum(step.removed for step in prune(op.store, events[-1])) == 25
    assert there(op) == mine

    late = op.publish("mine")
    taken = op.take_all("idle")
    assert ids(taken) == [*mine, late.id], "its cursor passes what was pruned, and misses nothing"
    for delivery in [*taken, op.take()]:
        op.settle(delivery)
    assert sum(step.removed for step in prune(op.store, late.id)) == 26
    assert there(op) == []


def test_what_would_go_can_be_counted_before(op: Operator):
    """It is what goes then, what was held by an earlier pruning included, and counting changes nothing (P.5)."""
    events = worked(op, 4)
    dead = op.kill()
    for stream in Stream:
        through = op.store.span(stream).head
        would = op.store.prunable(stream, through)
        assert op.store.span(stream).pruned == 0
        assert would == prune(op.store, through, stream)[0].removed > 0
        assert op.store.prunable(stream, through) == 0
    op.store.purge_dead(DeadFilter(event_id=dead.id), "ops")
    assert op.store.prunable(Stream.EVENTS, dead.id) == 1
    assert op.store.prunable(Stream.EVENTS, events[-1]) == 0


def test_entries_that_were_recorded_together_go_together(op: Operator):
    """Once none of their events is needed, and all lie before the position (P.5, I14)."""
    events = op.publish_all(*[{"type": "a"}] * 4)
    taken = op.claim(4, shared=True)
    op.store.settle([Settlement(each.lease, DONE, "w", None, 1.0) for each in taken[:3]])
    op.settle(taken[3], DEAD)
    head = op.store.span(Stream.AUDIT).head
    last = op.logs(events[2])[-1].id
    assert [op.store.prunable(Stream.AUDIT, through) for through in (last - 1, last, head)] == [0, 3, 3]
    assert op.store.prune(Stream.AUDIT, after=0, through=last - 1) == Pruned(0, 6, last - 1, done=True)
    assert prune(op.store, head, Stream.AUDIT, limit=1) == [
        Pruned(0, 4, op.logs(events[3])[0].id, done=False),
        Pruned(3, 0, last, done=False),
        Pruned(0, 1, head, done=True),
    ]
    assert [op.actions(event) for event in events] == [["PICKED"], ["PICKED"], ["PICKED"], ["PICKED", "FAILED"]]
    op.store.purge_dead(DeadFilter(), "ops")
    prune_all(op.store)
    assert [op.actions(event) for event in events] == [[], [], [], []]


def test_what_was_held_goes_once_it_is_finished(op: Operator):
    """The next pruning begins at the beginning, however little lies there (P.5)."""
    events = worked(op, 3)
    dead = op.kill()
    events += worked(op, 3)
    assert sum(step.removed for step in prune(op.store, events[-1])) == 6
    op.store.purge_dead(DeadFilter(event_id=dead.id), "ops")
    assert prune(op.store, events[-1]) == [Pruned(1, 0, events[-1], done=True)]
    prune_all(op.store)
    assert there(op) == op.actions(dead) == []


def test_each_step_looks_at_no_more_rows_than_it_may(op: Operator):
    """Rows that are held cost a step as well, and the next goes on behind them (P.5)."""
    pending = ids(op.publish_all(*[{"type": "b"}] * 5))
    events = ids(op.publish_all(*[{"type": "a"}] * 5))
    for delivery in op.claim(10, interests=wanting("a")):
        op.settle(delivery)
    steps = prune(op.store, events[-1], limit=3)
    assert [(step.removed, step.kept) for step in steps] == [(0, 3), (1, 2), (3, 0), (1, 0)]
    assert [step.reached for step in steps] == [pending[2], events[0], events[3], events[4]]
    assert there(op) == pending


def test_the_bound_tells_of_all_that_is_gone_at_every_moment(site: Site, crew: Crew):
    """Whoever has read, and then looks at the bound, knows whether something was missing (I5, P.5)."""
    op = Operator(site.open(), site.clock)
    events = worked(op, 120)
    other = site.open()
    crew.start(lambda: prune(op.store, events[-1], limit=1))
    seen = set[int]()
    while first := other.ahead(Stream.EVENTS, 0, 1):
        assert other.span(Stream.EVENTS).pruned >= first - 1
        seen.add(first)
    crew.join(60)
    assert seen


def test_a_step_that_fails_removes_nothing_and_moves_nothing(op: Operator):
    """Nor does a bound ever move backwards (I2, I5)."""
    events = worked(op)
    prune(op.store, events[3])
    assert prune(op.store, events[1]) == [Pruned(0, 0, events[1], done=True)]
    assert op.store.span(Stream.EVENTS).pruned == events[3]
    with pytest.raises(InvalidRequest, match="can be read up to 5"):
        op.store.prune(Stream.EVENTS, after=0, through=events[4] + 1)
    with pytest.raises(InvalidRequest, match="pruned up to 4"):
        op.store.prune(Stream.EVENTS, after=events[4], through=events[4])
    with pytest.raises(InvalidRequest):
        op.store.prune(Stream.EVENTS, after=2, through=1)
    with pytest.raises(InvalidRequest):
        op.store.prune(Stream.EVENTS, after=0, through=1, limit=0)
    assert there(op) == events[4:]
    assert op.store.span(Stream.EVENTS).pruned == events[3]


def test_an_empty_stream_can_be_pruned_to_where_it_is(store: Log):
    """There is nothing to do (P.5)."""
    for stream in Stream:
        assert store.prune(stream, after=0, through=0) == Pruned(0, 0, 0, done=True)


# ── nobody is cut off ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stream_that_is_behind_is_not_cut_off(op: Operator):
    """It is named, nothing is removed, and what it has passed may go (I14, P.5)."""
    events = worked(op)
    audit = op.store.span(Stream.AUDIT).head
    lake = op.store.consumer("lake", Stream.EVENTS, events[1])
    with pytest.raises(Conflict, match="'lake' has come to 2 of events"):
        op.store.prune(Stream.EVENTS, after=0, through=events[2])
    assert there(op) == events
    assert op.store.span(Stream.EVENTS).pruned == 0
    assert op.store.prune(Stream.AUDIT, after=0, through=audit).removed == 10
    assert op.store.prune(Stream.EVENTS, after=0, through=events[1]).removed == 2
    op.store.advance("lake", events[4], lake.log_id)
    assert prune(op.store, events[4])[-1].removed == 3


def test_a_stream_is_passed_only_if_it_is_named(op: Operator):
    """So that one that has stalled for too long does not fill the disk; another one still counts (P.5, I14)."""
    events = worked(op)
    op.store.consumer("slow", Stream.EVENTS, events[0])
    op.store.consumer("slower", Stream.EVENTS, 0)
    with pytest.raises(Conflict, match="'slower'"):
        op.store.prune(Stream.EVENTS, after=0, through=events[-1], past=["slow"])
    op.store.prune(Stream.EVENTS, after=0, through=events[-1], past=["slow", "slower"])
    assert there(op) == []
    assert {each.subscription: each.position for each in op.store.checkpoints()} == {"slow": events[0], "slower": 0}


def test_an_ordered_subscription_that_has_not_begun_holds_everything(op: Operator):
    """Where it will begin is not known yet (I14)."""
    op.subscription("mirror", mode=Mode.ORDERED)
    events = worked(op)
    with pytest.raises(Conflict, match="'mirror' has come to 0"):
        op.store.prune(Stream.EVENTS, after=0, through=events[0])
    prune(op.store, op.store.span(Stream.AUDIT).head, Stream.AUDIT)
    op.store.delete_subscription("mirror", "ops")
    prune(op.store, events[-1])
    assert there(op) == []


def test_a_position_in_another_log_still_holds(op: Operator):
    """After a restore nobody knows what it has seen: an operator decides (I14)."""
    events = worked(op)
    op.store.consumer("lake", Stream.EVENTS, events[0])
    op.store.restore_mark("ops")
    with pytest.raises(Conflict, match="'lake'"):
        op.store.prune(Stream.EVENTS, after=0, through=events[-1])


def prune_beside(store: Log, events: list[int], come: Callable[[], object], crew: Crew) -> None:
    """Have the first half of events pruned, one a step, while somebody comes, and then the second half."""
    half, there = events[len(events) // 2], threading.Event()
    store.prune(Stream.EVENTS, after=0, through=half, limit=20)

    def cut() -> None:
        prune(store, half, limit=1)
        assert there.wait(60)
        store.prune(Stream.EVENTS, after=half, through=events[-1])

    crew.start(cut)
    come()
    there.set()
    crew.join(60)


def test_a_stream_that_begins_while_the_log_is_pruned_stops_that(site: Site, crew: Crew):
    """From the moment it is there, nothing more goes that it has not seen (I14, P.5)."""
    op = Operator(site.open(), site.clock)
    events, other = worked(op, 400), site.open()
    pruned: list[int] = []

    def come() -> None:
        other.consumer("late", Stream.EVENTS, 0)
        pruned.append(other.span(Stream.EVENTS).pruned)

    with pytest.raises(Conflict, match="'late'"):
        prune_beside(op.store, events, come, crew)
    assert [other.span(Stream.EVENTS).pruned] == pruned
    assert pruned[0] <= events[200]
    assert there(op) == [event for event in events if event > pruned[0]]


def test_a_queue_made_while_the_log_is_pruned_gets_what_is_left(site: Site, crew: Crew):
    """Each of its deliveries has its event, and keeps it (I14, P.5)."""
    op = Operator(site.open(), site.clock)
    events = worked(op, 400)
    other = Operator(site.open(), site.clock)
    prune_beside(op.store, events, lambda: other.subscription("late", start="beginning"), crew)
    left = there(other)
    assert sorted(ids(other.take_all("late"))) == left
    assert other.dead(subscription="late").total == 0
    assert 0 < len(left) < len(events)


def test_a_queue_that_asks_for_what_is_gone_gets_the_rest(op: Operator):
    """Beginning, or an id, means as far as it is still there (P.5)."""
    events = worked(op)
    prune(op.store, events[2])
    op.subscription("all", start="beginning")
    op.subscription("some", start=events[0])
    assert ids(op.take_all("all")) == ids(op.take_all("some")) == events[3:]


# ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ids_are_never_given_again(op: Operator, site: Site):
    """Not after everything was pruned, nor after a restore of that (I4)."""
    events = worked(op)
    audit = op.store.span(Stream.AUDIT).head
    prune_all(op.store)
    other = Operator(site.open(), site.clock)
    again = other.publish()
    other.settle(other.take())
    assert again.id == events[-1] + 1
    assert op.logs(again)[0].id > audit
    prune_all(op.store)
    op.store.restore_mark("ops")
    assert op.publish().id > 1_000_000_000
    assert op.take().id > 1_000_000_000
    assert op.store.span(Stream.AUDIT).head > 1_000_000_000


def test_a_pruned_log_can_be_read_by_position(op: Operator, clock: FrozenClock):
    """It begins where it was pruned to, and moments are found in what is left (P.1, I5)."""
    events: list[int] = []
    for _ in range(10):
        clock.advance(10)
        events += worked(op, 1)
    dead = op.kill()
    events += worked(op, 1)
    prune(op.store, events[6])
    assert op.store.ahead(Stream.EVENTS, events[6], 2) == events[8]
    assert op.store.before(Stream.EVENTS, op.get(events[8]).created_at) == events[7]
    assert op.store.before(Stream.EVENTS, clock.now() - timedelta(days=1)) == events[6]
    prune(op.store, op.store.span(Stream.EVENTS).head)
    span = op.store.span(Stream.EVENTS)
    assert span.pruned == span.head == events[-1] > dead.id
    assert op.store.before(Stream.EVENTS, clock.now()) == op.store.ahead(Stream.EVENTS, span.head, 5) == events[-1]


def test_lists_figures_and_checks_work_on_a_pruned_log(op: Operator):
    """Also where the audit log tells of events that are gone (S1.12, P.5)."""
    events = worked(op)
    dead = op.kill()
    prune(op.store, dead.id)
    assert [ids(op.list(status).items) for status in (None, *Status)] == [[dead.id], [], [], [], [], [dead.id]]
    assert [letter.event.id for letter in op.dead().items] == [dead.id]
    assert op.store.logs(events[0])[-1].status == "COMPLETED"
    assert op.store.settled(events[0], ["default"])
    stats = op.store.stats()
    assert (stats.events, stats.head, stats.subscriptions[0].dead) == (1, dead.id, 1)
    assert all(finding.ok for finding in op.store.inspect(deep=True))
    assert op.store.retry_dead(DeadFilter(), "ops") == 1
    assert op.take().event.payload is None


def test_a_page_goes_on_though_the_last_one_seen_was_pruned(op: Operator, clock: FrozenClock):
    """Dead letters are passed over or shown twice by no pruning between two pages (S1.12)."""
    letters: list[int] = []
    for _ in range(5):
        clock.advance(1)
        letters.append(op.kill().id)
    page = op.dead(limit=2)
    failed = op.list(Status.FAILED, limit=2)
    assert ids([letter.event for letter in page.items]) == ids(failed.items) == letters[:2:-1]
    op.store.purge_dead(DeadFilter(event_id=letters[3]), "ops")
    prune(op.store, letters[-1])
    assert [letter.event.id for letter in op.dead(after=page.next).items] == letters[2::-1]
    assert ids(op.list(Status.FAILED, after=failed.next).items) == letters[2::-1]


def in_a_transaction(op: Operator, *news: dict[str, object]) -> list[int]:
    """Publish in a transaction of the caller's."""
    with op.store.transaction() as tx:
        return ids(tx.publish([draft(new) for new in news]))


@pytest.mark.parametrize("publish", [lambda op, *news: ids(op.publish_all(*news)), in_a_transaction])
@pytest.mark.parametrize("many", [0, 150])
def test_a_repeated_publish_of_a_pruned_event_is_a_repeat(
    op: Operator, clock: FrozenClock, publish: Callable[..., list[int]], many: int
):
    """The uid stands for it as long as for any other; nothing is stored anew (I3, P.5)."""
    new = {"type": "a", "payload": {"n": 1}, "uid": "u", "tags": ["x", "y"], "metadata": {"k": "v"}}
    first = op.publish_all(new)[0]
    op.settle(op.take())
    prune_all(op.store)
    clock.advance(60)
    others = [{"type": "b"}] * many
    assert publish(op, *others, new)[-1] == first.id
    with pytest.raises(InvalidEventError, match="another body"):
        publish(op, *others, {**new, "payload": 2})
    assert len(there(op)) == many
    again = op.publish_all(new)[0]
    assert (again.id, again.uid, again.payload, again.tags, again.metadata, again.created_at) == (
        first.id,
        "u",
        {"n": 1},
        ("x", "y"),
        {"k": "v"},
        first.created_at,
    )


def test_a_repeat_of_a_pruned_event_tells_how_it_ended_if_that_is_known(op: Operator):
    """The audit log may outlive the event (I3)."""
    first = op.publish(uid="u")
    op.settle(op.take())
    prune(op.store, first.id)
    assert op.publish(uid="u").status is Status.COMPLETED
    prune_all(op.store)
    assert op.publish(uid="u").status is None


def test_the_store_becomes_smaller(op: Operator):
    """What pruning frees is given back, not only kept for later (P.5, S3.14)."""
    chance = Random(4)
    for _ in range(6):
        op.publish_all(*[{"type": "a", "payload": chance.randbytes(30_000).hex()} for _ in range(50)])
    for delivery in op.take_all(shared=False):
        op.settle(delivery)
    before = op.store.stats().store_bytes
    assert before > 18_000_000
    prune(op.store, op.store.span(Stream.EVENTS).head, limit=100)
    assert op.store.stats().store_bytes < before * 0.6
