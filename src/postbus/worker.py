"""The worker: claim → handle → settle, each at its own pace, with bounded work in between."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from postbus import figures
from postbus.claiming import Claiming
from postbus.config import Settings
from postbus.errors import NotFound, StoreUnavailable, UnsafeStore
from postbus.execution import Execution, Report, Run, describe
from postbus.lanes import WATCH_EVERY, AsyncLane, ThreadLane
from postbus.loop import Loop, Signal
from postbus.model import Dead, Delivery, Lease
from postbus.observe import probe, tell
from postbus.store import is_file, is_log
from postbus.store.contract import Claimed, Queue, Settled, Settlement

__all__ = ["Worker"]

HOLD_SECONDS: Final = 0.5
MOST_HELD: Final = 1_000
CHUNK_SECONDS: Final = 0.001
MOST_CHUNK: Final = 64
STEPS: Final = 3
"""In how many claims a worker fills up: while handlers run what one brought, the next is under way."""
QUICK_SECONDS: Final = 0.05
SMOOTHING: Final = 0.2
SHORTEST_BEAT: Final = 0.05


class Worker:
    """Claims what this process has handlers for, runs it, and settles it. Started once, stopped once."""

    def __init__(
        self,
        store: Queue,
        settings: Settings,
        execution: Execution,
        owner: str,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Work for `owner` with the handlers of `execution`; coroutines run on `loop` if one is given."""
        self._store = store
        self._in_file = is_file(store.url)
        """Claims cost this process the time that its handlers need; elsewhere a server does the work."""
        self._settings = settings
        self._execution = execution
        self._worker_id = settings.worker_id or ""
        self._lease = timedelta(seconds=settings.lease)
        self._held: dict[Lease, Delivery] = {}
        self._reports: deque[Report] = deque()
        self._seconds = 0.0
        self._alone = False
        self._draining = False
        self._lasts = False
        """Whether the last claim met last attempts, or may have: of these none is claimed ahead of the handlers."""
        self._look_again_at = 0.0
        self._threads = ThreadLane(execution, settings.concurrency, self._take_report)
        self._async = AsyncLane(execution, settings.concurrency, self._take_report, self._go_on, loop)
        self.changed = Signal()
        self._turns = 0
        self._told_worn_out = False
        self._started = False
        self._returned: dict[tuple[int, str], int] = {}
        self._beat_every = settings.lease / 3
        self._watch = store.watch()
        self._claiming = Claiming(store, execution, self._worker_id, owner)
        self._looking = Loop("claim", self._claim_turn, self._watch)
        self.error: UnsafeStore | None = None
        """Why this worker cannot go on until somebody changes something; it still tries."""
        self._settling = Loop("settle", self._settle_turn)
        self._beating = Loop("heartbeat", self._heartbeat_turn)
        self._overdue = Loop("timeouts", self._timeout_turn)

    @property
    def _loops(self) -> tuple[Loop, ...]:
        return self._looking, self._settling, self._beating, self._overdue

    @property
    def held(self) -> int:
        """How many deliveries are leased to this worker."""
        return len(self._held)

    @property
    def worn_out(self) -> bool:
        """Whether so many handlers hang that this process should be replaced; it claims nothing more."""
        left_behind = sum(thread.is_alive() for thread in tuple(self._execution.left_behind))
        return len(self._threads.hung) + left_behind >= self._settings.concurrency

    def start(self) -> None:
        """Begin to work; a second call does nothing."""
        if not self._started:
            self._started = True
            for loop in self._loops:
                loop.start()

    def stop(self, timeout: float) -> bool:
        """Claim no more, hand back what has not begun, let the rest finish; return whether all of it did.

        Coroutines still running after `timeout` are cancelled, transactional handlers undone, and their leases given
        back. Other plain handlers cannot be: their leases end with this process.
        """
        deadline = time.monotonic() + timeout
        self._looking.stop(max(timeout, 1.0))
        self._take_back()
        done = self.changed.wait_for(lambda: not self._held, deadline - time.monotonic())
        if not done:
            self._threads.cancel()
            self._async.cancel()
            self._looking.stop(timeout=5)
            self._take_back()
            done = self.changed.wait_for(lambda: not self._held, 1.0)
        for loop in self._loops:
            loop.stop(timeout=5)
        try:
            self._settle_turn()
        finally:
            self._threads.stop()
            self._async.stop()
            self._watch.close()
        return done

    def _take_back(self) -> None:
        """Hand back what has not begun."""
        self._drop(self._threads.take_back() + self._async.take_back())

    def run_due(self) -> int:
        """Claim, run and settle in the calling thread, one delivery at a time, until nothing is due.

        Transactional handlers run in this very thread, so that their timeouts cannot be kept.
        """
        count = 0
        with asyncio.Runner() as runner:
            while found := self._next_due():
                run = self._execution.begin(found)
                report = runner.run(self._execution.run_async(run)) or self._execution.run(run, _undisturbed)
                if report is not None:
                    self._settle([report])
                self._forget(found.lease)
                count += 1
        return count

    def _next_due(self) -> Delivery | None:
        for name in self._execution.handlers.subscriptions():
            if found := self._claiming.claim(name, 1, alone=True).deliveries:
                return found[0]
        return None

    def wake(self) -> None:
        """Look for work now."""
        self._looking.wake()

    # ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _claim_turn(self) -> float:
        """Claim for each subscription in turn; return how long nothing more is expected."""
        self.changed.notify()
        names = self._execution.handlers.subscriptions()
        self._look_again(names)
        if not names or self._is_busy() or self._is_worn_out():
            return self._settings.poll_interval
        pause = self._settings.poll_interval
        self._draining = False
        self._turns += 1
        first = self._turns % len(names)
        for name in names[first:] + names[:first]:
            claimed = self._claim(name, max(1, self._room() // len(names)))
            if claimed.deliveries and claimed.more:
                pause = 0.0
            elif claimed.next_due is not None and (self._free() or not self._lasts):
                pause = min(pause, max((claimed.next_due - self._store.now()).total_seconds(), 0.001))
            if self._is_busy():
                break
        return pause

    def _look_again(self, names: Sequence[str]) -> None:
        """Drain no longer if the suspects have been taken by others: a claim of nothing tells whether one waits."""
        now = time.monotonic()
        if self._draining and self._held and now >= self._look_again_at and is_log(self._store):
            self._look_again_at = now + self._settings.poll_interval
            self._draining = False
            for name in names:
                self._claim(name, 0)

    def _is_worn_out(self) -> bool:
        if self.worn_out and not self._told_worn_out:
            tell(logging.ERROR, "worker_worn_out", hung_handlers=len(self._threads.hung))
        self._told_worn_out = self.worn_out
        return self.worn_out

    def _is_busy(self) -> bool:
        """Return whether to wait for settlements before claiming again.

        Claims come in large steps; a suspect runs alone, and one that waits is let in by claiming nothing else.
        """
        held = len(self._held)
        if held and (self._alone or self._draining):
            return True
        if self._lasts and not self._free():
            return True
        limit, concurrency = self._limit(), self._settings.concurrency
        # Handlers this quick keep Python's lock all the time: claiming beside them would only slow both down, unless
        # a server does the claiming.
        quick = self._in_file and self._seconds * limit < QUICK_SECONDS * concurrency
        wanted = limit - concurrency if quick else (limit - concurrency) // STEPS
        return held >= limit or (held >= concurrency and limit - held < wanted)

    def _free(self) -> int:
        """Return how many handlers have nothing to do."""
        return max(0, self._settings.concurrency - len(self._held))

    def _room(self) -> int:
        return self._limit() - len(self._held)

    def _limit(self) -> int:
        """Return how many deliveries to hold: what can be started within half a second, as handlers go now."""
        if self._settings.prefetch is not None:
            return self._settings.prefetch
        concurrency = self._settings.concurrency
        if not self._seconds:
            return 2 * concurrency
        most = MOST_HELD if self._in_file else STEPS * MOST_HELD
        return max(concurrency, min(most, int(concurrency * HOLD_SECONDS / self._seconds)))

    def _claim(self, subscription: str, limit: int) -> Claimed:
        free = self._free()
        try:
            claimed = self._claiming.claim(subscription, limit, alone=not self._held, free=free)
        except UnsafeStore as error:
            self.error = error
            raise
        except NotFound as error:
            tell(logging.WARNING, "subscription_gone", subscription=subscription, reason=str(error))
            return Claimed()
        if figures.listener is not None:
            for name, state in tuple(self._execution.breakers.items()):
                figures.listener.broken(name, state)
        self._draining |= claimed.suspects
        self._lasts = any(each.is_last for each in claimed.deliveries) or not (claimed.deliveries or free)
        self._dispatch(claimed.deliveries)
        return claimed

    def _dispatch(self, deliveries: Sequence[Delivery]) -> None:
        if not deliveries:
            return
        probe("claimed")
        first = deliveries[0]
        claimed_at = first.event.updated_at or first.lease_until
        self._beat_faster((first.lease_until - claimed_at).total_seconds() / 3)
        self._alone = deliveries[0].suspect
        self._held.update((delivery.lease, delivery) for delivery in deliveries)
        untaken = deliveries
        try:
            runs = [self._execution.begin(delivery) for delivery in deliveries]
            awaited = [run for run in runs if run.is_async]
            plain = [run for run in runs if not run.is_async] if awaited else runs
            if self._lasts and (lasts := [run for run in plain if run.delivery.is_last]):
                self._threads.submit(lasts, 1)  # there is a handler for each; in a chunk they would wait
                plain = [run for run in plain if not run.delivery.is_last]
                untaken = [run.delivery for run in (*plain, *awaited)]
            if plain:
                self._threads.submit(plain, self._chunk(len(plain)))
                untaken = [run.delivery for run in awaited]
            if awaited:
                self._async.submit(awaited)
        except Exception:
            self._drop(untaken)
            raise

    def _chunk(self, count: int) -> int:
        """Return how many short events to hand to a thread at once: handing over costs more than running them."""
        if not self._seconds:
            return 1
        share = -(-count // self._settings.concurrency)
        return max(1, min(share, MOST_CHUNK, int(CHUNK_SECONDS / self._seconds)))

    def _go_on(self, run: Run) -> None:
        self._threads.submit([run], 1)

    # ── settle ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_report(self, report: Report) -> None:
        self._reports.append(report)
        self._settling.wake()

    def _settle_turn(self) -> float:
        """Settle all that was reported since the last turn, in one transaction."""
        batch: list[Report] = []
        while self._reports and len(batch) < MOST_HELD:
            batch.append(self._reports.popleft())
        if not batch:
            return 1.0
        probe("settling")
        # From here on a lease is gone as soon as the commit is through: a heartbeat must not call it lost.
        self._execution.settled.update(each.delivery.lease for each in batch)
        try:
            self._settle_or_bury(batch)
        except BaseException:
            # Nothing was recorded, or it is not known: settling again is harmless, forgetting is not.
            self._reports.extendleft(reversed(batch))
            raise
        probe("settled")
        self._let_go(batch)
        return 0.0

    def _settle_or_bury(self, batch: list[Report]) -> None:
        """Settle a batch; an outcome that cannot be stored at all becomes a dead letter and holds up nobody.

        StoreUnavailable is no such outcome: it is raised, for the whole batch to be tried again.
        """
        try:
            self._settle(batch)
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  told, and recorded as what became of the delivery
            if len(batch) > 1:
                for report in batch:
                    self._settle_or_bury([report])
                return
            (report,) = batch
            tell(logging.ERROR, "settle_failed", error=error, event_id=report.delivery.id)
            if not isinstance(report.outcome, Dead):
                told = describe(error, report.delivery)
                self._settle_or_bury([report._replace(outcome=Dead(told))])

    def _settle(self, batch: list[Report]) -> None:
        told = [
            Settlement(each.delivery.lease, each.outcome, self._worker_id, execution_time_ms=each.execution_time_ms)
            for each in batch
            if each.outcome is not None and not isinstance(each.outcome, Settled)
        ]
        results = self._store.settle(told) if told else []
        if figures.listener is not None:
            for settlement, result in zip(told, results, strict=True):
                if result is not Settled.LOST:  # repeated: the first time, nobody heard that it was recorded
                    figures.listener.settled(settlement.lease.subscription, settlement.outcome)
        lost = [settlement.lease for settlement, result in zip(told, results, strict=True) if result is Settled.LOST]
        lost += [each.delivery.lease for each in batch if each.outcome is Settled.LOST]
        for lease in lost:
            tell(logging.WARNING, "lease_lost", **lease._asdict())
        self._give_back([each.delivery for each in batch if each.outcome is None])

    def _give_back(self, deliveries: list[Delivery]) -> None:
        """Hand back what was cancelled; a second time not at once, or it would keep the bus busy with nothing else."""
        again = [each for each in deliveries if self._returned.get(each.lease[:2]) == each.attempt]
        self._hand_back([each for each in deliveries if each not in again], timedelta(0))
        self._hand_back(again, timedelta(seconds=self._settings.poll_interval))
        if len(self._returned) > MOST_HELD:
            self._returned.clear()
        self._returned.update((each.lease[:2], each.attempt) for each in deliveries)

    def _let_go(self, batch: list[Report]) -> None:
        mean = sum(each.execution_time_ms for each in batch) / len(batch) / 1000
        self._seconds += (mean - self._seconds) * (SMOOTHING if self._seconds else 1)
        for each in batch:
            self._held.pop(each.delivery.lease, None)
            self._forget(each.delivery.lease)
        if not self._held:
            self._alone = False
        self.changed.notify()
        if not self._is_busy():
            self._looking.wake()

    def _forget(self, lease: Lease) -> None:
        self._execution.probes.discard(lease)
        self._execution.settled.discard(lease)

    def _drop(self, deliveries: Sequence[Delivery]) -> None:
        """Hand back what will not run; by the settling loop, for the store may be busy with a transaction, or away."""
        for delivery in deliveries:
            self._take_report(Report(delivery, None, 0.0))

    def _hand_back(self, deliveries: list[Delivery], delay: timedelta) -> None:
        if deliveries:
            self._store.release([delivery.lease for delivery in deliveries], self._worker_id, delay)

    # ── heartbeat, wake-up, timeouts ─────────────────────────────────────────────────────────────────────────────

    def _heartbeat_turn(self) -> float:
        """Extend all leases in one statement, every third of the shortest; remember those that are lost."""
        held = list(self._held)
        passed = self._store.extend(held, self._lease) if held else ()
        # In this order: a lease is let go before it is forgotten that it was settled.
        lost = {lease for lease in passed if lease not in self._execution.settled and lease in self._held}
        for lease in lost - self._execution.lost:
            tell(logging.WARNING, "lease_lost", **lease._asdict())
        self._execution.lost = lost
        return self._beat_every

    def _beat_faster(self, seconds: float) -> None:
        """Beat at least this often from now on: a subscription may have a shorter lease than the bus."""
        if max(seconds, SHORTEST_BEAT) < self._beat_every:
            self._beat_every = max(seconds, SHORTEST_BEAT)
            self._beating.wake()

    def _timeout_turn(self) -> float:
        self._threads.watch()
        return WATCH_EVERY


def _undisturbed(run: Run, *, calling: bool) -> bool:
    """Say that a run is the asking thread's own: nobody watches its time."""
    del run, calling
    return True
