"""The processes of a trial, each playing a role until it is told to stop, or killed: `python -m postbus.torture.crew`.

It reads one configuration a line from its standard input, and forks a process for each, which is cheap: everything is
imported already. It has one thread and has opened nothing when it forks, so that a process is as good as one that was
started from nothing. Each writes its history down as it goes.
"""

import ctypes
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from postbus.bus import EventBus
from postbus.clock import SystemClock
from postbus.errors import Discard, LeaseLost, StoreUnavailable
from postbus.execution import Context
from postbus.follow import CheckpointMode
from postbus.model import Event, NewEvent
from postbus.observe import set_probe
from postbus.retry import RetryPolicy
from postbus.store.contract import Transaction
from postbus.torture.history import Abort, History, read

__all__ = ["LEASE", "PROJECTION", "QUEUES", "READER", "TABLES", "fork_for_each", "play"]

Config = dict[str, Any]
T = TypeVar("T")
LEASE: Final = 2.0
"""Seconds that a lease lasts in a trial: short, so that what a process that vanished held is soon another's."""
QUEUES: Final = ("default", "ledger")
"""The subscriptions that workers handle: one by plain functions, one by functions with a transaction."""
PROJECTION: Final = "projection"
READER: Final = "reader"
TABLES: Final = (
    "CREATE TABLE own (uid VARCHAR(80) PRIMARY KEY)",
    "CREATE TABLE effects (n {serial}, subscription VARCHAR(20) NOT NULL, event_id BIGINT NOT NULL)",
)
"""Of the trial's own: rows that publishers write with an event, and what transactional handlers do."""
LIMITS: Final = {"poll_interval": 0.2, "lease": LEASE, "prefetch": 10, "concurrency": 4, "shutdown_timeout": 10.0}
LOOK_EVERY: Final = 1.0
MOST_WAITING: Final = 300
"""How many events may wait for a worker before publishers pause."""
SLOW: Final = frozenset({"outlast", "hold the lock"})
PARENT_DEATH: Final = 1
"""Linux's number for the signal that a process gets when the one that forked it ends."""
PAUSE: Final = threading.Event()


class Stopping(Exception):  # noqa: N818  not an error: it was asked to
    """Raised in a publisher that was told to stop."""


class Interrupted(Exception):  # noqa: N818  not an error: what a signal handler raises
    """Raised in a publisher wherever it is, as Ctrl-C in a console."""


def _interrupt(_: int, __: object) -> None:
    raise Interrupted


# ── what events ask for ──────────────────────────────────────────────────────────────────────────────────────────


def wish(chance: random.Random) -> str:
    """Draw what an event asks of its handler: most succeed, some after a while, some not at first, some never."""
    wishes, weights = ("succeed", "pause", "fail once", "discard", "fail"), (60, 25, 10, 3, 2)
    return chance.choices(wishes, weights)[0]


def obey(event: Event, attempt: int) -> None:
    """Do what an event asks for."""
    match event.payload["do"]:
        case "fail":
            raise ValueError("asked for by its payload, always")
        case "fail once" if attempt == 1:
            raise ValueError("asked for by its payload, at first")
        case "discard":
            raise Discard("asked for by its payload")
        case "pause":
            PAUSE.wait(0.02)
        case "outlast":
            PAUSE.wait(2.5 * LEASE)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fork" if not os.fork():
            return  # into what its parent was doing, with a copy of all that waits there
        case "hold the lock" if attempt == 1:
            _hold_the_lock(1.5 * LEASE)
        case _:
            pass


def _hold_the_lock(seconds: float) -> None:
    """Let no other thread of this process run for a while, as an extension in C may."""
    sys.setswitchinterval(2 * seconds)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    sys.setswitchinterval(0.005)


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────


