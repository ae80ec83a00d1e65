"""postbus through its public names, with default options, as a user would write it."""

import asyncio
import logging
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count as counting
from pathlib import Path
from typing import Any, Final

from bench import load, pace, postgres
from bench.child import start
from bench.measure import Call
from postbus import EventBus
from postbus.pattern import Interest
from postbus.store.contract import Claim

__all__ = [
    "claim",
    "dispatch",
    "drain",
    "drain_beside",
    "drain_some",
    "fan_out",
    "feed",
    "hold",
    "publish_concurrently",
    "publish_large",
    "publish_many",
    "publish_paced",
    "publish_singly",
    "read_dead_letters",
    "recover",
    "sustain",
]

URL: Final = os.environ.get("BENCH_URL", "sqlite:///postbus.db")
WARM_UP: Final = 20


def publish_many(batches: int, size: int) -> dict[str, float]:
    """Publish batches, a transaction each."""
    bus = EventBus(URL)
    given = [load.events(size) for _ in range(batches + 1)]
    bus.publish_many(given.pop())
    took = _timed_each(bus.publish_many, given)
    bus.shutdown()
    return {"rate": batches * size / took}


def publish_singly(count: int) -> dict[str, float]:
    """Publish events one after another, a commit each."""
    bus = EventBus(URL)
    payloads = [load.order(number) for number in range(count + WARM_UP)]
    for payload in payloads[:WARM_UP]:
        bus.publish(load.TYPE, payload)
    took = _timed_each(lambda payload: bus.publish(load.TYPE, payload), payloads[WARM_UP:])
    bus.shutdown()
    return {"rate": count / took}


