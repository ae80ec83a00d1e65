"""Faults that need no crew: what is left of a database after a power cut, a flipped bit, or in a backup."""

import functools
import gc
import json
import os
import random
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import apsw

from postbus.bus import EventBus
from postbus.errors import LeaseLost, NotFound, StoreUnavailable, UnsafeStore
from postbus.model import Delivery, NewEvent
from postbus.store import log_of, open_store
from postbus.torture import checker, powerloss
from postbus.torture.checker import Journal, Verdict
from postbus.torture.cluster import Cluster, query
from postbus.torture.powerloss import DROP, KEEP, TEAR, Disk

__all__ = ["Apart", "bit_flip", "fork_after_open", "power_loss", "replaced_file", "restored_backup"]

Struck = tuple[int, list[Verdict]]
Known = tuple[int, str]
"""The id and the uid of an event that was acknowledged."""
Apart = Callable[[str, random.Random, Path, int], Iterator[Struck]]
"""Strikes so many times, on a store, in a folder; yields how many events each time was about, and what it broke."""
REFUSED: Final = (UnsafeStore, StoreUnavailable)


def _acknowledged(bus: EventBus, name: str, chance: random.Random) -> Iterator[Known]:
    """Publish something, singly or together, and yield the id and uid of each once that is acknowledged."""
    uids = [f"{name}-{number}" for number in range(chance.choice((1, 1, 4)))]
    stored = bus.publish_many([NewEvent(type="trial.1", payload={"text": "x" * 200}, uid=uid) for uid in uids])
    yield from ((event.id, event.uid) for event in stored)


def _settle_some(bus: EventBus, chance: random.Random) -> list[tuple[int, int]]:
    """Claim and settle each in one of the ways there are; return the event and epoch of each, acknowledged."""
    ended: list[tuple[int, int]] = []
    for each in bus.poll_many(4):
        match chance.randrange(4):
            case 0:
                bus.finalize(each, success=False, errors=["asked to fail"], retry=False)
            case 1:
                bus.finalize(each, success=False, errors=["asked to fail"])
            case 2:
                bus.finalize(each)
            case _:
                continue
        ended.append((each.event.id, each.epoch))
    return ended


# ── power loss ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _recorded() -> Generator[powerloss.Recorder]:
    """Let every connection opened within the block write to a disk that keeps a trace of what it was asked for."""
    whole = apsw.Connection
    with powerloss.recording() as recorder:
        setattr(apsw, "Connection", functools.partial(whole, vfs="recorder"))  # noqa: B010  a type, and a partial
        try:
            yield recorder
        finally:
            setattr(apsw, "Connection", whole)  # noqa: B010


def power_loss(store: str, chance: random.Random, folder: Path, strikes: int) -> Iterator[Struck]:
    """Cut the power before any step asked of the disk; of what was not synced, none, some or all is there."""
    del store
    told: list[tuple[int, str, Any]] = []
    with _recorded() as recorder:
        bus = EventBus(f"sqlite:///{folder / 'bus.db'}")
        for turn in range(40):
            batch = list(_acknowledged(bus, f"e{turn}", chance))
            told.append((len(recorder.steps), "publish", batch))
            told += [(len(recorder.steps), "settle", each) for each in _settle_some(bus, chance)]
        bus.shutdown()
    for number in range(strikes):
        cut, how = chance.randint(told[0][0], len(recorder.steps)), chance.choice((DROP, TEAR, KEEP))
        disk = Disk()
        for step in recorder.steps[:cut]:
            disk.take(step)
        place = folder / f"cut-{number}"
        place.mkdir()
        for name, content in disk.left(how, chance).items():
            (place / name).write_bytes(content)
        promised = [each for each in told if each[0] <= cut]
        count = sum(len(batch) for _, kind, batch in promised if kind == "publish")
        yield count, list(_after_power_loss(place / "bus.db", promised, told))