class Publisher:
    """Publishes one by one, in batches, and beside rows of its own in a transaction, some of which it undoes."""

    def __init__(self, config: Config) -> None:
        """Open the bus."""
        self.bus = opened(config)
        self.history = History(config["history"], config["name"])
        self.stop = Path(config["stop"])
        self._chance = random.Random(f"{config['seed']} {config['name']} {config['life']}")
        self._uids = (f"{config['name']}-{config['life']}-{number}" for number in range(1 << 60))
        self._pace: float = config.get("pace", 0.02)
        self._transactions = not config["url"].startswith("http")
        self._looked = 0.0

    def run(self) -> None:
        """Publish until told to stop; what nobody answered is asked for again."""
        self._ask_again()
        signal.signal(signal.SIGUSR1, _interrupt)
        with suppress(Stopping):
            while True:
                with suppress(Interrupted):  # what it was about to publish may be stored, or not
                    self._go_on()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self.bus.shutdown()

    def _go_on(self) -> None:
        while True:
            self._look()
            roll = self._chance.random()
            if self._transactions and roll < 0.2:
                self._publish_beside(undone=roll < 0.06)
            else:
                self._insist(self._made(self._chance.randint(2, 6) if roll > 0.85 else 1))
            PAUSE.wait(self._chance.uniform(0, 2 * self._pace))
            self._leave_room()

    def _leave_room(self) -> None:
        """Let workers catch up: on a slow machine the backlog would grow, and what waits at its end seem stuck."""
        if time.monotonic() < self._looked + LOOK_EVERY:
            return
        with suppress(StoreUnavailable):
            while any(each.pending > MOST_WAITING for each in self.bus.stats().subscriptions):
                self._look()
                PAUSE.wait(0.1)
        self._looked = time.monotonic()

    def _look(self) -> None:
        if self.stop.exists():
            raise Stopping

    def _made(self, count: int) -> list[NewEvent]:
        return [
            NewEvent(
                type=f"trial.{self._chance.randint(1, 4)}", payload={"do": wish(self._chance)}, uid=next(self._uids)
            )
            for _ in range(count)
        ]

    def _ask_again(self) -> None:
        """Publish what an earlier life of this publisher was never answered to, under the same uids."""
        open_ones: dict[tuple[str, ...], list[list[Any]]] = {}
        for entry in read([self.history.path]):
            if entry.op == "publish" and entry.told.get("news"):
                uids = tuple(entry.told["uids"])
                open_ones[uids] = entry.told["news"]
                if entry.kind in {"ok", "fail"}:
                    del open_ones[uids]
        for uids, news in open_ones.items():
            made = [
                NewEvent(type=kind, payload=payload, uid=uid) for uid, (kind, payload) in zip(uids, news, strict=True)
            ]
            with suppress(Stopping):
                self._insist(made)

    def _insist(self, batch: list[NewEvent]) -> None:
        """Publish; while nobody knows whether that worked, ask again by the same uids, or rarely leave it at that."""
        while True:
            try:
                self._publish(batch)
            except StoreUnavailable:
                self._look()
                if self._chance.random() < 0.05:
                    return
                PAUSE.wait(0.05)
            else:
                return

    def _publish(self, batch: list[NewEvent]) -> None:
        told = {"uids": [event.uid for event in batch], "news": [(event.type, event.payload) for event in batch]}
        with self.history.calling("publish", **told) as answer:
            if len(batch) > 1:
                stored = self.bus.publish_many(batch)
            else:
                stored = [self.bus.publish(batch[0].type, batch[0].payload, uid=batch[0].uid)]
            answer["ids"] = [event.id for event in stored]

    def _publish_beside(self, *, undone: bool) -> None:
        """Publish with a row of our own, both or neither; whoever was not answered to does not know which."""
        batch = self._made(self._chance.randint(1, 3))
        with (
            suppress(Abort, StoreUnavailable),
            self.history.calling("publish", uids=[event.uid for event in batch], beside=True) as answer,
            self.bus.transaction() as tx,
        ):
            for event in batch:
                tx.execute(f"INSERT INTO own VALUES ('{event.uid}')")  # noqa: S608  made of our own letters
            answer["ids"] = [event.id for event in self.bus.publish_many(batch, connection=tx)]
            if undone:
                raise Abort


# ── handling ─────────────────────────────────────────────────────────────────────────────────────────────────────


def patiently(call: Callable[[], T]) -> T:
    """Return what a call returns; a store that is away is waited for."""
    while True:
        try:
            return call()
        except StoreUnavailable:
            PAUSE.wait(0.1)


class Wrong(SystemClock):
    """The machine's clock, but for as many seconds as a file says."""

    def __init__(self, file: str) -> None:
        """Look into a file each time."""
        self._file = Path(file)

    def now(self) -> datetime:
        """Return the moment it would be."""
        return super().now() + timedelta(seconds=self.by())

    def by(self) -> float:
        """Return by how many seconds it is wrong."""
        return float(self._file.read_text() or "0")


