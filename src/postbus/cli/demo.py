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
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from postbus.cli.console import Output, emit, say, stderr, table
from postbus.cli.options import Format
from postbus.cli.supervise import Supervisor
from postbus.model import NewEvent, Status
from postbus.payload import Draft, draft
from postbus.store import Store, open_store
from postbus.store.contract import DeadFilter

__all__ = ["register"]

WORKERS: Final = 3
SEED: Final = 7
TICK: Final = 0.05
PATIENCE: Final = 30.0
"""How long nothing may happen before the demo gives up."""
TELL_EVERY: Final = 1.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: postbus demo\n\nExample: postbus demo --events 5000 --keep-file   (then look around in it)"
    )(demo)


def demo(
    *,
    events: Annotated[int, typer.Option(min=20, max=1_000_000, help="How many events to publish.")] = 1_000,
    keep_file: Annotated[bool, typer.Option("--keep-file", help="Keep the database to look around in.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Watch a small shop survive flaky handlers, poison events and killed workers, in well under a minute.

    Exits with 1 unless completed + dead = published.
    """
    folder = Path(tempfile.mkdtemp(prefix="postbus-demo-"))
    try:
        account = _Shop(folder, events).run()
        emit(output, account, lambda: _view(account))
        if not account.adds_up:
            say(f"the sum does not add up; the workers said:\n{_tail(folder)}", style="red")
            raise typer.Exit(1)
    finally:
        if keep_file:
            say(f"Look around: postbus events list --url sqlite:///{folder}/shop.db")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _tail(folder: Path) -> str:
    return "\n".join((folder / "workers.log").read_text(errors="replace").splitlines()[-20:])


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
    total, sign = account.completed + account.dead, "=" if account.adds_up else "≠"
    rows = [
        ("published", account.published, None),
        ("completed", account.completed, None),
        ("dead letters", account.dead, None),
        ("completed + dead", total, f"{sign} published"),
    ]
    yield Text()
    yield table(("EVENTS", "COUNT", ""), [(name, count, note or " ") for name, count, note in rows])
    reasons = ", ".join(f"{count} x {reason}" for reason, count in account.reasons.items())
    yield Text(
        f"\nSurvived in {account.seconds:.0f} s: {account.workers_killed} worker processes killed with SIGKILL, "
        f"{account.retries:,} retries, and {account.dead} events nobody could handle, kept as dead letters "
        f"with the reason ({reasons})."
    )
    if account.adds_up:
        yield Text("No event was lost.", style="bold green")


def _orders(count: int) -> list[Draft]:
    """Return the events of the shop: the same ones every time."""
    chance = random.Random(SEED)  # noqa: S311  repeatable, not secret
    made = [_order(number, chance) for number in range(count)]
    made[count // 4] = NewEvent(type="label.wanted", payload={"driver": "faulty"}, title="kills its worker once")
    return [draft(each) for each in made]


def _order(number: int, chance: random.Random) -> NewEvent:
    if number % 50 == 10:  # noqa: PLR2004  one in fifty
        return NewEvent(type="payment.due", payload={"card": "4111", "currency": "EUR"}, tags=["poison"])
    if number % 100 == 15:  # noqa: PLR2004  one in a hundred
        return NewEvent(type="payment.due", payload={"card": "4111111111111111", "currency": "XXX"}, tags=["poison"])
    flaky = chance.choices((0, 1, 2), (80, 15, 5))[0]
    return NewEvent(type="order.placed", payload={"order_id": number, "flaky": flaky})


class _Shop:
    """One run of the demo: publishes, watches over the workers, kills one of them, counts."""

    def __init__(self, folder: Path, count: int) -> None:
        self._count = count
        self._url = f"sqlite:///{folder}/shop.db"
        self._store: Store = open_store(self._url)
        self._log = (folder / "workers.log").open("wb")
        self._display = _Display(count)
        self._supervisor = Supervisor(
            "postbus.cli.demo_shop:open_bus",
            WORKERS,
            self._hear,
            environment={"POSTBUS_URL": self._url},
            settings=False,
            cwd=str(folder),
            log=self._log,
        )
        self._victim: int | None = None

    def run(self) -> Account:
        """Run until every event has ended, or nothing happens any more; return the account."""
        began = time.monotonic()
        say(f"A shop on a temporary SQLite file, {WORKERS} worker processes, {self._count:,} events.")
        try:
            with self._display:
                self._work()
            seconds = time.monotonic() - began
            self._end()
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
            if completed > 0.4 * self._count:
                self._kill_one()
            if not left and completed + dead == self._count:
                return
            time.sleep(TICK)

    def _counts(self) -> tuple[int, int, int, int]:
        """Return what is published, completed, retried and dead by now."""
        stats = self._store.stats()
        mine = stats.subscriptions[0]
        tried_again = int(stats.rates.get("FAILED", 0) + stats.rates.get("EXPIRED", 0)) - mine.dead
        return stats.events, mine.completed, max(tried_again, 0), mine.dead

    def _kill_one(self) -> None:
        if self._victim is None and (pids := self._supervisor.pids):
            self._victim = pids[0]
            os.kill(self._victim, signal.SIGKILL)

    def _hear(self, event: str, fields: Mapping[str, object]) -> None:
        pid = fields["pid"]
        match event:
            case "worker_process_started":
                self._display.tell(f"worker {pid} started")
            case _ if pid == self._victim:
                self._display.tell(f"worker {pid} was killed by the demo (SIGKILL)")
            case _:
                self._display.tell(f"worker {pid} was killed by its own handler ({fields['how']})")

    def _end(self) -> None:
        self._supervisor.stop()
        deadline = time.monotonic() + PATIENCE
        while self._supervisor.turn() and time.monotonic() < deadline:
            time.sleep(TICK)

    def _account(self, seconds: float) -> Account:
        """Count again, exactly: by the audit log of every event, and by every dead letter."""
        stats = self._store.stats()
        completed = stats.subscriptions[0].completed
        letters = self._store.dead_letters(DeadFilter(), limit=stats.events, offset=0, after=None).items
        logs = (entry for event_id in range(1, stats.head + 1) for entry in self._store.logs(event_id))
        return Account(
            published=stats.events,
            completed=completed,
            dead=len(letters),
            retries=sum(entry.action in ("FAILED", "EXPIRED") and entry.status is Status.PENDING for entry in logs),
            workers_killed=self._supervisor.killed,
            reasons=Counter(f"{each.errors[-1].type}: {each.errors[-1].message}" for each in letters),
            seconds=seconds,
            adds_up=completed + len(letters) == stats.events == self._count,
        )


class _Display:
    """Bars on a terminal; elsewhere a line a second."""

    def __init__(self, count: int) -> None:
        text = TextColumn("{task.description:<10}")
        self._bars = Progress(text, BarColumn(), TextColumn("{task.completed:,.0f}"), console=stderr())
        names = ("published", "completed", "retried", "dead")
        self._tasks: list[TaskID] = [self._bars.add_task(name, total=count) for name in names]
        self._live = sys.stderr.isatty()
        self._told = 0.0

    def __enter__(self) -> None:
        if self._live:
            self._bars.start()

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bars.stop()

    def tell(self, text: str) -> None:
        """Say what happened, above the bars."""
        if self._live:
            self._bars.console.print(text)
        else:
            say(text)

    def show(self, counts: tuple[int, int, int, int]) -> None:
        """Show how far it is."""
        if self._live:
            for task, count in zip(self._tasks, counts, strict=True):
                self._bars.update(task, completed=count)
        elif time.monotonic() - self._told >= TELL_EVERY:
            self._told = time.monotonic()
            say("published {:,}, completed {:,}, retried {:,}, dead {:,}".format(*counts))
