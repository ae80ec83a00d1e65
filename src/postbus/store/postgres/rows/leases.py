"""The verbs that change a delivery: claim, settle, extend, release, reset, expire. Each runs inside a transaction."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from heapq import merge
from itertools import islice, takewhile
from typing import Final, NamedTuple, assert_never

import orjson

from postbus.clock import from_micros
from postbus.errors import Conflict, LeaseLost, NotFound, UnsafeStore
from postbus.model import Action, AttemptError, Dead, Done, DoneWithErrors, Lease, Outcome, Retry, State, Status
from postbus.retry import RetryPolicy
from postbus.store.contract import Claim, Settled, Settlement
from postbus.store.postgres.rows.routes import Selection
from postbus.store.postgres.rows.session import Session
from postbus.store.records import Held, decode_errors, encode_errors, json_array
from postbus.store.session import Row

__all__ = ["CHUNK", "Candidate", "Finished", "Leases", "Share", "Taken", "ending", "retries"]

EXACT_ROUTES: Final = 64
ROTATING_ROUTES: Final = 32
CHUNK: Final = 1_000
LOWEST: Final = -(1 << 63)
_MICROS: Final = timedelta(microseconds=1)

Candidate = Row
"""What a claim looks at: due_at, event_id, state, attempt, retry_count. Sorts as it is due."""


class Taken(NamedTuple):
    """What a claim took."""

    event_id: int
    attempt: int
    retry_count: int
    epoch: int
    until: int
    suspect: bool

    def lease(self, subscription: str) -> Lease:
        """Return the lease that was given."""
        return Lease(self.event_id, subscription, self.epoch)


class Finished(NamedTuple):
    """A delivery that is no more, because its work is done: as it last was."""

    attempt: int
    retry_count: int
    max_retries: int | None


class Share(NamedTuple):
    """What one of several claims gets, and until when."""

    claim: Claim
    end: int
    rows: list[Candidate]


class Leases:
    """The lease verbs on one transaction's connection, at one moment."""

    def __init__(self, session: Session) -> None:
        """Work inside a write transaction."""
        self._db, self._catalog, self._now = session
        self._met_expired = False
        self._writes: defaultdict[str, list[Row]] = defaultdict(list)
        self._epochs: Iterator[int] = iter(())
        self._variants: dict[tuple[int, bool], int] = {}

    # ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim) -> tuple[list[Taken], bool]:
        """Lease what the claim may have; also return whether a suspect waits for somebody who holds nothing."""
        subscription = self._catalog.subscription(claim.subscription)
        if subscription.paused:
            return [], False
        end = self._now + (subscription.lease or claim.lease) // _MICROS
        suspects = self._find(claim, 1, solo=True)
        if suspects and claim.alone:
            return self._take(suspects, claim, end, suspect=True), False
        found = self._find(claim, claim.limit, solo=False)
        if self._met_expired and claim.alone:
            suspects = self._find(claim, 1, solo=True)
            if suspects:
                return self._take(suspects, claim, end, suspect=True), False
        return self._take(found, claim, end), bool(suspects) or self._met_expired

    def claim_each(self, claims: Sequence[Claim]) -> list[tuple[list[Taken], bool]]:
        """Claim for several workers that may all have the same, in their order; what they get is looked for once."""
        first, *others = claims
        if not others or self._catalog.subscription(first.subscription).paused or self._find(first, 1, solo=True):
            return [self.claim(each) for each in claims]
        found = iter(self._find(first, sum(each.limit for each in claims), solo=False))
        if self._met_expired:
            return [self.claim(each) for each in claims]
        own = self._catalog.subscription(first.subscription).lease
        shares = [
            Share(each, self._now + (own or each.lease) // _MICROS, list(islice(found, each.limit))) for each in claims
        ]
        return [(taken, False) for taken in self._take_all(shares)]

    def _find(self, claim: Claim, limit: int, *, solo: bool) -> list[Candidate]:
        """Return up to `limit` claimable rows, highest priority first, ending the expired leases it meets."""
        selection = self._catalog.select(claim.subscription, claim.interests, claim.blocked)
        groups = selection.solo if solo else selection.normal
        found: list[Candidate] = []
        for priority in sorted(groups, reverse=True):
            while len(found) < limit:
                rows = self._probe(groups[priority], selection, priority, limit - len(found))
                expired = [row for row in rows if row[2] == State.LEASED]
                if not expired:
                    found += rows
                    break
                self._met_expired = True
                self._expire_all([self._row(row[1], claim.subscription) for row in expired], claim.policy)
        return found

    def _probe(self, routes: dict[int, None], selection: Selection, priority: int, limit: int) -> list[Candidate]:
        if len(routes) <= EXACT_ROUTES:
            return self._merged(list(routes), limit)
        found: list[Candidate] = []
        turn = self._turn(routes, selection.turns.get(priority, LOWEST))
        while len(found) < limit and (chosen := list(islice(turn, ROTATING_ROUTES))):
            found += self._merged(chosen, limit - len(found))
            selection.turns[priority] = chosen[-1]
        return found

    def _merged(self, routes: list[int], limit: int) -> list[Candidate]:
        step = -(-2 * limit // len(routes)) if len(routes) > 1 else limit
        return list(islice(merge(*(self._due(route, step) for route in routes)), limit))

    def _due(self, route: int, step: int) -> Iterator[Candidate]:
        """Go through what is due on a route in order, fetched `step` rows at a time, as far as the caller goes."""
        due_at = event_id = LOWEST
        while True:
            given = (route, self._now, due_at, event_id, step)
            rows = self._db.run("due_one", given) if step == 1 else self._db.rows("due", given)
            yield from rows
            if len(rows) < step:
                return
            due_at, event_id, *_ = rows[-1]

    def _turn(self, routes: dict[int, None], start: int) -> Iterator[int]:
        """Go once round the routes that hold something due, from where the last claim stopped: each gets its turn."""
        yield from self._present(routes, start)
        if start > LOWEST:
            yield from takewhile(lambda route: route <= start, self._present(routes, LOWEST))

    def _present(self, routes: dict[int, None], after: int) -> Iterator[int]:
        return (row[0] for row in self._db.iterate("routes_with_due", (after, self._now)) if row[0] in routes)

    def _take(self, rows: list[Candidate], claim: Claim, end: int, *, suspect: bool = False) -> list[Taken]:
        return self._take_all([Share(claim, end, rows)], suspect=suspect)[0]

    def _take_all(self, shares: list[Share], *, suspect: bool = False) -> list[list[Taken]]:
        """Lease to each of some claims on one subscription its share."""
        epochs = iter(self._lease_all([share for share in shares if share.rows]))
        return [
            [Taken(row[1], row[3] + 1, row[4], next(epochs), share.end, suspect) for row in share.rows]
            for share in shares
        ]

    def _lease_all(self, shares: list[Share]) -> Sequence[int]:
        """Write the leases and their audit rows; return the epochs, which rise in the order given."""
        taken = [row[1] for share in shares for row in share.rows]
        if not taken:
            return ()
        subscription = shares[0].claim.subscription
        first = epoch = self._draw(len(taken))
        if len(taken) == len(shares):
            self._lease_singly(shares, first)
            return range(first, first + len(taken))
        leases: list[Row] = []
        for claim, end, rows in shares:
            ids = json_array(row[1] for row in rows)
            leases.append((ids, subscription, end, epoch, self._now, claim.worker_id, claim.owner))
            epoch += len(rows)
        self._db.many("lease", leases)
        self._db.run("log_picked", (json_array(taken), subscription))
        return range(first, epoch)

    def _lease_singly(self, shares: list[Share], first: int) -> None:
        """Do so for claims that get one each: several times as fast as an array of one."""
        now = self._now
        for epoch, (claim, end, ((_, event_id, _, attempt, *_),)) in enumerate(shares, first):
            name, worker = claim.subscription, claim.worker_id
            self._put("lease_one", (end, epoch, now, worker, claim.owner, event_id, name))
            self._put("log", (event_id, name, "PICKED", now, "PROCESSING", attempt + 1, epoch, worker, *_NOTHING))
        self._flush()

    def _draw(self, count: int = 1) -> int:
        """Return the first of `count` epochs that nobody has had before."""
        return self._db.value("draw_epochs", (count,)) - count + 1

    def _epoch(self) -> int:
        """Return an epoch nobody has had, of those drawn together if there are any left."""
        return next(self._epochs, None) or self._draw()

    def _variant(self, route: int, *, solo: bool) -> int:
        """Return the route for the same events run alone, or run beside others again."""
        found = self._variants.get((route, solo))
        if found is None:
            found = self._variants[route, solo] = self._catalog.variant(self._db, route, solo=solo)
        return found

    def _put(self, name: str, row: Row) -> None:
        """Have a statement run with this row at the next `_flush`, together with all others like it."""
        self._writes[name].append(row)

    def _flush(self) -> None:
        writes, self._writes = self._writes, defaultdict(list)
        for name, rows in writes.items():
            self._db.many(name, rows)

    # ── settle ───────────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Record outcomes; see the contract."""
        if len({each.lease for each in settlements}) < len(settlements):
            return [result for each in settlements for result in self._settle_singly([each])]
        finished = self._finish_all([each for each in settlements if isinstance(each.outcome, Done)])
        rest = [each for each in settlements if each.lease not in finished]
        told = dict(zip((each.lease for each in rest), self._settle_singly(rest), strict=True)) if rest else {}
        return [told.get(each.lease, Settled.APPLIED) for each in settlements]

    def _finish_all(self, done: list[Settlement]) -> set[Lease]:
        """Finish what simply worked, as far as that goes by the batch; return those whose epoch still stood."""
        batches: dict[tuple[str, str], list[Settlement]] = {}
        for each in done:
            if each.execution_time_ms is not None and each.status_code is None:
                batches.setdefault((each.lease.subscription, each.worker_id), []).append(each)
        return {lease for key, batch in batches.items() for lease in self._finish_batch(batch, *key)}

    def _finish_batch(self, batch: list[Settlement], subscription: str, worker_id: str) -> list[Lease]:
        """Do so in three statements whatever the number."""
        asked = json_array(each.lease.event_id for each in batch)
        standing: dict[int, int] = dict(self._db.rows("epochs", (asked, subscription)))
        held = [each for each in batch if standing.get(each.lease.event_id) == each.lease.epoch]
        if held:
            told = orjson.dumps([f"{each.lease.event_id} {each.execution_time_ms}" for each in held]).decode()
            if self._db.count("log_completed", (told, subscription, worker_id, self._now)) != len(held):
                raise UnsafeStore("a delivery is filed under a route that is not registered")
            self._db.run("finish_all", (json_array(each.lease.event_id for each in held), subscription))
        return [each.lease for each in held]

    def _end_row(self, told: Settlement, row: Held, errors: str | None) -> Row:
        action, status, error = ending(told)
        route = self._catalog.route(self._db, row.route)
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
            row.retry_count,
            errors,
        )

    def _settle_singly(self, settlements: Sequence[Settlement]) -> list[Settled]:
        """Settle what needs a thought each: the rows are read together, and what becomes of them written together."""
        results: list[Settled] = []
        for start in range(0, len(settlements), CHUNK):
            chunk = settlements[start : start + CHUNK]
            results += self.settle_held(chunk, self.held([each.lease for each in chunk]))
        return results

    def settle_held(self, settlements: Sequence[Settlement], held: dict[Lease, Held]) -> list[Settled]:
        """Settle what the caller knows to be held, of this very transaction; no two of them are on one lease."""
        drawn = sum(isinstance(each.outcome, Retry | Dead) for each in settlements if each.lease in held)
        if drawn:
            first = self._draw(drawn)
            self._epochs = iter(range(first, first + drawn))
        results = [self._settle_one(each, held.get(each.lease)) for each in settlements]
        self._flush()
        return results

    def _settle_one(self, told: Settlement, row: Held | None) -> Settled:
        if row is None:
            return self._repeated(told)
        match told.outcome:
            case Retry(after, error):
                self._fail(row, told, error, due=self._now + after // _MICROS)
            case Dead(error):
                self._bury(row, told, error)
            case Done():
                self._finish(row, told, row.errors)
            case DoneWithErrors(errors):
                self._finish(row, told, self._with(row, *errors))
            case _:
                assert_never(told.outcome)
        return Settled.APPLIED

    def _finish(self, row: Held, told: Settlement, errors: str | None) -> None:
        self._put("log_end", self._end_row(told, row, errors))
        self._put("finish", (row.event_id, row.subscription, row.epoch))

    def _with(self, row: Held, *errors: AttemptError) -> str:
        """Return the delivery's errors with this attempt's among them: the latest word on each attempt."""
        earlier = [each for each in decode_errors(row.errors) if each.attempt != row.attempt]
        now = from_micros(self._now)
        return encode_errors([*earlier, *(replace(error, attempt=row.attempt, at=error.at or now) for error in errors)])

    def _repeated(self, told: Settlement) -> Settled:
        recorded = self._db.run("recorded", tuple(told.lease))
        return Settled.REPEATED if ending(told)[:2] in recorded else Settled.LOST

    def _row(self, event_id: int, subscription: str) -> Held:
        return Held._make(self._db.run("delivery", (event_id, subscription))[0])

    def held(self, leases: Sequence[Lease]) -> dict[Lease, Held]:
        """Return what the fence lets through."""
        held = map(Held._make, self._db.many("held", leases))
        return {Lease(row.event_id, row.subscription, row.epoch): row for row in held}

    def _fail(self, row: Held, told: Settlement, error: AttemptError, due: int) -> None:
        """Make it pending again."""
        route = self._variant(row.route, solo=False)
        self._put(
            "end_attempt",
            (route, due, due, self._now, self._epoch(), retries(row, told.outcome), self._with(row, error),
             row.event_id, row.subscription, row.epoch),
        )  # fmt: skip
        self._log(row, Action.FAILED, Status.PENDING, told.worker_id, error=error, told=told)

    def _bury(self, row: Held, told: Settlement, error: AttemptError) -> None:
        """Make it a dead letter, with the row in the audit log that tells its whole story."""
        route = self._variant(row.route, solo=False)
        errors = self._with(row, error)
        self._put(
            "bury",
            (
                route,
                self._now,
                self._epoch(),
                row.retry_count,
                errors,
                self._now,
                row.event_id,
                row.subscription,
                row.epoch,
            ),
        )
        self._put("log_end", self._end_row(told, row, errors))

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
        self._put(
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

    def _lease_of(self, name: str, default: timedelta) -> int:
        own = next((each.lease for each in self._catalog.subscriptions() if each.name == name), None)
        return (own or default) // _MICROS

    def release(self, leases: Sequence[Lease], worker_id: str, delay: timedelta) -> int:
        """Hand deliveries back, the attempt given back."""
        if not leases:
            return 0
        leases = sorted(leases)  # so that two never wait crosswise
        first = self._draw(len(leases))
        now, due = self._now, self._now + delay // _MICROS
        rows = self._db.many(
            "release",
            [
                (due, due, now, epoch, lease.event_id, lease.subscription, lease.epoch)
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
        row = self.held([lease]).get(lease)
        if row is None:
            raise LeaseLost(f"the lease on event {lease.event_id} in {lease.subscription!r} has passed to another")
        self._log(row, Action.STARTED, Status.PROCESSING, worker_id)
        self._flush()

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
        self._flush()

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
        for row in rows:
            allowed = self._allowed(row, policy)
            error = self._silence(row)
            if row.attempt >= allowed:
                lease = Lease(row.event_id, row.subscription, row.epoch)
                self._bury(row, Settlement(lease, Dead(error), row.worker_id or ""), error)
                continue
            route = self._variant(row.route, solo=True)
            # The epoch stays: until somebody claims it anew, the worker thought lost may still complete it.
            self._put(
                "end_attempt",
                (route, self._now, self._now, self._now, row.epoch, row.retry_count + 1, self._with(row, error),
                 row.event_id, row.subscription, row.epoch),
            )  # fmt: skip
            self._log(row, Action.EXPIRED, Status.PENDING, row.worker_id, error=error)
        self._flush()

    def _allowed(self, row: Held, policy: RetryPolicy) -> int:
        if row.max_retries is not None:
            return row.max_retries + 1
        return (self._catalog.subscription(row.subscription).retry or policy).attempts

    def _silence(self, row: Held) -> AttemptError:
        message = f"worker {row.worker_id} was lost, or its lease ran out, before it reported an outcome"
        return AttemptError("LeaseExpired", message, row.attempt, row.worker_id, from_micros(self._now))


_NOTHING: Final = (None, None, None, None)


def retries(row: Held, outcome: Outcome) -> int:
    """Return how often an event was, or is about to be, tried again once an attempt has ended so: not after the last.

    An attempt that had expired was counted then.
    """
    return row.retry_count + (isinstance(outcome, Retry) and row.state == State.LEASED)


def ending(told: Settlement) -> tuple[str, str, AttemptError | None]:
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