def opened(config: Config) -> EventBus:
    """Open the bus."""
    options: Config = {
        **LIMITS,
        "retry": RetryPolicy(base_delay=0.05),
        "clock": Wrong(config["clock"]),
        **config["options"],
    }
    bus = EventBus(config["url"], worker_id=config["name"], auto_migrate=False, **options)
    patiently(lambda: bus.store)
    return bus


def plain(history: History) -> Callable[[Event, Context], None]:
    """Return a handler that writes itself down, and does what the event asks for."""

    def handle(event: Event, ctx: Context) -> None:
        lease = ctx.delivery.lease
        history.note("handle", "invoke", delivery=[event.id, lease.subscription, ctx.attempt, lease.epoch])
        try:
            obey(event, ctx.attempt)
        except (ValueError, Discard) as error:
            history.note("handle", "fail", event_id=event.id, epoch=lease.epoch, error=str(error))
            raise
        history.note("handle", "ok", event_id=event.id, epoch=lease.epoch)

    return handle


def with_effect(history: History) -> Callable[[Event, Context, Transaction], None]:
    """Return a handler that leaves a row in the same transaction.

    It never takes long: on SQLite, where there is one writer, nobody's lease could be kept meanwhile.
    """
    handle = plain(history)

    def record(event: Event, ctx: Context, tx: Transaction) -> None:
        effect(tx, ctx.delivery.lease.subscription, event)
        quick = replace(event, payload={"do": "succeed"}) if event.payload["do"] in SLOW else event
        handle(quick, ctx)

    return record


def effect(tx: Transaction, subscription: str, event: Event) -> None:
    """Leave a row that tells of an event."""
    sql = f"INSERT INTO effects (subscription, event_id) VALUES ('{subscription}', {event.id:d})"  # noqa: S608  our words
    tx.execute(sql)


def work(config: Config) -> None:
    """Handle until told to stop."""
    bus, history = opened(config), History(config["history"], config["name"])
    patiently(lambda: bus.subscribe("trial.*", plain(history), subscription=QUEUES[0]))
    if not config["url"].startswith("http"):
        effective = with_effect(history)
        patiently(lambda: bus.subscribe("trial.*", effective, subscription=QUEUES[1], transactional=True))
    _run(bus)


def poll(config: Config) -> None:
    """Claim and finalize by hand until told to stop."""
    bus, history, stop = opened(config), History(config["history"], config["name"]), Path(config["stop"])
    chance = random.Random(f"{config['seed']} {config['name']} {config['life']}")
    while not stop.exists():
        with suppress(StoreUnavailable):
            for delivery in bus.poll_many(chance.randint(1, 5)):
                _settle(bus, history, delivery)
        PAUSE.wait(0.05)
    bus.shutdown()


def _settle(bus: EventBus, history: History, delivery: Any) -> None:
    lease = delivery.lease
    if delivery.event.payload["do"] in SLOW:  # nobody keeps its lease meanwhile: it is for somebody else
        bus.release(delivery)
        return
    history.note("handle", "invoke", delivery=[lease.event_id, lease.subscription, delivery.attempt, lease.epoch])
    if delivery.event.payload["do"] == "die":
        obey(delivery.event, delivery.attempt)
    with suppress(LeaseLost, StoreUnavailable), history.calling("settle", event_id=lease.event_id, epoch=lease.epoch):
        failing = delivery.event.payload["do"] in {"fail", "discard"}
        bus.finalize(delivery, success=not failing, errors=["asked for by its payload"] if failing else ())


def follow(config: Config) -> None:
    """Follow until told to stop: one with a transaction, one that only writes down what it sees."""
    bus, history = opened(config), History(config["history"], config["name"])

    def project(event: Event, tx: Transaction) -> None:
        effect(tx, PROJECTION, event)

    def see(event: Event, ctx: Context) -> None:
        history.note("see", "ok", subscription=READER, event_id=event.id, epoch=ctx.epoch)

    few = CheckpointMode.batched(5, 0.2)
    patiently(lambda: bus.follow(PROJECTION, "trial.*", start="beginning", lease=LEASE)(project))
    patiently(lambda: bus.follow(READER, "trial.*", start="beginning", lease=LEASE, checkpoint=few)(see))
    _run(bus)


def serve(config: Config) -> None:
    """Serve the bus on a port until told to stop."""
    from postbus.http.serve import serve as serve_http  # noqa: PLC0415  only this role needs a web server

    bus = opened({**config, "options": {}})
    policy = RetryPolicy(base_delay=0.05)
    serve_http(bus, "127.0.0.1", config["port"], require_token=False, policy=policy, lease=LEASE, ready=lambda _: None)
    bus.shutdown()


