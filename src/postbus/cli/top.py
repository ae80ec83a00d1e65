"""`postbus top`: the bus, watched from a terminal."""

import os
import select
import sys
import termios
import time
import tty
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from postbus.cli.console import Output, emit, ending_well, line, stdout, table
from postbus.cli.options import Format, Url, existing_store
from postbus.doctor import Patient
from postbus.errors import StoreUnavailable
from postbus.model import Checkpoint, HandlerRecord, Stats
from postbus.store import Queue
from postbus.store.contract import Finding
from postbus.telling import age, many

__all__ = ["EXAMPLES", "top"]

EXAMPLES: Final = "Example: postbus top\n\nExample: postbus top --once -o json | jq .attention"
BARS: Final = "▁▂▃▄▅▆▇█"
KEPT: Final = 24
"""Of how many looks the rates are kept."""
TICK: Final = 0.2
"""How soon a key is heard and a new size of the screen is seen."""
IN: Final = "published"
DONE: Final = ("COMPLETED", "COMPLETED_WITH_ERRORS")
QUEUES: Final = "SUBSCRIPTION  PENDING  SCHEDULED  PROCESSING  DEAD  OLDEST WAITS  DONE/S  "
READERS: Final = "FOLLOWER  POSITION  LAG  WAITS  READ BY  MOVED/S  "
WORKERS: Final = "WORKER  HANDLERS  SEEN  "


