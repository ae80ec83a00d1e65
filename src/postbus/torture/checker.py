"""What must hold after any crash, as pure functions over what was seen from outside and what is stored.

A history has witnesses that the bus cannot touch: what publishers were told (`Journal`), what handlers did
(`Execution`), what followers saw (`Sight`), and the database itself (`Database`), read past the product. Each rule
compares them and yields verdicts; none is good news. Calls whose outcome their caller never learnt may have happened or
not, but at most once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import apsw

from postbus.torture.history import FAIL, INVOKE, OK, UNKNOWN, Entry
from postbus.torture.tables import (
    DEAD,
    LEASED,
    PENDING,
    AuditRow,
    Run,
    StoredDelivery,
    audit_of,
    deliveries_of,
    reading,
)

__all__ = [
    "RULES",
    "Database",
    "Execution",
    "Journal",
    "Sight",
    "Verdict",
    "check",
    "check_effects",
    "check_follower",
    "check_projection",
    "check_settled",
    "executions",
    "journal",
    "read_database",
    "read_file",
    "read_through",
    "sights",
    "with_lake",
]

RULES: Final = {
    "lost": "an acknowledged event is not in the log under its id (I1)",
    "phantom": "the log holds an event that nobody asked for, or one uid twice (I3)",
    "aborted-read": "the log holds an event whose publisher was told that it was not stored",
    "torn": "some of a batch, or of an event and the row written with it, is there, and some is not (I2)",
    "duplicate": "a handler ran again, or an effect is there twice, and the audit log names no cause (I11)",
    "reordered": "a follower saw a later event before an earlier one (I6)",
    "gap": "a follower passed an event that it never saw (I5, I6)",
    "stale-accepted": "a settlement counted whose lease was another's by then (I8)",
    "stuck": "an event came to no end, though nothing was in its way any more (I9, I10)",
    "two-ends": "an event came to two ends in one subscription (I9)",
    "attempts": "an event got more attempts than its policy allows (I12)",
    "unhandled": "an event was completed and no handler ran (S1.1)",
    "unclaimed": "a handler ran under a lease that nobody gave (I7)",
    "epoch-reused": "a lease's number was given twice (I4)",
    "audit-mismatch": "replaying the audit log leads elsewhere than the tables (I13)",
    "lake-mismatch": "the lake holds other rows than the log (I15)",
    "grown": "memory or tables grow while what they hold does not",
    "damaged": "the database says of itself that it is damaged (I16)",
}
"""Every verdict there is, and what it says."""

Key = tuple[int, str]
"""An event on its way to one subscription."""

CAUSES: Final = frozenset({"EXPIRED", "RELEASED", "RESET", "RETRIED"})
COMPLETED: Final = frozenset({"COMPLETED", "COMPLETED_WITH_ERRORS"})
GONE: Final = frozenset({"PURGED", "DISCARDED"})


class Verdict(NamedTuple):
    """One broken promise: which rule, and where."""

    rule: str
    detail: str


class Execution(NamedTuple):
    """A handler ran: recorded by itself, before it did anything else."""

    event_id: int
    subscription: str
    attempt: int
    epoch: int
    pid: int


class Sight(NamedTuple):
    """A follower's handler saw an event, under the lead of an epoch."""

    event_id: int
    epoch: int
    pid: int


@dataclass(frozen=True)
class Journal:
    """What publishers asked for, a batch a call, and what they were told: the id of each acknowledged uid, or no."""

    tried: tuple[tuple[str, ...], ...] = ()
    acknowledged: Mapping[str, int] = field(default_factory=dict[str, int])
    aborted: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    """Those that came with a row of the publisher's own, in one transaction."""


@dataclass(frozen=True)
class Database:
    """What is stored: uids by event id, deliveries, the audit log by its ids, in their order."""

    events: Mapping[int, str]
    deliveries: Mapping[Key, StoredDelivery]
    rows: Mapping[int, AuditRow]
    damage: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    effects: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """What transactional handlers wrote, by subscription, in the order of writing."""

    @property
    def audit(self) -> Sequence[AuditRow]:
        """The audit log, in its order."""
        return tuple(self.rows.values())


