"""Figures for pages that must not wait: counted in the background, each row once."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from postbus.dashboard.pulse import Background, Flow, Pulse, _Trend
from postbus.errors import StoreUnavailable
from postbus.store import log_of
from postbus.testing import FrozenClock

LONG = 30.0


@pytest.fixture
def clock() -> FrozenClock:
    """Give a clock that stands still."""
    return FrozenClock()


@pytest.fixture
def bus(tmp_path: Path, clock: FrozenClock) -> Iterator[EventBus]:
    """Give a bus on that clock."""
    bus = EventBus(f"sqlite:///{tmp_path / 'bus.db'}", clock=clock)
    yield bus
    bus.shutdown()


def totals(flow: Flow) -> dict[str, float]:
    """Return how often each kind of thing happened."""
    return {kind: round(sum(rates) * 10) for kind, rates in flow.rates.items()}


def end(bus: EventBus, **how: Any) -> None:
    """Publish an event, and tell how it ended."""
    bus.publish("a")
    (delivery,) = bus.poll_many(1)
    bus.finalize(delivery, **how)


def test_every_row_is_counted_once_in_its_slot(bus: EventBus, clock: FrozenClock):
    """Looking again adds what is new and nothing else; an hour later nothing is left of it (S0.9)."""
    trend = _Trend(log_of(bus.store))
    end(bus)
    end(bus, success=False, errors=["no"])
    clock.advance(10)
    assert totals(trend.refresh()) == {"published": 2, "completed": 1, "retried": 1, "dead": 0}
    end(bus, success=False, retry=False, errors=["no"])
    clock.advance(10)
    for _ in range(2):
        assert totals(trend.refresh()) == {"published": 3, "completed": 1, "retried": 1, "dead": 1}
    assert totals(_Trend(log_of(bus.store)).refresh()) == totals(trend.refresh())
    clock.advance(3_600)
    assert not any(totals(trend.refresh()).values())


def test_what_is_too_much_to_count_is_left_out_and_said(
    bus: EventBus, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
):
    """From when on it was counted, the page can tell."""
    monkeypatch.setattr("postbus.dashboard.pulse.MOST", 5)
    bus.publish_many([{"type": "a"}] * 5)
    clock.advance(10)
    bus.publish_many([{"type": "a"}] * 5)
    since = clock.now()
    clock.advance(10)
    flow = _Trend(log_of(bus.store)).refresh()
    assert totals(flow)["published"] == 5
    assert flow.cut is not None
    assert abs((flow.cut - since).total_seconds()) <= 10


def test_a_page_waits_no_longer_than_its_patience():
    """Counting that takes long goes on beside it, once for all who ask."""
    go_on, calls = threading.Event(), list[int]()

    def find() -> int:
        calls.append(1)
        go_on.wait(LONG)
        return len(calls)

    background = Background(find, fresh=LONG)
    assert background.look(0.01) is None
    assert background.look(0.01) is None
    go_on.set()
    found = background.look(LONG)
    assert found is not None
    assert (found.value, len(calls)) == (1, 1)


def test_a_store_that_does_not_answer_is_told_of_and_looked_at_again(monkeypatch: pytest.MonkeyPatch):
    """What was known stays; the trouble is gone when it answers again."""
    monkeypatch.setattr("postbus.dashboard.pulse.SHARE", 0)
    answers = iter([1, StoreUnavailable("away"), 2])

    def find() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    background = Background(find, fresh=0)
    seen: list[tuple[int, str | None]] = []
    for _ in range(3):
        found = background.look(LONG)
        assert found is not None
        seen.append((found.value, background.trouble))
    assert seen == [(1, None), (1, "away"), (2, None)]


def test_the_pulse_of_a_bus(bus: EventBus):
    """Stats and flow, together."""
    bus.publish("a")
    found = Pulse(log_of(bus.store)).look(LONG)
    assert found is not None
    assert found.value.stats.events == 1