def _after_power_loss(
    path: Path, promised: list[tuple[int, str, Any]], asked: list[tuple[int, str, Any]]
) -> Iterator[Verdict]:
    bus = EventBus(f"sqlite:///{path}")  # a file that was never acknowledged to exist is made anew
    bus.publish("trial.1", uid="afterwards")
    bus.shutdown()
    batches = [tuple(uid for _, uid in told) for _, kind, told in asked if kind == "publish"]
    acknowledged = {uid: event_id for _, kind, told in promised if kind == "publish" for event_id, uid in told}
    journal = Journal((*batches, ("afterwards",)), acknowledged)
    database = checker.read_file(path)
    yield from checker.lost(journal, database)
    yield from checker.phantom(journal, database)
    yield from checker.torn(journal, database)
    yield from checker.replayed_differs(database)
    yield from (Verdict("damaged", each) for each in database.damage)
    ended = {(row.event_id, row.epoch) for row in database.audit if row.action in {"COMPLETED", "FAILED"}}
    for _, kind, told in promised:
        if kind == "settle" and told not in ended:
            yield Verdict("lost", f"the outcome of event {told[0]}, epoch {told[1]}")


# ── bit flips ────────────────────────────────────────────────────────────────────────────────────────────────────


def bit_flip(store: str, chance: random.Random, folder: Path, strikes: int) -> Iterator[Struck]:
    """Flip one bit of the file that a SQLite bus is kept in."""
    del store
    bus = EventBus(f"sqlite:///{folder / 'bus.db'}")
    told = {event_id: uid for turn in range(60) for event_id, uid in _acknowledged(bus, f"e{turn}", chance)}
    _settle_some(bus, chance)
    bus.shutdown()
    content = (folder / "bus.db").read_bytes()
    for number in range(strikes):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path = folder / f"flip-{number}.db"
        path.write_bytes(damaged)
        yield len(told), list(_after_flip(path, told))


def _after_flip(path: Path, told: dict[int, str]) -> Iterator[Verdict]:
    """Yield what reads differently without a word; an error of ours, or a finding of `doctor`, is a word."""
    with suppress(*REFUSED):
        bus = EventBus(f"sqlite:///{path}")
        try:
            wrong = list(_wrong(bus, told))
            if wrong and all(finding.ok for finding in log_of(bus.store).inspect(deep=True)):
                yield from wrong
            later = bus.publish("trial.1", {"later": 1})
            if bus.get(later.id).payload != {"later": 1}:
                yield Verdict("lost", f"event {later.id}, published into the damaged file")
        finally:
            with suppress(*REFUSED):
                bus.shutdown()


def _wrong(bus: EventBus, told: dict[int, str]) -> Iterator[Verdict]:
    for event_id, uid in told.items():
        try:
            event = bus.get(event_id)
        except UnsafeStore:
            continue
        except NotFound:
            yield Verdict("lost", f"event {event_id} is not found, and nothing tells of damage")
        else:
            if (event.uid, event.payload) != (uid, {"text": "x" * 200}):
                yield Verdict("damaged", f"event {event_id} reads differently, and nothing tells of damage")


# ── forks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def fork_after_open(store: str, chance: random.Random, folder: Path, strikes: int) -> Iterator[Struck]:
    """Fork with a bus open; the parent closes it, drops it or goes on while the child publishes."""
    cluster = Cluster() if store == "postgres" else None
    try:
        for number in range(strikes):
            url = cluster.url() if cluster else f"sqlite:///{folder / f'{number}.db'}"
            known, found = _forked(url, chance)
            yield len(known), [*found, *_all_there(url, known)]
            if cluster is not None:
                query(url, "DROP SCHEMA postbus CASCADE")
    finally:
        if cluster is not None:
            cluster.remove()


