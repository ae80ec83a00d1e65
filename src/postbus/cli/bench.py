"""`postbus bench`: what this database can do, measured on it."""

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final
from uuid import uuid4

import typer

from postbus.bus import EventBus
from postbus.cli.console import Output, emit, progress, say, table
from postbus.cli.dlq import ACTOR
from postbus.cli.options import Format, Yes, existing_store
from postbus.errors import Conflict
from postbus.model import Done, Event, Mode, Subscription
from postbus.pattern import Interest
from postbus.payload import drafts
from postbus.store import Queue, open_store
from postbus.store.contract import Claim, Settlement
from postbus.telling import many

__all__ = ["EXAMPLES", "NAME", "bench"]

EXAMPLES: Final = """\
Example: postbus bench --seconds 2

Example: postbus bench --url postgresql://user@host/db --rate 500 -o json"""
NAME: Final = "postbus.bench"
"""Its subscription; its events are of types that begin so."""
KIND: Final = f"{NAME}.event"
MINE: Final = Interest(f"{NAME}.*")
PAYLOAD: Final = {"order_id": 7, "text": "x" * 100}
BATCH: Final = 500
SHOW_EVERY: Final = 50
PATIENCE: Final = 10.0
"""How long, in seconds, the last events are waited for."""
COLUMNS: Final = "MEASURE  EVENTS  SECONDS  A SECOND  P50 MS  P99 MS"
Place = Annotated[
    str | None,
    typer.Option(help="The bus to measure. Only as an option; else a temporary SQLite file in this folder."),
]


def bench(
    *,
    seconds: Annotated[float, typer.Option(min=0.1, max=3_600, help="How long each measure may take.")] = 5.0,
    events: Annotated[int, typer.Option(min=1, max=10_000_000, help="How many events it may publish.")] = 20_000,
    rate: Annotated[float, typer.Option(min=0.1, max=100_000, help="At how many a second delays are taken.")] = 200.0,
    yes: Yes = False,
    url: Place = None,
    output: Format = Output.TABLE,
) -> None:
    """Measure a database: events published one by one and in batches, events handled, and the delay at a fixed rate.

    One process publishes from one thread and handles with one worker. Delays count from the moment an event was to be
    published until its handler runs. Each measure ends after --seconds, or after --events.

    It uses the subscription postbus.bench and types of that name; at the end the subscription is deleted, and whatever
    else got its events is rid of them. Only the events themselves, and the audit rows of what was done with them, stay
    in the log. A bus where other work waits, or others would get these events, is refused unless --yes.
    """
    with _place(url) as where, existing_store(where) as store:
        _require_quiet(store, yes=yes)
        before = store.stats().events
        try:
            figures = list(_Bench(where, store, seconds, events, rate).measure())
        finally:
            takers = _leave(store)
        told = {"url": store.url, "deliveries_an_event": 1 + len(takers), "figures": figures}
        told |= {"events_left": 0 if url is None else store.stats().events - before}
    emit(output, told, lambda: [table(COLUMNS, map(_row, figures))])
    _tell(told, takers)


@dataclass(frozen=True)
class Figure:
    """What was measured: how many in how long, and how long one took."""

    measure: str
    events: int
    seconds: float
    per_second: float
    p50_ms: float | None
    p99_ms: float | None


def _figure(measure: str, count: int, seconds: float, times: Sequence[float]) -> Figure:
    ordered = sorted(times)
    p50, p99 = (1_000 * ordered[int(part * (len(ordered) - 1))] if ordered else None for part in (0.5, 0.99))
    return Figure(measure, count, seconds, count / max(seconds, 1e-9), p50, p99)


def _row(each: Figure) -> tuple[object, ...]:
    times = ("" if time is None else f"{time:,.2f}" for time in (each.p50_ms, each.p99_ms))
    return (each.measure, each.events, f"{each.seconds:.2f}", f"{each.per_second:,.0f}", *times)


def _tell(told: dict[str, Any], takers: Sequence[str]) -> None:
    if takers:
        say(f"each event was also delivered to {', '.join(takers)}, which took its part of the time", style="dim")
    if told["events_left"]:
        left = many(told["events_left"], "event")
        say(f"{left} of type {KIND}, and the audit rows of them, stay in the log of {told['url']}", style="dim")


