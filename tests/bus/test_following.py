"""`@bus.follow`: every event once and in order, from where it stopped, whatever fails on the way."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from pydantic import BaseModel

from postbus import (
    AsyncEventBus,
    CheckpointMode,
    Conflict,
    Context,
    Discard,
    Event,
    EventBus,
    EventBusShutdownError,
    Follower,
    InstanceMode,
    InvalidRequest,
    LeaseLost,
    MaxRetriesExceeded,
    NotFound,
    RetryLater,
    RetryPolicy,
    Status,
    StoreUnavailable,
    open_store,
)
from postbus.follow import make_follow
from postbus.model import Checkpoint
from postbus.observe import set_probe
from postbus.store.contract import Claim, Claimed, Rewound, Transaction
from tests.bus.telling import failures
from tests.conftest import Crew
from tests.kinds import on_sqlite

QUICK = RetryPolicy(max_retries=2, base_delay=0.01, max_delay=0.01)
ONCE = RetryPolicy(max_retries=0)
LONG = 10.0

Make = Callable[..., EventBus]
Eventually = Callable[..., Any]


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look behind more often than a follower need."""
    monkeypatch.setattr("postbus.follower.LOOK_BEHIND", 0.05)
    monkeypatch.setattr("postbus.follower.STANDBY", 0.05)
    monkeypatch.setattr("postbus.leftovers.LOOK_AGAIN", 0.05)


@pytest.fixture
def probes() -> Iterator[Callable[[Callable[[str], None]], None]]:
    """Give a way to hold on to the steps of the bus, until the test is over."""
    yield set_probe
    set_probe(None)


def publish(bus: EventBus, *payloads: Any, kind: str = "a") -> list[Event]:
    """Publish events of these payloads."""
    return bus.publish_many([{"type": kind, "payload": each} for each in payloads])


def publish_keyed(bus: EventBus, *names: str) -> dict[str, Event]:
    """Publish events such as A5, of the key A."""
    return {name: bus.publish("a", name, key=name[0]) for name in names}


def stand(bus: EventBus, name: str = "s") -> Checkpoint:
    """Return how a follower's checkpoint stands."""
    return next(each for each in bus.store.checkpoints() if each.subscription == name)


def collect(bus: EventBus, pattern: str = "*", name: str = "s", **options: Any) -> list[Any]:
    """Follow, and return the list that payloads are put into."""
    seen: list[Any] = []
    bus.follow(name, pattern, **options)(lambda event: seen.append(event.payload))
    return seen


def actions(bus: EventBus, event: Event) -> list[str]:
    """Return what the audit log tells of an event in `s`."""
    return [row.action.value for row in bus.get(event.id, include_logs=True).logs if row.subscription == "s"]


def looks(bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the list of what followers found when they looked whether they are paused."""
    look, found = bus.store.is_paused, list[bool]()

    def looking(lead: Any) -> bool:
        found.append(look(lead))
        return found[-1]

    monkeypatch.setattr(bus.store, "is_paused", looking)
    return found


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
    store = open_store(url)
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


# ── failure ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_its_attempts_an_event_is_a_dead_letter_and_the_next_comes(bus: EventBus):
    """With the error of each attempt; nothing behind it ran before that (S4.5, I6, I12)."""
    ran: list[Any] = []

    @bus.follow("s", retry=QUICK)
    def handle(event: Event, ctx: Context) -> None:
        ran.append(event.payload)
        if event.payload == 1:
            raise [ValueError, KeyError, OSError][ctx.attempt - 1](f"try {ctx.attempt}")

    events = publish(bus, 0, 1, 2)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
        assert ran == [0, 1, 1, 1, 2]
        assert (letter.event.id, letter.subscription, letter.attempts) == (events[1].id, "s", 3)
        assert [error.type for error in letter.errors] == ["ValueError", "KeyError", "OSError"]
        assert [error.attempt for error in letter.errors] == [1, 2, 3]
        assert {error.worker_id for error in letter.errors} == {bus.worker_id}
        assert all("in handle" in (error.traceback or "") for error in letter.errors)
        assert actions(bus, events[1]) == ["FAILED"] * 3
        assert bus.get(events[1].id, subscription="s").status is Status.FAILED


def test_the_waits_between_attempts_grow(bus: EventBus):
    """By the policy's factor (S4.5)."""
    moments: list[float] = []

    @bus.follow("s", retry={"max_retries": 3, "base_delay": 0.02, "max_delay": 0.06})
    def fail(_: Event) -> None:
        moments.append(time.monotonic())
        raise ValueError

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
    waits = [after - before for before, after in pairwise(moments)]
    assert len(waits) == 3
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.06), strict=True))


def test_an_events_own_retries_go_before_the_policys(bus: EventBus):
    """Never more attempts than that (I12)."""
    ran: list[int] = []

    @bus.follow("s", retry=QUICK)
    def fail(event: Event) -> None:
        ran.append(event.id)
        raise ValueError

    one, two = bus.publish("a", max_retries=0), bus.publish("a", max_retries=3)
    with bus:
        bus.wait_for("s", two.id, timeout=LONG)
    assert ran == [one.id] + [two.id] * 4


