"""`postbus demo`: a small shop, several worker processes, failures and kills, and every event accounted for."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn

from postbus.cli import pipeline
from postbus.cli.console import Output, emit, line, say, stderr, table
from postbus.cli.demo_open import WORKERS, crew, stay_open
from postbus.cli.dlq import reason
from postbus.cli.options import Format
from postbus.errors import InvalidRequest
from postbus.model import NewEvent, Status
from postbus.payload import Draft, draft
from postbus.spark.launch import brief_java
from postbus.store import open_store
from postbus.store.contract import DeadFilter

__all__ = ["EXAMPLES", "demo"]

EXAMPLES: Final = """\
Example: postbus demo

Example: postbus demo --keep   (then open the dashboard, and kill workers)

Example: postbus demo --events 5000 --keep-file   (then look around in it)"""
SEED: Final = 7
TICK: Final = 0.05
PATIENCE: Final = 30.0
"""How long nothing may happen before the demo gives up."""
Counts = tuple[int, int, int, int]
"""What is published, completed, retried and dead."""


def demo(
    *,
    events: Annotated[int, typer.Option(min=20, max=1_000_000, help="How many events to publish.")] = 1_000,
    keep_file: Annotated[bool, typer.Option("--keep-file", help="Keep the database to look around in.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Then stay open, with a dashboard, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Where the dashboard is; 0: anywhere.")] = 8080,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Then the report, if Spark is installed.")
    ] = True,
    output: Format = Output.TABLE,
) -> None:
    """Watch a small shop survive flaky handlers, poison events and killed workers, in a few seconds.

    Exits with 1 unless completed + dead = published. Where Spark is installed, the events then go into a lake, and the
    report on them is shown.
    """
    folder = Path(tempfile.mkdtemp(prefix="postbus-demo-"))
    try:
        account = _Shop(folder, events).run()
        emit(output, account, lambda: _view(account))
        if not account.adds_up:
            said = (folder / "workers.log").read_text(errors="replace").splitlines()[-20:]
            say("\n".join(["the sum does not add up; the workers said last:", *said]), style="red")
            raise typer.Exit(1)
        if report and output is Output.TABLE:
            _report(folder)
        if keep:
            stay_open(folder, port)
        else:
            say("\nSee it live, and kill workers yourself: postbus demo --keep", style="dim")
    finally:
        if keep_file:
            say(f"Look around: postbus events list --url sqlite:///{folder}/shop.db")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _report(folder: Path) -> None:
    """Bring the shop's events into a lake and show the report on them; say in a line what that would need."""
    url, lake = f"sqlite:///{folder}/shop.db", str(folder / "lake")
    say("\nThe same events in a lake of Parquet files, and the report on them, by Spark:")
    brief_java()
    try:
        with pipeline.spark_for(url, None):
            pipeline.ingest(lake=lake, url=url)
            pipeline.report(lake=lake, url=url)
    except InvalidRequest as error:
        say(f"not shown: {error}", style="dim")


@dataclass(frozen=True)
class Account:
    """What became of every event, and what was survived on the way."""

    published: int
    completed: int
    dead: int
    retries: int
    workers_killed: int
    reasons: Mapping[str, int]
    seconds: float
    adds_up: bool


def _view(account: Account) -> Iterator[RenderableType]:
    sign = "= published" if account.adds_up else "is not what was published"
    yield table(
        "\nEVENTS  \nCOUNT  \n ",
        [
            ("published", account.published, " "),
            ("completed", account.completed, " "),
            ("dead letters", account.dead, " "),
            ("completed + dead", account.completed + account.dead, sign),
        ],
    )
    reasons = ", ".join(f"{count} x {why}" for why, count in account.reasons.items())
    yield line(
        f"\nSurvived in {account.seconds:.0f} s: {account.workers_killed} worker processes killed with SIGKILL, "
        f"{account.retries:,} retries, and {account.dead} events that could not be handled, each kept as a dead letter "
        f"with its reason ({reasons})."
    )
    if account.adds_up:
        yield line("No event was lost.", "bold green")


