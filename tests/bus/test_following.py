"""`@bus.follow`: every event once and in order, from where it stopped."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from postbus import (
    AsyncEventBus,
    Conflict,
    Context,
    Event,
    EventBus,
    EventBusShutdownError,
    Follower,
    InvalidRequest,
    open_store,
)
from postbus.follow import make_follow
from postbus.store import log_of
from tests.bus.following import (
    LONG,
    QUICK,
    Make,
    collect,
    publish,
    stand,
)
from tests.conftest import Crew

pytestmark = pytest.mark.usefixtures("brisk")


# ── every event, in order ────────────────────────────────────────────────────────────────────────────────────────────


def test_it_sees_every_event_in_order(bus: EventBus):
    """What was there before and what comes while it runs, more than one reading's worth (S4.1, S4.3, S4.9)."""
    seen = collect(bus, batch_size=10)
    publish(bus, *range(55))
    with bus:
        last = publish(bus, *range(55, 99))[-1]
        bus.wait_for("s", last.id, timeout=LONG)
        assert seen == list(range(99))
        assert stand(bus).position == last.id


def test_there_is_no_gap_between_catching_up_and_live(make_bus: Make, crew: Crew):
    """Many publish while it starts: each event once, by position (S4.3, S4.4, I5)."""
    bus, other = make_bus(), make_bus()
    seen: list[int] = []
    bus.follow("s", batch_size=7)(lambda event: seen.append(event.id))

    def work() -> list[int]:
        return [(bus if number % 2 else other).publish("a").id for number in range(15)]

    crew.start(work, count=4)
    with bus:
        published = sorted(each for ids in crew.join() for each in ids)
        bus.wait_for("s", published[-1], timeout=LONG)
    assert seen == published


def test_after_a_restart_it_goes_on_where_it_stopped(make_bus: Make):
    """What came meanwhile is caught up with, nothing is repeated after an orderly end (S4.3, S4.6)."""
    first = make_bus()
    seen = collect(first)
    with first:
        first.wait_for("s", publish(first, 1, 2)[-1].id, timeout=LONG)
    publisher = make_bus()
    publish(publisher, 3, 4)
    second = make_bus()
    again = collect(second, start="now")
    with second:
        second.wait_for("s", publish(second, 5)[-1].id, timeout=LONG)
    assert (seen, again) == ([1, 2], [3, 4, 5])


@pytest.mark.parametrize(("start", "expected"), [("beginning", [0, 1, 2, 3]), ("now", [3]), (2, [2, 3]), (0, None)])
def test_it_begins_where_it_is_told_to(bus: EventBus, start: str | int, expected: list[int] | None):
    """At the beginning, after an id, or with what is published from then on (S4.3)."""
    publish(bus, 0, 1, 2)
    seen = collect(bus, start=start)
    with bus:
        bus.wait_for("s", publish(bus, 3)[-1].id, timeout=LONG)
    assert seen == (expected or [0, 1, 2, 3])


def test_it_sees_what_the_pattern_and_the_tags_cover(bus: EventBus):
    """The checkpoint passes the rest all the same (S1.4, S4.4)."""
    orders, tagged, both = (
        collect(bus, "order.*", "orders"),
        collect(bus, name="tagged", tags=["eu", "uk"]),
        collect(bus, "order.*", "both", tags=["eu"]),
    )
    bus.publish("order.placed", 1, tags=["eu"])
    bus.publish("order.placed", 2)
    bus.publish("user.made", 3, tags=["uk", "fr"])
    last = bus.publish("user.made", 4)
    with bus:
        for name in ("orders", "tagged", "both"):
            bus.wait_for(name, last.id, timeout=LONG)
    assert (orders, tagged, both) == ([1, 2], [1, 3], [1])


def test_a_new_pattern_counts_from_where_it_stands(make_bus: Make):
    """The subscription shows it, the position stays (S4.2)."""
    first, second = make_bus(), make_bus()
    collect(first, "a")
    first.start()
    first.wait_for("s", publish(first, 1)[-1].id, timeout=LONG)
    first.shutdown()
    publish(second, 2, kind="b")
    seen = collect(second, "b", tags=())
    with second:
        second.wait_for("s", publish(second, 3, kind="b")[-1].id, timeout=LONG)
        assert second.subscriptions.get("s").patterns == ("b",)
    assert seen == [2, 3]