def test_each_failed_attempt_is_one_log_entry(bus: EventBus, caplog: pytest.LogCaptureFixture):
    """With what follows: a retry, or what `on_error` says (S1.11)."""

    @bus.follow("s", retry=QUICK)
    def fail(_: Event) -> None:
        raise ValueError("oops")

    with caplog.at_level(logging.WARNING, "postbus"), bus:
        (event,) = publish(bus, 1)
        bus.wait_for("s", event.id, timeout=LONG)
    told = failures(caplog)
    assert [(entry["attempt"], entry["then"]) for entry in told] == [(1, "retry"), (2, "retry"), (3, "dead_letter")]
    assert {(entry["event_id"], entry["subscription"], entry["error_message"]) for entry in told} == {
        (event.id, "s", "oops")
    }


def test_a_failed_retry_of_a_dead_letter_is_logged_too(
    bus: EventBus, caplog: pytest.LogCaptureFixture, eventually: Eventually
):
    """Each failed attempt, redelivered ones included (S1.11)."""

    @bus.follow("s", retry=ONCE)
    def fail(_: Event) -> None:
        raise ValueError("oops")

    with caplog.at_level(logging.WARNING, "postbus"), bus:
        (event,) = publish(bus, 1)
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: actions(bus, event) == ["FAILED", "RETRIED", "PICKED", "FAILED"])
    assert len(failures(caplog)) == 2


def test_discard_is_a_dead_letter_at_once(bus: EventBus):
    """With its reason, although retries are left (S4.5)."""

    @bus.follow("s")
    def handle(event: Event) -> None:
        if event.payload == 1:
            raise Discard("no such customer")

    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert [(error.type, error.message) for error in letter.errors] == [("Discard", "no such customer")]


def test_retry_later_waits_as_long_as_asked_and_counts(bus: EventBus):
    """Its own delay instead of the policy's, until the attempts are used up (S4.5, I12)."""
    moments: list[float] = []

    @bus.follow("s", retry={"max_retries": 1, "base_delay": 60, "max_delay": 60})
    def handle(_: Event) -> None:
        moments.append(time.monotonic())
        raise RetryLater(0.1, "closed for lunch")

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert len(moments) == letter.attempts == 2
    assert moments[1] - moments[0] >= 0.1


def test_retry_later_may_mean_at_once(bus: EventBus):
    """No delay is a delay that was chosen (S4.5)."""

    @bus.follow("s", retry={"max_retries": 1, "base_delay": 60, "max_delay": 60})
    def handle(_: Event, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RetryLater(0)

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=3)


@pytest.mark.parametrize("error", [SystemExit("no"), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_no_error_ends_the_follower(bus: EventBus, error: BaseException):
    """Even SystemExit is only a failed attempt (I10)."""
    seen: list[Any] = []

    @bus.follow("s", retry=ONCE)
    def handle(event: Event) -> None:
        if event.payload == 1:
            raise error
        seen.append(event.payload)

    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=LONG)
        assert bus.dlq.list(subscription="s").total == 1
    assert seen == [2]


@pytest.mark.parametrize("error", [LeaseLost("of a delivery of its own"), StoreUnavailable("of another bus")], ids=repr)
def test_an_error_that_only_looks_like_the_buses_own_is_a_failed_attempt(bus: EventBus, error: Exception):
    """A handler may use postbus elsewhere: what fails there does not come again for ever (S4.5, I12)."""
    ran: list[Any] = []

    @bus.follow("s", retry=QUICK)
    def handle(event: Event) -> None:
        ran.append(event.payload)
        if event.payload == 1:
            raise error

    with bus:
        bus.wait_for("s", publish(bus, 1, 2)[-1].id, timeout=3)
        assert bus.dlq.list(subscription="s").total == 1
    assert ran == [1, 1, 1, 2]


def test_a_cancelled_retry_of_a_dead_letter_is_given_back(bus: EventBus, eventually: Eventually):
    """At once, and no attempt is burnt, as with any other delivery (S0.7, I11)."""
    errors = iter([ValueError(), asyncio.CancelledError()])

    @bus.follow("s", retry=ONCE, lease=0.5)
    def handle(_: Event) -> None:
        for error in errors:
            raise error

    with bus:
        (event,) = publish(bus, 1)
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: actions(bus, event)[-1] in ("COMPLETED", "EXPIRED") or len(actions(bus, event)) > 5)
        assert actions(bus, event)[:4] == ["FAILED", "RETRIED", "PICKED", "RELEASED"]
        eventually(lambda: bus.get(event.id, subscription="s").status is Status.COMPLETED)


def test_cancellation_is_not_a_failure(bus: EventBus):
    """The event comes again, and no attempt is burnt (S0.7)."""
    errors = iter([asyncio.CancelledError()])
    attempts: list[int] = []

    @bus.follow("s", retry=ONCE)
    def handle(_: Event, ctx: Context) -> None:
        attempts.append(ctx.attempt)
        for error in errors:
            raise error

    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        assert bus.dlq.list(subscription="s").total == 0
    assert attempts == [1, 1]