# ── reading the witnesses ────────────────────────────────────────────────────────────────────────────────────────


def journal(history: Iterable[Entry]) -> Journal:
    """Return what publishers wrote down."""
    tried: dict[tuple[str, ...], None] = {}
    acknowledged: dict[str, int] = {}
    aborted: set[str] = set()
    unknown: set[str] = set()
    beside: set[str] = set()
    for entry in history:
        if entry.op != "publish":
            continue
        uids = tuple(entry.told["uids"])
        tried[uids] = None
        if entry.told.get("beside"):
            beside |= set(uids)
        if entry.kind == OK:
            acknowledged |= zip(uids, entry.told["ids"], strict=False)  # told fewer ids, it is told of fewer events
        elif entry.kind == FAIL:
            aborted |= set(uids)
        elif entry.kind == UNKNOWN:
            unknown |= set(uids)
    return Journal(tuple(tried), acknowledged, frozenset(aborted - acknowledged.keys() - unknown), frozenset(beside))


def executions(history: Iterable[Entry]) -> list[Execution]:
    """Return what handlers wrote down before they did anything else."""
    told = (entry for entry in history if entry.op == "handle" and entry.kind == INVOKE)
    return [Execution._make((*each.told["delivery"], each.pid)) for each in told]


def sights(history: Iterable[Entry], subscription: str) -> list[Sight]:
    """Return what a follower's handlers wrote down."""
    told = (entry for entry in history if entry.op == "see" and entry.told["subscription"] == subscription)
    return [Sight(each.told["event_id"], each.told["epoch"], each.pid) for each in told]


def with_lake(database: Database, folder: Path) -> tuple[Database, list[Verdict]]:
    """Return what log and lake hold together, and where they tell different things of one row, or of one row twice."""
    from postbus.spark.manifest import Manifest  # noqa: PLC0415  needs pyarrow, and few trials have a lake

    verdicts: list[Verdict] = []
    events: dict[int, Any] = dict(database.events)
    audit: dict[int, Any] = dict(database.rows)
    streams: tuple[tuple[str, dict[int, Any], tuple[str, ...]], ...] = (
        ("events", events, ("uid",)),
        ("audit", audit, AuditRow._fields),
    )
    for stream, known, columns in streams:
        manifest = Manifest(folder, stream)
        rows: list[dict[str, Any]] = (
            manifest.dataset().to_table(columns=["id", *columns]).to_pylist() if manifest.entries() else []
        )
        seen: set[int] = set()
        for row in rows:
            told = row["uid"] if stream == "events" else AuditRow._make(row[name] for name in columns)
            if row["id"] in seen or known.setdefault(row["id"], told) != told:
                verdicts.append(
                    Verdict("lake-mismatch", f"{stream} {row['id']} is there twice, or differs from the log")
                )
            seen.add(row["id"])
        if missing := sorted(set(known) - seen):
            verdicts.append(
                Verdict("lake-mismatch", f"{len(missing)} of {stream} are not in the lake, as {missing[0]}")
            )
    return replace(database, events=events, rows=dict(sorted(audit.items()))), verdicts


def read_database(url: str) -> Database:
    """Return what is stored, as of one moment, read past the product."""
    if url.startswith("sqlite:"):
        return read_file(Path(url.removeprefix("sqlite:///")))
    with reading(url) as run:
        return _read(run, postgres=True)


