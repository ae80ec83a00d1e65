"""Who reads an ordered subscription, and what a store refuses to go on from."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from postbus.errors import Conflict, InvalidRequest, LeaseLost, NotFound, UnsafeStore
from postbus.model import Event, Mode, State, Stream
from postbus.pattern import Interest
from postbus.store import Log
from postbus.store.contract import Burial, DeadFilter
from postbus.testing import FrozenClock
from tests.contract.following import HELD, burial, lead, left, on_postgres, stand, standby, step
from tests.contract.stores import DEAD, OOPS, Operator, Site

# ── who leads ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_one_leads(site: Site, store: Log, events: list[Event]):
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


def test_a_lease_that_ran_out_passes(store: Log, clock: FrozenClock, events: list[Event]):
    """At its end, not a microsecond before (S4.7, I10)."""
    lead(store)
    clock.advance(HELD - timedelta(microseconds=1))
    assert standby(store) is None
    clock.advance(timedelta(microseconds=1))
    assert standby(store) is not None


def test_a_lease_that_is_kept_does_not_run_out(store: Log, clock: FrozenClock, events: list[Event]):
    """Each time it runs anew from then on (S4.7)."""
    first = lead(store)
    for _ in range(3):
        clock.advance(HELD - timedelta(seconds=1))
        assert store.keep(first, HELD)
        assert standby(store) is None
    clock.advance(HELD)
    assert standby(store) is not None


def test_who_is_late_and_not_deposed_goes_on(store: Log, clock: FrozenClock, events: list[Event]):
    """Nobody has taken over: the lease only allows it (I8)."""
    first = lead(store)
    clock.advance(HELD * 2)
    store.move(step(first, events[0]))
    assert store.keep(first, HELD)
    assert standby(store) is None


def test_a_lock_that_is_free_passes_the_lead_at_once(store: Log, events: list[Event]):
    """Whoever led by the lock is gone when another holds it: no waiting for the lease (S4.7)."""
    lead(store, locked=True)
    assert standby(store, locked=True) is not None


def test_who_is_known_to_be_dead_is_not_waited_for(store: Log, events: list[Event], monkeypatch: pytest.MonkeyPatch):
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
    store: Log, clock: FrozenClock, events: list[Event], *, leader: bool, other: bool
):
    """A leader that never had the lock is not deposed by one who gets it, nor one that has it by one without (S4.7)."""
    first = lead(store, locked=leader)
    assert standby(store, locked=other) is None
    store.move(step(first, events[0]))
    clock.advance(HELD)
    assert standby(store, locked=other) is not None


def test_single_always_takes(store: Log, events: list[Event]):
    """Nobody is asked; of two that run all the same, the first one's writes are refused (S4.8, I8)."""
    first = lead(store, single=True)
    second = lead(store, "two", single=True)
    assert second.epoch > first.epoch
    with pytest.raises(LeaseLost):
        store.move(step(first, events[0]))
    store.move(step(second, events[0]))


def test_epochs_only_rise(store: Log, clock: FrozenClock, events: list[Event]):
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


def test_who_leads_again_begins_under_a_new_epoch(store: Log, events: list[Event]):
    """A process that stepped down without a word is not in its own way; what it began before counts no more (I8)."""
    first = lead(store)
    again = lead(store)
    with pytest.raises(LeaseLost):
        store.move(step(first, events[0]))
    store.move(step(again, events[0]))


def test_resigning_after_another_has_taken_over_changes_nothing(store: Log, clock: FrozenClock, events: list[Event]):
    """The heir still leads (I8)."""
    first = lead(store)
    clock.advance(HELD)
    heir = lead(store, "two")
    store.resign(first)
    assert standby(store, "three") is None
    assert store.keep(heir, HELD)


def test_a_lead_begins_where_the_last_one_stopped(store: Log, events: list[Event]):
    """The position is that of the last move (S4.2, S4.3)."""
    first = lead(store)
    store.move(step(first, events[3]))
    store.resign(first)
    assert lead(store, "two").position == events[3].id