def test_it_can_stop_at_what_it_fails_at(make_bus: Make, eventually: Eventually):
    """Nothing is passed, nothing is dead, and it says why; healed, it goes on from there (S4.5, I6)."""
    bus = make_bus()
    ran: list[Any] = []

    @bus.follow("s", on_error="stop", retry=QUICK)
    def handle(event: Event) -> None:
        ran.append(event.payload)
        if event.payload == 1:
            raise ValueError("broken")

    events = publish(bus, 0, 1, 2)
    with bus:
        error = eventually(lambda: bus.followers["s"].error)
        assert isinstance(error, MaxRetriesExceeded)
        assert f"before event {events[1].id} (a) after 3 attempts: ValueError: broken" in str(error)
        eventually(lambda: stand(bus).worker_id is None)
        assert bus.followers["s"].leads is False
        assert stand(bus).position == events[0].id
        assert bus.dlq.list(subscription="s").total == 0
        assert ran == [0, 1, 1, 1]
    healed = make_bus()
    seen = collect(healed, on_error="stop")
    with healed:
        healed.wait_for("s", events[-1].id, timeout=LONG)
    assert seen == [1, 2]


def test_nobody_is_told_that_a_stopped_follower_has_passed(bus: EventBus, eventually: Eventually):
    """A publish that waits for it does not claim that the event was handled (S1.2, I6)."""

    @bus.follow("s", on_error="stop", retry=ONCE)
    def fail(_: Event) -> None:
        raise ValueError("broken")

    with bus:
        publish(bus, 1)
        eventually(lambda: bus.followers["s"].error)
        with pytest.raises((TimeoutError, MaxRetriesExceeded)):
            bus.publish("a", wait=True, timeout=0.3)


@on_sqlite
def test_an_unreadable_event_is_a_dead_letter_and_its_neighbours_are_seen(bus: EventBus):
    """It is never handed to the handler (I16)."""
    events = publish(bus, *range(5))
    with bus.transaction() as tx:
        tx.execute("UPDATE events SET payload = '99' WHERE id = ?", (events[2].id,))
    seen = collect(bus, retry=QUICK)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert seen == [0, 1, 3, 4]
    assert (letter.event.id, letter.errors[0].type) == (events[2].id, "UnsafeStore")


def test_an_event_that_ends_every_process_dies_alone(bus: EventBus):
    """As many readers as it has attempts ended without a word before it: it is not tried again (S0.8, I12)."""
    events = publish(bus, 0, 1, 2)
    seen = collect(bus, retry=QUICK, checkpoint=CheckpointMode.batched(10, 60), lease=0.3)
    for number in range(QUICK.attempts):
        assert bus.store.lead("s", f"gone {number}", "w", timedelta(0))
    with bus:
        bus.wait_for("s", events[0].id, timeout=LONG)
        (letter,) = bus.dlq.list(subscription="s")
    assert (letter.event.id, letter.errors[-1].type) == (events[0].id, "ProcessEnded")
    assert seen == [1, 2]


# ── parked keys ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Projection:
    """A follower that fails at what it is told to, and parks what follows of the same key."""

    def __init__(self, bus: EventBus, *broken: str, **options: Any) -> None:
        """Follow as `s`."""
        self.broken = set(broken)
        self.done: list[str] = []
        self.again: list[str] = []
        bus.follow("s", on_error="park_key", retry=ONCE, **options)(self.handle)

    def handle(self, event: Event, ctx: Context) -> None:
        """Take an event such as A5."""
        if event.payload in self.broken:
            raise ValueError(event.payload)
        self.done.append(event.payload)
        if ctx.redelivered:
            self.again.append(event.payload)

    def of(self, key: str) -> list[str]:
        """Return what is done of a key."""
        return [each for each in self.done if each[0] == key]


BOTH = [f"{key}{number}" for number in range(1, 9) for key in "AB"]


def keyed(key: str, first: int, last: int) -> list[str]:
    """Return A1, A2 … of a key."""
    return [f"{key}{number}" for number in range(first, last + 1)]


def test_what_follows_a_dead_one_of_its_key_waits_while_others_flow(bus: EventBus, eventually: Eventually):
    """A5 fails for good: A6… wait, B flows; once A5 is retried, A5, A6… arrive in order, and then the rest (S4.5)."""
    made = Projection(bus, "A5")
    events = publish_keyed(bus, *BOTH)
    nobody = bus.publish("a", "no key")
    with bus:
        bus.wait_for("s", nobody.id, timeout=LONG)
        assert made.of("A") == keyed("A", 1, 4)
        assert made.of("B") == keyed("B", 1, 8)
        assert made.done[-1] == "no key"
        assert [letter.event.id for letter in bus.dlq.list(subscription="s")] == [events["A5"].id]
        assert actions(bus, events["A6"]) == ["PARKED"]
        events |= publish_keyed(bus, "A9", "B9")
        bus.wait_for("s", events["B9"].id, timeout=LONG)
        assert (made.of("A")[-1], made.of("B")[-1]) == ("A4", "B9")

        made.broken.clear()
        bus.dlq.retry(events["A5"].id, "s")
        eventually(lambda: made.done[-1] == "A9")
        assert made.of("A") == keyed("A", 1, 9)
        assert made.again == keyed("A", 5, 9)
        bus.wait_idle(timeout=LONG)
        assert actions(bus, events["A5"]) == ["FAILED", "RETRIED", "PICKED", "COMPLETED"]
        assert actions(bus, events["A6"]) == ["PARKED", "RELEASED", "PICKED", "COMPLETED"]
        bus.wait_for("s", publish_keyed(bus, "A0")["A0"].id, timeout=LONG)
        assert (made.done[-1], made.again[-1]) == ("A0", "A9")


