"""Handlers come and go: subscribe, unsubscribe, `@on`, and the subscriptions behind them."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from postbus import Conflict, Event, EventBus, InvalidRequest, NotFound, RetryPolicy, Status
from postbus.testing import drain


def test_subscribe_gives_an_id_that_unsubscribe_takes(still: EventBus):
    """After it the handler sees no further event, and the id is unknown (S1.3)."""
    ran: list[int] = []
    identity = still.subscribe("order.*", lambda event: ran.append(event.id))
    first = still.publish("order.placed")
    drain(still)
    still.unsubscribe(identity)
    later = still.publish("order.placed")
    assert drain(still) == 0
    assert ran == [first.id]
    assert still.get(later.id).status is Status.PENDING
    with pytest.raises(NotFound):
        still.unsubscribe(identity)


def test_the_decorator_registers_and_returns_the_function(still: EventBus):
    """It can still be called by its name (S1.3)."""

    @still.on("a")
    def double(event: Any) -> int:
        return event.payload * 2

    class Fake:
        payload = 4

    assert double(Fake()) == 8
    still.publish("a", 1)
    assert drain(still) == 1


@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        ("user.created", ["user.created"], ["user.create", "user.created.x", "users.created"]),
        ("user.*", ["user.created", "user.a.b"], ["user", "xuser.created"]),
        ("order.*.shipped", ["order.7.shipped", "order.a.b.shipped"], ["order.shipped"]),
        ("*", ["anything.at.all"], []),
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_a_handler_gets_what_its_pattern_covers(
    still: EventBus, pattern: str, covered: list[str], not_covered: list[str]
):
    """Literal text and stars; dots are nothing special (S1.4)."""
    ran: list[str] = []
    still.subscribe(pattern, lambda event: ran.append(event.type))
    still.publish_many({"type": kind} for kind in covered + not_covered)
    drain(still)
    assert ran == covered


def test_tags_narrow_a_handler(still: EventBus):
    """Any one of them is enough; the rest stays pending."""
    ran: list[Any] = []
    still.subscribe("*", lambda event: ran.append(event.payload), tags=["eu", "uk"])
    still.publish("a", 1, tags=["uk", "big"])
    left = still.publish("a", 2, tags=["us"])
    drain(still)
    assert ran == [1]
    assert still.get(left.id).status is Status.PENDING


def test_what_nobody_handles_stays_pending_and_is_told(still: EventBus):
    """Nothing is completed because nobody cared (S1.1, S0.9)."""
    still.subscribe("order.*", lambda _: None)
    event = still.publish("invoice.paid")
    drain(still)
    assert still.get(event.id).status is Status.PENDING
    assert still.stats().unhandled == {"default/invoice.paid": 1}


def test_handlers_are_stored_with_their_process_and_leave_with_it(make_bus: Callable[..., EventBus]):
    """Id, name, pattern, subscription and process can be read by others; the functions cannot (S1.6)."""
    one, two = make_bus(worker_id="host:1"), make_bus(worker_id="host:2")

    def ship(_: object) -> None:
        """Ship it."""

    identity = one.subscribe("order.*", ship, tags=["eu"])
    two.subscribe("*", ship, subscription="audit")
    one.start()
    two.start()
    stored = {each.id: each for each in two.store.handlers()}
    assert len(stored) == 2
    mine = stored[identity]
    assert (mine.pattern, mine.subscription, mine.tags, mine.worker_id) == ("order.*", "default", ("eu",), "host:1")
    assert mine.name.endswith("ship")
    one.shutdown()
    assert [each.worker_id for each in two.store.handlers()] == ["host:2"]


def test_unsubscribing_takes_the_stored_handler_away(bus: EventBus):
    """One of two stays (S1.6)."""
    bus.start()
    first = bus.subscribe("a", lambda _: None)
    second = bus.subscribe("b", lambda _: None)
    bus.unsubscribe(first)
    assert [each.id for each in bus.store.handlers()] == [second]


@pytest.mark.parametrize(("start", "begun"), [(None, 0), ("beginning", 0), ("now", 3), (1, 1)])
def test_a_handler_that_names_a_new_subscription_makes_it(
    still: EventBus, caplog: pytest.LogCaptureFixture, start: Any, begun: int
):
    """For its pattern, from the beginning of the log unless `start` says otherwise; the log tells from where (N.29)."""
    ran: list[int] = []
    ids = [still.publish(name).id for name in ("order.placed", "user.made", "order.placed")]
    options: dict[str, Any] = {} if start is None else {"start": start}
    with caplog.at_level("INFO", logger="postbus"):
        still.subscribe("order.*", lambda event: ran.append(event.id), subscription="billing", **options)
    ids.append(still.publish("order.paid").id)
    drain(still)
    assert ran == [each for each in ids if each > begun and each != ids[1]]
    made = {each.name: each for each in still.subscriptions.list()}["billing"]
    assert made.patterns == ("order.*",)
    assert f"subscription_created: subscription='billing' position={begun} waiting={len(ran) - 1}" in caplog.messages


def test_where_a_subscription_begins_counts_only_for_the_first_that_names_it(still: EventBus):
    """A second handler joins it where it stands."""
    ran: list[str] = []
    still.publish("order.placed")
    still.subscribe("order.*", lambda event: ran.append(event.type), subscription="billing", start="now")
    still.subscribe("user.*", lambda event: ran.append(event.type), subscription="billing", start="beginning")
    still.publish("user.made")
    drain(still)
    assert ran == ["user.made"]


@pytest.mark.parametrize("start", ["yesterday", -1, 1.5, True, None])
def test_a_start_that_is_none_is_refused(bus: EventBus, start: Any):
    """With what would do; nothing is registered."""
    with pytest.raises(InvalidRequest, match="start is 'beginning', 'now' or an id"):
        bus.subscribe("a", print, subscription="s", start=start)
    assert bus.handlers == ()


def test_a_second_handler_widens_the_subscription(still: EventBus):
    """It wants both patterns from then on."""
    ran: list[str] = []
    for pattern in ("order.*", "user.*"):
        still.subscribe(pattern, lambda event: ran.append(event.type), subscription="billing")
    still.publish("user.made")
    still.publish("order.placed")
    drain(still)
    assert sorted(ran) == ["order.placed", "user.made"]


def test_two_subscriptions_each_get_every_event(still: EventBus):
    """And each has its own end."""
    ran: list[str] = []
    still.subscribe("*", lambda _: ran.append("default"))

    @still.on("*", subscription="audit", retry={"max_retries": 0})
    def fail(_: object) -> None:
        ran.append("audit")
        raise ValueError("no")

    event = still.publish("a")
    assert drain(still) == 2
    assert sorted(ran) == ["audit", "default"]
    assert still.get(event.id).status is Status.COMPLETED
    assert still.get(event.id, subscription="audit").status is Status.FAILED


def test_subscribing_while_running_takes_effect_at_once(bus: EventBus):
    """Events that waited for a handler are handled (S1.3)."""
    bus.publish("a")
    done = threading.Event()
    with bus:
        bus.subscribe("a", lambda _: done.set())
        assert done.wait(10)


def test_prefetched_events_of_an_unsubscribed_handler_are_not_completed(
    make_bus: Callable[..., EventBus], eventually: Any
):
    """They go back, pending and with their attempt (S1.1, S1.3)."""
    bus = make_bus(concurrency=1, prefetch=5)
    started, gate = threading.Event(), threading.Event()

    def slow(_: object) -> None:
        started.set()
        gate.wait(10)

    events = bus.publish_many([{"type": "a"}] * 4)
    identity = bus.subscribe("*", slow)
    with bus:
        assert started.wait(10)
        eventually(lambda: bus.list(status="PROCESSING").total == 4)
        bus.unsubscribe(identity)
        gate.set()
        eventually(lambda: bus.list(status="PENDING").total == 3)
        stands = [bus.get(event.id).deliveries[0] for event in events]
        assert [stand.status for stand in stands] == [Status.COMPLETED] + [Status.PENDING] * 3
        assert [stand.attempt for stand in stands[1:]] == [0, 0, 0]


@pytest.mark.parametrize("options", [{"on_error": "x"}, {"timeout": 0}, {"retry": {"x": 1}}, {"subscription": "a/b"}])
def test_wrong_options_register_nothing(bus: EventBus, options: dict[str, Any]):
    """Neither a handler nor a subscription is left behind (S1.3)."""
    with pytest.raises(InvalidRequest):
        bus.subscribe("*", lambda _: None, **options)
    assert bus.store.handlers() == ()
    assert [each.name for each in bus.subscriptions.list()] == ["default"]


# ── bus.subscriptions ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_subscription_can_be_made_with_its_own_terms(still: EventBus):
    """Patterns, tags, lease in seconds, policy and start."""
    still.publish("order.placed", tags=["eu"])
    made = still.subscriptions.create(
        "billing", "order.*", tags=["eu"], lease=90, retry=RetryPolicy(max_retries=7), start="beginning"
    )
    assert (made.patterns, made.tags, made.lease) == (("order.*",), ("eu",), timedelta(seconds=90))
    delivery = still.poll(subscription="billing")
    assert delivery is not None
    assert delivery.lease_until - still.store.now() == timedelta(seconds=90)
    assert still.get(delivery.id, subscription="billing").max_retries == 7
    assert still.get(delivery.id).max_retries == 3


@pytest.mark.parametrize(
    ("name", "options"),
    [("", {}), ("a/b", {}), ("s", {"patterns": []}), ("s", {"patterns": [""]}), ("s", {"start": "yesterday"})],
)
def test_a_wrong_subscription_is_refused(bus: EventBus, name: str, options: dict[str, Any]):
    """InvalidRequest, and nothing made."""
    with pytest.raises(InvalidRequest):
        bus.subscriptions.create(name, **options)
    assert [each.name for each in bus.subscriptions.list()] == ["default"]


def test_pause_resume_and_delete(still: EventBus):
    """Paused: nothing is handled; resumed: all of it; deleted: what was left is discarded."""
    ran: list[int] = []
    still.subscribe("*", lambda event: ran.append(event.id), subscription="s")
    still.subscriptions.pause("s")
    first = still.publish("a")
    assert drain(still) == 0
    still.subscriptions.resume("s")
    drain(still)
    assert ran == [first.id]
    second = still.publish("a")
    assert still.subscriptions.delete("s") == 1
    assert [row.action for row in still.get(second.id, include_logs=True).logs] == ["DISCARDED"]
    with pytest.raises(NotFound):
        still.subscriptions.pause("s")
    with pytest.raises(Conflict):
        still.subscriptions.create("default")


def test_a_deleted_subscription_does_not_hold_up_the_others(bus: EventBus, eventually: Any):
    """Its handlers find nothing; those of other subscriptions go on at once (I10)."""
    ran: list[Event] = []
    bus.subscribe("*", lambda _: None, subscription="gone")
    bus.subscribe("*", ran.append)
    with bus:
        bus.publish("a", wait=True, timeout=10)
        bus.subscriptions.delete("gone")
        for count in range(2, 6):
            bus.publish("a")
            eventually(lambda count=count: len(ran) == count, within=2)
