"""Followers that park a key: what comes after a dead event of its key waits for it, in order."""

from typing import Any

import pytest

from postbus import (
    Context,
    Event,
    EventBus,
    Status,
)
from postbus.store.contract import Rewound
from tests.bus.following import (
    BOTH,
    LONG,
    ONCE,
    Eventually,
    Make,
    Projection,
    actions,
    keyed,
    publish,
    publish_keyed,
    stand,
)

pytestmark = pytest.mark.usefixtures("brisk")


# ── parked keys ──────────────────────────────────────────────────────────────────────────────────────────────────────


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
        assert bus.subscriptions.rewind("s", events["A1"].id) == Rewound(events["A1"].id, 3, 3, before=events["A4"].id)
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
