"""Random histories: a real store and a dict live the same life, and must agree after every step."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from postbus.errors import Conflict, InvalidEventError
from postbus.model import Dead, DoneWithErrors, Lease, Outcome, Retry, Status
from postbus.retry import RetryPolicy
from postbus.store.contract import DeadFilter, Settlement
from tests.contract.stores import DONE, OOPS, Operator, replay, site_of
from tests.kinds import KINDS
from tests.machine.model import QUEUES, Key, Model

POLICY = RetryPolicy(max_retries=QUEUES["default"].max_retries)
TYPES = st.sampled_from(["a.x", "a.y", "b"])
NAMES = st.sampled_from(sorted(QUEUES))
RETRIES = st.builds(Retry, st.sampled_from([0, 5, 60]).map(lambda seconds: timedelta(seconds=seconds)), st.just(OOPS))
OUTCOMES = st.one_of(st.just(DONE), st.just(DoneWithErrors((OOPS,))), RETRIES, st.just(Dead(OOPS)))
TIMES = st.sampled_from([None, 0.0, 12.5])
UNFINISHED = (Status.PENDING, Status.PROCESSING)


class BusMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, the store agrees with the model (I3, I7, I8, I9, I10, I12, I13)."""

    kind = "sqlite"
    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        """Open an empty store of this kind."""
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="postbus-machine-")
        self.site = site_of(self.kind, Path(self.folder.name))
        self.model = Model(self.site.clock.now(), leaves_rows=self.kind == "postgres")
        self.uids: dict[str, tuple[int, str]] = {}
        self.op = Operator(self.site.open(), self.site.clock)
        self.other = Operator(self.site.open(), self.site.clock)

    def teardown(self) -> None:
        """Close it."""
        self.site.close()
        self.folder.cleanup()

    # ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────

    @initialize(target=leases, kinds=st.lists(TYPES, min_size=1, max_size=3), limit=st.integers(1, 3))
    def begin(self, kinds: list[str], limit: int) -> Any:
        """Have two queues, one with terms of its own, some events, and some of them leased."""
        queue = QUEUES["narrow"]
        retry = RetryPolicy(max_retries=queue.max_retries)
        self.op.subscription("narrow", [queue.pattern], lease=queue.lease, retry=retry)
        for kind in kinds:
            self.publish(kind, 0, 0, None, supplied=False)
        return self.claim("default", limit, alone=True)

    @rule(
        kind=TYPES,
        priority=st.sampled_from([0, 0, 5, -5]),
        delay=st.sampled_from([0, 0, 0, 30]),
        max_retries=st.sampled_from([None, None, 0, 1]),
        supplied=st.booleans(),
    )
    def publish(self, kind: str, priority: int, delay: int, max_retries: int | None, *, supplied: bool) -> None:
        """Have a new event pending wherever it is wanted (S0.1)."""
        uid = f"u{len(self.model.items)}" if supplied else None
        event = self.op.publish(kind, priority=priority, delay=delay, max_retries=max_retries, uid=uid)
        self.model.publish(event.id, kind, priority, delay, max_retries)
        if uid is not None:
            self.uids[uid] = (event.id, kind)

    @precondition(lambda self: self.uids)
    @rule(data=st.data(), other=st.booleans())
    def publish_again(self, data: st.DataObject, *, other: bool) -> None:
        """Get the first event for a known uid, or a refusal if the body differs; nothing changes (I3)."""
        uid = data.draw(st.sampled_from(sorted(self.uids)))
        event_id, kind = self.uids[uid]
        if not other:
            assert self.op.publish(kind, uid=uid).id == event_id
            return
        with pytest.raises(InvalidEventError):
            self.op.publish(kind, uid=uid, payload="another body")

    @rule(target=leases, name=NAMES, limit=st.integers(1, 4), alone=st.booleans())
    def claim(self, name: str, limit: int, *, alone: bool) -> Any:
        """With no lease lapsed, a claim is determined: who, how many and in which order (S0.2, I7)."""
        for key in self._upkeep():
            self.model.expire(key)
        expected = self.model.claimable(name, alone=alone, limit=limit)
        taken = self.op.claim(limit, name, policy=POLICY, alone=alone)
        assert [(delivery.id, name) for delivery in taken] == expected
        self.model.look(name, expected, limit, alone=alone)
        return self._took([delivery.lease for delivery in taken])

    @precondition(lambda self: self.model.lapsed())
    @rule(target=leases, name=NAMES, limit=st.integers(1, 4), alone=st.booleans())
    def claim_past_lapsed_leases(self, name: str, limit: int, *, alone: bool) -> Any:
        """Lapsed leases are ended once, nothing comes twice, and something comes (I7, I10, I12).

        A claim ends them if it finds nothing else.
        """
        lapsed = self.model.lapsed()
        taken = self.op.claim(limit, name, policy=POLICY, alone=alone)
        keys = [(delivery.id, name) for delivery in taken]
        assert len(set(keys)) == len(keys) <= limit
        self.model.look(name, keys, limit, alone=alone)
        for key in lapsed:
            if self._stand(key) != (Status.PROCESSING, self.model.items[key].attempt) or key in keys:
                self.model.expire(key)
        may = self.model.claimable(name, alone=False, limit=100) + self.model.claimable(name, alone=alone, limit=1)
        assert set(keys) <= set(may)
        assert keys or not may
        return self._took([delivery.lease for delivery in taken])

    @rule()
    def upkeep(self) -> None:
        """Upkeep ends every lapsed lease and no other (I10)."""
        for key in self._upkeep():
            self.model.expire(key)

    @rule(lease=leases)
    def extend(self, lease: Lease) -> None:
        """Only a lease that stands can be extended (I8)."""
        ours = QUEUES[lease.subscription].lease
        stands = self.model.is_leased(lease)
        assert self.op.store.extend([lease], ours) == (set() if stands else {lease})
        if stands:
            self.model.items[lease.event_id, lease.subscription].due = self.model.now + ours

    @rule(lease=leases, outcome=OUTCOMES, took=TIMES)
    def settle(self, lease: Lease, outcome: Outcome, took: float | None) -> None:
        """Present, stale and settled epochs alike get the answer the model gives (I8, I9)."""
        (answer,) = self.op.store.settle([Settlement(lease, outcome, "w", execution_time_ms=took)])
        assert answer in self.model.settle(lease, outcome)

    @rule(batch=st.lists(st.tuples(leases, OUTCOMES, TIMES), min_size=2, max_size=5))
    def settle_together(self, batch: list[tuple[Lease, Outcome, float | None]]) -> None:
        """Several at once are settled in order, each for itself (I8, I9)."""
        told = [Settlement(lease, outcome, "w", execution_time_ms=took) for lease, outcome, took in batch]
        answers = self.op.store.settle(told)
        for (lease, outcome, _), answer in zip(batch, answers, strict=True):
            assert answer in self.model.settle(lease, outcome)

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        """Only a lease that stands can be handed back (I8)."""
        assert self.op.store.release([lease], "w") == self.model.release(lease)

    @precondition(lambda self: self.model.items)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        """Make what is unfinished due again; what has ended is a conflict (I9)."""
        key = data.draw(st.sampled_from(sorted(self.model.items)))
        if self.model.items[key].status in UNFINISHED:
            self.op.store.reset(*key, "because", "admin")
            self.model.reset(key)
            return
        with pytest.raises(Conflict):
            self.op.store.reset(*key, "because", "admin")

    @precondition(lambda self: self.model.items)
    @rule(data=st.data(), purge=st.booleans())
    def bury_or_revive(self, data: st.DataObject, *, purge: bool) -> None:
        """Dead letters can be retried or purged, and nothing else can (S1.12)."""
        key = data.draw(st.sampled_from(sorted(self.model.items)))
        item, which = self.model.items[key], DeadFilter(event_id=key[0], subscription=key[1])
        is_dead = item.status is Status.FAILED and key in self._dead()
        change = self.op.store.purge_dead if purge else self.op.store.retry_dead
        assert change(which, "admin") == is_dead
        if is_dead and purge:
            item.rows += 1
        elif is_dead:
            self.model.revive(key)

    @rule(seconds=st.sampled_from([1, 5, 30, 60, 3600]))
    def time_passes(self, seconds: int) -> None:
        """Move the one clock on (S2.2)."""
        self.site.clock.advance(seconds)
        self.model.now = self.site.clock.now()

    @rule()
    def change_process(self) -> None:
        """Go on through another store on the same place, which must have seen everything."""
        self.op, self.other = self.other, self.op

    @rule()
    def tidy(self) -> None:
        """Tidy up: nothing that lives is touched."""
        self.op.store.tidy()

    @rule()
    def restart(self) -> None:
        """All is there after closing and opening (I1)."""
        self.op.store.close()
        self.op = Operator(self.site.open(), self.site.clock)

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def stands_as_the_model_says(self) -> None:
        """Status, attempts, retries and the number of audit rows agree; attempts are never too many (I12, I13)."""
        for event_id in {key[0] for key in self.model.items}:
            told = {each.subscription: each for each in self.op.get(event_id).deliveries}
            rows = self.op.logs(event_id)
            replayed = replay(rows)
            for name in QUEUES:
                item = self.model.items.get((event_id, name))
                assert (item is None) == (name not in told)
                if item is None:
                    continue
                stand = told[name]
                assert (stand.status, stand.attempt) == (item.status, item.attempt)
                assert stand.retry_count == item.retry_count or item.status not in {*UNFINISHED, Status.FAILED}
                assert sum(row.subscription == name for row in rows) == item.rows
                assert item.attempt <= item.allowed + item.granted
                if name in replayed:
                    assert (replayed[name].status, replayed[name].attempt) == (item.status, item.attempt)

    @invariant()
    def lists_agree(self) -> None:
        """List each dead letter once, and nothing else."""
        dead = {key for key, item in self.model.items.items() if item.status is Status.FAILED}
        assert set(self._dead()) <= dead

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _upkeep(self) -> list[Key]:
        lapsed = self.model.lapsed()
        assert self.op.store.expire(None, POLICY) == len(lapsed)
        return lapsed

    def _took(self, leases: list[Lease]) -> Any:
        for lease in sorted(leases, key=lambda each: each.epoch):
            self.model.take(lease)
        return multiple(*leases)

    def _stand(self, key: Key) -> tuple[Status, int]:
        stand = self.op.stand(*key)
        return stand.status, stand.attempt

    def _dead(self) -> list[Key]:
        keys = [(letter.event.id, letter.subscription) for letter in self.op.dead(limit=1000)]
        assert len(set(keys)) == len(keys)
        return keys


def machine_of(kind: str) -> type[BusMachine]:
    """Return the machine that runs on a kind of store."""
    return type(f"{kind.title()}Machine", (BusMachine,), {"kind": kind})


def run(kind: str, examples: int, steps: int) -> None:
    """Run that many histories of that length."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine_of(kind),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks
        ),
    )


@pytest.mark.timeout(600)  # only a failure takes long: it is shrunk to the shortest history
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_agree_with_the_model(kind: str):
    """Publish, claim, extend, settle, reset, restart in any order: store and dict agree (I3, I7, I8, I9, I12, I13)."""
    run(kind, examples={"sqlite": 120, "postgres": 25}[kind], steps=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_long_random_histories_agree_with_the_model(kind: str):
    """The same, many times longer (I3, I7, I8, I9, I12, I13)."""
    run(kind, examples={"sqlite": 1_500, "postgres": 300}[kind], steps=80)