def publish_concurrently(count: int, threads: int, slow_fsync: float = 0.0) -> dict[str, float]:
    """Publish from many threads at once; `slow_fsync` adds seconds to every fsync, to stand for a slower disk."""
    if slow_fsync:
        from bench.slowdisk import install  # noqa: PLC0415  only where it is wanted: it replaces SQLite's default VFS

        install(slow_fsync)
    bus = EventBus(URL)
    for number in range(WARM_UP):
        bus.publish(load.TYPE, load.order(number))
    ready = threading.Barrier(threads + 1)

    def publish() -> None:
        ready.wait()
        for number in range(count // threads):
            bus.publish(load.TYPE, load.order(number))

    publishers = [threading.Thread(target=publish) for _ in range(threads)]
    for each in publishers:
        each.start()
    ready.wait()
    took = _timed(lambda: [each.join() for each in publishers])
    bus.shutdown()
    return {"rate": count // threads * threads / took}


def publish_large(count: int, kind: str) -> dict[str, float]:
    """Publish payloads of 100 kB one after another; `kind` names the maker in `load`."""
    make: Callable[[], Any] = getattr(load, kind)
    payload = make()
    bus = EventBus(URL)
    for _ in range(WARM_UP):
        bus.publish(load.TYPE, payload)
    took = _timed_each(lambda _: bus.publish(load.TYPE, payload), range(count))
    bus.shutdown()
    return {"seconds": took / count}


def drain(count: int) -> dict[str, float]:
    """Handle a backlog with a handler that does nothing, until the last of it is settled."""
    bus = EventBus(URL)
    for batch in load.batches(count, 1_000):
        bus.publish_many(batch)
    took = _handle_all(bus, ["default"], count)
    _check(bus, "default", pending=0, completed=count)
    bus.shutdown()
    return {"rate": count / took}


def drain_some(count: int, backlog: int) -> dict[str, float]:
    """Handle the first `count` events of a backlog on PostgreSQL, with a handler that does nothing.

    It is the backlog that is to be measured, not the checkpoint and the vacuum that publishing so much sets off.
    """
    bus = EventBus(URL)
    for batch in load.batches(backlog, 10_000):
        bus.publish_many(batch)
    postgres.calm()
    return {"rate": count / _handle_first(bus, count)}


def drain_beside(count: int, failing: bool) -> dict[str, float]:  # noqa: FBT001  it arrives as JSON
    """Handle a backlog on two subscriptions, and return the rate of the first; the second may fail each time."""
    logging.disable(logging.CRITICAL)
    bus = EventBus(URL)
    bus.subscriptions.create("other")
    for batch in load.batches(count, 1_000):
        bus.publish_many(batch)

    @bus.on("*", subscription="other")
    def handle(_: object) -> None:
        if failing:
            raise ValueError("it never works")

    return {"rate": count / _handle_first(bus, count)}


def sustain(seconds: float, concurrency: int, threads: bool) -> dict[str, float]:  # noqa: FBT001  it arrives as JSON
    """Return how many handlers of 1 ms a second end while another process publishes as many: see `pace.Feed`."""
    bus = EventBus(URL, concurrency=concurrency)
    with pace.Feed(Call("bench.ours:feed")) as feed:

        async def handle(_: object) -> None:
            await asyncio.sleep(0.001)
            feed.handled()

        def handle_in_thread(_: object) -> None:
            time.sleep(0.001)
            feed.handled()

        bus.on("*")(handle_in_thread if threads else handle)
        bus.start()
        rate = feed.rate(seconds)
        bus.shutdown()
    return {"rate": rate}


def feed() -> dict[str, float]:
    """Publish what `pace.Feed` asks for."""
    bus = EventBus(URL)
    for count in pace.wanted():
        bus.publish_many(load.events(count))
    bus.shutdown()
    return {}


def fan_out(count: int, subscriptions: int) -> dict[str, float]:
    """Publish to several subscriptions and handle it all; return the seconds of the publishing and of the whole."""
    bus = EventBus(URL)
    names = ["default", *(f"subscription-{number}" for number in range(1, subscriptions))]
    for name in names[1:]:
        bus.subscriptions.create(name)
    given = list(load.batches(count, 1_000))
    published = _timed_each(bus.publish_many, given)
    handled = _handle_all(bus, names, count * subscriptions)
    for name in names:
        _check(bus, name, pending=0, completed=count)
    bus.shutdown()
    return {"publish": published, "publish and drain": published + handled}


def _handle_all(bus: EventBus, subscriptions: Sequence[str], count: int) -> float:
    """Return the seconds from the start of the worker until `count` deliveries are handled and settled."""
    numbers = counting(1)
    finished = threading.Event()

    def handle(_: object) -> None:
        if next(numbers) == count:
            finished.set()

    for name in subscriptions:
        bus.on("*", subscription=name)(handle)

    def work() -> None:
        bus.start()
        finished.wait()
        bus.wait_idle()

    return _timed(work)


def _handle_first(bus: EventBus, count: int) -> float:
    """Return the seconds from the start of the worker until `count` events are handled; then shut down."""
    numbers = counting(1)
    finished = threading.Event()

    @bus.on("*")
    def handle(_: object) -> None:
        if next(numbers) == count:
            finished.set()

    def work() -> None:
        bus.start()
        finished.wait()

    took = _timed(work)
    bus.shutdown()
    if (completed := _completed("default")) < count:
        raise RuntimeError(f"{completed} of {count} are completed")
    return took


# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def fill(path: str, due: int, rare: int, scheduled: int, tag_sets: int) -> dict[str, float]:
    """Make a store with a backlog, `rare` of it tagged so, in its middle; or spread over up to 10,000 tag sets.

    The first claim that looks for something rare passes the log, and makes rows of what it finds on its way. How long
    that takes for all of the backlog stands in a file beside the store: the claims that are measured come after it.
    """
    bus = EventBus(f"sqlite:///{path}")
    batch = load.events(min(10_000, due))
    if tag_sets:
        batch = [{**event, "tags": [f"tenant-{number % tag_sets}"]} for number, event in enumerate(batch)]
    turns = due // len(batch)
    for turn in range(turns):
        bus.publish_many(batch)
        if turn == turns // 2:
            bus.publish_many([{**event, "tags": ["rare"]} for event in batch[:rare]])
    later = [{**event, "delay": timedelta(days=1)} for event in load.events(10_000)]
    for _ in range(scheduled // len(later)):
        bus.publish_many(later)
    _first_pass(path).write_text(str(_timed(lambda: _pass_all(bus))))
    bus.shutdown()
    return {}


def _pass_all(bus: EventBus) -> None:
    asked = Claim("default", bus.worker_id, "", (Interest("*", frozenset({"nobody's"})),))
    while bus.store.claim(asked).more:
        pass


def _first_pass(path: str) -> Path:
    return Path(f"{path}.first-pass")


def claim(path: str, tags: list[str] | None, most: int, times: int = 200) -> dict[str, float]:
    """Return the median seconds of `poll` and of `poll_many`; what was claimed is handed back, untimed.

    The backlog is therefore the same at every claim, and a file can be used again. Checkpoints, which fall on one
    writer in thousands, whatever it does, are outside the median.
    """
    bus = EventBus(f"sqlite:///{path}")
    figures = {
        "poll()": _median_claim(bus, tags, 1, times),
        f"poll_many({most})": _median_claim(bus, tags, most, max(times // 4, 20)),
    }
    bus.shutdown()
    figures["first pass"] = float(_first_pass(path).read_text())
    return {name: seconds for name, seconds in figures.items() if name != "poll_many(1)"}


def _median_claim(bus: EventBus, tags: list[str] | None, limit: int, times: int) -> float:
    took: list[float] = []
    for number in range(times + WARM_UP):
        began = time.perf_counter()
        found = bus.poll_many(limit, tags=tags)
        if number >= WARM_UP:
            took.append(time.perf_counter() - began)
        if len(found) != limit:
            raise RuntimeError(f"claimed {len(found)} of {limit}")
        bus.store.release([delivery.lease for delivery in found], bus.worker_id)
    return statistics.median(took)


# ── dispatch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def dispatch(count: int, across: bool) -> dict[str, float]:  # noqa: FBT001  it arrives as JSON
    """Return quantiles of the time from the call of `publish` to the first line of the handler, on an idle bus."""
    bus = EventBus(URL)
    took: list[float] = []
    finished = threading.Event()

    @bus.on("*")
    def handle(event: Any) -> None:
        took.append((time.monotonic_ns() - event.payload["at"]) / 1e9)
        if len(took) == count + WARM_UP:
            finished.set()

    bus.start()
    if across:
        with start(Call("bench.ours:publish_paced", {"count": count + WARM_UP}), Path()) as publisher:
            finished.wait()
            publisher.communicate()
    else:
        _publish_paced(bus, count + WARM_UP)
        finished.wait()
    bus.shutdown()
    return pace.quantiles(took[WARM_UP:])


def publish_paced(count: int) -> dict[str, float]:
    """Publish as another process, at the pace of `dispatch`."""
    bus = EventBus(URL)
    _publish_paced(bus, count)
    bus.shutdown()
    return {}


def _publish_paced(bus: EventBus, count: int) -> None:
    for number, pause in enumerate(pace.pauses(count)):
        time.sleep(pause)
        bus.publish(load.TYPE, {"at": time.monotonic_ns(), **load.order(number)})


# ── dead letters and recovery ────────────────────────────────────────────────────────────────────────────────────────


def bury(path: str, count: int) -> dict[str, float]:
    """Make a store with dead letters, each by a handler that gave up on it."""
    from postbus.model import AttemptError, Dead  # noqa: PLC0415  only to fill the store faster than handlers can
    from postbus.store.contract import Settlement  # noqa: PLC0415

    bus = EventBus(f"sqlite:///{path}")
    for batch in load.batches(count, 1_000):
        bus.publish_many(batch)
        given_up = Dead(AttemptError("ValueError", "no such customer", traceback="Traceback …\n" * 20))
        bus.store.settle([Settlement(each.lease, given_up, bus.worker_id) for each in bus.poll_many(1_000)])
    bus.shutdown()
    return {}


def read_dead_letters(path: str, times: int = 30) -> dict[str, float]:
    """Return the median seconds of the first page of 100 dead letters."""
    bus = EventBus(f"sqlite:///{path}")
    took = [_timed(lambda: bus.dlq.list(limit=100)) for _ in range(times + 3)]
    bus.shutdown()
    return {"page": statistics.median(took[3:])}


def recover(count: int) -> dict[str, float]:
    """Return the seconds that `start` takes to free what a killed process held."""
    bus = EventBus(URL)
    for batch in load.batches(count, 1_000):
        bus.publish_many(batch)
    with start(Call("bench.ours:hold", {"count": count}), Path()) as holder:
        if holder.stdout is None or holder.stdout.readline().strip() != "held":
            raise RuntimeError("the holder did not get its leases")
        holder.send_signal(signal.SIGKILL)
    _check(bus, "default", pending=0, completed=0)
    logging.disable(logging.WARNING)
    took = _timed(bus.start)
    _check(bus, "default", pending=count, completed=0)
    bus.shutdown()
    return {"start": took}


def hold(count: int) -> None:
    """Lease everything and wait to be killed."""
    bus = EventBus(URL)
    if len(bus.poll_many(count)) != count:
        sys.exit("claimed too little")
    print("held", flush=True)
    time.sleep(60)


# ── ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _timed_each(work: Callable[[Any], object], given: Iterable[Any]) -> float:
    """Return the seconds for all of `given`; what the calls return is let go at once, as most callers do."""
    began = time.perf_counter()
    for each in given:
        work(each)
    return time.perf_counter() - began


def _completed(subscription: str) -> int:
    bus = EventBus(URL)
    found = next(each for each in bus.stats().subscriptions if each.name == subscription)
    bus.shutdown()
    return found.completed


def _check(bus: EventBus, subscription: str, *, pending: int, completed: int) -> None:
    """Refuse a figure for work that was not done."""
    found = next(each for each in bus.stats().subscriptions if each.name == subscription)
    if (found.pending, found.completed) != (pending, completed):
        raise RuntimeError(f"expected {pending} pending and {completed} completed, found {found}")