def test_rare_events_are_found_in_a_long_log(bus: EventBus):
    """Reading reaches further while little is wanted, and passes nothing by (S4.4, S4.9)."""
    bus.publish_many([{"type": "rare" if number % 400 == 7 else "a", "payload": number} for number in range(1_500)])
    seen = collect(bus, "rare", batch_size=10)
    with bus:
        bus.wait_idle(timeout=LONG)
    assert seen == [7, 407, 807, 1207]


def test_followers_of_one_bus_do_not_wait_for_each_other(bus: EventBus):
    """One hangs, the other goes on (S4.7)."""
    gate = threading.Event()
    bus.follow("slow")(lambda _: gate.wait(LONG))
    seen = collect(bus)
    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=LONG)
        assert seen == [1, 2]
        assert stand(bus, "slow").position == 0
        gate.set()


def test_a_follower_can_be_added_to_a_running_bus(bus: EventBus):
    """It starts at once, and is shown among the handlers (S1.6)."""
    collect(bus, name="other")
    with bus:
        seen = collect(bus)
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        assert seen == [1]
        assert {each.subscription for each in bus.store.handlers()} == {"s", "other"}
    with pytest.raises(EventBusShutdownError):
        collect(bus, name="late")


def test_a_follower_runs_alone(make_bus: Make, url: str):
    """Without a bus: it needs a store and what to do (S4.3)."""
    bus = make_bus()
    seen: list[Any] = []
    store = log_of(open_store(url))
    with Follower(store, make_follow("s", "*", lambda event: seen.append(event.payload)), poll_interval=0.05):
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=LONG)
    store.close()
    assert seen == [1, 2]
    assert stand(bus).worker_id is None


# ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_async_handler_is_awaited_before_the_next(bus: EventBus):
    """In order, one at a time, on one loop (S4.3)."""
    seen: list[Any] = []
    loops: set[int] = set()

    @bus.follow("s")
    async def handle(event: Event) -> None:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.002 * (3 - event.payload))
        seen.append(event.payload)

    with bus:
        bus.wait_for("s", publish(bus, 0, 1, 2)[-1].id, timeout=LONG)
    assert seen == [0, 1, 2]
    assert len(loops) == 1


def test_an_async_bus_follows_on_the_callers_loop(url: str):
    """A coroutine handler sees the loop of whoever started the bus; waiting for it does not block that (S4.3)."""
    seen: list[Any] = []

    async def main(use: Callable[[AsyncEventBus], Awaitable[None]]) -> None:
        bus = AsyncEventBus(url, poll_interval=0.05)
        try:
            await asyncio.wait_for(use(bus), 20)
        finally:
            await bus.shutdown(timeout=5)

    async def use(bus: AsyncEventBus) -> None:
        here = asyncio.get_running_loop()

        @bus.follow("s")
        async def handle(event: Event) -> None:
            await asyncio.sleep(0)
            seen.append((event.payload, asyncio.get_running_loop() is here))

        async with bus:
            events = await bus.publish_many([{"type": "a", "payload": number} for number in range(3)])
            await bus.wait_for("s", events[-1].id, timeout=LONG)
            assert (await bus.subscriptions.rewind("s", events[1].id)).again == 1
            await bus.wait_for("s", events[-1].id, timeout=LONG)

    asyncio.run(main(use))
    assert seen == [(number, True) for number in (0, 1, 2, 2)]


class Order(BaseModel):
    """A typed payload."""

    number: int