def test_a_retry_that_fails_again_keeps_its_key_waiting(bus: EventBus, eventually: Eventually):
    """Dead once more, and nothing behind it has moved (S4.5, I6)."""
    made = Projection(bus, "A1")
    events = publish_keyed(bus, "A1", "A2", "A3")
    with bus:
        bus.wait_for("s", events["A3"].id, timeout=LONG)
        bus.dlq.retry(events["A1"].id, "s")
        eventually(lambda: actions(bus, events["A1"]) == ["FAILED", "RETRIED", "PICKED", "FAILED"])
        bus.wait_for("s", publish_keyed(bus, "A4", "B1")["B1"].id, timeout=LONG)
        assert made.done == ["B1"]
        made.broken.clear()
        bus.dlq.retry(events["A1"].id, "s")
        eventually(lambda: made.of("A") == keyed("A", 1, 4))


def test_one_that_was_parked_can_die_too(bus: EventBus, eventually: Eventually):
    """Then what follows waits for that one (S4.5)."""
    made = Projection(bus, "A1", "A3")
    events = publish_keyed(bus, *keyed("A", 1, 5))
    with bus:
        bus.wait_for("s", events["A5"].id, timeout=LONG)
        made.broken.discard("A1")
        bus.dlq.retry(events["A1"].id, "s")
        eventually(lambda: [letter.event.id for letter in bus.dlq.list(subscription="s")] == [events["A3"].id])
        assert made.done == ["A1", "A2"]
        made.broken.clear()
        bus.dlq.retry(events["A3"].id, "s")
        eventually(lambda: made.done == keyed("A", 1, 5))


def test_a_purge_frees_the_key_too(bus: EventBus, eventually: Eventually):
    """What was discarded does not come, what waited for it does, in order (S4.5)."""
    made = Projection(bus, "A5")
    events = publish_keyed(bus, *BOTH)
    with bus:
        bus.wait_for("s", events["B8"].id, timeout=LONG)
        assert bus.dlq.purge(0, subscription="s") == 1
        eventually(lambda: made.of("A")[-1] == "A8")
        assert made.of("A") == keyed("A", 1, 4) + keyed("A", 6, 8)
        bus.wait_for("s", publish_keyed(bus, "A9")["A9"].id, timeout=LONG)
        eventually(lambda: made.done[-1] == "A9")


@pytest.mark.parametrize("way", ["retry", "purge"])
def test_what_is_parked_outlives_the_process(make_bus: Make, eventually: Eventually, way: str):
    """Another process has them wait, and replays them in order, also when it was mended while none ran (S4.5)."""
    first, ops = make_bus(), make_bus()
    Projection(first, "A2")
    events = publish_keyed(first, *keyed("A", 1, 4))
    with first:
        first.wait_for("s", events["A4"].id, timeout=LONG)
    second = make_bus()
    made = Projection(second)
    with second:
        second.wait_for("s", publish_keyed(ops, "A5", "B1")["B1"].id, timeout=LONG)
        assert made.done == ["B1"]
    third = make_bus()
    if way == "retry":
        ops.dlq.retry(events["A2"].id)
    else:
        ops.dlq.purge(0)
    made = Projection(third)
    with third:
        expected = keyed("A", 2 if way == "retry" else 3, 5)
        eventually(lambda: made.done[-1:] == ["A5"])
        assert made.done == made.again == expected


def test_lists_are_parked_one_by_one(bus: EventBus, eventually: Eventually):
    """Of a list that holds several keys, only the dead one's wait (S4.5)."""
    lists: list[list[str]] = []
    broken = {"A1"}

    @bus.follow("s", on_error="park_key", batch=10, retry=ONCE)
    def handle(events: list[Event]) -> None:
        lists.append([event.payload for event in events])
        if broken & set(lists[-1]):
            raise ValueError

    events = publish_keyed(bus, "A1", "B1", "A2", "B2")
    with bus:
        bus.wait_for("s", events["B2"].id, timeout=LONG)
        assert lists[-2:] == [["B1"], ["B2"]]
        broken.clear()
        bus.dlq.retry(events["A1"].id)
        eventually(lambda: lists[-1] == ["A2"])
        assert lists[-2:] == [["A1"], ["A2"]]


def test_a_rewind_begins_the_key_anew(bus: EventBus, eventually: Eventually):
    """What was dead and parked comes again in its order (S4.3, S4.5, I9)."""
    made = Projection(bus, "A2")
    events = publish_keyed(bus, *keyed("A", 1, 4))
    with bus:
        bus.wait_for("s", events["A4"].id, timeout=LONG)
        made.broken.clear()
        assert bus.subscriptions.rewind("s", events["A1"].id) == Rewound(events["A1"].id, 3, 3)
        eventually(lambda: made.done == keyed("A", 1, 4))
        bus.wait_for("s", publish_keyed(bus, "A5")["A5"].id, timeout=LONG)
    assert made.done == keyed("A", 1, 5)
    assert made.again == []


