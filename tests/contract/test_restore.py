"""After a restore: another log, in which nothing given out by the old one is given again."""

import pytest

from postbus.model import Status, Stream
from postbus.store.contract import DeadFilter, Settled
from tests.contract.stores import DEAD, RETRY, Operator, Site, ids

MULTIPLE = 1_000_000_000


def test_ids_go_on_from_the_next_multiple(op: Operator):
    """Event ids and audit ids leave room for all that the old log gave after the backup (I4)."""
    before = op.publish()
    op.store.restore_mark("admin")
    after = op.publish()
    assert (before.id, after.id) == (1, MULTIPLE + 1)
    op.settle(op.take())
    assert [row.id > MULTIPLE for row in op.logs(before)] == [True, True]
    op.store.restore_mark("admin")
    assert op.publish().id == 2 * MULTIPLE + 1


def test_a_log_that_was_empty_jumps_too(op: Operator):
    """There may have been events after the backup of an empty log (I4)."""
    op.store.restore_mark("admin")
    event = op.publish()
    assert event.id == MULTIPLE + 1
    op.take()
    assert op.logs(event)[0].id > MULTIPLE


def test_what_was_leased_is_due_at_once_and_its_old_lease_is_void(op: Operator):
    """Each is recorded as RESET in the actor's name, with its attempts kept (I8, I11, I13)."""
    events = op.publish_all(*[{"type": "a"}] * 5)
    held = op.claim(3)
    op.store.restore_mark("admin")
    assert [op.settle(each) for each in held] == [Settled.LOST] * 3
    for event in events[:3]:
        row = op.logs(event)[-1]
        assert (row.action, row.worker_id, row.status) == ("RESET", "admin", Status.PENDING)
    assert [op.actions(event) for event in events[3:]] == [[], []]
    again = op.claim(10, worker="heir")
    assert sorted(ids(again)) == ids(events)
    assert sorted(each.attempt for each in again) == [1, 1, 2, 2, 2]


def test_more_leases_than_fit_one_transaction_are_all_put_back(op: Operator, monkeypatch: pytest.MonkeyPatch):
    """They are put back some at a time (I11)."""
    monkeypatch.setattr("postbus.store.base.CHUNK", 3)
    op.publish_all(*[{"type": "a"}] * 10)
    assert len(op.claim(8)) == 8
    op.store.restore_mark("admin")
    assert len(op.claim(20)) == 10


def test_epochs_jump_far_ahead(op: Operator):
    """No lease given by the old log after the backup has the number of one given by the new log (I7)."""
    op.publish_all({"type": "a"}, {"type": "a"})
    before = op.take().lease.epoch
    op.store.restore_mark("admin")
    assert op.take().lease.epoch - before >= 1 << 32


def test_what_waits_or_is_dead_stays_as_it_is(op: Operator):
    """Only leases are touched: delays, retries and dead letters keep their time and their errors (I9, I13)."""
    dead = op.kill()
    later, retried = op.publish(delay=100), op.publish()
    op.settle(op.take(), RETRY)
    before = [(op.stand(each), op.logs(each)) for each in (dead, later, retried)]
    op.store.restore_mark("admin")
    assert [(op.stand(each), op.logs(each)) for each in (dead, later, retried)] == before
    assert op.dead().total == 1


def test_the_log_has_a_new_name(site: Site, op: Operator):
    """Positions of the old log can be told from those of the new one, by whoever opens it next."""
    names = {op.store.restore_mark("admin") for _ in range(2)}
    assert len(names) == 2
    assert all(len(name) == 32 for name in names)
    Operator(site.open(), site.clock).publish()


def test_others_who_have_it_open_go_on_above(site: Site, op: Operator):
    """A store that was open meanwhile gives no id and no epoch of the old range (I4, I7)."""
    other = Operator(site.open(), site.clock)
    other.publish()
    first = other.take().lease.epoch
    op.store.restore_mark("admin")
    assert other.publish().id > MULTIPLE
    assert other.take().lease.epoch > first + (1 << 32) - 1024


def test_a_supplied_uid_still_stands_for_its_event(op: Operator):
    """A publish repeated after the restore makes no copy of what the backup holds (I3)."""
    event = op.publish(uid="mine")
    op.store.restore_mark("admin")
    assert op.publish(uid="mine").id == event.id


def test_uids_that_are_known_can_be_told(op: Operator):
    """Only supplied ones are remembered (I3)."""
    op.publish_all({"type": "a", "uid": "one"}, {"type": "a", "uid": "it's"}, {"type": "a"})
    assert op.store.known(["one", "it's", "two"]) == {"one", "it's"}
    assert op.store.known([]) == set()


def test_a_dead_letter_can_be_retried_afterwards(op: Operator):
    """Its retry draws from the new range (I7)."""
    event = op.kill()
    op.store.restore_mark("admin")
    assert op.store.retry_dead(DeadFilter(), "admin") == 1
    delivery = op.take()
    assert delivery.id == event.id
    op.settle(delivery, DEAD)
    assert op.dead().total == 1


def test_a_cursor_beyond_the_log_is_set_back_and_said(op: Operator, caplog: pytest.LogCaptureFixture):
    """Else it would pass over what is published next (I10)."""
    events = op.publish_all(*[{"type": "a"}] * 3)
    for delivery in op.take_all():
        op.settle(delivery)
    with op.store.transaction() as tx:
        schema = "" if op.store.url.startswith("sqlite") else "postbus."
        tx.execute(f"UPDATE {schema}cursors SET position = 7000000000, looked = 7000000000")  # noqa: S608  written above
    assert op.store.restore_mark("ops")
    assert f"cursor_set_back: subscription='default' position={events[2].id}" in caplog.messages
    event = op.publish()
    assert event.id < 7_000_000_000
    assert op.take().id == event.id


def test_a_cursor_at_the_end_of_a_pruned_log_stays(op: Operator, caplog: pytest.LogCaptureFixture):
    """There is no event at its position any more, and nothing was lost."""
    events = op.publish_all(*[{"type": "a"}] * 3)
    for delivery in op.take_all():
        op.settle(delivery)
    op.store.prune(Stream.EVENTS, after=0, through=events[2].id)
    op.store.restore_mark("ops")
    assert not [each for each in caplog.messages if "cursor_set_back" in each]
