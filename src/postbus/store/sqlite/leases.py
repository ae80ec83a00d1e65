"""The verbs that change a delivery: claim, settle, extend, release, reset, expire. Each runs inside a transaction."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Final, assert_never

from postbus.clock import from_micros
from postbus.errors import Conflict, LeaseLost, NotFound
from postbus.model import Action, AttemptError, Dead, Done, DoneWithErrors, Lease, Retry, State, Status, Subscription
from postbus.retry import RetryPolicy
from postbus.store.contract import Claim, Settled, Settlement
from postbus.store.routes import Selection
from postbus.store.sqlite.catalog import Catalog
from postbus.store.sqlite.connection import Database, Row
from postbus.store.sqlite.records import Held, decode_errors, encode_errors

__all__ = ["Leases", "Taken"]

EXACT_ROUTES: Final = 64
ROTATING_ROUTES: Final = 32
LOWEST_ROUTE: Final = -(1 << 63) - 1
_DUE_ORDER: Final = itemgetter(4, 0)
_MICROS: Final = timedelta(microseconds=1)

Taken = tuple[Held, int, int]
"""What a claim took: the row as it was, its new epoch, and its lease's end."""


class Leases:
    """The lease verbs on one transaction's connection, at one moment."""

    def __init__(self, db: Database, catalog: Catalog, now: int) -> None:
        """Work on `db`, which is inside a write transaction; `now` is the moment all of it happens at."""
        self._db = db
        self._catalog = catalog
        self._now = now

    # ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim, subscription: Subscription, selection: Selection) -> tuple[list[Taken], bool]:
        """Lease what the claim may have; also return whether a suspect waits for somebody who holds nothing."""
        end = self._now + (subscription.lease or claim.lease) // _MICROS
        suspects = self._find(selection.solo, selection, 1, claim.policy)
        if suspects and claim.alone:
            return self._take(suspects, claim, end), False
        found = self._find(selection.normal, selection, claim.limit, claim.policy)
        return self._take(found, claim, end), bool(suspects)

    def _find(
        self, groups: dict[int, dict[int, None]], selection: Selection, limit: int, policy: RetryPolicy
    ) -> list[Held]:
        """Return up to `limit` claimable rows, highest priority first, ending the expired leases it meets."""
        found: list[Held] = []
        for priority in sorted(groups, reverse=True):
            while len(found) < limit:
                rows = self._probe(groups[priority], selection, priority, limit - len(found))
                expired = [row for row in rows if row.state == State.LEASED]
                found += [row for row in rows if row.state == State.PENDING]
                if not expired:
                    break
                self._expire_all(expired, policy)
        return found

    def _probe(self, routes: dict[int, None], selection: Selection, priority: int, limit: int) -> list[Held]:
        chosen: Iterable[int] = routes
        if len(routes) > EXACT_ROUTES:
            chosen = self._next_turn(routes, selection, priority)
        cursors = [self._db.iterate("due", (route, self._now, limit)) for route in chosen]
        rows: Iterator[Row] = cursors[0] if len(cursors) == 1 else merge(*cursors, key=_DUE_ORDER)
        return [Held._make(row) for row in islice(rows, limit)]

    def _next_turn(self, routes: dict[int, None], selection: Selection, priority: int) -> list[int]:
        """Return the next few of many routes that hold something due, going round, so that each gets its turn."""
        start = selection.turns.get(priority, LOWEST_ROUTE + 1)
        chosen = list(islice(self._present(routes, start), ROTATING_ROUTES))
        if len(chosen) < ROTATING_ROUTES and start > LOWEST_ROUTE + 1:
            again = self._present(routes, LOWEST_ROUTE + 1)
            chosen += [route for route in islice(again, ROTATING_ROUTES - len(chosen)) if route <= start]
        selection.turns[priority] = chosen[-1] if chosen else LOWEST_ROUTE + 1
        return chosen

    def _present(self, routes: dict[int, None], after: int) -> Iterator[int]:
        return (row[0] for row in self._db.iterate("routes_with_due", (after, self._now)) if row[0] in routes)

    def _take(self, rows: list[Held], claim: Claim, end: int) -> list[Taken]:
        if not rows:
            return []
        first = self._draw(len(rows))
        now, worker, owner = self._now, claim.worker_id, claim.owner
        self._db.many(
            "lease",
            [
                (end, epoch, row.attempt + 1, now, now, worker, owner, row.event_id, row.subscription)
                for epoch, row in enumerate(rows, first)
            ],
        )
        self._db.many(
            "log",
            [
                (row.event_id, row.subscription, "PICKED", now, "PROCESSING", row.attempt + 1, epoch, worker, *_NOTHING)
                for epoch, row in enumerate(rows, first)
            ],
        )
        return [(row, epoch, end) for epoch, row in enumerate(rows, first)]

    def _draw(self, count: int = 1) -> int:
        """Return the first of `count` epochs that nobody has had before."""
        return self._db.value("draw_epochs", (count,)) - count + 1

    # ── settle ───────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Record outcomes; see the contract."""
        applied = self._finish([each for each in settlements if isinstance(each.outcome, Done | DoneWithErrors)])
        return [self._settle_one(each, applied) for each in settlements]

    def _finish(self, settlements: list[Settlement]) -> set[Lease]:
        """Remove finished deliveries whose epoch still stands, all in one go, and return which they were."""
        told = {each.lease: each for each in settlements}
        keys = [(lease.event_id, lease.subscription, lease.epoch) for lease in told]
        rows = self._db.many("finish", keys) if keys else []
        applied: set[Lease] = set()
        ends: list[Row] = []
        for row in map(Held._make, rows):
            lease = Lease(row.event_id, row.subscription, row.epoch)
            applied.add(lease)
            outcome = told[lease].outcome
            errors = _with(row, *outcome.errors) if isinstance(outcome, DoneWithErrors) else row.errors
            ends.append(self._end_row(told[lease], row, errors))
        if ends:
            self._db.many("log_end", ends)
        return applied

    def _end_row(self, told: Settlement, row: Held, errors: str | None) -> Row:
        action, status, error = _told(told)
        route = self._catalog.route(row.route)
        return (
            row.event_id,
            row.subscription,
            action,
            self._now,
            status,
            row.attempt,
            row.epoch,
            told.worker_id,
            told.status_code,
            error.type if error else None,
            error.message if error else None,
            told.execution_time_ms,
            route.type,
            route.tags,
            route.priority,
            row.created_at,
            row.ready_at,
            row.claimed_at,
            errors,
        )

    def _settle_one(self, told: Settlement, applied: set[Lease]) -> Settled:
        if told.lease in applied:
            applied.discard(told.lease)
            return Settled.APPLIED
        match told.outcome:
            case Retry(after, error):
                row = self._held(told.lease)
                if row is not None:
                    self._fail(row, told, error, due=self._now + after // _MICROS)
                    return Settled.APPLIED
            case Dead(error):
                row = self._held(told.lease)
                if row is not None:
                    self._bury(row, told, error)
                    return Settled.APPLIED
            case Done() | DoneWithErrors():
                pass
            case _:
                assert_never(told.outcome)
        return self._repeated(told)

    def _repeated(self, told: Settlement) -> Settled:
        recorded = self._db.run("recorded", (told.lease.event_id, told.lease.subscription, told.lease.epoch))
        return Settled.REPEATED if (_told(told)[0],) in recorded else Settled.LOST

    def _held(self, lease: Lease) -> Held | None:
        rows = self._db.run("held", (lease.event_id, lease.subscription, lease.epoch))
        return Held._make(rows[0]) if rows else None

    def _fail(self, row: Held, told: Settlement, error: AttemptError, due: int) -> None:
        """Make it pending again. An attempt already counted as expired is not counted twice."""
        counted = row.retry_count + (row.state == State.LEASED)
        route = self._catalog.variant(self._db, row.route, solo=False)
        self._db.run(
            "end_attempt",
            (route, due, due, self._now, self._draw(), counted, _with(row, error), row.event_id, row.subscription,
             row.epoch),
        )  # fmt: skip
        self._log(row, Action.FAILED, Status.PENDING, told.worker_id, error=error, told=told)

    def _bury(self, row: Held, told: Settlement, error: AttemptError) -> None:
        """Make it a dead letter, with the row in the audit log that tells its whole story."""
        counted = row.retry_count + (row.state == State.LEASED)
        route = self._catalog.variant(self._db, row.route, solo=False)
        errors = _with(row, error)
        self._db.run(
            "bury",
            (route, self._now, self._draw(), counted, errors, self._now, row.event_id, row.subscription, row.epoch),
        )
        self._db.run("log_end", self._end_row(told, row, errors))

    def _log(
        self,
        row: Held,
        action: Action,
        status: Status | None,
        worker_id: str | None,
        *,
        error: AttemptError | None = None,
        told: Settlement | None = None,
    ) -> None:
        self._db.run(
            "log",
            (
                row.event_id,
                row.subscription,
                action,
                self._now,
                status,
                row.attempt,
                row.epoch,
                worker_id,
                told.status_code if told else None,
                error.type if error else None,
                error.message if error else None,
                told.execution_time_ms if told else None,
            ),
        )

    # ── extend, release, started, reset ──────────────────────────────────────────────────────────────────────────

    def extend(self, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
        """Let leases run on; return those that are lost."""
        rows = self._db.many(
            "extend",
            [
                (self._now + self._lease_of(each.subscription, lease), self._now, each.event_id, each.subscription,
                 each.epoch)
                for each in leases
            ],
        )  # fmt: skip
        return set(leases) - {Lease(*row) for row in rows}

    def _lease_of(self, subscription: str, default: timedelta) -> int:
        return (self._catalog.subscription(subscription).lease or default) // _MICROS

    def release(self, leases: Sequence[Lease], worker_id: str) -> int:
        """Hand deliveries back, due now, the attempt given back."""
        if not leases:
            return 0
        first = self._draw(len(leases))
        now = self._now
        rows = self._db.many(
            "release",
            [
                (now, now, now, epoch, lease.event_id, lease.subscription, lease.epoch)
                for epoch, lease in enumerate(leases, first)
            ],
        )
        epochs = {(lease.event_id, lease.subscription): lease.epoch for lease in leases}
        self._db.many(
            "log",
            [
                (event_id, name, "RELEASED", now, "PENDING", attempt + 1, epochs[event_id, name], worker_id, *_NOTHING)
                for event_id, name, attempt in rows
            ],
        )
        return len(rows)

    def started(self, lease: Lease, worker_id: str) -> None:
        """Record that work has begun."""
        row = self._held(lease)
        if row is None:
            raise LeaseLost(f"the lease on event {lease.event_id} in {lease.subscription!r} has passed to another")
        self._log(row, Action.STARTED, Status.PROCESSING, worker_id)

    def reset(self, event_id: int, subscription: str, reason: str, actor: str) -> None:
        """Make a leased or scheduled delivery due now."""
        rows = self._db.run("delivery", (event_id, subscription))
        if not rows:
            if self._db.run("event", (event_id,)):
                raise Conflict(f"event {event_id} has nothing unfinished in {subscription!r}")
            raise NotFound(f"there is no event {event_id}")
        row = Held._make(rows[0])
        if row.state not in (State.PENDING, State.LEASED):
            raise Conflict(f"event {event_id} is a dead letter in {subscription!r}: retry it with dlq.retry")
        self._db.run("make_due", (self._now, self._now, self._now, self._draw(), event_id, subscription, row.epoch))
        self._log(row, Action.RESET, Status.PENDING, actor, error=AttemptError("Reset", reason))

    # ── expiry ───────────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self, owners: Iterable[str] | None, policy: RetryPolicy, limit: int) -> int:
        """End leases that ran out, or those of dead processes; see the contract."""
        if owners is None:
            rows = self._db.run("expired_leases", (self._now, limit))
        else:
            rows = [row for owner in owners for row in self._db.run("leases_of", (owner, limit))]
        self._expire_all([Held._make(row) for row in rows], policy)
        return len(rows)

    def _expire_all(self, rows: list[Held], policy: RetryPolicy) -> None:
        """End attempts nobody will report on: pending again, to be run alone, or dead after the last one."""
        again: list[Row] = []
        logs: list[Row] = []
        for row in rows:
            allowed = self._allowed(row, policy)
            error = self._silence(row)
            if row.attempt >= allowed:
                lease = Lease(row.event_id, row.subscription, row.epoch)
                self._bury(row, Settlement(lease, Dead(error), row.worker_id or ""), error)
                continue
            route = self._catalog.variant(self._db, row.route, solo=True)
            # The epoch stays: until somebody claims it anew, the worker thought lost may still complete it.
            again.append(
                (route, self._now, self._now, self._now, row.epoch, row.retry_count + 1, _with(row, error),
                 row.event_id, row.subscription, row.epoch)
            )  # fmt: skip
            logs.append(
                (row.event_id, row.subscription, "EXPIRED", self._now, "PENDING", row.attempt, row.epoch,
                 row.worker_id, None, error.type, error.message, None)
            )  # fmt: skip
        self._db.many("end_attempt", again)
        self._db.many("log", logs)

    def _allowed(self, row: Held, policy: RetryPolicy) -> int:
        if row.max_retries is not None:
            return row.max_retries + 1
        return (self._catalog.subscription(row.subscription).retry or policy).attempts

    def _silence(self, row: Held) -> AttemptError:
        message = f"worker {row.worker_id} was lost, or its lease ran out, before it reported an outcome"
        return AttemptError("LeaseExpired", message, row.attempt, row.worker_id, from_micros(self._now))


_NOTHING: Final = (None, None, None, None)


def _told(told: Settlement) -> tuple[str, str, AttemptError | None]:
    """Return the action, the status and the error that an ending settlement writes into the audit log."""
    match told.outcome:
        case Done():
            return "COMPLETED", "COMPLETED", None
        case DoneWithErrors(errors):
            return "COMPLETED_WITH_ERRORS", "COMPLETED_WITH_ERRORS", errors[0] if errors else None
        case Retry(_, error):
            return "FAILED", "PENDING", error
        case Dead(error):
            return "FAILED", "FAILED", error
        case _:
            assert_never(told.outcome)


def _with(row: Held, *errors: AttemptError) -> str:
    """Return the delivery's errors with this attempt's among them: the latest word on each attempt."""
    earlier = [each for each in decode_errors(row.errors) if each.attempt != row.attempt]
    return encode_errors([*earlier, *(replace(error, attempt=row.attempt) for error in errors)])
