"""What is done to a crew at work: each fault by its name, with what must hold whatever it does.

A fault strikes once, by chance drawn from the trial's seed, and sees to it that what it broke is whole again. The same
seed draws the same victims, moments and ways. What cannot be struck here says why, and is not counted as tried.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psycopg

from postbus.bus import EventBus
from postbus.errors import PostbusError, StoreUnavailable
from postbus.torture.apart import Apart, bit_flip, fork_after_open, power_loss, replaced_file, restored_backup
from postbus.torture.checker import Verdict
from postbus.torture.cluster import Bouncer, Cluster
from postbus.torture.crew import LEASE, PROJECTION, QUEUES
from postbus.torture.history import FAIL, INVOKE, OK
from postbus.torture.proxy import Cut, Proxy
from postbus.torture.stage import Late, Stage, Store, until
from postbus.torture.tables import AuditRow, audit_of

__all__ = ["FAULTS", "Fault", "Play"]

BOTH: Final = ("sqlite", "postgres")
SQLITE: Final = ("sqlite",)
POSTGRES: Final = ("postgres",)
AHEAD: Final = 3 * LEASE
"""How far, in seconds, a clock jumps that leases are measured by: past the end of each of them."""
ATTEMPTS: Final = 4
FROZEN: Final = 30.0
"""Seconds after which nobody may wait any longer for a server that stands still."""
POISON: Final[tuple[Any, ...]] = (
    float("nan"),
    float("inf"),
    "a\x00b",
    "\ud800",
    {"a": {1, 2}},
    {1: "a key that is no text"},
    10**5_000,
    object(),
)
"""Payloads that JSON, or one of the stores, would change or refuse."""


@dataclass
class Play:
    """A trial under way, as a fault sees it."""

    stage: Stage
    chance: random.Random
    doors: dict[str, Proxy]
    found: list[Verdict] = field(default_factory=list[Verdict])
    _asked: int = 0

    def pause(self, most: float, least: float = 0.0) -> None:
        """Let some time pass."""
        time.sleep(self.chance.uniform(least, most))

    def note(self, what: str, **told: Any) -> None:
        """Write down what is done."""
        self.stage.history.note("strike", OK, what=what, **told)

    def pick(self, *roles: str) -> str:
        """Draw one of those who play these roles."""
        return self.chance.choice(self.stage.playing(*roles))

    def ask(self, wish: str, **more: str) -> int:
        """Publish an event that asks its handlers for something; return its id."""
        self._asked += 1
        uid = f"nemesis-{self._asked}"
        bus = EventBus(self.stage.store.url, auto_migrate=False)
        try:
            with self.stage.history.calling("publish", uids=[uid]) as answer:
                event = bus.publish("trial.1", {"do": wish, **more}, uid=uid)
                answer["ids"] = [event.id]
        finally:
            bus.shutdown()
        self.note(f"an event asks: {wish}", event_id=event.id)
        return event.id

    def claims(self, event_id: int) -> dict[str, int]:
        """Return how often an event was claimed, by subscription."""
        return dict(Counter(each.subscription for each in self._entries(event_id) if each.action == "PICKED"))

    def holders(self, event_id: int, queue: str = QUEUES[0]) -> list[str]:
        """Return who has claimed an event in a queue and not given it back, in their order."""
        entries = [each for each in self._entries(event_id) if each.subscription == queue]
        released = {each.epoch for each in entries if each.action == "RELEASED"}
        return [each.worker_id or "" for each in entries if each.action == "PICKED" and each.epoch not in released]

    def ended(self, event_id: int) -> bool:
        """Return whether an event has come to an end in every queue."""
        return not any(each == event_id for each, _ in self.stage.store.unfinished())

    def _entries(self, event_id: int) -> list[AuditRow]:
        """Return the entries of the audit log on an event, in their order."""
        store = self.stage.store
        entries = audit_of(store.rows, postgres=not store.is_sqlite).values()
        return [each for each in entries if each.event_id == event_id]


Strike = Callable[[Play], None]


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    name: str
    what: str
    holds: str
    strike: Strike = lambda _: None
    stores: Sequence[str] = BOTH
    http: bool = False
    doors: tuple[str, ...] = ()
    around: "Callable[[str, Path], Any] | None" = None
    """What must be in place around the stage: returns a context manager that gives options for it, or raises Absent."""
    missing: Callable[[], str | None] = lambda: None
    """Why it cannot be tried here, if so."""
    lake: bool = False
    """Whether the log is brought into a lake, which must then hold the same."""
    apart: Apart | None = None
    """How it is tried without a crew, if so."""

    def fits(self, store: str) -> bool:
        """Return whether it can strike any crew on a store, whatever else does."""
        return store in self.stores and not (self.apart or self.around or self.doors or self.lake)


FAULTS: Final[dict[str, Fault]] = {}


def fault(name: str, holds: str, **options: Any) -> Callable[[Strike], Strike]:
    """Enter a strike into the matrix; its docstring says what it does."""

    def enter(strike: Strike) -> Strike:
        FAULTS[name] = Fault(name, (strike.__doc__ or "").rstrip("."), holds, strike, **options)
        return strike

    return enter


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────


@fault("calm", "all ends well without any fault", http=True)
def calm(play: Play) -> None:
    """Do nothing at all."""
    play.pause(1, 0.5)


def killing(*roles: str) -> Strike:
    """Return a strike that kills one of these, and starts it again."""

    def strike(play: Play) -> None:
        play.pause(0.4)
        name = play.pick(*roles)
        play.note(f"SIGKILL {name}")
        play.stage.crew[name].kill()
        play.pause(0.5)
        play.stage.again(name)

    strike.__doc__ = f"Kill a process that plays {' or '.join(roles)} (SIGKILL)."
    return strike


fault("kill-worker", "handled again by another; the audit log names each cause")(killing("work", "poll"))
fault("kill-publisher", "a batch is there whole or not at all; asked again, the same ids")(killing("publish"))
fault("kill-follower", "the next goes on from the checkpoint; effects once, in order")(killing("follow"))
fault("kill-server", "clients ask again; one event each", http=True)(killing("serve"))


@fault("kill-all", "all start again and go on", http=True)
def kill_all(play: Play) -> None:
    """Kill every process at once."""
    play.pause(0.4)
    play.note("SIGKILL of all")
    names = play.stage.playing()
    for name in names:
        play.stage.crew[name].send(signal.SIGKILL)
    for name in names:
        play.stage.crew[name].kill()
        play.stage.again(name)


@fault("pause-worker", "another handles it; what the late one reports is refused")
def pause_worker(play: Play) -> None:
    """Stop a worker in the midst of its work until another has it (SIGSTOP), then let it go on."""
    event_id = play.ask("outlast")
    first = until(lambda: play.holders(event_id), f"somebody handles event {event_id}")
    play.pause(0.5)
    play.stage.halt(first[0])
    play.note(f"SIGSTOP {first[0]}")
    until(lambda: len(play.holders(event_id)) > 1 or play.ended(event_id), f"another handles event {event_id}")
    play.note(f"SIGCONT {first[0]}")
    play.stage.go_on(first[0])
    until(lambda: play.ended(event_id), f"event {event_id} ends")


@fault("two-leaders", "the one that was deposed moves nothing and does nothing")
def two_leaders(play: Play) -> None:
    """Stop the follower that leads until another leads, then let it go on."""
    found = f"SELECT worker_id FROM checkpoints WHERE subscription = '{PROJECTION}' AND holder IS NOT NULL"  # noqa: S608
    leader = until(lambda: play.stage.store.rows(found), "somebody leads")[0][0]
    play.stage.halt(leader)
    play.note(f"SIGSTOP {leader}, who leads")
    until(lambda: play.stage.store.rows(found) not in ([], [(leader,)]), "another leads")
    play.pause(0.5)
    play.note(f"SIGCONT {leader}")
    play.stage.go_on(leader)


@fault("gil-held", "the lease ends, another handles it, the late one is refused")
def gil_held(play: Play) -> None:
    """Have a handler let no other thread of its process run, for longer than its lease."""
    event_id = play.ask("hold the lock")
    until(lambda: play.ended(event_id), f"event {event_id} ends")


@fault("slow-handler", "its lease is kept: handled once in each queue")
def slow_handler(play: Play) -> None:
    """Have a handler take two and a half leases."""
    event_id = play.ask("outlast")
    until(lambda: play.ended(event_id), f"event {event_id} ends")
    for queue in QUEUES:
        if len(holders := play.holders(event_id, queue)) != 1:
            play.found.append(Verdict("duplicate", f"event {event_id} in {queue!r} was handled by {holders}"))


@fault("handler-forks", "the child ends; handled once in each queue, by the parent")
def handler_forks(play: Play) -> None:
    """Have a handler fork, and its child come back out of it."""
    event_id = play.ask("fork")
    until(lambda: play.ended(event_id), f"event {event_id} ends")


@fault("interrupt", "it goes on; what was under way is stored or not, and no later write waits")
def interrupt(play: Play) -> None:
    """Raise an exception in publishers wherever they are, again and again (SIGUSR1)."""
    for _ in range(30):
        name = play.pick("publish")
        play.stage.crew[name].send(signal.SIGUSR1)
        play.pause(0.03)
    play.note("30 interrupts")
    for name in play.stage.playing("publish"):
        journal = play.stage.folder / "history" / f"{name}.jsonl"
        known = journal.stat().st_size
        until(lambda journal=journal, known=known: b'"kind": "ok"' in journal.read_bytes()[known:], f"{name} goes on")


@fault("crashing-event", f"a dead letter after {ATTEMPTS} attempts, exactly; its neighbours are handled")
def crashing_event(play: Play) -> None:
    """Publish an event whose handler ends its process, every time."""
    event_id = play.ask("die")

    def buried() -> bool:
        for name in play.stage.playing("work", "poll"):
            if not play.stage.crew[name].runs():
                play.note(f"{name} was ended by its handler, and is started again")
                play.stage.again(name)
        return play.ended(event_id)

    until(buried, f"event {event_id} is a dead letter")
    for queue in QUEUES:
        count = play.claims(event_id).get(queue)
        if count != ATTEMPTS:
            play.found.append(Verdict("attempts", f"event {event_id} in {queue!r}: {count} of {ATTEMPTS}"))
    buried()


@fault("poison-payload", "refused at the door, the same by each store; nothing is stored")
def poison_payload(play: Play) -> None:
    """Publish payloads that JSON cannot carry exactly, beside good ones."""
    bus = EventBus(play.stage.store.url, auto_migrate=False)
    for number, payload in enumerate(POISON):
        told = {"uids": [f"poison-{play.chance.getrandbits(40)}-{number}", f"beside-{play.chance.getrandbits(40)}"]}
        play.stage.history.note("publish", INVOKE, **told)
        try:
            news = [
                {"type": "trial.1", "payload": each, "uid": uid}
                for each, uid in zip((payload, 1), told["uids"], strict=True)
            ]
            stored = bus.publish_many(news)
        except PostbusError as error:
            play.stage.history.note("publish", FAIL, **told, error=type(error).__name__)
        else:
            play.found.append(Verdict("phantom", f"payload {number} of the poison was stored as {stored[0].id}"))
    bus.shutdown()


# ── the database ─────────────────────────────────────────────────────────────────────────────────────────────────


@fault(
    "database-crash", "no acknowledged event is lost, none is stored twice; all go on by themselves", stores=POSTGRES
)
def database_crash(play: Play) -> None:
    """Stop PostgreSQL as a crash would, and start it."""
    cluster = play.stage.store.cluster
    if cluster is None:
        raise Late("there is no server")
    play.pause(0.4)
    play.note("immediate stop")
    cluster.stop("immediate")
    try:
        play.pause(1.5)
    finally:
        play.note("start")
        cluster.start()


@fault("connections-ended", "everybody connects anew and goes on; listeners too", stores=POSTGRES)
def connections_ended(play: Play) -> None:
    """End the connections of the listeners, or all (pg_terminate_backend)."""
    which = play.chance.choice(("", " AND (query ILIKE 'LISTEN%' OR query LIKE '%events WHERE id > $1%')"))
    play.note("the listeners' connections end" if which else "all connections end")
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database()"
    play.stage.store.rows(f"{ended} AND pid <> pg_backend_pid(){which}")


@fault(
    "cut-in-commit",
    "asked again by uid: one copy; a settlement that was not answered counts once",
    stores=POSTGRES,
    doors=("publish", "work", "follow"),
)
def cut_in_commit(play: Play) -> None:
    """Cut a connection before, during or after the statement that commits."""
    role = play.chance.choice(sorted(play.doors))
    when = play.chance.choice(list(Cut))
    play.note(f"a connection of {role} is cut: {when.value}")
    # A lone publish or success commits itself: it is known by what it stores. Everything else says COMMIT.
    play.doors[role].cut(when, r"COMMIT\x00|postbus_(?:finish|claim)_|trial\.\d")
    if not play.doors[role].wait(10):
        raise Late(f"no {role} came by to be cut off")


@contextmanager
def _pooled(store: str, folder: Path) -> Generator[dict[str, Any]]:
    del store, folder
    yield {"pooled": True}


@fault(
    "pooler-crash",
    "everything works behind PgBouncer in transaction mode, and goes on when it does",
    stores=POSTGRES,
    around=_pooled,
    missing=lambda: None if Bouncer.program() else "pgbouncer is not installed",
)
def pooler_crash(play: Play) -> None:
    """Kill the PgBouncer between all processes and the database, and start it again."""
    bouncer = play.stage.bouncer
    if bouncer is None:
        raise Late("there is no pooler")
    play.pause(0.4)
    play.note("PgBouncer is killed")
    bouncer.kill()
    play.pause(1)
    bouncer.start()
    play.note("PgBouncer is back")


@fault(
    "partition", "others handle what it held; what it reports later is refused", stores=POSTGRES, doors=("worker-1",)
)
def partition(play: Play) -> None:
    """Let no byte pass between a worker and the database for longer than its leases last; no connection ends."""
    play.note("worker-1 is cut off")
    with play.doors["worker-1"].shut():
        play.stage.await_progress(without=["worker-1"])
        play.pause(1.5 * LEASE, 1.1 * LEASE)
    play.note("worker-1 is back")


@fault("http-cut", "clients ask again: one event each, one outcome each", http=True, doors=("http",))
def http_cut(play: Play) -> None:
    """Cut a connection between a client and the server around a request."""
    when = play.chance.choice(list(Cut))
    play.note(f"a client is cut off: {when.value}")
    play.doors["http"].cut(when, "POST")
    if not play.doors["http"].wait(10):
        raise Late("no client came by to be cut off")


@fault("long-transaction", "publishing and handling go on; what commits late is missed by nobody", stores=POSTGRES)
def long_transaction(play: Play) -> None:
    """Keep write transactions open, one of them with an event in it that commits late."""
    bus = EventBus(play.stage.store.url, auto_migrate=False)
    uid = f"late-{play.chance.getrandbits(40)}"
    try:
        with (
            psycopg.connect(play.stage.store.url) as other,
            play.stage.history.calling("publish", uids=[uid]) as answer,
        ):
            other.execute("CREATE TEMPORARY TABLE IF NOT EXISTS mine (n int)")
            with bus.transaction() as tx:
                answer["ids"] = [bus.publish("trial.1", {"do": "succeed"}, uid=uid, connection=tx).id]
                play.note("a transaction with an event in it is open, and another that only writes")
                # Followers wait for the event that may still come; everybody else goes on.
                play.stage.await_progress(without=play.stage.playing("follow"))
            play.note("it has committed")
            play.pause(0.5)
    finally:
        bus.shutdown()


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _small_disk(store: str, folder: Path) -> Generator[dict[str, Any]]:
    del folder  # the way to a server's socket must be short
    size, place = ("48m" if store == "sqlite" else "160m"), Path(tempfile.mkdtemp(prefix="postbus-disk-"))
    mount = ["/bin/mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "postbus", str(place)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield {"within": place}
    finally:
        subprocess.run(["/bin/umount", "-l", place], check=False, capture_output=True)
        place.rmdir()


def _no_mount() -> str | None:
    if os.geteuid():
        return "it mounts a small disk, which needs root"
    try:
        with _small_disk("sqlite", Path()):
            return None
    except (OSError, subprocess.CalledProcessError):
        return "no disk can be mounted here"


@fault(
    "disk-full",
    "nothing is acknowledged that is not stored; all go on once there is room",
    around=_small_disk,
    missing=_no_mount,
)
def disk_full(play: Play) -> None:
    """Fill the disk that the database lies on to the last byte, and free it again."""
    store = play.stage.store
    ballast = (store.path.parent if store.cluster is None else store.cluster.folder.parent) / "ballast"
    play.note("the disk is full")
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        for size in (65_536, 4_096, 512, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    play.pause(1.5, 0.5)
    ballast.unlink()
    play.note("there is room again")
    if store.cluster is not None:
        cluster = store.cluster
        until(
            lambda: _answers(store) or _started(cluster), "the server recovers, or starts, if it ended for want of room"
        )


def _started(cluster: Cluster) -> bool:
    """Start a server that has ended; while one is about to recover, or to end, there is nothing to start."""
    if cluster.runs():
        return False
    with suppress(subprocess.CalledProcessError):
        cluster.start()
        return True
    return False


def _answers(store: Store) -> bool:
    with suppress(psycopg.OperationalError):
        return store.rows("SELECT 1") == [(1,)]
    return False


@fault("clock-jump", "leases may end early, or work wait; nothing else")
def clock_jump(play: Play) -> None:
    """Let the clock of all processes jump ahead or back, and return: by an hour where it must not matter at all."""
    most = AHEAD if play.stage.store.is_sqlite else 3_600.0
    jump = play.chance.choice((most, -most))
    play.note(f"the clock jumps by {jump:+.0f} s")
    play.stage.clock.write_text(f"{jump}")
    play.pause(1, 0.5)
    play.stage.clock.write_text("0")
    play.note("the clock is right again")


@fault("database-clock-jump", "leases end early, or work waits; nothing else", stores=POSTGRES)
def database_clock_jump(play: Play) -> None:
    """Let the clock that the database decides by jump ahead or back, and return."""
    jump = play.chance.choice((AHEAD, -AHEAD))
    play.note(f"the database's clock jumps by {jump:+.0f} s")
    _set_clock(play, f"clock_timestamp() + interval '{jump:.0f} seconds'")
    play.pause(1, 0.5)
    _set_clock(play, "clock_timestamp()")
    play.note("the database's clock is right again")


def _set_clock(play: Play, told: str) -> None:
    play.stage.store.rows(
        "CREATE OR REPLACE FUNCTION postbus.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE "
        f"AS $$ SELECT {told} $$"
    )


# ── the way to the database ──────────────────────────────────────────────────────────────────────────────────────

WORDS: Final = "é ß Ω 漢字"


@fault("client-encoding", "text is stored as it was published", stores=POSTGRES)
def client_encoding(play: Play) -> None:
    """Have the database tell its clients to speak LATIN1, and end their connections."""
    rows = play.stage.store.rows
    name = rows("SELECT current_database()")[0][0]
    play.note("clients are told to speak LATIN1")
    rows(f"ALTER DATABASE {name} SET client_encoding = 'LATIN1'")
    try:
        rows(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        event_id = play.ask("succeed", words=WORDS)
        play.stage.await_progress()
        ((told,),) = rows(
            f"SELECT encode(convert_to(payload ->> 'words', 'UTF8'), 'hex') FROM events WHERE id = {event_id:d}"  # noqa: S608  a number
        )
        if told != WORDS.encode().hex():
            play.found.append(Verdict("phantom", f"event {event_id} was stored with another text: {told}"))
    finally:
        rows(f"ALTER DATABASE {name} RESET client_encoding")
    play.note("clients may speak as they like")


@fault(
    "answer-lost", "the event is returned that is there; StoreUnavailable: it is not", stores=POSTGRES, doors=("ask",)
)
def answer_lost(play: Play) -> None:
    """Cut the connection of a publisher before, during or after its commit, and ask nobody again."""
    door = play.doors["ask"]
    for when in Cut:
        uid = f"answer-{play.chance.getrandbits(40)}"
        play.note(f"a publisher is cut off: {when.value}")
        bus = EventBus(door.url(play.stage.store.url), auto_migrate=False)
        try:
            door.cut(when, uid)
            with suppress(StoreUnavailable), play.stage.history.calling("publish", uids=[uid]) as answer:
                answer["ids"] = [bus.publish("trial.1", {"do": "succeed"}, uid=uid).id]
        finally:
            bus.shutdown()


@fault("server-frozen", f"nobody waits for longer than {FROZEN:.0f} s; all go on when it does", stores=POSTGRES)
def server_frozen(play: Play) -> None:
    """Have PostgreSQL and all of its processes stand still (SIGSTOP) while a publisher asks for something."""
    cluster = play.stage.store.cluster
    if cluster is None:
        raise Late("there is no server")
    uid = f"frozen-{play.chance.getrandbits(40)}"
    bus = EventBus(play.stage.store.url, auto_migrate=False)

    def publish() -> None:
        with suppress(StoreUnavailable), play.stage.history.calling("publish", uids=[uid]) as answer:
            answer["ids"] = [bus.publish("trial.1", {"do": "succeed"}, uid=uid).id]

    publisher = threading.Thread(target=publish)
    play.note("the server stands still")
    with cluster.frozen():
        publisher.start()
        publisher.join(FROZEN)
        if publisher.is_alive():
            play.found.append(Verdict("stuck", f"a publish waits for a server that has stood still for {FROZEN:.0f} s"))
    play.note("the server goes on")
    publisher.join()
    bus.shutdown()


# ── Spark ────────────────────────────────────────────────────────────────────────────────────────────────────────

INGEST: Final = ("ingest.reading", "ingest.files_written", "ingest.manifest_written", "ingest.before_commit_log")
ARCHIVE: Final = ("archive.verifying", "archive.verified", "archive.pruned")


def _no_spark() -> str | None:
    return None if find_spec("pyspark") else "Spark is not installed: pip install 'postbus[spark]'"


def _drive(play: Play, job: str, **details: Any) -> None:
    play.stage.drive(job, play.chance.randint(500, 5_000), **details)


@fault("spark-driver", "the lake is the log: each row once, none missing", lake=True, missing=_no_spark)
def spark_driver(play: Play) -> None:
    """Kill the driver that brings the log into the lake: reading, files or manifest written, before Spark knows."""
    probe = play.chance.choice(INGEST)
    play.note(f"the driver is killed at {probe}")
    _drive(play, "ingest", probe=probe, hit=play.chance.randint(1, 2))


@fault("spark-worker", "the lake is the log: each row once, none missing", lake=True, missing=_no_spark)
def spark_worker(play: Play) -> None:
    """Kill two of the Python processes that plan and read for Spark, while it reads the log."""
    places, later = play.chance.sample(range(-6, 0), 2), play.chance.uniform(0, 0.5)
    play.note(f"Spark's Python processes {places} are killed {later:.2f} s into reading")
    _drive(play, "ingest", probe="ingest.reading", hit=1, workers=places, later=later)


@fault("spark-checkpoint", "the lake is the log: it goes on from the manifest", lake=True, missing=_no_spark)
def spark_checkpoint(play: Play) -> None:
    """Remove the directory in which Spark keeps how far it has come."""
    _drive(play, "ingest")
    stream = play.chance.choice(("events", "audit"))
    play.note(f"the checkpoint of {stream} is removed")
    shutil.rmtree(play.stage.folder / "lake" / stream / "checkpoint")


@fault("archive-crash", "each event is in the tables or, verified, in the lake", lake=True, missing=_no_spark)
def archive_crash(play: Play) -> None:
    """Kill the driver that prunes what the lake holds: verifying, verified, some of it pruned."""
    probe = play.chance.choice(ARCHIVE)
    play.note(f"the archive is killed at {probe}")
    _drive(play, "archive", probe=probe, hit=1)


# ── what is left of a database ───────────────────────────────────────────────────────────────────────────────────


def _apart(name: str, holds: str, trial: Apart, stores: Sequence[str]) -> None:
    FAULTS[name] = Fault(name, (trial.__doc__ or "").rstrip("."), holds, stores=stores, apart=trial)


_apart(
    "fork-after-open",
    "what parent and child were acknowledged is there, each under an id of its own",
    fork_after_open,
    BOTH,
)
_apart(
    "replaced-file",
    "what was acknowledged had been stored before; after it every write is refused, and says why",
    replaced_file,
    SQLITE,
)
_apart(
    "power-loss",
    "what was acknowledged is there, all or nothing of each call; it opens and goes on",
    power_loss,
    SQLITE,
)
_apart("bit-flip", "an error of ours, a finding of doctor, or good data", bit_flip, SQLITE)
_apart(
    "restored-backup",
    "no id or lease is given again; what was leased is due; old leases are void",
    restored_backup,
    BOTH,
)