def read_file(path: Path) -> Database:
    """Return what a SQLite file holds, read past the product."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(10_000)
    try:
        return read_through(connection)
    finally:
        connection.close()


def read_through(connection: apsw.Connection) -> Database:
    """Return what an open SQLite file holds, and what is wrong with it."""
    found = _read(connection.execute, postgres=False)
    damage = (row[0] for row in connection.execute("PRAGMA integrity_check"))
    return replace(found, damage=tuple(each for each in damage if each != "ok"))


def _read(run: Run, *, postgres: bool) -> Database:
    return Database(
        events=dict(run("SELECT id, uid FROM events")),
        deliveries=deliveries_of(run, postgres=postgres),
        rows=audit_of(run, postgres=postgres),
    )


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────


def check(
    journal: Journal,
    executions: Sequence[Execution],
    database: Database,
    *,
    subscriptions: Sequence[str] = ("default",),
    allowed: int = 4,
    drained: bool = True,
) -> list[Verdict]:
    """Return every broken promise; `drained` says that all work had time to end."""
    verdicts = [
        *(Verdict("damaged", each) for each in database.damage),
        *lost(journal, database),
        *phantom(journal, database),
        *aborted_read(journal, database),
        *torn(journal, database),
        *repeated(executions, database),
        *unclaimed(executions, database),
        *reused(database),
        *attempts(database, allowed),
        *unhandled(executions, database),
        *replayed_differs(database),
    ]
    return verdicts + (list(unfinished(database, subscriptions)) if drained else [])


def lost(journal: Journal, database: Database) -> Iterator[Verdict]:
    """Yield acknowledged events that are not in the log under the id their publisher was told (I1)."""
    for uid, event_id in journal.acknowledged.items():
        if database.events.get(event_id) != uid:
            yield Verdict("lost", f"{uid} was acknowledged as event {event_id}")


def phantom(journal: Journal, database: Database) -> Iterator[Verdict]:
    """Yield events that nobody asked for, and uids that stand in the log twice (I3)."""
    wanted = {uid for batch in journal.tried for uid in batch}
    for event_id, uid in database.events.items():
        if uid not in wanted:
            yield Verdict("phantom", f"event {event_id} ({uid}) was never published")
    for uid, count in Counter(database.events.values()).items():
        if count > 1:
            yield Verdict("phantom", f"{uid} stands in the log {count} times")


def aborted_read(journal: Journal, database: Database) -> Iterator[Verdict]:
    """Yield events in the log whose publisher was told that they were not stored."""
    for event_id, uid in database.events.items():
        if uid in journal.aborted:
            yield Verdict(
                "aborted-read", f"event {event_id} ({uid}) is in the log, and its publisher was told it is not"
            )


def torn(journal: Journal, database: Database) -> Iterator[Verdict]:
    """Yield batches of which some events are there and some are not, and events without their row (I2, S4.9)."""
    stored = set(database.events.values())
    for batch in journal.tried:
        there = sum(uid in stored for uid in batch)
        if there not in (0, len(batch)):
            yield Verdict("torn", f"{there} of the {len(batch)} events from {batch[0]} on")
    for uid in journal.beside:
        if (uid in stored) != (uid in database.own):
            there, missing = ("event", "row") if uid in stored else ("row", "event")
            yield Verdict("torn", f"{uid}: its {there} is there, and its {missing} is not")


def repeated(executions: Sequence[Execution], database: Database) -> Iterator[Verdict]:
    """Yield claims after the first, and executions within one claim, that no audit row explains (I11)."""
    for key, rows in _by_key(database).items():
        free = True
        for row in rows:
            if row.action == "PICKED":
                if not free:
                    yield Verdict("duplicate", f"{key} was claimed as epoch {row.epoch} while it was another's")
                free = False
            elif row.action in CAUSES or (row.action == "FAILED" and row.status == "PENDING"):
                free = True
    for each, count in Counter((one.event_id, one.subscription, one.epoch) for one in executions).items():
        if count > 1:
            yield Verdict("duplicate", f"{each} was executed {count} times under one lease")


def unclaimed(executions: Sequence[Execution], database: Database) -> Iterator[Verdict]:
    """Yield executions under a lease the audit log does not know (I7, I13)."""
    picked = {(row.event_id, row.subscription, row.epoch) for row in database.audit if row.action == "PICKED"}
    for one in executions:
        if (one.event_id, one.subscription, one.epoch) not in picked:
            yield Verdict("unclaimed", f"{one} ran without a recorded claim")


def reused(database: Database) -> Iterator[Verdict]:
    """Yield epochs that more than one claim was given (I4)."""
    for epoch, count in Counter(row.epoch for row in database.audit if row.action == "PICKED").items():
        if count > 1:
            yield Verdict("epoch-reused", f"epoch {epoch} was given {count} times")


def attempts(database: Database, allowed: int) -> Iterator[Verdict]:
    """Yield deliveries that got more attempts than allowed, counting anew after a dead letter's retry (I12)."""
    for key, rows in _by_key(database).items():
        count = most = 0
        for row in rows:
            count += {"PICKED": 1, "RELEASED": -1}.get(row.action, 0)
            count = 0 if row.action == "RETRIED" else count
            most = max(most, count)
        if most > allowed:
            yield Verdict("attempts", f"{key}: {most} of {allowed}")


