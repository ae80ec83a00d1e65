"""Where a trial plays: a store of its own, the processes that use it, and what can be done to them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, LiteralString, TypeVar, cast

import apsw

from postbus.bus import EventBus
from postbus.errors import StoreUnavailable
from postbus.torture.cluster import Bouncer, Cluster, free_port, query
from postbus.torture.crew import QUEUES, TABLES
from postbus.torture.history import Entry, History, read
from postbus.torture.proxy import Proxy
from postbus.torture.tables import LEASED, PENDING, deliveries_of, reading

__all__ = ["Late", "Member", "Stage", "Store", "is_locked", "on_stage", "until"]

T = TypeVar("T")
CREW: Final = {
    "publisher-1": "publish",
    "publisher-2": "publish",
    "worker-1": "work",
    "worker-2": "work",
    "poller": "poll",
    "follower-1": "follow",
    "follower-2": "follow",
}
HTTP_CREW: Final = {"server": "serve", "http-publisher": "publish", "http-worker": "work"}
BUSY: Final = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = %s AND (state <> 'idle' OR backend_xid IS NOT NULL)
"""
TABLES_SIZE: Final = """
    SELECT sum(pg_total_relation_size(oid)) FROM pg_class
    WHERE relkind = 'r' AND relnamespace = 'postbus'::regnamespace AND relname != 'dedup'
"""
FILE_SIZE: Final = """
    SELECT (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)
           - coalesce(sum(pgsize), 0)
      FROM dbstat WHERE name IN (SELECT name FROM sqlite_schema WHERE tbl_name IN ('dedup', 'effects', 'own'))
"""
PATIENCE: Final = 60.0
"""How long, in seconds, whatever should happen by itself is waited for."""


class Late(Exception):  # noqa: N818  what did not happen is a finding, told in a sentence
    """Raised when something that should happen by itself does not."""


def until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Return the first true answer of `condition`; raise Late if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise Late(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.01)
    return answer