def test_without_park_key_a_retried_letter_comes_between_positions(bus: EventBus, eventually: Eventually):
    """Marked as redelivered, under a lease of its own; the checkpoint stays (S4.5, I11)."""
    told: list[tuple[Any, bool, int]] = []
    broken = {1}

    @bus.follow("s", retry=ONCE)
    def handle(event: Event, ctx: Context) -> None:
        if event.payload in broken:
            raise ValueError
        told.append((event.payload, ctx.redelivered, ctx.epoch))

    events = publish(bus, 1, 2)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        broken.clear()
        bus.dlq.retry_all(subscription="s")
        eventually(lambda: bus.get(events[0].id, subscription="s").status is Status.COMPLETED)
        assert stand(bus).position == events[-1].id
        epoch = stand(bus).epoch
    assert [each[:2] for each in told] == [(2, False), (1, True)]
    assert told[0][2] == epoch != told[1][2]


# ── effects and checkpoints in one transaction ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def effects(bus: EventBus) -> Callable[[], list[int]]:
    """Have a table of one's own, and give what stands in it."""
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE effects (event_id INTEGER)")

    def look() -> list[int]:
        with bus.transaction() as tx:
            return [row[0] for row in tx.execute("SELECT event_id FROM effects ORDER BY event_id")]

    return look


def add(tx: Transaction, event: Event) -> None:
    """Have an effect."""
    tx.execute(f"INSERT INTO effects VALUES ({event.id:d})")  # noqa: S608  a number, in any dialect


def ids(events: Sequence[Event]) -> list[int]:
    """Return the events' ids."""
    return [each.id for each in events]


def test_effects_and_checkpoint_commit_together(
    bus: EventBus, make_bus: Make, effects: Callable[[], list[int]], probes: Any
):
    """Until the end of its transaction nobody sees that the event is passed (S4.6, I6)."""
    other, positions = make_bus(), list[int]()
    events = publish(bus, 0, 1, 2)

    @bus.follow("s")
    def handle(event: Event, tx: Transaction) -> None:
        add(tx, event)
        bus.publish("after", event.id, connection=tx)

    probes(lambda step: positions.append(stand(other).position) if step == "checkpointing" else None)
    bus.start()
    bus.wait_for("s", events[-1].id, timeout=LONG)
    bus.subscriptions.pause("s")
    assert positions[:3] == [0, events[0].id, events[1].id]
    assert effects()[:3] == ids(events)


def test_a_failure_undoes_what_was_written(bus: EventBus, effects: Callable[[], list[int]]):
    """Of each event, only the attempt that worked has left anything; of a dead one, none (S4.6, I2)."""

    @bus.follow("s", "a", retry=QUICK)
    def handle(event: Event, ctx: Context, tx: Transaction) -> None:
        add(tx, event)
        bus.publish("after", event.id, connection=tx)
        if event.payload == "dies" or ctx.attempt < 3:
            raise ValueError

    events = publish(bus, "lives", "dies", "lives")
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == [events[0].id, events[2].id]
        assert sorted(each.payload for each in bus.list(type="after")) == [events[0].id, events[2].id]
        assert [letter.event.id for letter in bus.dlq.list(subscription="s")] == [events[1].id]


def test_a_checkpoint_that_fails_undoes_the_effect(bus: EventBus, effects: Callable[[], list[int]], probes: Any):
    """It is done again, and stands once (S4.6, I6)."""
    errors = iter([OSError("the moment before the commit")])

    def fail(step: str) -> None:
        if step == "checkpointing":
            for error in errors:
                raise error

    bus.follow("s", retry=QUICK)(lambda event, tx: add(tx, event))
    events = publish(bus, 0, 1)
    probes(fail)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == ids(events)
        assert next(errors, None) is None
        assert bus.dlq.list(subscription="s").total == 0


def test_a_deposed_reader_leaves_no_effect(bus: EventBus, effects: Callable[[], list[int]], probes: Any):
    """It was deposed after it had read: what it writes is undone, and stands once in the end (S4.6, S4.7, I8)."""
    rewinds = iter([0])
    ran: list[int] = []

    def depose(step: str) -> None:
        if step == "read" and stand(bus).position < stand(bus).position + stand(bus).lag:
            for position in rewinds:
                bus.subscriptions.rewind("s", position)

    @bus.follow("s")
    def handle(event: Event, tx: Transaction) -> None:
        ran.append(event.id)
        add(tx, event)

    events = publish(bus, 0, 1, 2)
    probes(depose)
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == ids(events)
    assert ran == [events[0].id, *ids(events)]


def test_two_that_both_believe_to_lead_have_one_effect(
    bus: EventBus, make_bus: Make, effects: Callable[[], list[int]], eventually: Eventually
):
    """Nobody is asked with SINGLE, so both run: the epoch decides, each effect stands once (S4.7, S4.8, I8)."""
    other = make_bus()
    for each in (bus, other):
        each.follow("s", instance=InstanceMode.SINGLE, retry=ONCE)(lambda event, tx: add(tx, event))
    events = publish(bus, *range(30))
    bus.start()
    other.start()
    eventually(lambda: stand(bus).position >= events[-1].id)
    assert effects() == ids(events)
    assert bus.dlq.list(subscription="s").total == 0


def test_a_list_and_its_checkpoint_are_one_transaction(bus: EventBus, effects: Callable[[], list[int]]):
    """The list that fails is undone whole, then each alone: all but the culprit stand once (S4.6, I2)."""
    calls: list[int] = []

    @bus.follow("s", batch=4, retry=ONCE)
    def handle(events: list[Event], tx: Transaction) -> None:
        calls.append(len(events))
        for event in events:
            add(tx, event)
            if event.payload == 5:
                raise ValueError

    events = publish(bus, *range(8))
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert effects() == ids([*events[:5], *events[6:]])
    assert calls == [4, 4, 1, 1, 1, 1]