def unhandled(executions: Sequence[Execution], database: Database) -> Iterator[Verdict]:
    """Yield deliveries recorded as completed under a lease whose handler never ran (S1.1)."""
    ran = {(one.event_id, one.subscription, one.epoch) for one in executions}
    for row in database.audit:
        if row.action in COMPLETED and (row.event_id, row.subscription, row.epoch) not in ran:
            yield Verdict("unhandled", f"event {row.event_id} was completed as epoch {row.epoch}, but nothing ran")


def check_effects(database: Database, subscription: str) -> Iterator[Verdict]:
    """Yield what a transactional handler did twice, or did not do though it was completed (I9, I11)."""
    done = Counter(database.effects.get(subscription, ()))
    ended = {row.event_id for row in database.audit if row.subscription == subscription and row.action in COMPLETED}
    for event_id in sorted(ended | done.keys()):
        if done[event_id] != (event_id in ended):
            rule = "unhandled" if done[event_id] < 1 else "duplicate"
            yield Verdict(rule, f"event {event_id} in {subscription!r}: {done[event_id]} effects")


def check_follower(seen: Sequence[Sight], database: Database, start: int = 0) -> Iterator[Verdict]:
    """Yield what a follower left out, or saw out of order or twice, under any lead (I5, I6)."""
    ids = sorted(event_id for event_id in database.events if event_id > start)
    following = dict(pairwise(ids))
    leads: dict[tuple[int, int], list[int]] = defaultdict(list)
    for each in seen:
        leads[each.pid, each.epoch].append(each.event_id)
    for (pid, epoch), run in leads.items():
        for earlier, later in pairwise(run):
            if later != following.get(earlier):
                rule = "duplicate" if later == earlier else "reordered" if later < earlier else "gap"
                yield Verdict(rule, f"process {pid}, lead {epoch}: event {later} after {earlier}")
    for missing in sorted(set(ids) - {each.event_id for each in seen}):
        yield Verdict("gap", f"event {missing} was never seen")


def check_settled(history: Iterable[Entry], database: Database) -> Iterator[Verdict]:
    """Yield settlements that their caller was told of and that the audit log does not know (I13)."""
    ends = {(row.event_id, row.epoch) for row in database.audit if row.action in COMPLETED or row.action == "FAILED"}
    for entry in history:
        if entry.op == "settle" and entry.kind == OK and (entry.told["event_id"], entry.told["epoch"]) not in ends:
            yield Verdict("audit-mismatch", f"{entry.told} was settled by {entry.who}, and is not in the audit log")


def check_projection(database: Database, subscription: str, start: int = 0) -> Iterator[Verdict]:
    """Yield what a transactional follower left out, did twice, or did in another order than the log's (I5, I6)."""
    effects = database.effects.get(subscription, ())
    for earlier, later in pairwise(effects):
        if later <= earlier:
            yield Verdict(
                "duplicate" if later == earlier else "reordered", f"effect of {later} after that of {earlier}"
            )
    for event_id in sorted({each for each in database.events if each > start} - set(effects)):
        yield Verdict("gap", f"event {event_id} has no effect in {subscription!r}")