def _forked(url: str, chance: random.Random) -> tuple[list[Known], list[Verdict]]:
    """Return what parent and child were acknowledged, and what was wrong with the child."""
    bus: EventBus | None = EventBus(url)
    known = list(_acknowledged(bus, "before", chance))
    own, act = chance.random() < 0.5, chance.choice(("closes", "drops", "goes on"))
    heard, told = os.pipe()
    hears, go = os.pipe()
    if not (child := os.fork()):
        _in_child(EventBus(url) if own else bus, chance, told, hears)
    os.close(told)
    with os.fdopen(heard, encoding="utf-8") as lines:
        answers = [lines.readline()]
        if act == "goes on":
            known += _acknowledged(bus, "beside", chance)
        elif act == "closes":
            bus.shutdown()
        bus = None if act == "drops" else bus
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of a connection that is dropped open, as is meant here
            gc.collect()
        os.write(go, b".")
        answers.append(lines.readline())
    _, status = os.waitpid(child, 0)
    for end in (hears, go):
        os.close(end)
    if bus is not None:
        bus.shutdown()
    for answer in answers:
        known += [(event_id, uid) for event_id, uid in json.loads(answer or "[]")]
    ended = os.waitstatus_to_exitcode(status)
    return known, [Verdict("stuck", f"the child was refused, or ended: {ended}")] if ended or not all(answers) else []