def test_a_retried_letter_and_its_end_are_one_transaction(
    bus: EventBus, effects: Callable[[], list[int]], eventually: Eventually
):
    """Its failed attempts leave nothing, the one that works stands once (S4.6, I9)."""

    @bus.follow("s", retry=QUICK)
    def handle(event: Event, ctx: Context, tx: Transaction) -> None:
        add(tx, event)
        if not ctx.redelivered or ctx.attempt < 2:
            raise ValueError

    (event,) = publish(bus, 1)
    with bus:
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: bus.get(event.id, subscription="s").status is Status.COMPLETED)
        assert effects() == [event.id]
        assert actions(bus, event)[3:] == ["RETRIED", "PICKED", "FAILED", "PICKED", "COMPLETED"]


def test_a_retried_letter_taken_away_leaves_no_effect(
    bus: EventBus, effects: Callable[[], list[int]], eventually: Eventually, monkeypatch: pytest.MonkeyPatch
):
    """Its lease was reset before it was handled: what it wrote is undone, the next one's stands (S4.6, I8, I9)."""
    claim, ran, resets = bus.store.claim, list[bool](), iter([1])

    def claiming(terms: Claim) -> Claimed:
        got = claim(terms)
        for delivery in got.deliveries:
            for _ in resets:
                bus.store.reset(delivery.id, "s", "taken away", "ops")
        return got

    @bus.follow("s", retry=QUICK)
    def handle(event: Event, ctx: Context, tx: Transaction) -> None:
        add(tx, event)
        ran.append(ctx.redelivered)
        if not ctx.redelivered:
            raise Discard

    monkeypatch.setattr(bus.store, "claim", claiming)
    (event,) = publish(bus, 1)
    with bus:
        bus.wait_for("s", event.id, timeout=LONG)
        bus.dlq.retry(event.id, "s")
        eventually(lambda: bus.get(event.id, subscription="s").status is Status.COMPLETED)
        assert effects() == [event.id]
        assert actions(bus, event) == ["FAILED", "RETRIED", "PICKED", "RESET", "PICKED", "COMPLETED"]
    assert ran == [False, True, True]


# ── batched checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batched_checkpoint_moves_after_so_many_events(make_bus: Make, eventually: Eventually):
    """What is not saved yet is saved at the shutdown (S4.8, S1.14)."""
    bus, other = make_bus(), make_bus()
    seen = collect(bus, checkpoint=CheckpointMode.batched(10, 60))
    events = publish(bus, *range(25))
    bus.start()
    eventually(lambda: len(seen) == 25)
    assert stand(other).position == events[19].id
    assert bus.shutdown(timeout=5)
    assert stand(other).position == events[24].id
    again = collect(other)
    with other:
        other.wait_for("s", publish(other, 25)[-1].id, timeout=LONG)
    assert again == [25]


def test_a_batched_checkpoint_moves_after_a_while(bus: EventBus):
    """Also when nothing more comes (S4.8)."""
    seen = collect(bus, checkpoint=CheckpointMode.batched(1_000, 0.1))
    with bus:
        began = time.monotonic()
        bus.wait_for("s", publish(bus, 1, 2, 3)[-1].id, timeout=LONG)
        assert time.monotonic() - began >= 0.1
    assert seen == [1, 2, 3]


def test_a_dead_letter_takes_the_checkpoint_along(bus: EventBus, eventually: Eventually):
    """What was done before it is never behind it (I6)."""
    seen: list[Any] = []

    @bus.follow("s", checkpoint=CheckpointMode.batched(1_000, 60), retry=ONCE)
    def handle(event: Event) -> None:
        if event.payload == 2:
            raise ValueError
        seen.append(event.payload)

    events = publish(bus, *range(5))
    with bus:
        eventually(lambda: seen == [0, 1, 3, 4])
        assert stand(bus).position == events[2].id


# ── one of many leads ────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_of_two_leads_and_the_other_takes_over(make_bus: Make, eventually: Eventually):
    """At once when the first has ended, from where that stopped: each event once, in order (S4.7)."""
    one, two, ops = make_bus(worker_id="one"), make_bus(worker_id="two"), make_bus()
    seen: list[tuple[str, Any]] = []
    for bus in (one, two):
        bus.follow("s")(lambda event, name=bus.worker_id: seen.append((name, event.payload)))
    one.start()
    eventually(lambda: one.followers["s"].leads)
    two.start()
    ops.wait_for("s", publish(ops, 0, 1)[-1].id, timeout=LONG)
    assert (stand(ops).worker_id, two.followers["s"].leads) == ("one", False)
    one.shutdown()
    began = time.monotonic()
    eventually(lambda: two.followers["s"].leads)
    assert time.monotonic() - began < 2
    ops.wait_for("s", publish(ops, 2, 3)[-1].id, timeout=LONG)
    assert seen == [("one", 0), ("one", 1), ("two", 2), ("two", 3)]
    assert stand(ops).worker_id == "two"