def test_what_is_no_ordered_subscription_has_no_lead(store: Log, clock: FrozenClock):
    """A queue, a Spark stream, or nothing at all."""
    store.consumer("lake", Stream.EVENTS, 0)
    for name in ("default", "lake"):
        with pytest.raises(InvalidRequest, match="no ordered subscription"):
            store.lead(name, "one", "w", HELD)
    with pytest.raises(NotFound):
        store.lead("nowhere", "one", "w", HELD)


def test_a_pause_is_told_to_whoever_leads_and_to_nobody_else(store: Log, clock: FrozenClock, events: list[Event]):
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


# ── one that has stopped, or is gone ─────────────────────────────────────────────────────────────────────────────────


def test_why_a_reader_stopped_shows_to_all(site: Site, store: Log, events: list[Event]):
    """With the event it stopped before; whoever reads next and ends in good order does not hide it (S4.5)."""
    store.resign(lead(store), "stopped before event 1", events[0].id)
    other = site.open()
    found = stand(other)
    assert (found.stopped, found.stopped_before, found.worker_id) == ("stopped before event 1", events[0].id, None)
    other.resign(lead(other, "two"))
    assert stand(store).stopped == "stopped before event 1"
    store.resign(lead(store), "the file is damaged")
    assert (stand(store).stopped, stand(store).stopped_before) == ("the file is damaged", None)


@pytest.mark.parametrize("way", ["lightly", "leaving one dead", "with other writes", "rewind"])
def test_why_a_reader_stopped_is_forgotten_once_it_goes_on(store: Log, events: list[Event], way: str):
    """Whoever gets further, or puts it elsewhere, has dealt with it; to lead alone is not enough (S4.5)."""
    store.resign(lead(store), "stopped before event 1", events[0].id)
    again = lead(store)
    assert stand(store).stopped is not None
    match way:
        case "lightly":
            store.move(step(again, events[0]))
        case "leaving one dead":
            store.move(step(again, events[0], buried=[burial(events[0])]))
        case "with other writes":
            with store.transaction() as tx:
                tx.move(step(again, events[0]))
        case _:
            store.rewind("s", events[0].id, "ops")
    assert (stand(store).stopped, stand(store).stopped_before) == (None, None)


def test_one_that_was_deposed_says_nothing_of_its_end(store: Log, clock: FrozenClock, events: list[Event]):
    """Its heir may be past that event already (I8)."""
    first = lead(store)
    clock.advance(HELD)
    heir = lead(store, "two")
    store.resign(first, "stopped before event 1", events[0].id)
    assert (stand(store).stopped, stand(store).worker_id, stand(store).epoch) == (None, "host:two", heir.epoch)


def test_a_reader_known_to_be_dead_is_told_to_be_gone(
    store: Log, clock: FrozenClock, events: list[Event], monkeypatch: pytest.MonkeyPatch
):
    """While its lease still runs; after that nobody is told to read at all (S4.7)."""
    lead(store)
    assert (stand(store).gone, stand(store).reader) == (False, "host:one")
    monkeypatch.setattr(store, "is_dead", lambda owner: owner == "one")
    assert (stand(store).gone, stand(store).worker_id, stand(store).reader) == (True, "host:one", None)
    assert store.stats().checkpoints[0].gone
    clock.advance(HELD)
    assert (stand(store).gone, stand(store).worker_id) == (False, None)


@on_postgres
def test_a_reader_that_lost_its_lock_is_told_to_be_gone(site: Site, store: Log, events: list[Event]):
    """From any host: the lock is the server's. One that reads without a lock is left alone (S4.7)."""
    with site.open().hold("follower s"):
        lead(store, locked=True)
        assert stand(store).gone is False
    assert stand(store).gone is True
    lead(store, "two", single=True)
    assert stand(store).gone is False


# ── where going on would lose something ──────────────────────────────────────────────────────────────────────────────