def _run(bus: EventBus) -> None:
    patiently(bus.start)
    # Whoever asks it to end may do so before `run` has begun to listen for that.
    signal.signal(signal.SIGTERM, lambda _, __: sys.exit(not bus.shutdown()))
    bus.run()


def publish(config: Config) -> None:
    """Publish until told to stop."""
    Publisher(config).run()


# ── Spark ────────────────────────────────────────────────────────────────────────────────────────────────────────


def drive(config: Config) -> None:
    """Do with one Spark what is ordered, one job after the other; an order that is done is removed."""
    from postbus.spark.launch import brief_java, session  # noqa: PLC0415  only this role needs Spark

    brief_java()
    os.environ["PYSPARK_DRIVER_PYTHON"] = "none"  # looking for data sources in all of Python's packages takes seconds
    spark, order = session("local[2,4]"), Path(config["order"])
    while True:
        while not order.exists():
            PAUSE.wait(0.02)
        job = json.loads(order.read_text())
        set_probe(_killer(job) if "probe" in job else None)
        JOBS[job["job"]](spark, config, job["rows"])
        order.unlink()


def ingest(spark: Any, config: Config, rows: int) -> None:
    """Bring the log into the lake, as far as it has come."""
    from postbus.spark.lake import Lake  # noqa: PLC0415
    from postbus.spark.lake import ingest as bring  # noqa: PLC0415

    bring(spark, config["url"], Lake(config["lake"]), rows=rows)


def archive(spark: Any, config: Config, rows: int) -> None:
    """Bring the log into the lake, and prune what it then holds, verified."""
    from postbus.spark.archive import archive as prune  # noqa: PLC0415
    from postbus.spark.archive import bounds  # noqa: PLC0415
    from postbus.spark.lake import Lake  # noqa: PLC0415
    from postbus.spark.source import open_bus  # noqa: PLC0415

    ingest(spark, config, rows)
    lake, store = Lake(config["lake"]), open_bus(config["url"])
    for bound in bounds(store, lake, older_than=timedelta(0)):
        prune(spark, config["url"], store, lake, bound)
    store.close()


JOBS: Final = {each.__name__: each for each in (ingest, archive)}


def _killer(job: Config) -> Callable[[str], None]:
    """Return what kills, when a probe is come by for the `hit`-th time: all of this process's group, or `workers`.

    Of the Python processes that work for this driver's Spark, these are the ones at these places, a little `later`.
    """
    lock, left = threading.Lock(), [job["hit"]]

    def hook(probe: str) -> None:
        with lock:
            left[0] -= probe == job["probe"]
            if left[0] or probe != job["probe"]:
                return
        if "workers" in job:
            threading.Timer(job["later"], _kill_workers, [job["workers"]]).start()
        else:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    return hook


def _kill_workers(places: list[int]) -> None:
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"pyspark.daemon" in (folder / "cmdline").read_bytes() and os.getpgid(int(folder.name)) == os.getpgrp():
                found.append(int(folder.name))
    for pid in {sorted(found)[place % len(found)] for place in places} if found else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


ROLES: Final = {each.__name__: each for each in (publish, work, poll, follow, serve, drive)}


# ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────


def play(config: Config) -> None:
    """Play a role to its end."""
    logging.getLogger("postbus").setLevel(logging.CRITICAL)
    wrong, right = Wrong(config["clock"]), time.time
    time.time = lambda: right() + wrong.by()
    ROLES[config["role"]](config)


def _lines() -> Iterator[bytes]:
    """Read without a buffer, which a forked process would inherit."""
    line = b""
    while byte := os.read(0, 1):
        if byte == b"\n":
            yield line
            line = b""
        else:
            line += byte


def _grow_up(config: Config) -> None:
    # Whoever started all this may be killed itself: then nobody is to be left behind.
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.dup2(os.open(config["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    code = 1
    try:
        play(config)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001  whatever it was, this process ends here
        traceback.print_exc()
    os._exit(code)


def fork_for_each(grow_up: Callable[[Config], None]) -> None:
    """Fork a process for every configuration that comes in, and tell its id; end when nothing more can come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need not be buried one by one
    for line in _lines():
        pid = os.fork()
        if not pid:
            grow_up(json.loads(line))
        os.write(1, f"{pid}\n".encode())


if __name__ == "__main__":
    fork_for_each(_grow_up)