def test_who_forgot_to_say_so_is_waited_for_no_longer_than_its_lease(make_bus: Make, eventually: Eventually):
    """A reader on a host that is gone: nobody can see its lock (S4.7, I10)."""
    bus = make_bus()
    seen = collect(bus, lease=0.4)
    gone = bus.store.lead("s", "elsewhere", "gone:1", bus.followers["s"]._lease)
    assert gone is not None
    with bus:
        assert bus.followers["s"].leads is False
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        assert stand(bus).epoch > gone.epoch
    assert seen == [1]


def test_a_leader_keeps_its_lease_while_a_handler_takes_long(make_bus: Make, eventually: Eventually):
    """Longer than the lease; the other does not take over meanwhile (S4.7, S2.5)."""
    one, two = make_bus(worker_id="one"), make_bus(worker_id="two")
    gate, entered = threading.Event(), threading.Event()
    seen: list[str] = []

    def handle(_: Event) -> None:
        seen.append("once")
        entered.set()
        gate.wait(LONG)

    for bus in (one, two):
        bus.follow("s", lease=0.3)(handle)
    one.start()
    (event,) = publish(one, 1)
    assert entered.wait(LONG)
    two.start()
    until = time.monotonic() + 0.9
    eventually(lambda: time.monotonic() > until)
    gate.set()
    one.wait_for("s", event.id, timeout=LONG)
    assert seen == ["once"]
    assert stand(one).worker_id == "one"


def test_a_single_one_needs_no_lock(bus: EventBus):
    """It reads at once, although another's lease still runs: there is no other (S4.8)."""
    seen = collect(bus, instance=InstanceMode.SINGLE, lease=60)
    assert bus.store.lead("s", "my former self", "host:1", bus.followers["s"]._lease) is not None
    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
    assert seen == [1]


# ── pausing, rewinding, deleting ─────────────────────────────────────────────────────────────────────────────────────


def test_a_paused_follower_reads_nothing_until_it_may(
    bus: EventBus, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
):
    """Paused before it starts or while it runs; nothing is lost by it (S4.3)."""
    looked, seen = looks(bus, monkeypatch), collect(bus)
    bus.subscriptions.pause("s")
    with bus:
        publish(bus, 1)
        eventually(lambda: looked.count(True) >= 3)
        assert seen == []
        bus.subscriptions.resume("s")
        eventually(lambda: seen == [1])
        bus.subscriptions.pause("s")
        looked.clear()
        eventually(lambda: looked.count(True) >= 1)
        (event,) = publish(bus, 2)
        looked.clear()
        eventually(lambda: looked.count(True) >= 3)
        assert seen == [1]
        assert stand(bus).position < event.id
        bus.subscriptions.resume("s")
        bus.wait_for("s", event.id, timeout=LONG)
    assert seen == [1, 2]


def test_a_rewind_takes_effect_while_it_runs(bus: EventBus, eventually: Eventually):
    """Whoever reads begins there, in order; what comes later follows (S4.3)."""
    seen = collect(bus)
    events = publish(bus, *range(5))
    with bus:
        bus.wait_for("s", events[-1].id, timeout=LONG)
        assert bus.subscriptions.rewind("s", events[1].id, dry_run=True) == Rewound(events[1].id, 3, 0)
        assert bus.subscriptions.rewind("s", events[1].id) == Rewound(events[1].id, 3, 0)
        eventually(lambda: len(seen) == 8)
        bus.wait_for("s", publish(bus, 5)[-1].id, timeout=LONG)
        assert seen == [0, 1, 2, 3, 4, 2, 3, 4, 5]
        bus.subscriptions.rewind("s", "beginning")
        eventually(lambda: len(seen) == 15)
    assert seen[9:] == [0, 1, 2, 3, 4, 5]


def test_a_rewind_in_the_midst_of_a_handler_loses_nothing(bus: EventBus, eventually: Eventually):
    """The running event ends, its checkpoint is refused, and reading begins where it was told to (I8)."""
    gate, entered = threading.Event(), threading.Event()
    seen: list[Any] = []

    @bus.follow("s")
    def handle(event: Event) -> None:
        seen.append(event.payload)
        if event.payload == 2:
            entered.set()
            gate.wait(LONG)

    events = publish(bus, *range(4))
    with bus:
        assert entered.wait(LONG)
        bus.subscriptions.rewind("s", events[0].id)
        gate.set()
        bus.wait_for("s", events[-1].id, timeout=LONG)
    assert seen == [0, 1, 2, 1, 2, 3]


def test_what_was_skipped_is_not_seen(bus: EventBus):
    """A rewind to now goes forwards (S4.3)."""
    seen = collect(bus)
    publish(bus, 1, 2)
    bus.subscriptions.rewind("s", "now")
    with bus:
        bus.wait_for("s", publish(bus, 3)[-1].id, timeout=LONG)
    assert seen == [3]


def test_deleting_it_stops_it(bus: EventBus, eventually: Eventually):
    """It says why and does not come back; others go on, and nobody waits for it (I10)."""
    seen, other = collect(bus), collect(bus, name="other")
    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
        bus.subscriptions.delete("s")
        assert isinstance(eventually(lambda: bus.followers["s"].error), NotFound)
        assert bus.followers["s"].leads is False
        bus.wait_for("other", publish(bus, 2)[-1].id, timeout=LONG)
        bus.wait_idle(timeout=LONG)
        with pytest.raises(NotFound):
            bus.wait_for("s", 1)
    assert (seen, other) == ([1], [1, 2])


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_waiting_for_a_position_shows_what_was_written(make_bus: Make):
    """From any process: what is built shows the event then (S4.2)."""
    bus, other = make_bus(), make_bus()
    seen = collect(bus)
    with bus:
        for number in range(5):
            event = other.publish("a", number)
            other.wait_for("s", event.id, timeout=LONG)
            assert seen[-1] == number
        other.wait_for("s", event.id, timeout=0)
        other.wait_for("s", 0)


