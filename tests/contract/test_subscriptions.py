"""Subscriptions: made from a place in the log, widened, paused, deleted; and who handles them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from postbus.errors import Conflict, NotFound
from postbus.model import HandlerRecord, Mode, Status
from postbus.retry import RetryPolicy
from postbus.store import Log
from postbus.store.contract import DeadFilter, Settled
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, Operator, Site, ids, wanting


def test_the_default_subscription_is_there_from_the_start(store: Log):
    """A queue of everything."""
    (default,) = store.subscriptions()
    assert (default.name, default.mode, default.patterns) == ("default", Mode.QUEUE, ("*",))
    assert (default.paused, default.lease, default.retry) == (False, None, None)


def test_a_subscription_comes_back_as_it_was_made(op: Operator, clock: FrozenClock):
    """All its parts are stored, and the list goes by name."""
    policy = RetryPolicy(max_retries=7, base_delay=0.5, max_delay=60, multiplier=3, jitter=0.1)
    made = op.subscription(
        "billing", ["invoice.*", "order.paid"], tags=["eu", "uk"], lease=timedelta(seconds=90), retry=policy
    )
    op.subscription("a-first")
    found = {each.name: each for each in op.store.subscriptions()}
    assert list(found) == ["a-first", "billing", "default"]
    assert found["billing"] == made
    assert (made.patterns, made.tags) == (("invoice.*", "order.paid"), ("eu", "uk"))
    assert (made.lease, made.retry, made.created_at) == (timedelta(seconds=90), policy, clock.now())


def test_of_many_who_make_the_same_subscription_one_succeeds(site: Site):
    """The others are told that it is there, and what was published before and meanwhile comes once (S4.11, I9)."""
    stores = [site.open() for _ in range(4)]
    operators = [Operator(store, site.clock) for store in stores]
    operators[0].publish_all(*[{"type": "a"}] * 20)

    def make(op: Operator) -> bool:
        try:
            op.subscription("s", start="beginning")
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        published = [threads.submit(op.publish_all, *[{"type": "a"}] * 5) for op in operators]
        made = [threads.submit(make, op) for op in operators]
        assert sum(each.result() for each in made) == 1
        total = 20 + sum(len(each.result()) for each in published)
    taken = ids(operators[0].take_all("s"))
    assert len(taken) == len(set(taken)) == total


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_is_stored(op: Operator, mode: Mode):
    """And only queues get deliveries."""
    assert op.subscription("s", mode=mode, start="beginning").mode is mode
    event = op.publish()
    assert (op.status(event, "s") is Status.PENDING) == (mode is Mode.QUEUE)


def test_a_name_is_given_once(op: Operator):
    """The second is a conflict and changes nothing."""
    op.subscription("s", ["a"])
    with pytest.raises(Conflict, match="'s'"):
        op.subscription("s", ["b"])
    assert next(each for each in op.store.subscriptions() if each.name == "s").patterns == ("a",)


def test_from_now_on_means_none_before(op: Operator):
    """The default start gets only what is published after it."""
    op.publish()
    op.subscription("s")
    after = op.publish()
    assert ids(op.take_all("s")) == [after.id]


def test_from_the_beginning_means_all_that_is_wanted(op: Operator):
    """The whole log, filtered by pattern and tags, none missed and none doubled."""
    wanted = [op.publish("order.placed", tags=["eu"]) for _ in range(3)]
    op.publish("order.placed", tags=["us"])
    op.publish("user.made", tags=["eu"])
    op.settle(op.take(), DONE)
    op.subscription("s", ["order.*"], tags=["eu"], start="beginning")
    wanted.append(op.publish("order.placed", tags=["eu"]))
    assert ids(op.take_all("s")) == ids(wanted)


def test_from_an_id_means_after_it(op: Operator):
    """The event of that id has been seen; the next one comes."""
    events = [op.publish() for _ in range(5)]
    op.subscription("s", start=events[1].id)
    assert ids(op.take_all("s")) == ids(events[2:])


def test_a_long_log_is_given_whole_and_in_order(op: Operator):
    """More than one chunk's worth, with their priorities."""
    events = op.publish_all(*({"type": "a", "priority": n % 2} for n in range(2_300)))
    op.subscription("s", start="beginning")
    taken = op.take_all("s")
    assert ids(taken) == [event.id for event in sorted(events, key=lambda event: (-event.priority, event.id))]


