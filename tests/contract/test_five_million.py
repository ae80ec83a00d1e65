"""What people and programs look at, in a log of five million events: finished, pending and dead. It prints its figures.

`POSTBUS_TRIAL_EVENTS` makes the log smaller. The bounds are ten times those that a quiet machine is held to.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

from postbus import EventBus
from postbus.model import Delivery, Outcome, Status
from postbus.store.contract import Claim, Settlement
from tests.contract.stores import DEAD, DONE, FLAWED, wanting
from tests.postgres.server import query, server

GROUPS: Final = int(os.environ.get("POSTBUS_TRIAL_EVENTS") or 5_000_000) // 10_000
"""Of 10,000 events, 8,000 are finished, 1,000 pending in rows (no worker handles them), and 1,000 above the cursor."""
EVENTS: Final = GROUPS * 10_000
BATCH: Final = 1_000
DEAD_OF_BATCH: Final = 50
FLAWED_OF_BATCH: Final = 5
LEASED: Final = 500
LIMIT: Final = 100
PAGE: Final = 0.5
STATS: Final = 5.0
TIMES: Final = 100


# ── filling ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def publish(bus: EventBus, kind: str, batches: int) -> None:
    """Publish events of a type, with a small business payload each."""
    items = [{"sku": "A-1001", "quantity": 2}, {"sku": "B-2002", "quantity": 1}]
    payloads = [{"order": number, "customer": f"customer-{number % 997}", "items": items} for number in range(BATCH)]
    for _ in range(batches):
        bus.publish_many([{"type": kind, "payload": payload} for payload in payloads])


def fill(bus: EventBus, groups: range) -> None:
    """Publish groups of events, and finish them: 1,000 in one block, and 1,000 in blocks of one, by turns."""
    flawed, dead = [FLAWED] * FLAWED_OF_BATCH, [DEAD] * DEAD_OF_BATCH
    singly = [*flawed, *dead, *[DONE] * (BATCH - len(flawed) - len(dead))]
    for group in groups:
        publish(bus, f"order.{group % 20}", 8)
        publish(bus, "parcel.returned", 1)
        for _ in range(4):
            settle(bus, [DONE] * BATCH, shared=True)
            settle(bus, singly, shared=False)


def settle(bus: EventBus, outcomes: Sequence[Outcome], *, shared: bool) -> None:
    """Claim so many and settle them."""
    told = zip(claim(bus, len(outcomes), shared=shared), outcomes, strict=True)
    bus.store.settle([Settlement(each.lease, outcome, "w", execution_time_ms=1.5) for each, outcome in told])


def claim(bus: EventBus, count: int, *, shared: bool) -> list[Delivery]:
    """Claim so many of the events that are handled; one claim may answer with fewer."""
    taken: list[Delivery] = []
    while len(taken) < count:
        limit = count - len(taken)
        asked = Claim("default", "w", "w", wanting("order.*"), limit=limit, lease=timedelta(hours=1), shared=shared)
        claimed = bus.store.claim(asked)
        assert claimed.deliveries or claimed.more
        taken += claimed.deliveries
    return taken


def fill_all(bus: EventBus) -> None:
    """Make all of it; some events are leased for long among those that were finished last."""
    fill(bus, range(GROUPS - 1))
    publish(bus, "order.last", 1)
    claim(bus, LEASED, shared=True)
    claim(bus, BATCH - LEASED, shared=False)
    fill(bus, range(GROUPS - 1, GROUPS))
    publish(bus, "order.last", GROUPS - 1)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def looks(bus: EventBus) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    chance = random.Random(5)

    def place() -> int:
        return chance.randint(1, EVENTS)

    found: dict[str, Callable[[], object]] = {"get, with logs": lambda: bus.get(place(), include_logs=True)}
    for status in (None, *Status):
        name = f"list {status.value}" if status else "list"
        found[name] = lambda status=status: bus.list(status=status, limit=LIMIT)
        found[f"{name}, from anywhere"] = lambda status=status: bus.list(status=status, limit=LIMIT, after=place())
    found["dead letters"] = lambda: bus.dlq.list(limit=LIMIT)
    found["dead letters, from anywhere"] = lambda: bus.dlq.list(limit=LIMIT, after=f"{place()}:default")
    return found


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Return how long each of some calls took, in order of that; the first ones, which warm up, do not count."""
    took: list[float] = []
    for _ in range(times + 3):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return sorted(took[3:])


def measure(bus: EventBus, show: Callable[[str], None]) -> dict[str, float]:
    """Return the p99 of everything, in seconds."""
    found: dict[str, float] = {}
    for name, call in {**looks(bus), "stats": bus.stats}.items():
        took = timed(call, 10 * TIMES if name.startswith("get") else TIMES)
        found[name] = took[len(took) * 99 // 100]
        show(f"  {name:42} p50 {1000 * took[len(took) // 2]:7.2f} ms, p99 {1000 * found[name]:7.2f} ms")
    return found


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """Give the address of an empty store, on a clock that goes on: how much is recent counts for the figures."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'bus.db'}"
    else:
        with server().database() as url:
            yield url


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Give a function that prints a line of figures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201  the figures are what a long trial is for

    return show


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_every_look_at_five_million_events_is_quick(kind: str, url: str, show: Callable[[str], None]):
    """One event with its logs, a page of each status, dead letters: p99 of 50 ms; figures of the bus: 500 ms (S4.1)."""
    bus = EventBus(url)
    began = time.monotonic()
    fill_all(bus)
    if kind == "postgres":
        query(url, "VACUUM (ANALYZE)")  # as autovacuum does within minutes
    show(f"\n{EVENTS:,} events on {kind}, made in {time.monotonic() - began:.0f} s:")
    check(bus)
    p99 = measure(bus, show)
    bus.shutdown()
    stats = p99.pop("stats")
    assert max(p99.values()) <= PAGE, p99
    assert stats <= STATS


def check(bus: EventBus) -> None:
    """Fail unless the store holds what was made: exactly what ended, and about what waits."""
    dead, flawed = 4 * GROUPS * DEAD_OF_BATCH, 4 * GROUPS * FLAWED_OF_BATCH
    waiting = 2_000 * GROUPS - BATCH
    found = bus.stats()
    (queue,) = found.subscriptions
    assert (queue.dead, queue.completed_with_errors, queue.completed) == (dead, flawed, 8_000 * GROUPS - dead - flawed)
    assert (found.events, queue.processing) == (EVENTS, BATCH)
    assert queue.pending == pytest.approx(waiting, rel=0.1)
    of = {Status.PENDING: waiting, Status.FAILED: dead, Status.COMPLETED_WITH_ERRORS: flawed}
    for status in Status:
        page = bus.list(status=status, limit=LIMIT)
        total = of.get(status, BATCH if status is Status.PROCESSING else queue.completed)
        assert (page.total, page.total_capped) == (min(total, 10_000), total > 10_000)
        assert [each.status for each in page.items] == [status] * LIMIT