def top(
    *,
    interval: Annotated[float, typer.Option(min=0.1, max=3_600, help="Look every so many seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, as it does where there is no terminal.")] = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Watch the bus: what waits, runs and is dead, how fast it goes, who reads and works, what needs somebody.

    Ends with q or Ctrl-C. The rates of the first look are of the last minute, later ones from look to look. A store
    that is away for a while is waited for.
    """
    with ending_well(), existing_store(url) as store:
        viewer = _Viewer(store, url)
        if once or output is not Output.TABLE or not sys.stdout.isatty() or stdout().is_dumb_terminal:
            frame = viewer.look()
            emit(output, frame, lambda: _view(frame))
        else:
            _watch(viewer, interval)


@dataclass(frozen=True)
class Worker:
    """A process that has handlers; `silent` if it is known to be gone, or has not been heard of for long."""

    worker_id: str
    handlers: tuple[str, ...]
    seen_at: datetime
    silent: bool


@dataclass(frozen=True)
class Frame:
    """The bus at a moment. `rates` are events a second, the latest last: published, and by subscription."""

    url: str
    at: datetime
    stats: Stats
    workers: tuple[Worker, ...]
    rates: Mapping[str, tuple[float, ...]]
    attention: tuple[Finding, ...]
    away: str | None = None
    """Why it could not be looked at since, if it could not."""


# ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Viewer:
    """Looks at a store again and again, and remembers how fast its counts have moved."""

    def __init__(self, store: Queue, url: str | None) -> None:
        """Look at a store; `url` is what commands need to find it."""
        self._store, self._url = store, url
        self._last: Frame | None = None
        self._counts: Mapping[str, int] = {}
        self._at = 0.0
        self._rates = defaultdict[str, deque[float]](lambda: deque(maxlen=KEPT))

    def look(self) -> Frame:
        """Return the bus as it stands; if it is away, as it stood last, with the reason."""
        try:
            self._last = self._look()
        except StoreUnavailable as error:
            if self._last is None:
                raise
            self._last = replace(self._last, away=str(error))
        return self._last

    def _look(self) -> Frame:
        patient = Patient.of(self._store, self._url)
        found, now = patient.stats, self._store.now()
        attention = tuple(each for each in patient.findings() if not each.ok)
        workers = tuple(_workers(self._store.handlers()))
        self._measure(found)
        rates = {name: tuple(each) for name, each in self._rates.items()}
        return Frame(self._store.url, now, found, workers, rates, attention)

    def _measure(self, found: Stats) -> None:
        """Take note of how many a second it has been since the last look; at the first, in the last minute."""
        counts, at = _counts(found), time.monotonic()
        if self._at:
            for name, count in counts.items():
                moved = count - self._counts.get(name, count)
                self._rates[name].append(max(0.0, moved / max(at - self._at, 0.001)))
        else:
            self._rates[IN].append(found.rates.get(IN, 0) / 60)
        self._counts, self._at = counts, at


def _counts(found: Stats) -> dict[str, int]:
    """Return what only ever grows, unless the log is pruned or replaced."""
    done = {each.name: each.completed + each.completed_with_errors for each in found.subscriptions}
    return {IN: found.head} | done | {each.subscription: each.position for each in found.checkpoints}


def _workers(handlers: Iterable[HandlerRecord]) -> Iterator[Worker]:
    by_owner = defaultdict[str, list[HandlerRecord]](list)
    for each in handlers:
        by_owner[each.owner].append(each)
    for mine in sorted(by_owner.values(), key=lambda records: records[0].worker_id):
        seen = max(each.seen_at for each in mine)
        names = tuple(sorted({each.name for each in mine}))
        yield Worker(mine[0].worker_id, names, seen, silent=all(each.gone for each in mine))


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _view(frame: Frame) -> Iterator[RenderableType]:
    found = frame.stats
    size = f"{many(found.events, 'event')}, the last is {found.head}, {found.store_bytes / 1e6:,.1f} MB"
    yield line(f"{frame.url}  {frame.at:%H:%M:%SZ}  {size}", "bold")
    done = sum(found.rates.get(name, 0) for name in DONE) / 60
    yield line(
        f"published {_speed(frame, IN)}; in the last minute {found.rates.get(IN, 0) / 60:,.1f}/s, {done:,.1f}/s done"
    )
    if frame.away is not None:
        yield line(f"\nAWAY since then, and tried again: {frame.away}", "bold red")
    yield from _attention(frame.attention)
    yield line("")
    yield table(QUEUES, [(each.name, each.pending, each.scheduled, each.processing, each.dead,
                          each.oldest_age, *_moving(frame, each.name)) for each in found.subscriptions])  # fmt: skip
    if found.checkpoints:
        yield line("")
        yield table(READERS, [(each.subscription, each.position, each.lag, each.waiting, _reader(each),
                               *_moving(frame, each.subscription)) for each in found.checkpoints])  # fmt: skip
    if frame.workers:
        yield line("")
        yield table(WORKERS, [(each.worker_id, " ".join(each.handlers), f"{age(frame.at - each.seen_at)} ago",
                               "SILENT" if each.silent else "alive") for each in frame.workers])  # fmt: skip


def _attention(findings: Iterable[Finding]) -> Iterator[RenderableType]:
    for place, each in enumerate(findings):
        yield line(f"{'' if place else chr(10)}! {each.message}", "yellow")
        yield line(f"  mend it: {each.remedy}", "dim")


def _reader(stand: Checkpoint) -> str:
    if stand.stopped is not None:
        return "has stopped"
    return f"{stand.worker_id} (gone)" if stand.gone else stand.worker_id or "nobody"


def _speed(frame: Frame, name: str) -> str:
    return " ".join(filter(None, _moving(frame, name)))


def _moving(frame: Frame, name: str) -> tuple[str, str]:
    """Return how fast it goes now, and bars of how fast it went; nothing until there were two looks."""
    rates = frame.rates.get(name, ())
    return (f"{rates[-1]:,.1f}" + ("/s" if name == IN else ""), _bars(rates)) if rates else ("", " ")


def _bars(rates: tuple[float, ...]) -> str:
    most = max(rates)
    return "".join(BARS[round(each / most * (len(BARS) - 1)) if most else 0] for each in rates)


def _watch(viewer: _Viewer, interval: float) -> None:
    """Show frame after frame until somebody wants no more."""
    console = stdout()
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        ended = False
        while not ended:
            live.update(Group(*_view(viewer.look()), line("\nq ends", "dim")))
            ended = _rest(live, console, key, interval)


def _rest(live: Live, console: Console, key: Callable[[float], str], interval: float) -> bool:
    """Draw, and wait for the next look, drawing anew if the screen has another size; return whether it was the last."""
    until, size = time.monotonic() + interval, console.size
    live.refresh()
    while (left := until - time.monotonic()) > 0:
        if key(min(left, TICK)) in {"q", "Q"}:
            return True
        if console.size != size:
            size = console.size
            live.refresh()
    return False


@contextmanager
def _keys() -> Generator[Callable[[float], str]]:
    """Give what waits for a key for so many seconds; the terminal is put back as it was."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield lambda seconds: os.read(terminal, 1).decode(errors="replace") if _is_ready(terminal, seconds) else ""
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _is_ready(terminal: int, seconds: float) -> bool:
    return bool(select.select([terminal], [], [], seconds)[0])