@dataclass
class Member:
    """One of the crew: what it was started with, and the process that it is now."""

    config: dict[str, Any]
    pid: int

    @property
    def name(self) -> str:
        """What it is called."""
        return self.config["name"]

    def runs(self) -> bool:
        """Return whether its process is there."""
        try:
            return _state(Path(f"/proc/{self.pid}/stat")) != "Z"
        except OSError:
            return False

    def rests(self) -> bool:
        """Return whether every one of its threads is suspended: one that was in the kernel may take a lock first."""
        try:
            return all(_state(each) == "T" for each in Path(f"/proc/{self.pid}/task").glob("*/stat"))
        except OSError:  # it has ended, or one of them just now
            return not self.runs()

    def send(self, number: int) -> None:
        """Send its process, and those it has started, a signal."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)
        until(lambda: not self.runs(), f"{self.name} is gone")


def _state(file: Path) -> str:
    return file.read_text().rpartition(")")[2].split()[0]


@dataclass
class Store:
    """The database that a trial uses, by the address that leads straight to it."""

    url: str
    cluster: Cluster | None = None

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file."""
        return self.cluster is None

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.url.removeprefix("sqlite:///"))

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return rows of our tables, read past the product."""
        if not self.is_sqlite:
            return query(self.url, cast("LiteralString", sql))
        connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(10_000)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def unfinished(self) -> list[tuple[int, str]]:
        """Return what is still to be done, as of one moment: event and subscription."""
        with reading(self.url) as run:
            found = deliveries_of(run, postgres=not self.is_sqlite)
        return [key for key, each in found.items() if each.state in (PENDING, LEASED)]

    def size(self) -> int:
        """Return how many bytes it takes, but for what is to last: uids, for days, and what the crew itself writes."""
        return int(self.rows(FILE_SIZE if self.is_sqlite else TABLES_SIZE)[0][0])

    def is_writing(self, name: str) -> bool:
        """Return whether one of the crew (on a file: anybody) has a transaction open that others may wait for."""
        if not self.is_sqlite:
            return query(self.url, BUSY, name) != [(0,)]
        return is_locked(self.path)


def is_locked(path: Path) -> bool:
    """Return whether somebody writes to a SQLite file at this moment."""
    probe = apsw.Connection(str(path))
    try:
        probe.execute("BEGIN IMMEDIATE; ROLLBACK")
    except apsw.BusyError:
        return True
    finally:
        probe.close()
    return False


@dataclass
class Stage:
    """One trial: its store, its crew, and what all of them wrote down."""

    folder: Path
    store: Store
    seed: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    crew: dict[str, Member] = field(default_factory=dict[str, Member])
    doors: dict[str, str] = field(default_factory=dict[str, str])
    """Addresses that some, by name or role, are to use instead of the store's own."""
    bouncer: Bouncer | None = None
    port: int = 0
    _nursery: "subprocess.Popen[bytes] | None" = None

    @property
    def clock(self) -> Path:
        """By how many seconds the processes' clock is wrong."""
        return self.folder / "clock"

    @property
    def history(self) -> History:
        """Where the nemesis writes down what it does."""
        return History(self.folder / "history" / "nemesis.jsonl", "nemesis")

    def entries(self) -> list[Entry]:
        """Return what everybody has written down so far."""
        return read(sorted((self.folder / "history").glob("*.jsonl")))

    # ── the crew ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Make the bus's tables and the trial's own, and the process that starts all others."""
        (self.folder / "history").mkdir()
        self.clock.write_text("0")
        bus = EventBus(self.store.url)
        bus.subscriptions.create(QUEUES[1], "trial.*")
        serial = "INTEGER PRIMARY KEY AUTOINCREMENT" if self.store.is_sqlite else "BIGSERIAL PRIMARY KEY"
        with bus.transaction() as tx:
            for sql in TABLES:
                tx.execute(sql.format(serial=serial))
        bus.shutdown()
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "postbus.torture.crew"],
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, name: str, role: str, **config: Any) -> Member:
        """Have one more, or one again: it knows how many there have been before it under its name."""
        before = self.crew.get(name)
        url = self.doors.get(name) or self.doors.get(role) or self.store.url
        told = {
            "role": role,
            "name": name,
            "url": url
            if url.startswith(("sqlite", "http"))
            else f"{url}{'&' if '?' in url else '?'}application_name={name}",
            "seed": self.seed,
            "life": before.config["life"] + 1 if before else 0,
            "history": str(self.folder / "history" / f"{name}.jsonl"),
            "errors": str(self.folder / f"{name}.err"),
            "stop": str(self.folder / "stop"),
            "clock": str(self.clock),
            "options": {**self.options},
            "lake": str(self.folder / "lake"),
            "order": str(self.folder / "order"),
            "port": self.port,
            **config,
        }
        nursery = self._nursery
        if nursery is None or nursery.stdin is None or nursery.stdout is None:
            raise RuntimeError("the stage is not open")
        nursery.stdin.write(json.dumps(told).encode() + b"\n")
        nursery.stdin.flush()
        member = self.crew[name] = Member(told, int(nursery.stdout.readline()))
        return member

    def again(self, name: str) -> Member:
        """Start one again as it was."""
        config = {key: value for key, value in self.crew[name].config.items() if key not in {"life", "name", "role"}}
        return self.start(name, self.crew[name].config["role"], **config)

    def begin(self, *, http: bool, pace: float) -> None:
        """Start the crew, publishers at a pace, and wait until everybody does his work."""
        for name, role in {**CREW, **(HTTP_CREW if http else {})}.items():
            far = {"url": self.doors.get("http", f"http://127.0.0.1:{self.port}")} if name.startswith("http-") else {}
            self.start(name, role, pace=pace, **far)
        self.await_progress()

    def playing(self, *roles: str) -> list[str]:
        """Return the names of those who play these roles, or of all."""
        return [name for name, each in self.crew.items() if not roles or each.config["role"] in roles]

    def drive(self, job: str, rows: int, **details: Any) -> None:
        """Have Spark's driver do a job, and wait until it is done or the driver has ended; one that is there goes on.

        A Spark takes far longer to start than such a job takes.
        """
        driver = self.crew.get("driver")
        if driver is None or not driver.runs():
            driver = self.start("driver", "drive")
        order = self.folder / "order"
        written = order.with_suffix(".new")
        written.write_text(json.dumps({"job": job, "rows": rows, **details}))
        written.rename(order)
        until(lambda: not (order.exists() and driver.runs()), f"the driver is done or ends: {job}", 600)
        order.unlink(missing_ok=True)

    def halt(self, name: str) -> None:
        """Suspend one at a moment when nobody is writing: a writer stopped midway would stop everybody."""
        member = self.crew[name]

        def halted() -> bool:
            member.send(signal.SIGSTOP)
            until(member.rests, f"{name} rests")
            if self.store.is_writing(name):
                member.send(signal.SIGCONT)
                time.sleep(0.003)
                return False
            return True

        until(halted, f"a moment when nobody is writing, to halt {name}")

    def go_on(self, name: str) -> None:
        """Resume one that was suspended."""
        self.crew[name].send(signal.SIGCONT)

    # ── progress, and the end ────────────────────────────────────────────────────────────────────────────────────

    def await_progress(self, seconds: float = PATIENCE, without: Iterable[str] = ()) -> float:
        """Wait until everybody has got something done since now; return how long that took. Raise Late if not."""
        began = time.monotonic()
        watched = [name for name in self.playing("publish", "work", "poll", "follow") if name not in without]
        enough = {name: self._written(name) + 700 for name in watched if self.crew[name].config["role"] != "follow"}
        followers = [name for name in watched if name not in enough]
        followed = self._written_by(followers) + 700

        def moved() -> bool:
            self._check_alive()
            there = all(self._written(name) > size for name, size in enough.items())
            return there and (not followers or self._written_by(followers) > followed)

        until(moved, f"all get something done: {', '.join(enough)}, followers", seconds)
        return time.monotonic() - began

    def _written(self, name: str) -> int:
        file = self.folder / "history" / f"{name}.jsonl"
        return file.stat().st_size if file.exists() else 0

    def _written_by(self, names: Iterable[str]) -> int:
        return sum(map(self._written, names))

    def _check_alive(self) -> None:
        for name, each in self.crew.items():
            if each.config["role"] != "drive" and not each.runs():
                raise Late(f"{name} has ended by itself: {self.errors(name)}")

    def errors(self, name: str) -> str:
        """Return the end of what one has written to its standard error."""
        file = self.folder / f"{name}.err"
        return file.read_text(errors="replace")[-1_500:] if file.exists() else ""

    def finish(self) -> None:
        """Let publishers end, wait until all that was published has come to an end, and let all but the driver go."""
        (self.folder / "stop").touch()
        publishers = [self.crew[name] for name in self.playing("publish")]
        until(lambda: not any(each.runs() for each in publishers), "publishers end")
        self._drain()
        leaving = [each for each in self.crew.values() if each.config["role"] != "drive"]
        for each in leaving:
            each.send(signal.SIGCONT)
            each.send(signal.SIGTERM)
        until(lambda: not any(each.runs() for each in leaving), "all end when asked to")

    def _drain(self) -> None:
        """Wait until nothing is left to be done, or raise Late: what is left then is the checker's to tell."""
        behind = (
            "SELECT count(*) FROM checkpoints WHERE subscription IN ('projection', 'reader') "
            "AND position < (SELECT coalesce(max(id), 0) FROM events)"
        )

        def done() -> bool:
            with suppress(StoreUnavailable):
                return not self.store.unfinished() and self.store.rows(behind) == [(0,)]
            return False

        until(done, "everything published comes to an end, and followers come to the end of the log")

    def close(self) -> None:
        """End whoever is left."""
        for each in self.crew.values():
            each.send(signal.SIGKILL)
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.communicate()