def test_a_position_of_another_log_is_refused(store: Log, clock: FrozenClock, events: list[Event]):
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


def test_nothing_is_pruned_that_a_follower_has_not_passed(store: Log, events: list[Event]):
    """Unless it is named (I14)."""
    store.move(step(lead(store), events[3]))
    with pytest.raises(Conflict, match="'s'"):
        store.prune(Stream.EVENTS, after=0, through=events[4].id)
    store.prune(Stream.EVENTS, after=0, through=events[3].id)


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


def test_nobody_is_told_to_read_who_does_not(store: Log, clock: FrozenClock, events: list[Event]):
    """Not one whose lease has run out, nor one who has resigned (S4.7)."""
    lead(store)
    clock.advance(HELD)
    assert (stand(store).worker_id, stand(store).held_until) == (None, None)
    second = lead(store, "two")
    assert stand(store).worker_id == "host:two"
    store.resign(second)
    assert stand(store).worker_id is None


# ── readers that end without a word ──────────────────────────────────────────────────────────────────────────────────


def test_readers_that_ended_without_a_word_are_counted(store: Log, clock: FrozenClock, events: list[Event]):
    """By the lock or by the lease, as long as the position does not move (S0.8, I12)."""
    lead(store, "one", locked=True)
    second = lead(store, "two", locked=True)
    assert (second.crashes, second.tried) == (1, None)
    store.announce(second, events[0].id)
    clock.advance(HELD)
    third = lead(store, "three")
    assert (third.crashes, third.tried) == (2, events[0].id)
    store.move(step(third, events[0]))
    clock.advance(HELD)
    assert lead(store, "four").crashes == 1


def test_who_was_at_no_event_is_the_end_of_none(store: Log, clock: FrozenClock, events: list[Event]):
    """However many end while it is paused, or before they get there: they only make the next ones say what they try."""
    for number in range(5):
        found = lead(store, f"w{number}")
        clock.advance(HELD)
    assert (found.crashes, found.tried) == (1, None)
    store.announce(lead(store, "six"), events[0].id)
    clock.advance(HELD)
    lead(store, "seven")
    clock.advance(HELD)
    assert lead(store, "eight").tried is None


def test_a_deposed_reader_announces_nothing(store: Log, clock: FrozenClock, events: list[Event]):
    """As it does nothing else (I8)."""
    first = lead(store)
    clock.advance(HELD)
    lead(store, "two")
    with pytest.raises(LeaseLost):
        store.announce(first, events[0].id)
    clock.advance(HELD)
    assert lead(store, "three").tried is None


def test_who_stops_for_good_is_not_held_against_the_next_try(store: Log, clock: FrozenClock, events: list[Event]):
    """Started again, it tries again (I12)."""
    lead(store)
    clock.advance(HELD)
    second = lead(store, "two")
    assert second.crashes == 1
    store.resign(second, "why", events[0].id)
    assert lead(store, "three").crashes == 0


def test_what_is_read_tells_how_far_the_log_was_pruned(op: Operator, events: list[Event]):
    """As of the same moment: who stands before that has missed something (I5)."""
    store = op.store
    assert store.read_on(0, 10, (Interest(),)).pruned == 0
    for each in store.subscriptions():
        store.delete_subscription(each.name, "ops")
    store.prune(Stream.EVENTS, after=0, through=events[1].id)
    ahead = store.read_on(0, 10, (Interest(),))
    assert (ahead.events[0].id, ahead.pruned) == (events[2].id, events[1].id)


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
    store: Log, clock: FrozenClock, events: list[Event]
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


def test_an_orderly_end_does_not_clear_an_event_of_suspicion(store: Log, clock: FrozenClock, events: list[Event]):
    """It is still the next one, and nobody has got past it (I12)."""
    lead(store)
    clock.advance(HELD)
    store.resign(lead(store, "two"))
    assert lead(store, "three").crashes == 1


def test_a_rewind_ends_the_count(store: Log, clock: FrozenClock, events: list[Event]):
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
