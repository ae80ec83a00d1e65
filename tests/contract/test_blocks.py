"""Blocks: what a worker claims together is leased together, and settled one by one."""

from datetime import timedelta
from typing import Any, Final

import psycopg

from postbus.model import AttemptError, Dead, Delivery, Mode, Status
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store.contract import Claim, Settled, Settlement, Work
from postbus.store.sqlite.claim import claim
from postbus.store.sqlite.store import SqliteStore
from postbus.testing import FrozenClock
from postbus.torture.tables import reading
from tests.contract.stores import DEAD, DONE, FLAWED, RETRY, Operator, Site, ids, wanting
from tests.kinds import on_sqlite


def done(op: Operator, *deliveries: Delivery) -> list[Settled]:
    """Settle deliveries as a worker does what simply worked."""
    return op.store.settle([Settlement(each.lease, DONE, each.worker_id, None, 1.5) for each in deliveries])


def test_a_shared_claim_is_one_lease_of_many_places(op: Operator):
    """Its epochs share a number, and differ in their place (I7)."""
    op.publish_all(*[{"type": "a"}] * 5)
    taken = op.claim(5, shared=True)
    assert len({each.epoch >> 10 for each in taken}) == 1
    assert [each.epoch & 1_023 for each in taken] == [0, 1, 2, 3, 4]
    assert len({each.epoch >> 10 for each in op.claim(5, shared=True) + taken}) == 1


def test_a_claim_gives_no_more_than_was_asked_for_and_in_order(op: Operator):
    """Also where some may not be tried again, and so have blocks of their own (S0.2, I12)."""
    events = op.publish_all({"type": "a"}, {"type": "a", "max_retries": 0}, {"type": "a"})
    assert ids(op.claim(1, shared=True)) == [events[0].id]
    assert ids(op.claim(2, shared=True)) == [events[1].id, events[2].id]


def test_each_place_is_settled_by_itself(op: Operator):
    """In any order, with any outcome, in one call or several; the others are still held (I8, I9)."""
    op.publish_all(*[{"type": "a"}] * 6)
    taken = op.claim(6, shared=True)
    assert done(op, taken[4]) == [Settled.APPLIED]
    outcomes = [DONE, RETRY, DEAD, FLAWED]
    settlements = [
        Settlement(each.lease, outcome, "w", None, 1.0) for each, outcome in zip(taken, outcomes, strict=False)
    ]
    assert op.store.settle(settlements) == [Settled.APPLIED] * 4
    expected = [
        Status.COMPLETED, Status.PENDING, Status.FAILED, Status.COMPLETED_WITH_ERRORS, Status.COMPLETED,
        Status.PROCESSING,
    ]  # fmt: skip
    assert [op.status(each.event) for each in taken] == expected
    assert op.store.extend([taken[5].lease], timedelta(seconds=9)) == set()
    assert op.store.extend([taken[0].lease], timedelta(seconds=9)) == {taken[0].lease}


def test_a_repeat_is_known_of_each_place(op: Operator):
    """Also where many entries are one row of the audit log; another outcome is lost (I8)."""
    op.publish_all(*[{"type": "a"}] * 3)
    taken = op.claim(3, shared=True)
    assert done(op, *taken) == [Settled.APPLIED] * 3
    assert done(op, *taken) == [Settled.REPEATED] * 3
    assert [op.settle(each, DEAD) for each in taken] == [Settled.LOST] * 3


def test_a_place_does_not_stand_for_another_event(op: Operator):
    """The event's id is compared, and so is the subscription (I8)."""
    op.subscription("other")
    op.publish_all(*[{"type": "a"}] * 2)
    first, second = op.claim(2, shared=True)
    crossed = first.lease._replace(event_id=second.event.id)
    elsewhere = first.lease._replace(subscription="other")
    beyond = first.lease._replace(epoch=first.epoch + 7)
    told = [Settlement(each, DONE, "w", None, 1.0) for each in (crossed, elsewhere, beyond)]
    assert op.store.settle(told) == [Settled.LOST] * 3
    assert [op.status(each.event) for each in (first, second)] == [Status.PROCESSING] * 2