@contextmanager
def on_stage(
    store: str,
    seed: str,
    folder: Path,
    *,
    http: bool = False,
    doors: Iterable[str] = (),
    within: Path | None = None,
    pooled: bool = False,
    pace: float = 0.02,
) -> Generator[tuple[Stage, dict[str, Proxy]]]:
    """Give a stage with its crew at work, and the doors asked for: before `http`, or before the store of some."""
    with ExitStack() as stack:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if store == "sqlite":
            place = Store(f"sqlite:///{(within or folder) / 'bus.db'}")
        else:
            cluster = Cluster(within=within)
            stack.callback(cluster.remove)
            place = Store(cluster.url(), cluster)
        stage = Stage(folder, place, seed, port=free_port() if http else 0)
        stack.callback(stage.close)
        stage.open()
        if pooled and place.cluster is not None:
            stage.bouncer = Bouncer(place.cluster)
            stack.callback(stage.bouncer.remove)
            stage.options = {"direct_url": place.url}
            stage.doors = dict.fromkeys(("publish", "work", "poll", "follow"), stage.bouncer.url())
        made: dict[str, Proxy] = {}
        for door in doors:
            proxy = made[door] = Proxy(stage.port if door == "http" or not place.cluster else place.cluster.socket)
            stack.callback(proxy.close)
            stage.doors[door] = proxy.url(place.url) if door != "http" else f"http://127.0.0.1:{proxy.port}"
        stage.begin(http=http, pace=pace)
        yield stage, made