# ── where ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _place(url: str | None) -> Generator[str]:
    """Give the URL to measure: the one given, or that of a bus of its own, on this disk, gone afterwards."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix=".postbus-bench-", dir=".") as folder:
        made = open_store(f"sqlite:///{folder}/bench.db")
        made.delete_subscription("default", ACTOR)
        made.close()
        yield f"sqlite:///{folder}/bench.db"


def _require_quiet(store: Queue, *, yes: bool) -> None:
    """Raise Conflict where figures would mean little or others would be disturbed, unless that is agreed to."""
    found = store.subscriptions()
    if any(each.name == NAME for each in found):
        raise Conflict(f"another bench runs, or one was killed: then postbus subscriptions delete {NAME}")
    if paused := [each.name for each in _takers(found) if each.paused]:
        raise Conflict(f"{paused[0]} is paused and would keep the events: postbus subscriptions resume {paused[0]}")
    if not yes and (reasons := "; ".join(_disturbed(store, found))):
        raise Conflict(f"{store.url} is not for measuring now: {reasons}. Add --yes to do it all the same")


def _disturbed(store: Queue, found: Sequence[Subscription]) -> Iterator[str]:
    for each in store.stats().subscriptions:
        if count := each.pending - each.scheduled + each.processing:
            yield f"{many(count, 'event')} in {each.name} to be handled"
    for each in found:
        if each.mode is not Mode.QUEUE and _wants(each):
            yield f"{each.name} would read these events"
    for each in store.handlers():
        if not each.gone and Interest(each.pattern, frozenset(each.tags)).wants(KIND, ()):
            yield f"{each.name} in {each.worker_id} would get these events"


def _takers(found: Sequence[Subscription]) -> list[Subscription]:
    return [each for each in found if each.mode is Mode.QUEUE and each.name != NAME and _wants(each)]


def _wants(each: Subscription) -> bool:
    return any(Interest(pattern, frozenset(each.tags)).wants(KIND, ()) for pattern in each.patterns)


def _leave(store: Queue) -> list[str]:
    """Take away the subscription and every delivery of these events; return who else had got them."""
    _forget(store)
    takers = [each.name for each in _takers(store.subscriptions())]
    with progress("leaving nothing behind", None) as show:
        done = 0
        for name in takers:
            claim = Claim(subscription=name, worker_id=ACTOR, owner=uuid4().hex, interests=(MINE,), limit=BATCH)
            while taken := store.claim(claim).deliveries:
                store.settle([Settlement(each.lease, Done(), ACTOR) for each in taken])
                done += len(taken)
                show(done)
    return takers


def _forget(store: Queue) -> None:
    if any(each.name == NAME for each in store.subscriptions()):
        store.delete_subscription(NAME, ACTOR)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Bench:
    """One run."""

    url: str = field(repr=False)
    store: Queue
    seconds: float
    events: int
    rate: float

    def measure(self) -> Iterator[Figure]:
        """Yield one figure after the other; what is published is what is handled."""
        with self._bus() as bus:
            bus.subscriptions.create(NAME, MINE.pattern)
            yield self._publish("publish, one by one", bus, 1)
            yield self._publish(f"publish, {BATCH} at once", bus, BATCH)
            yield self._handle(bus)
        _forget(self.store)
        with self._bus() as bus:
            yield self._delay(bus)

    @contextmanager
    def _bus(self) -> Generator[EventBus]:
        bus = EventBus(self.url, auto_migrate=False)
        try:
            yield bus
        finally:
            bus.shutdown()

    def _publish(self, measure: str, bus: EventBus, size: int) -> Figure:
        batch: list[dict[str, Any]] = [{"type": KIND, "payload": PAYLOAD}] * min(size, self.events)
        times: list[float] = []
        begun = now = time.monotonic()
        with progress(measure, self.events) as show:
            while now < begun + self.seconds and len(times) * len(batch) < self.events:
                bus.store.publish(drafts(batch))
                before, now = now, time.monotonic()
                times.append(now - before)
                if size > 1 or len(times) % SHOW_EVERY == 0:
                    show(len(times) * len(batch))
        return _figure(measure, len(times) * len(batch), now - begun, times)

    def _handle(self, bus: EventBus) -> Figure:
        """Have a worker handle what was published, as far as it comes."""
        total = next(each.pending for each in self.store.stats().subscriptions if each.name == NAME)
        ends: list[float] = []
        bus.subscribe(MINE.pattern, _noting(ends), subscription=NAME)
        begun = time.monotonic()
        bus.start()
        _wait("handle, one worker", ends, total, begun + self.seconds)
        count = len(ends)
        return _figure("handle, one worker", count, max(ends[:count], default=begun) - begun, ())

    def _delay(self, bus: EventBus) -> Figure:
        """Publish at a fixed rate, late ones counting from when they were due, and see when their handlers run."""
        delays: list[float] = []
        bus.subscribe(MINE.pattern, _timing(delays), subscription=NAME)
        bus.start()
        measure, total = f"delay at {self.rate:,g} a second", max(1, min(self.events, int(self.rate * self.seconds)))
        begun = time.monotonic()
        with progress(measure, total) as show:
            for number in range(total):
                due = begun + number / self.rate
                time.sleep(max(0.0, due - time.monotonic()))
                bus.publish(KIND, {"due": due})
                show(number + 1)
        seconds = time.monotonic() - begun
        _wait("the last of them", delays, total, time.monotonic() + PATIENCE)
        if (lost := total - len(delays)) > 0:
            say(f"{many(lost, 'event')} had not been handled {PATIENCE:.0f} s later", style="yellow")
        return _figure(measure, len(delays), seconds, delays)


def _noting(ends: list[float]) -> Callable[[Event], None]:
    return lambda _: ends.append(time.monotonic())


def _timing(delays: list[float]) -> Callable[[Event], None]:
    return lambda event: delays.append(time.monotonic() - event.payload["due"])


def _wait(what: str, seen: Sequence[object], total: int, until: float) -> None:
    """Return once all have been seen, or it is too late."""
    with progress(what, total) as show:
        while len(seen) < total and time.monotonic() < until:
            time.sleep(0.01)
            show(len(seen))