def _in_child(bus: EventBus, chance: random.Random, told: int, hears: int) -> None:
    """Publish before and after the parent has done what it does, and end: with 1 if that was refused."""
    code = 1
    try:
        os.write(told, json.dumps(list(_acknowledged(bus, "child", chance))).encode() + b"\n")
        os.read(hears, 1)
        later = [each for turn in range(20) for each in _acknowledged(bus, f"later{turn}", chance)]
        os.write(told, json.dumps(later).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _all_there(url: str, known: list[Known]) -> Iterator[Verdict]:
    """Yield what was acknowledged and is not there, or is under an id that another has too."""
    if len({event_id for event_id, _ in known}) < len(known):
        yield Verdict("duplicate", "an id was given twice")
    with _opened(url) as bus:
        for event_id, uid in known:
            try:
                stored = bus.get(event_id).uid
            except NotFound:
                stored = None
            if stored != uid:
                yield Verdict("lost", f"event {event_id} ({uid}) was acknowledged")


# ── files that are replaced ──────────────────────────────────────────────────────────────────────────────────────


def replaced_file(store: str, chance: random.Random, folder: Path, strikes: int) -> Iterator[Struck]:
    """Remove, rename or replace the file while it is written to, or have another SQLite library drop its locks."""
    del store
    for number in range(strikes):
        place = folder / f"{number}"
        place.mkdir()
        known: list[tuple[int, str]] = []
        found = list(_replaced(place / "bus.db", chance, known))
        yield len(known), found


def _replaced(path: Path, chance: random.Random, known: list[tuple[int, str]]) -> Iterator[Verdict]:
    bus, refused, unharmed = EventBus(f"sqlite:///{path}"), threading.Event(), threading.Event()
    known += _acknowledged(bus, "first", chance)

    def publish() -> None:
        with suppress(UnsafeStore):
            for turn in range(10_000):
                if unharmed.is_set():
                    return
                known.extend(_acknowledged(bus, f"e{turn}", chance))
            return
        refused.set()

    publisher = threading.Thread(target=publish, daemon=True)
    publisher.start()
    time.sleep(chance.uniform(0, 0.1))
    kept = path.with_name("kept.db")
    for ending in ("", "-wal"):  # the same file under another name, which stays
        os.link(f"{path}{ending}", f"{kept}{ending}")
    chance.choice((_remove, _rename, _put_another, _close_by_another))(path)
    if all(_is_same(f"{path}{ending}", f"{kept}{ending}") for ending in ("", "-wal")):
        unharmed.set()  # another SQLite, of a version that sees our lock, leaves the WAL in its place
    publisher.join(30)
    if publisher.is_alive() or refused.is_set() is unharmed.is_set():
        told = "were refused" if refused.is_set() else "were not refused"
        yield Verdict("stuck" if publisher.is_alive() else "stale-accepted", f"writes to the file {told}")
    with suppress(*REFUSED):
        bus.shutdown()
    yield from _all_there(f"sqlite:///{kept}", known)


def _is_same(path: str, other: str) -> bool:
    return Path(path).exists() and Path(path).samefile(other)


def _remove(path: Path) -> None:
    path.unlink()


def _rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def _put_another(path: Path) -> None:
    open_store(f"sqlite:///{path.with_name('other.db')}").close()
    apsw.Connection(str(path.with_name("other.db"))).close()
    path.with_name("other.db").replace(path)


def _close_by_another(path: Path) -> None:
    """Close the file by Python's own SQLite, which takes itself for the last and removes the WAL."""
    other = sqlite3.connect(path)
    other.execute("SELECT count(*) FROM events").fetchall()
    other.close()


# ── backups ──────────────────────────────────────────────────────────────────────────────────────────────────────


def restored_backup(store: str, chance: random.Random, folder: Path, strikes: int) -> Iterator[Struck]:
    """Go on after a backup, restore it beside, mark it, and use it with what came from before."""
    cluster = Cluster() if store == "postgres" else None
    try:
        for number in range(strikes):
            url = cluster.url() if cluster else f"sqlite:///{folder / f'{number}.db'}"
            known: dict[str, int] = {}
            found = list(_restore(url, cluster, chance, folder / f"{number}", known))
            yield len(known), found
            if cluster is not None:
                _drop(url)
    finally:
        if cluster is not None:
            cluster.remove()


def _drop(url: str) -> None:
    query(url, "DROP SCHEMA postbus CASCADE")
    query(url, "DROP DATABASE restored WITH (FORCE)")


def _restore(
    url: str, cluster: Cluster | None, chance: random.Random, place: Path, known: dict[str, int]
) -> Iterator[Verdict]:
    with _opened(url) as bus:
        for turn in range(10):
            known |= {uid: event_id for event_id, uid in _acknowledged(bus, f"before{turn}", chance)}
        _settle_some(bus, chance)
        held = bus.poll_many(3)
        again = _copied(url, cluster, place)
        given = [event_id for turn in range(10) for event_id, _ in _acknowledged(bus, f"after{turn}", chance)]
        epochs = [each.epoch for each in bus.poll_many(3)]
    with _opened(again) as bus:
        log_of(bus.store).restore_mark("torture")
        yield from _in_the_restored(bus, known, held, given, epochs)


def _in_the_restored(
    bus: EventBus, known: dict[str, int], held: list[Delivery], given: list[int], epochs: list[int]
) -> Iterator[Verdict]:
    stored = {event.uid: event.id for event in bus.list(limit=1_000)}
    for uid, event_id in known.items():
        if stored.get(uid) != event_id:
            yield Verdict("lost", f"event {event_id} ({uid}) was in the backup")
    if (fresh := bus.publish("trial.1").id) <= max(given):
        yield Verdict("phantom", f"id {fresh} is given again: {max(given)} had been given after the backup")
    for each in held:
        with suppress(LeaseLost):
            bus.finalize(each)
            yield Verdict("stale-accepted", f"the lease on event {each.event.id} from before the restore still counts")
    while (delivery := bus.poll()) is not None:
        if delivery.epoch <= max(epochs):
            yield Verdict("epoch-reused", f"epoch {delivery.epoch}: {max(epochs)} had been given after the backup")
        bus.finalize(delivery)
    unfinished = sum(each.pending - each.scheduled + each.processing for each in bus.stats().subscriptions)
    if unfinished:
        yield Verdict("stuck", f"{unfinished} events of the backup come to no end")


@contextmanager
def _opened(url: str) -> Generator[EventBus]:
    bus = EventBus(url)
    try:
        yield bus
    finally:
        bus.shutdown()


def _copied(url: str, cluster: Cluster | None, place: Path) -> str:
    """Back a bus up while it is in use, by its database's own means; return the address of the restored one."""
    if cluster is None:
        copy = place.with_suffix(".restored")
        with (
            closing(apsw.Connection(url.removeprefix("sqlite:///"))) as source,
            closing(apsw.Connection(str(copy))) as into,
            into.backup("main", source, "main") as backup,
        ):
            backup.step()
        return f"sqlite:///{copy}"
    cluster.tool("pg_dump", "--format=custom", f"--file={place}.dump", url)
    cluster.tool("createdb", f"--host={cluster.data}", "restored")
    again = cluster.url("restored")
    cluster.tool("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={again}", f"{place}.dump")
    return again