def unfinished(database: Database, subscriptions: Sequence[str]) -> Iterator[Verdict]:
    """Yield stored events that did not come to exactly one end in each subscription (I9, I10)."""
    ends = Counter((row.event_id, row.subscription) for row in database.audit if _is_end(row))
    revived = Counter((row.event_id, row.subscription) for row in database.audit if row.action == "RETRIED")
    for event_id in database.events:
        for name in subscriptions:
            count = ends[event_id, name] - revived[event_id, name]
            if count != 1:
                yield Verdict("stuck" if count < 1 else "two-ends", f"event {event_id} in {name!r}: {count} ends")


def replayed_differs(database: Database) -> Iterator[Verdict]:
    """Yield what replaying the audit log finds impossible, and where it leads elsewhere than the table (I8, I13)."""
    for key, rows in _by_key(database).items():
        replay = _Replay(key)
        yield from replay.run(rows)
        yield from replay.compare(database.deliveries.get(key))
    known = {(row.event_id, row.subscription) for row in database.audit}
    for key, row in database.deliveries.items():
        if key not in known and (row.state, row.attempt) != (PENDING, 0):
            yield Verdict("audit-mismatch", f"{key} is in state {row.state} without an audit row")


@dataclass
class _Replay:
    """One delivery's life by its audit rows alone."""

    key: Key
    state: int | None = PENDING
    attempt: int = 0
    epoch: int = 0
    worker_id: str | None = None
    ended: bool = False

    def run(self, rows: Iterable[AuditRow]) -> Iterator[Verdict]:
        for row in rows:
            if row.action == "PICKED":
                yield from self._picked(row)
            elif row.action != "STARTED":
                yield from self._moved(row)

    def _picked(self, row: AuditRow) -> Iterator[Verdict]:
        if row.epoch <= self.epoch:
            yield Verdict("epoch-reused", f"{self.key}: epoch {row.epoch} after {self.epoch}")
        if row.attempt != self.attempt + 1:
            yield Verdict("audit-mismatch", f"{self.key}: attempt {row.attempt} follows {self.attempt}")
        if self.ended:
            yield Verdict("audit-mismatch", f"{self.key} was claimed after its end")
        self.state, self.attempt, self.epoch, self.worker_id = LEASED, row.attempt, row.epoch, row.worker_id

    def _moved(self, row: AuditRow) -> Iterator[Verdict]:
        if row.action == "RETRIED":
            self.state, self.attempt, self.ended = PENDING, 0, False
            return
        if self.ended and row.action not in GONE:
            yield Verdict("two-ends" if _is_end(row) else "audit-mismatch", f"{self.key}: {row.action} after its end")
        elif row.action not in {"RESET", *GONE} and (row.epoch, row.worker_id) != (self.epoch, self.worker_id):
            told = f"{row.action} of epoch {row.epoch} by {row.worker_id}"
            yield Verdict("stale-accepted", f"{self.key}: {told} while {self.worker_id} held it as {self.epoch}")
        self.attempt -= row.action == "RELEASED"
        self.ended = self.ended or _is_end(row)
        gone = row.action in COMPLETED or row.action in GONE
        self.state = None if gone else DEAD if row.status == "FAILED" else PENDING

    def compare(self, stored: StoredDelivery | None) -> Iterator[Verdict]:
        """Yield how the stored row differs from what the audit log leads to."""
        found = None if stored is None else (stored.state, stored.attempt)
        expected = None if self.state is None else (self.state, self.attempt)
        if found != expected:
            yield Verdict("audit-mismatch", f"{self.key}: (state, attempt) is {found}, by the audit log {expected}")
        elif stored is not None and stored.state == LEASED and stored.epoch != self.epoch:
            yield Verdict("audit-mismatch", f"{self.key}: epoch {stored.epoch}, by the audit log {self.epoch}")


def _is_end(row: AuditRow) -> bool:
    return row.action in COMPLETED or (row.action == "FAILED" and row.status == "FAILED")


def _by_key(database: Database) -> dict[Key, list[AuditRow]]:
    rows: dict[Key, list[AuditRow]] = defaultdict(list)
    for row in database.audit:
        rows[row.event_id, row.subscription].append(row)
    return rows