def test_waiting_in_vain_is_told(bus: EventBus):
    """TimeoutError while nobody follows, NotFound where there is nothing to wait for."""
    collect(bus)
    (event,) = publish(bus, 1)
    with pytest.raises(TimeoutError, match="'s' stands at 0, not yet at 1"):
        bus.wait_for("s", event.id, timeout=0.02)
    with pytest.raises(NotFound, match="'nobody'"):
        bus.wait_for("nobody", 1)


def test_wait_idle_waits_for_followers(bus: EventBus):
    """Until all that there is has been passed, retries included, whether it is wanted or not (S1.15)."""
    seen: list[Any] = []

    @bus.follow("s", "a", retry=QUICK)
    def handle(event: Event, ctx: Context) -> None:
        if ctx.attempt < 3:
            raise ValueError
        seen.append(event.payload)

    with bus:
        publish(bus, 1, 2, 3)
        publish(bus, 4, kind="b")
        bus.wait_idle(timeout=LONG)
        assert seen == [1, 2, 3]


def test_wait_idle_waits_for_retried_letters_and_what_they_held_up(bus: EventBus):
    """Freed ones and their followers of the same key count as work (S4.5)."""
    made = Projection(bus, "A1")
    events = publish_keyed(bus, "A1", "A2", "A3")
    with bus:
        bus.wait_idle(timeout=LONG)
        assert made.done == []
        made.broken.clear()
        bus.dlq.retry(events["A1"].id, "s")
        bus.wait_idle(timeout=LONG)
        assert made.done == ["A1", "A2", "A3"]


def test_wait_idle_does_not_claim_that_a_paused_follower_is_done(bus: EventBus):
    """There is still work (S1.15)."""
    collect(bus)
    bus.subscriptions.pause("s")
    with bus:
        publish(bus, 1)
        with pytest.raises(TimeoutError):
            bus.wait_idle(timeout=0.1)


@pytest.mark.parametrize("with_queue", [False, True])
def test_a_publish_can_wait_for_followers(bus: EventBus, *, with_queue: bool):
    """It returns once they have passed the event, and the queue has settled it (S1.2)."""
    seen, ran = collect(bus, retry=QUICK), list[Any]()
    if with_queue:
        bus.subscribe("*", lambda event: ran.append(event.payload))
    with bus:
        for number in range(3):
            event = bus.publish("a", number, wait=True, timeout=LONG)
            assert seen[-1] == event.payload == number
            assert not with_queue or (ran[-1], event.status) == (number, Status.COMPLETED)


def test_a_publish_waits_no_longer_than_it_was_told_to(bus: EventBus):
    """The event stays published (S1.2)."""
    gate = threading.Event()
    bus.follow("s")(lambda _: gate.wait(LONG))
    with bus:
        with pytest.raises(TimeoutError, match="stays published"):
            bus.publish("a", wait=True, timeout=0.05)
        gate.set()
    assert stand_after(bus) == 1


def stand_after(bus: EventBus) -> int:
    """Return where `s` stands once a bus is shut down."""
    store = open_store(bus.store.url)
    try:
        return store.checkpoints()[0].position
    finally:
        store.close()


def test_a_shutdown_lets_the_running_event_finish(bus: EventBus):
    """Its checkpoint is saved, the next one is not begun (S1.14, I6)."""
    entered = threading.Event()
    seen: list[Any] = []

    @bus.follow("s")
    def handle(event: Event) -> None:
        entered.set()
        threading.Event().wait(0.2)
        seen.append(event.payload)

    events = publish(bus, 1, 2, 3)
    bus.start()
    assert entered.wait(LONG)
    assert bus.shutdown(timeout=5)
    assert seen == [1]
    assert stand_after(bus) == events[0].id


def test_a_shutdown_does_not_wait_for_a_retry(bus: EventBus, eventually: Eventually):
    """The event that failed comes again, to whoever follows next (S1.14, I6)."""
    ran: list[int] = []

    @bus.follow("s", retry={"base_delay": 60, "max_delay": 60})
    def fail(event: Event) -> None:
        ran.append(event.id)
        raise ValueError

    publish(bus, 1)
    bus.start()
    eventually(lambda: ran)
    began = time.monotonic()
    assert bus.shutdown(timeout=20)
    assert time.monotonic() - began < 5
    assert stand_after(bus) == 0


# ── registering ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"on_error": "ignore"}, "on_error"), ({"start": 99}, "start at"), ({"pattern": ""}, "pattern")],
)
def test_what_cannot_be_followed_is_refused(bus: EventBus, options: dict[str, Any], reason: str):
    """When registering, with the reason, and nothing is made (S4.8)."""
    with pytest.raises(InvalidRequest, match=reason):
        bus.follow("s", **options)(lambda _: None)
    assert bus.followers == {}
    assert [each.name for each in bus.subscriptions.list()] == ["default"]


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
