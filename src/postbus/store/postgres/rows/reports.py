"""What a worker reports that knows neither its epoch nor the policy: whose lease it means, and what follows."""

import random
from collections.abc import Sequence
from dataclasses import replace

from postbus.clock import from_micros
from postbus.errors import LeaseLost, NotFound
from postbus.model import Action, Dead, Done, DoneWithErrors, Lease, LogEntry, Outcome, Retry, State, Status
from postbus.retry import RetryPolicy
from postbus.store.contract import Report, Reported, Settlement
from postbus.store.postgres.rows.leases import CHUNK, Finished, Leases, ending, retries
from postbus.store.postgres.rows.session import Session
from postbus.store.records import Held, log_from_row

__all__ = ["Reports", "success"]


def success(report: Report) -> Settlement | None:
    """Return what a report settles that names its lease, and tells of nothing but success."""
    if report.epoch is None or report.failed or report.errors:
        return None
    lease = Lease(report.event_id, report.subscription, report.epoch)
    return Settlement(lease, Done(), report.worker_id, report.status_code, report.execution_time_ms)


class Reports:
    """Reports on one transaction's connection, at one moment."""

    def __init__(self, session: Session, leases: Leases) -> None:
        """Work inside a write transaction, through its lease verbs."""
        self._db, self._catalog, self._now = session
        self._leases = leases

    def report(self, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
        """Return what became of each; see the contract."""
        answers: list[Reported | LeaseLost | NotFound] = []
        waiting = list(reports)
        while waiting:
            # Of several on one delivery each must see what the one before it did.
            seen: set[tuple[int, str]] = set()
            count = 0
            for each in waiting[:CHUNK]:
                if (each.event_id, each.subscription) in seen:
                    break
                seen.add((each.event_id, each.subscription))
                count += 1
            answers += self._report_apart(waiting[:count])
            waiting = waiting[count:]
        return answers

    def _report_apart(self, reports: Sequence[Report]) -> list[Reported | LeaseLost | NotFound]:
        """Do so for reports of which no two are on one delivery."""
        meant = [self._lease(each) for each in reports]
        leases = [each for each in meant if each is not None]
        held = self._leases.held(leases) if leases else {}
        answers: list[Reported | LeaseLost | NotFound] = []
        settlements: list[Settlement] = []
        for each, lease in zip(reports, meant, strict=True):
            row = None if lease is None else held.get(lease)
            if row is None or lease is None:
                answers.append(self._recall(each, lease))
                continue
            outcome, policy = self._outcome(each, row)
            told = Settlement(lease, outcome, each.worker_id, each.status_code, each.execution_time_ms)
            settlements.append(told)
            answers.append(self._reported(told, row, policy))
        self._leases.settle_held(settlements, held)
        return answers

    def _lease(self, report: Report) -> Lease | None:
        """Return the lease that is meant: without an epoch, the last one that this worker had on the event."""
        epoch = report.epoch
        if epoch is None:
            picked = [
                each
                for each in self._entries(report)
                if each.action is Action.PICKED and each.worker_id == report.worker_id
            ]
            epoch = picked[-1].epoch if picked else None
        return None if epoch is None else Lease(report.event_id, report.subscription, epoch)

    def _entries(self, report: Report) -> list[LogEntry]:
        rows = self._db.run("log_of", (report.event_id,))
        return [each for each in map(log_from_row, rows) if each.subscription == report.subscription]

    def succeeded(self, report: Report, told: Settlement, row: Finished) -> Reported:
        """Return what the settlement of a success has recorded."""
        return self._reported(told, row, self._policy(report, row))

    def _policy(self, report: Report, row: Held | Finished | None) -> RetryPolicy:
        policy = self._catalog.subscription(report.subscription).retry or report.policy
        own = row.max_retries if row is not None else None
        most = report.max_retries if own is None else own
        return policy if most is None else replace(policy, max_retries=most)

    def _outcome(self, report: Report, row: Held) -> tuple[Outcome, RetryPolicy]:
        policy = self._policy(report, row)
        if not report.failed:
            return (DoneWithErrors(report.errors) if report.errors else Done()), policy
        (error,) = report.errors
        if report.final or row.attempt > policy.max_retries:
            return Dead(error), policy
        chance = random.Random()  # noqa: S311  jitter needs no secrecy
        delay = policy.delay(row.attempt + 1, chance) if report.delay is None else report.delay
        return Retry(delay, error), policy

    def _reported(self, told: Settlement, row: Held | Finished, policy: RetryPolicy) -> Reported:
        action, status, error = ending(told)
        now = from_micros(self._now)
        entry = LogEntry(
            0,
            told.lease.event_id,
            told.lease.subscription,
            Action(action),
            now,
            Status(status),
            row.attempt,
            told.lease.epoch,
            told.worker_id,
            told.status_code,
            error.type if error else None,
            error.message if error else None,
            told.execution_time_ms,
        )
        tries = retries(row, told.outcome) if isinstance(row, Held) else row.retry_count
        due = now + told.outcome.after if isinstance(told.outcome, Retry) else None
        return Reported(entry, tries, policy.max_retries, due)

    def _recall(self, report: Report, lease: Lease | None) -> Reported | LeaseLost | NotFound:
        """Return what the very same report had recorded before, or why it comes too late."""
        entries = self._entries(report)
        if not entries and not self._db.run("event", (report.event_id,)):
            return NotFound(f"there is no event {report.event_id}")
        same = {Action.FAILED} if report.failed else {Action.COMPLETED, Action.COMPLETED_WITH_ERRORS}
        recorded = [each for each in entries if lease is not None and each.epoch == lease.epoch and each.action in same]
        if not recorded:
            return LeaseLost(
                f"{report.worker_id} holds no lease on event {report.event_id} in {report.subscription!r}: "
                "another claim, a reset or another outcome came first, or it never had one"
            )
        rows = self._db.run("delivery", (report.event_id, report.subscription))
        row = Held._make(rows[0]) if rows else None
        retrying = row is not None and row.state == State.PENDING and recorded[-1].status is Status.PENDING
        due = from_micros(row.due_at) if row is not None and retrying and row.due_at is not None else None
        tries = row.retry_count if row is not None else (recorded[-1].attempt or 1) - 1
        return Reported(recorded[-1], tries, self._policy(report, row).max_retries, due, repeated=True)
