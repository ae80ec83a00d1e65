"""What a worker asks the store for: what its handlers want, less what open breakers forbid, plus probes."""

from dataclasses import dataclass, replace
from datetime import timedelta

from postbus.breaker import Admission, Breaker, BreakerState
from postbus.execution import Execution
from postbus.handlers import Handler
from postbus.model import Delivery
from postbus.pattern import Interest
from postbus.store.contract import Claim, Claimed, Queue

__all__ = ["Claiming"]


@dataclass(frozen=True)
class Claiming:
    """Claims on behalf of one worker."""

    store: Queue
    execution: Execution
    worker_id: str
    owner: str

    def claim(self, subscription: str, limit: int, *, alone: bool, free: int | None = None) -> Claimed:
        """Claim up to `limit` deliveries of a subscription for this process's handlers; see `Claim`.

        A handler whose breaker is open gets nothing, and when it is time, one probe.
        """
        probes: list[Delivery] = []
        blocked: list[Interest] = []
        for handler in self.execution.handlers.all():
            if handler.subscription == subscription and handler.breaker is not None:
                admission = self._admission(handler, handler.breaker)
                if admission is not Admission.ALL:
                    blocked.append(handler.interest)
                if admission is Admission.PROBE:
                    probes += self._probe(handler, handler.breaker, alone=alone and not probes)
        if any(probe.suspect for probe in probes):
            return Claimed(tuple(probes))
        wanted = self.execution.handlers.interests(subscription)
        claimed = self._ask(subscription, wanted, tuple(blocked), limit, alone=alone and not probes, free=free)
        return replace(claimed, deliveries=(*probes, *claimed.deliveries)) if probes else claimed

    def _ask(
        self,
        subscription: str,
        interests: tuple[Interest, ...],
        blocked: tuple[Interest, ...],
        limit: int,
        *,
        alone: bool,
        free: int | None = None,
    ) -> Claimed:
        return self.store.claim(
            Claim(
                subscription=subscription,
                worker_id=self.worker_id,
                owner=self.owner,
                interests=interests,
                blocked=blocked,
                limit=limit,
                lease=self.execution.lease,
                policy=self.execution.policy,
                alone=alone,
                free=free,
                shared=not any(
                    each.transactional for each in self.execution.handlers.all() if each.subscription == subscription
                ),
            )
        )

    def _admission(self, handler: Handler, breaker: Breaker) -> Admission:
        state = self.store.breaker(handler.breaker_name)
        self.execution.breakers[handler.breaker_name] = state
        return breaker.admit(state, self.store.now())

    def _probe(self, handler: Handler, breaker: Breaker, *, alone: bool) -> tuple[Delivery, ...]:
        """Claim one event past an open breaker, unless another worker is doing so.

        The event first, then the right to try it: the other way round, a worker with nothing to try would take that
        right and give it back for ever, woken each time by its own write.
        """
        found = self._ask(handler.subscription, (handler.interest,), (), 1, alone=alone).deliveries
        if not found:
            return ()
        leases, won = [delivery.lease for delivery in found], False
        try:
            won = self._may_probe(handler, breaker)
        finally:
            if not won:
                self.store.release(leases, self.worker_id)
        if not won:
            return ()
        self.execution.probes.update(leases)
        return found

    def _may_probe(self, handler: Handler, breaker: Breaker) -> bool:
        """Make the breaker half-open; return whether it was this worker that did."""
        won: list[BreakerState] = []

        def send(state: BreakerState) -> BreakerState | None:
            now = self.store.now()
            won.clear()
            if breaker.admit(state, now) is not Admission.PROBE:
                return None
            won.append(breaker.probing(state, now + max(self.execution.lease, timedelta(seconds=1))))
            return won[0]

        self.store.change_breaker(handler.breaker_name, send)
        return bool(won)