def test_what_ends_with_its_worker_is_run_alone_and_what_was_settled_stays(op: Operator):
    """Each unsettled place has used an attempt, and comes back by itself (I10, I12)."""
    op.publish_all(*[{"type": "a"}] * 4)
    taken = op.claim(4, shared=True)
    done(op, taken[1])
    op.end_leases()
    assert op.store.expire(None, RetryPolicy()) == 3
    assert op.status(taken[1].event) is Status.COMPLETED
    alone = [op.claim(10, worker=name) for name in ("x", "y", "z")]
    assert [(len(found), found[0].suspect, found[0].attempt) for found in alone] == [(1, True, 2)] * 3
    assert op.claim(10) == []


def test_nobody_dies_unrun_because_its_neighbour_killed_the_worker(op: Operator, clock: FrozenClock):
    """An attempt that may not be repeated has a lease of its own (I12)."""
    op.publish_all(*[{"type": "a", "max_retries": 0}] * 2, *[{"type": "a"}] * 2)
    taken = op.claim(4, shared=True)
    assert len({each.epoch >> 10 for each in taken}) == 3
    assert taken[2].epoch >> 10 == taken[3].epoch >> 10
    for each in taken[2:]:
        op.settle(each, RETRY)
    clock.advance(10)
    again = op.claim(4, shared=True, policy=RetryPolicy(max_retries=1))
    assert ids(again) == ids(taken[2:])
    assert len({each.epoch >> 10 for each in again}) == 2


def test_what_is_handed_back_from_a_block_is_new_again(op: Operator):
    """Its attempt is given back, and the rest of the block goes on (S0.7)."""
    op.publish_all(*[{"type": "a"}] * 3)
    taken = op.claim(3, shared=True)
    assert op.store.release([taken[0].lease, taken[2].lease], "w") == 2
    assert ids(again := op.claim(5, shared=True)) == ids([taken[0], taken[2]])
    assert [each.attempt for each in again] == [1, 1]
    assert done(op, taken[1], *again) == [Settled.APPLIED] * 3
    assert op.store.work("default", wanting("*")) == Work(due=False, leased=False, retrying=False)


def test_a_worker_of_one_type_leaves_the_others_to_their_workers(op: Operator):
    """Whatever it passes on its way: nothing is lost, and the order holds for each (C1, I10)."""
    events = op.publish_all(*({"type": "ab"[n % 2]} for n in range(40)))
    first = op.claim(100, interests=wanting("b"), shared=True)
    assert ids(first) == ids(events[1::2])
    second = op.claim(100, worker="other", interests=wanting("a"), shared=True)
    assert ids(second) == ids(events[::2])
    assert op.claim(100) == []


def test_a_claim_passes_no_more_than_it_takes(op: Operator):
    """What does not fit stays in the log, where a rewind of nothing finds it (C2)."""
    events = op.publish_all(*[{"type": "a"}] * 10)
    assert ids(op.claim(3, shared=True)) == ids(events[:3])
    late = op.publish("a", priority=5)
    assert ids(op.claim(3, shared=True)) == [late.id, *ids(events[3:5])]
    assert ids(op.claim(30, shared=True)) == ids(events[5:])


def test_what_was_taken_out_of_turn_is_not_handed_out_in_turn(op: Operator):
    """A reset, or a priority, brings an event forward; the pass leaves it out (C1)."""
    events = op.publish_all({"type": "a"}, {"type": "a", "priority": 3}, {"type": "a"}, {"type": "a"})
    op.store.reset(events[2].id, "default", "now", "me")
    taken = [op.take() for _ in events]
    assert ids(taken) == [events[1].id, events[2].id, events[0].id, events[3].id]
    assert op.claim(5) == []