def test_widening_lets_it_want_more_from_now_on(op: Operator):
    """What its cursor has passed is not delivered after the fact."""
    op.subscription("s", ["order.*"])
    op.publish("user.made")
    assert op.claim(1, "s") == []
    assert op.store.widen_subscription("s", "user.*") is True
    later = op.publish("user.made")
    assert ids(op.take_all("s")) == [later.id]


def test_widening_by_what_is_wanted_already_is_no_news(op: Operator):
    """The same pattern, or any pattern on a subscription of everything."""
    op.subscription("s", ["order.*"])
    assert op.store.widen_subscription("s", "order.*") is False
    assert op.store.widen_subscription("default", "order.*") is False


def test_an_event_that_two_patterns_cover_comes_once(op: Operator):
    """Overlap makes no doubles."""
    op.subscription("s", ["order.*", "*.placed", "*"])
    event = op.publish("order.placed")
    assert ids(op.take_all("s")) == [event.id]


def test_what_does_not_exist_cannot_be_widened_paused_or_deleted(op: Operator):
    """Each says NotFound."""
    with pytest.raises(NotFound):
        op.store.widen_subscription("nowhere", "a")
    with pytest.raises(NotFound):
        op.store.pause_subscription("nowhere", paused=True)
    with pytest.raises(NotFound):
        op.store.delete_subscription("nowhere", "me")


def test_pausing_stops_claims_and_nothing_else(op: Operator):
    """Publishes pile up, running work can be settled, other subscriptions go on."""
    op.subscription("other")
    op.publish()
    running = op.take()
    op.store.pause_subscription("default", paused=True)
    event = op.publish()
    assert op.settle(running) is Settled.APPLIED
    assert op.claim() == []
    assert len(op.take_all("other")) == 2
    op.store.pause_subscription("default", paused=False)
    assert ids(op.take_all()) == [event.id]


def test_deleting_discards_what_is_unfinished_and_says_so(op: Operator):
    """Pending, leased and dead deliveries each get a DISCARDED row; completed ones keep their end (I13)."""
    op.subscription("s")
    done, dead, leased, pending = (op.publish() for _ in range(4))
    op.settle(op.take("s"), DONE)
    op.settle(op.take("s"), DEAD)
    late = op.take("s")
    assert op.store.delete_subscription("s", "admin") == 3
    for event in (dead, leased, pending):
        assert op.actions(event, "s")[-1] == "DISCARDED"
        assert op.logs(event, "s")[-1].worker_id == "admin"
    assert op.actions(done, "s") == ["PICKED", "COMPLETED"]
    assert op.status(done, "s") is Status.COMPLETED
    assert op.settle(late) is Settled.LOST
    assert op.store.retry_dead(DeadFilter(), "me") == 0
    assert [each.name for each in op.store.subscriptions()] == ["default"]


def test_deleting_a_queue_tells_once_of_all_that_was_still_to_come(op: Operator, monkeypatch: pytest.MonkeyPatch):
    """What it wanted, and nobody had taken: on the last event of the log, counted up to a limit (I13)."""
    op.subscription("s", ["a"])
    op.publish("a")
    op.take("s")
    events = op.publish_all(*[{"type": "a"}] * 4, {"type": "b"})
    assert op.store.delete_subscription("s", "admin") == 5
    told = op.logs(events[4], "s")
    assert [(row.action, row.status, row.worker_id) for row in told] == [("DISCARDED", None, "admin")]
    assert told[0].error_message == "deleted at 1 of 6: 4 events were still to come"
    assert op.logs(events[3], "s") == []
    monkeypatch.setattr("postbus.store.retention.MOST_COUNTED", 2)
    assert op.store.delete_subscription("default", "admin") == 2


def test_many_deliveries_are_discarded_a_part_at_a_time(op: Operator):
    """Each once, those that somebody works on too, and none of another subscription's (I13)."""
    op.subscription("s")
    op.publish_all(*[{"type": "a", "delay": 60}] * 2_500, *[{"type": "b"}] * 10)
    held = op.claim(10, "s", interests=wanting("b"), shared=True)
    assert len(held) == 10
    op.settle(held[0], DEAD)
    assert op.store.delete_subscription("s", "admin") == 2_510
    assert [op.actions(event, "s") for event in (1, 2_500, held[0].id, held[9].id)] == [
        ["DISCARDED"],
        ["DISCARDED"],
        ["PICKED", "FAILED", "DISCARDED"],
        ["PICKED", "DISCARDED"],
    ]
    assert len(op.claim(20)) == 10


