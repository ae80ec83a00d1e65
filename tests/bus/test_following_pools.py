"""One of many leads; pausing, rewinding, deleting and waiting for a follower."""

import threading
import time
from typing import Any

import pytest

from postbus import (
    Context,
    Event,
    EventBus,
    Follower,
    InstanceMode,
    InvalidRequest,
    NotFound,
    Status,
    open_store,
)
from postbus.store import log_of
from postbus.store.contract import Rewound
from tests.bus.following import (
    LONG,
    QUICK,
    Eventually,
    Make,
    Projection,
    collect,
    looks,
    publish,
    publish_keyed,
    stand,
)

pytestmark = pytest.mark.usefixtures("brisk")


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
    gone = log_of(bus.store).lead("s", "elsewhere", "gone:1", bus.followers["s"]._lease)
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
    assert log_of(bus.store).lead("s", "my former self", "host:1", bus.followers["s"]._lease) is not None
    with bus:
        bus.wait_for("s", publish(bus, 1)[-1].id, timeout=LONG)
    assert seen == [1]


def test_a_follower_runs_alone(url: str, bus: EventBus):
    """With a store of its own, given back at the end (S4.3)."""
    seen: list[Any] = []
    last = publish(bus, 1, 2, 3)[-1]
    with Follower.open(url, "s", lambda event: seen.append(event.payload), batch_size=2):
        bus.wait_for("s", last.id, timeout=LONG)
    assert seen == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="on_error"):
        Follower.open(url, "s", print, on_error="ignore")


def test_one_that_stands_by_is_not_kept_busy_by_events(make_bus: Make, monkeypatch: pytest.MonkeyPatch):
    """Whatever wakes it, it asks for the lead now and then only (S4.7)."""
    first, second = make_bus(), make_bus()
    collect(first)
    asked: list[float] = []
    lead = log_of(second.store).lead

    def asking(*args: Any, **named: Any) -> Any:
        asked.append(time.monotonic())
        return lead(*args, **named)

    monkeypatch.setattr(second.store, "lead", asking)
    with first:
        first.wait_for("s", publish(first, 0)[-1].id, timeout=LONG)
        collect(second)
        with second:
            for number in range(200):
                last = publish(first, number)[-1]
            first.wait_for("s", last.id, timeout=LONG)
    assert 1 <= len(asked) <= 2 + (asked[-1] - asked[0]) / 0.05, "as often as STANDBY says, whatever happens"


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
        assert bus.subscriptions.rewind("s", events[1].id, dry_run=True) == Rewound(
            events[1].id, 3, 0, before=events[4].id
        )
        assert bus.subscriptions.rewind("s", events[1].id) == Rewound(events[1].id, 3, 0, before=events[4].id)
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


def test_waiting_for_a_queue_is_refused_with_what_would_do(bus: EventBus):
    """It is there, but has no position: it is not said to be missing (S1.2)."""
    with pytest.raises(InvalidRequest, match=r"'default' is a subscription of mode queue.*wait_for is for followers"):
        bus.wait_for("default", 1)


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
    entered, gate = threading.Event(), threading.Event()

    @bus.follow("s")
    def handle(_: Event) -> None:
        entered.set()
        gate.wait(LONG)

    with bus:
        with pytest.raises(TimeoutError, match="stays published"):
            bus.publish("a", wait=True, timeout=0.05)
        assert entered.wait(LONG)
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