def test_a_payload_is_validated_into_its_model(bus: EventBus):
    """What does not fit is a dead letter at once, and the next one comes (S4.5)."""
    seen: list[Any] = []
    bus.follow("s", model=Order, retry=QUICK)(lambda event: seen.append(event.payload))
    with bus:
        bus.wait_for("s", publish(bus, {"number": 1}, {"number": "x"}, {"number": 3})[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert seen == [Order(number=1), Order(number=3)]
    assert (letter.event.payload, letter.attempts) == ({"number": "x"}, 1)
    assert "does not fit Order" in letter.errors[0].message


def test_a_list_handler_gets_lists(bus: EventBus):
    """Up to `batch` of them, in order, all of them; the checkpoint moves a list at a time (S4.9)."""
    lists: list[list[int]] = []
    positions: list[int] = []

    @bus.follow("s", batch=4, model=int)
    def handle(events: list[Event]) -> None:
        assert type(events) is list
        lists.append([event.payload for event in events])
        positions.append(stand(bus).position)

    events = publish(bus, *range(10))
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
    assert lists == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert positions == [0, events[3].id, events[7].id]


def test_of_a_list_that_fails_only_the_culprit_dies(bus: EventBus):
    """It is split: each comes alone, with all its attempts, and the others are done (S4.5, I6)."""
    calls: list[list[int]] = []

    @bus.follow("s", batch=4, retry=QUICK)
    def handle(events: Sequence[Event]) -> None:
        calls.append([event.payload for event in events])
        if 5 in calls[-1]:
            raise ValueError("five")

    events = publish(bus, *range(10))
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [4], [5], [5], [5], [6], [7], [8, 9]]
    assert (letter.event.id, letter.attempts) == (events[5].id, 3)


def test_the_context_tells_of_the_run(bus: EventBus):
    """Attempt, epoch, worker; and that an event in its order is not redelivered (S4.5)."""
    told: list[tuple[Any, ...]] = []

    @bus.follow("s", retry=QUICK)
    def handle(event: Event, ctx: Context) -> None:
        ctx.extend()
        told.append((event.payload, ctx.attempt, ctx.epoch, ctx.worker_id, ctx.redelivered))
        if event.payload == 1 and ctx.attempt < 3:
            raise ValueError("not yet")

    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=LONG)
        epoch = stand(bus).epoch
        assert told == [
            (1, 1, epoch, bus.worker_id, False), (1, 2, epoch, bus.worker_id, False),
            (1, 3, epoch, bus.worker_id, False), (2, 1, epoch, bus.worker_id, False),
        ]  # fmt: skip
        assert bus.dlq.list(subscription="s").total == 0


# ── registering ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"on_error": "ignore"}, "on_error"), ({"start": 99}, "start at"), ({"pattern": ""}, "pattern")],
)
def test_what_cannot_be_followed_is_refused(bus: EventBus, options: dict[str, Any], reason: str):
    """When registering on a bus in use, with the reason, and nothing is made (S4.8)."""
    bus.stats()
    with pytest.raises(InvalidRequest, match=reason):
        bus.follow("s", **options)(lambda _: None)
    assert bus.followers == {}
    assert [each.name for each in bus.subscriptions.list()] == ["default"]


def test_a_start_that_cannot_be_is_told_at_the_first_use(make_bus: Make):
    """A bus that has not been used knows no positions: whatever is asked of it first is refused, and nothing stored."""
    bus = make_bus()
    bus.follow("s", start=99)(lambda _: None)
    for use in (bus.stats, lambda: bus.publish("a"), bus.start):
        with pytest.raises(InvalidRequest, match="start at"):
            use()
    assert make_bus().list().total == 0


def test_an_unknown_option_is_refused(bus: EventBus):
    """As `on` refuses one: by name (S4.8)."""
    with pytest.raises((InvalidRequest, TypeError), match="speed"):
        bus.follow("s", speed=9)(lambda _: None)  # pyright: ignore[reportCallIssue]
    assert bus.followers == {}


def test_a_name_that_is_taken_is_refused(bus: EventBus, make_bus: Make):
    """By a queue, or by a follower of this very process; another process may share it (S4.7)."""
    bus.subscriptions.create("queue")
    for name in ("queue", "default"):
        with pytest.raises(Conflict, match="mode queue"):
            collect(bus, name=name)
    collect(bus)
    with pytest.raises(Conflict, match="already"):
        collect(bus)
    collect(make_bus())
    assert list(bus.followers) == ["s"]


def test_an_ordered_name_is_refused_to_queue_handlers(bus: EventBus):
    """They would take a follower's retried letters away from it, out of order (S4.7)."""
    collect(bus)
    with pytest.raises(Conflict, match="mode ordered"):
        bus.subscribe("*", lambda _: None, subscription="s")


def test_the_function_stays_what_it_was(bus: EventBus):
    """The decorator only registers."""

    @bus.follow("s")
    def handle(event: Event) -> str:
        return event.type

    assert handle(bus.publish("a")) == "a"


def test_a_bus_that_was_never_started_leaves_nothing_behind(bus: EventBus):
    """Registering makes the subscription, and shutting down gives everything back (S1.14)."""
    collect(bus)
    threads = threading.active_count()
    assert bus.shutdown(timeout=5)
    assert threading.active_count() <= threads
