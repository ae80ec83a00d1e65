"""What a process counts of its own work: nothing unless asked, and then all of it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import Discard, EventBus, RetryPolicy, figures
from postbus.breaker import Breaker
from postbus.figures import BUCKETS, HANDLER, OUTCOMES, PUBLISHED, SETTLED, WAIT, Figures, Region, lasting, merged
from tests.contract.stores import Site, site_of
from tests.observability.reading import counting

AT_ONCE = RetryPolicy(max_retries=1, base_delay=0, max_delay=0)


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    """Give an empty store of each kind, on which time stands still."""
    with_clock = site_of(kind, tmp_path)
    yield with_clock
    with_clock.close()


@pytest.fixture
def bus(site: Site) -> Iterator[EventBus]:
    """Give a bus there."""
    bus = EventBus(site.url, clock=site.clock, retry=AT_ONCE)
    yield bus
    bus.shutdown(timeout=5)


def settled(counted: Any) -> dict[str, float]:
    """Return how many attempts ended, by outcome."""
    return {labels[1]: value for (name, labels), value in counted.items() if name == SETTLED.name}


def handle_three_ways(bus: EventBus) -> None:
    """Have one event work, one be recorded, and one fail until it is dead."""

    @bus.on("good")
    def good(event: object) -> None:
        pass

    @bus.on("odd", on_error="record")
    def odd(event: object) -> None:
        raise ValueError("odd")

    @bus.on("bad")
    def bad(event: object) -> None:
        raise ValueError("bad")

    bus.publish_many([{"type": "good"}, {"type": "good"}, {"type": "odd"}, {"type": "bad"}])
    while bus.run_due():
        pass


def test_outcomes_are_counted_as_they_are_recorded(bus: EventBus):
    """Two done, one with errors, one tried twice and then dead: no more and no less."""
    counted = counting(lambda: handle_three_ways(bus))
    assert settled(counted) == {"completed": 2, "completed_with_errors": 1, "retried": 1, "dead": 1}
    assert counted[PUBLISHED.name, ()] == 4
    handled = {labels[1].rpartition(".")[2]: sum(cell[:-1]) for (name, labels), cell in counted.items()
               if name == HANDLER.name}  # fmt: skip
    assert handled == {"good": 2, "odd": 1, "bad": 2}


def test_nothing_is_counted_while_nobody_listens(bus: EventBus):
    """A bus in a process that asks for no figures keeps none."""
    handle_three_ways(bus)
    assert figures.listener is None


def test_waiting_is_told_of_the_first_attempt(bus: EventBus, site: Site):
    """From publishing to the claim, by the store's clock: 7 s fall between 5 and 10."""

    @bus.on("*")
    def handle(event: object) -> None:
        pass

    def work() -> None:
        bus.publish("order")
        site.clock.advance(7)
        bus.run_due()

    *counts, total = counting(work)[WAIT.name, ("default",)]
    assert (counts.index(1), sum(counts), total) == (BUCKETS.index(10), 1, pytest.approx(7))


def test_a_transactional_handler_is_counted_too(bus: EventBus):
    """Its outcome is recorded in its own transaction, and counted once that is through."""

    @bus.on("*", transactional=True)
    def keep(event: object, tx: object) -> None:
        pass

    bus.publish("order")
    assert settled(counting(bus.run_due)) == {"completed": 1}


def test_what_is_polled_is_counted_once(bus: EventBus):
    """Finalizing again changes nothing, and counts nothing."""
    bus.publish("order")

    def work() -> None:
        delivery = bus.poll()
        assert delivery is not None
        bus.finalize(delivery, success=True)
        bus.finalize(delivery, success=True)

    assert settled(counting(work)) == {"completed": 1}


def test_followers_are_counted_too(bus: EventBus, eventually: Callable[..., Any]):
    """Events done, attempts that are repeated, and burials, under the subscriber's id."""

    @bus.follow("sales", start="beginning", retry=AT_ONCE)
    def sell(event: Any) -> None:
        if event.type == "bad":
            raise ValueError("bad")

    def work() -> None:
        bus.publish_many([{"type": "good"}, {"type": "bad"}, {"type": "good"}])
        bus.start()
        bus.wait_for("sales", 3, timeout=30)

    counted = counting(work)
    assert {name[1]: value for (metric, name), value in counted.items() if metric == SETTLED.name} == {
        "completed": 2,
        "retried": 1,
        "dead": 1,
    }
    assert {labels[0] for name, labels in counted if name == SETTLED.name} == {"sales"}


def test_an_open_breaker_shows(bus: EventBus, eventually: Callable[..., Any]):
    """Two: open. Its name is made of what the code says, no ids."""

    @bus.on("bad", breaker=Breaker(failures=1, reset_after=3_600))
    def bad(event: object) -> None:
        raise Discard("down")

    told = figures.listen()
    with bus:
        bus.publish("bad")
        bus.wait_idle(10)
        bus.publish("bad")
        name = next(handler.breaker_name for handler in bus.handlers)
        eventually(lambda: told.samples().get((figures.BREAKER.name, (name,))) == (2,))


def test_every_outcome_has_a_name():
    """What may become of an attempt is what is counted."""
    assert set(OUTCOMES.values()) == {"completed", "completed_with_errors", "retried", "dead"}


# ── of many processes ────────────────────────────────────────────────────────────────────────────────────────────────

COUNT_AND_DIE = """
import os, signal, sys
from postbus.figures import *
from postbus import figures
told = Figures(Region(int(sys.argv[1])).cell)
for _ in range(1_000):
    told.published(2)
told.handled("default", "shop.ship", 0.3)
told.set(figures.BREAKER, ("b",), 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_counted_is_there():
    """To the last number: it was counted in memory that another process holds."""
    region, file = Region.make()
    with file:
        subprocess.run([sys.executable, "-c", COUNT_AND_DIE, str(file.fileno())], check=False, pass_fds=[file.fileno()])
    told = region.samples()
    assert told[PUBLISHED.name, ()] == (2_000,)
    *counts, total = told[HANDLER.name, ("default", "shop.ship")]
    assert (counts[BUCKETS.index(0.5)], sum(counts), total) == (1, 1, 0.3)


def test_figures_of_several_processes_are_those_of_one():
    """What was counted adds up; of a gauge the highest holds, and none of a process that has ended."""
    parts = Figures(), Figures()
    for number, each in enumerate(parts, 1):
        each.published(number)
        each.set(figures.BREAKER, ("b",), number)
    total = merged(each.samples() for each in parts)
    assert total == {(PUBLISHED.name, ()): (3,), (figures.BREAKER.name, ("b",)): (2,)}
    assert lasting(total) == {(PUBLISHED.name, ()): (3,)}


def test_a_full_region_stops_nobody(monkeypatch: pytest.MonkeyPatch):
    """When there is no room for another name, it is counted in vain, and the others are told as before."""
    monkeypatch.setattr(Region, "SIZE", 4_096)
    region, file = Region.make()
    file.close()
    told = Figures(region.cell)
    for number in range(1_000):
        told.settled(f"subscription-{number}", figures.Done)
    assert 10 < len(region.samples()) < 1_000
    assert set(region.samples().values()) == {(1.0,)}