def _orders(count: int) -> list[Draft]:
    """Return the events of the shop: the same ones every time."""
    chance = random.Random(SEED)  # noqa: S311  repeatable, not secret
    made = [_order(number, chance) for number in range(count)]
    made[count // 4] = NewEvent(type="label.wanted", payload={"driver": "faulty"}, title="kills its worker once")
    return [draft(each) for each in made]


def _order(number: int, chance: random.Random) -> NewEvent:
    match number % 100:
        case 10 | 60:
            return NewEvent(type="payment.due", payload={"card": "4111", "currency": "EUR"}, tags=["poison"])
        case 15:
            return NewEvent(type="payment.due", payload={"card": "4" * 16, "currency": "XXX"}, tags=["poison"])
        case _:
            flaky = chance.choices((0, 1, 2), (80, 15, 5))[0]
            return NewEvent(type="order.placed", payload={"order_id": number, "flaky": flaky})


class _Shop:
    """One run of the demo: publishes, watches over the workers, kills one of them, counts."""

    def __init__(self, folder: Path, count: int) -> None:
        """Open the shop in a folder."""
        self._count = count
        self._victim: int | None = None
        url = f"sqlite:///{folder}/shop.db"
        self._store = open_store(url)
        self._log = (folder / "workers.log").open("wb")
        self._display = _Display(count)
        self._supervisor = crew(folder, url, self._hear, self._log)

    def run(self) -> Account:
        """Run until every event has ended, or nothing happens any more; return the account."""
        began = time.monotonic()
        say(f"A shop on a temporary SQLite file: {self._count:,} events, {WORKERS} worker processes.")
        try:
            with self._display:
                self._work()
            seconds = time.monotonic() - began
            self._supervisor.stop()
            while self._supervisor.turn() and time.monotonic() - began - seconds < PATIENCE:
                time.sleep(TICK)
            return self._account(seconds)
        finally:
            self._supervisor.stop(signal.SIGKILL)
            self._store.close()
            self._log.close()

    def _work(self) -> None:
        left = _orders(self._count)
        step = max(10, self._count // 40)
        last, since = (0, 0, 0, 0), time.monotonic()
        while time.monotonic() - since < PATIENCE:
            if left:
                self._store.publish(left[:step])
                del left[:step]
            self._supervisor.turn()
            counts = self._counts()
            self._display.show(counts)
            if counts != last:
                last, since = counts, time.monotonic()
            _, completed, _, dead = counts
            if completed > 0.4 * self._count and self._victim is None and (pids := self._supervisor.pids):
                self._victim = pids[0]
                os.kill(self._victim, signal.SIGKILL)
            if not left and completed + dead == self._count:
                return
            time.sleep(TICK)

    def _counts(self) -> Counts:
        stats = self._store.stats()
        mine = stats.subscriptions[0]
        failed = int(stats.rates.get("FAILED", 0) + stats.rates.get("EXPIRED", 0))
        return stats.events, mine.completed, max(failed - mine.dead, 0), mine.dead

    def _hear(self, event: str, fields: Mapping[str, object]) -> None:
        pid, by = fields["pid"], "the demo" if fields["pid"] == self._victim else "its own handler"
        ended = f"ended: {fields.get('how')}, by {by}"
        self._display.tell(f"worker {pid} {'started' if event == 'worker_process_started' else ended}")

    def _account(self, seconds: float) -> Account:
        """Count again, exactly: by the audit log of every event, and by every dead letter."""
        stats = self._store.stats()
        completed = stats.subscriptions[0].completed
        letters = self._store.dead_letters(DeadFilter(), limit=self._count, offset=0, after=None).items
        logs = (entry for event_id in range(1, stats.head + 1) for entry in self._store.logs(event_id))
        return Account(
            published=stats.events,
            completed=completed,
            dead=len(letters),
            retries=sum(entry.action in ("FAILED", "EXPIRED") and entry.status is Status.PENDING for entry in logs),
            workers_killed=self._supervisor.killed,
            reasons=Counter(map(reason, letters)),
            seconds=seconds,
            adds_up=completed + len(letters) == stats.events == self._count,
        )


class _Display:
    """Bars on a terminal; elsewhere a line a second."""

    def __init__(self, count: int) -> None:
        columns = TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.completed:,.0f}")
        self._bars = Progress(*columns, console=stderr(), disable=not sys.stderr.isatty())
        self._tasks = [self._bars.add_task(name, total=count) for name in ("published", "completed", "retried", "dead")]
        self._told = 0.0

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def tell(self, text: str) -> None:
        """Say what happened, above the bars."""
        self._bars.console.print(text)

    def show(self, counts: Counts) -> None:
        """Show how far it is."""
        for task, count in zip(self._tasks, counts, strict=True):
            self._bars.update(task, completed=count)
        if self._bars.disable and time.monotonic() - self._told >= 1:
            self._told = time.monotonic()
            self.tell("published {:,}, completed {:,}, retried {:,}, dead {:,}".format(*counts))