def test_a_discarded_delivery_is_not_shown_as_running(op: Operator):
    """Nobody works on it, so it is neither PENDING nor PROCESSING there (I9)."""
    op.subscription("s")
    event = op.publish()
    op.take("s")
    op.store.delete_subscription("s", "admin")
    assert op.status(event, "s") not in (Status.PENDING, Status.PROCESSING)
    assert op.status(event) is Status.PENDING


def test_a_deleted_name_can_be_used_anew(op: Operator):
    """The new one begins where it is told to, with nothing of the old one's."""
    op.subscription("s")
    event = op.publish()
    op.store.delete_subscription("s", "me")
    op.subscription("s", start="beginning")
    (delivery,) = op.take_all("s")
    assert (delivery.id, delivery.attempt) == (event.id, 1)


def test_a_subscription_made_anew_tells_of_its_own_deliveries_only(op: Operator):
    """What the old one had completed is pending in the new one, and listed once (I9)."""
    op.subscription("s")
    event = op.publish()
    op.settle(op.take("s"))
    op.store.delete_subscription("s", "me")
    op.subscription("s", start="beginning")
    assert op.status(event, "s") is Status.PENDING
    assert op.list(Status.COMPLETED, subscription="s").total == 0
    op.settle(op.take("s"))
    assert ids(op.list(Status.COMPLETED, subscription="s").items) == [event.id]


def test_another_store_on_the_same_place_sees_every_change(site: Site):
    """Made, widened, paused, deleted in one process: the next publish and claim in another go by it."""
    one, two = Operator(site.open(), site.clock), Operator(site.open(), site.clock)
    two.publish("warm.up")
    one.subscription("s", ["order.*"])
    first = two.publish("order.placed")
    one.store.widen_subscription("s", "user.*")
    second = two.publish("user.made")
    assert ids(two.take_all("s")) == [first.id, second.id]
    one.store.pause_subscription("s", paused=True)
    two.publish("order.placed")
    assert two.claim(subscription="s") == []
    one.store.delete_subscription("s", "me")
    third = two.publish("order.placed")
    assert {each.subscription for each in one.get(third).deliveries} == {"default"}


# ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def record(clock: FrozenClock, identity: str, owner: str = "p1", pattern: str = "order.*") -> HandlerRecord:
    """Return a handler as a process would register it."""
    return HandlerRecord(identity, "shop.ship", "default", pattern, ("eu", "uk"), "host:1", owner, clock.now())


def test_handlers_are_stored_and_seen_by_all(site: Site, clock: FrozenClock):
    """Id, pattern, subscription, process and time, from any store (S1.6)."""
    one, two = site.open(), site.open()
    handlers = [record(clock, "h1"), record(clock, "h2", "p2", "*")]
    one.register_handlers(handlers)
    assert sorted(two.handlers(), key=lambda each: each.id) == handlers


def test_registering_again_only_moves_the_time(store: Log, clock: FrozenClock):
    """A heartbeat of the registration (S1.6)."""
    store.register_handlers([record(clock, "h1")])
    clock.advance(60)
    store.register_handlers([record(clock, "h1")])
    (found,) = store.handlers()
    assert found == record(clock, "h1")


def test_a_process_forgets_its_own_handlers_only(store: Log, clock: FrozenClock):
    """One by id, or all of them; never another's (S1.6)."""
    store.register_handlers([record(clock, "h1"), record(clock, "h2"), record(clock, "h3", "p2")])
    store.forget_handlers("p1", ["h1", "h3"])
    assert {each.id for each in store.handlers()} == {"h2", "h3"}
    store.forget_handlers("p1")
    assert {each.id for each in store.handlers()} == {"h3"}


def test_a_handler_without_tags_has_none(store: Log, clock: FrozenClock):
    """No tags come back as no tags."""
    bare = HandlerRecord("h", "f", "default", "*", (), "host:1", "p", clock.now())
    store.register_handlers([bare])
    assert store.handlers() == (bare,)