def test_far_apart_events_have_blocks_of_their_own(op: Operator):
    """A block spans at most 16,384 ids, however few of them it holds."""
    op.publish("rare")
    for _ in range(17):
        op.publish_all(*[{"type": "common"}] * 1_000)
    op.publish("rare")
    taken: list[Delivery] = []
    while len(taken) < 2:
        taken += op.claim(10, interests=wanting("rare"), shared=True)
    assert len({each.epoch >> 10 for each in taken}) == 2
    assert done(op, *taken) == [Settled.APPLIED] * 2


def test_the_entries_of_a_block_are_entries_like_any_others(op: Operator):
    """With their own ids, epochs and times, in the order of what happened (I13)."""
    events = op.publish_all(*[{"type": "a", "tags": ["x"]}] * 3)
    taken = op.claim(3, shared=True)
    told = [Settlement(each.lease, DONE, "w", None, float(place)) for place, each in enumerate(taken)]
    op.store.settle(told)
    for place, (event, delivery) in enumerate(zip(events, taken, strict=True)):
        picked, completed = op.logs(event)
        assert (picked.action, completed.action) == ("PICKED", "COMPLETED")
        assert picked.epoch == completed.epoch == delivery.epoch
        assert completed.execution_time_ms == place
        assert completed.id > picked.id
    rows = [entry.id for event in events for entry in op.logs(event)]
    assert len(set(rows)) == 6


def test_an_event_that_cannot_be_read_dies_alone(op: Operator):
    """Its neighbours in the block go on (S1.17)."""
    op.publish_all(*[{"type": "a"}] * 3)
    taken = op.claim(3, shared=True)
    error = AttemptError("UnsafeStore", "damaged")
    assert op.settle(taken[1], Dead(error)) is Settled.APPLIED
    assert done(op, taken[0], taken[2]) == [Settled.APPLIED] * 2


def test_what_lies_behind_a_long_backlog_of_others_is_found_by_one_claim(op: Operator):
    """A claim that found nothing yet goes on passing, and a poll does not answer that there is nothing (I10)."""
    for _ in range(10):
        op.publish_all(*[{"type": "common"}] * 1_000)
    rare = op.publish("rare")
    assert ids(op.claim(1, interests=wanting("rare"))) == [rare.id]


@on_sqlite
def test_a_claim_knows_the_end_of_a_log_whose_last_ids_are_missing(op: Operator):
    """After a restore ids go on far above: nothing lies between, and a claim says that there is no more."""
    event = op.publish()
    op.store.restore_mark("ops")
    op.settle(op.take())
    assert isinstance(op.store, SqliteStore)
    won = op.store._write(lambda session: claim(session, Claim("default", "w", "o", limit=5)))
    assert (won.taken, won.more) == ([], False)
    assert op.status(event) is Status.COMPLETED


TABLES: Final = {
    "sqlite": "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'",
    "postgresql": "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'postbus'::regnamespace",
}


def rows(url: str) -> dict[str, list[Any]]:
    """Return what every table holds."""
    with reading(url) as run:
        names = [name for (name,) in run(TABLES[url.partition(":")[0]])]
        return {name: list(run(f"SELECT * FROM {name}")) for name in names}  # noqa: S608  names of ours


def test_publishing_writes_the_log_and_nothing_else(site: Site):
    """Whatever waits for it, and however it is published: events, and the uids that were supplied (C1)."""
    op = Operator(site.open(), site.clock)
    for number in range(5):
        op.subscription(f"s{number}", mode=Mode.ORDERED if number == 4 else Mode.QUEUE)
    before = rows(site.url)
    op.publish(priority=5)
    op.publish_all(*[{"type": "a", "delay": 60}] * 300)
    op.publish(uid="mine")
    with op.store.transaction() as tx:
        tx.publish([draft({"type": "b"})])
    if site.url.startswith("postgresql:"):
        with psycopg.connect(site.url) as connection:
            op.store.publish_on(connection, [draft({"type": "c", "uid": "yours"})])
            connection.execute("SELECT postbus.publish('d')")
    after = rows(site.url)
    assert {name for name in after if after[name] != before[name]} == {"events", "dedup"}
