"""Lists, single events, work and figures decide alike how an event stands, whatever has happened to it."""

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random

import pytest

from postbus.errors import InvalidRequest
from postbus.model import Delivery, Event, Outcome, Status
from postbus.retry import RetryPolicy
from postbus.store import audit, depth, lookups
from postbus.store.contract import DeadFilter, Settlement
from tests.contract.stores import DEAD, DONE, FLAWED, OUTCOMES, RETRY, Operator, ids, wanting

ENDED = (Status.COMPLETED, Status.COMPLETED_WITH_ERRORS)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch):
    """Have everything read a few at a time, so that few events are enough to meet every edge."""
    for name, few in {
        "FIRST_WINDOW": 3, "LARGE_WINDOW": 5, "LARGEST_WINDOW": 7, "FIRST_CHUNK": 2, "CHUNK": 5, "FEW_ROWS": 4,
        "SHOWN_TOGETHER": 2, "FIRST_LOOK": 3,
    }.items():  # fmt: skip
        monkeypatch.setattr(lookups, name, few)
    monkeypatch.setattr(depth, "FIRST_CHUNK", 2)
    monkeypatch.setattr(depth, "CHUNK", 5)
    monkeypatch.setattr(audit, "SPAN", 2)  # events further apart are looked for in statements of their own


def agree(op: Operator, subscription: str = "default") -> dict[Status | None, list[int]]:
    """Hold every list against what each event says of itself, on pages of seven too; return the ids by status."""
    events = [op.get(each, subscription) for each in op.list(limit=1_000).items]
    found: dict[Status | None, list[int]] = {}
    for status in Status:
        page = op.list(status, limit=1_000, subscription=subscription)
        found[status] = ids(page.items)
        assert found[status] == [each.id for each in events if each.status is status], status
        assert (page.total, page.total_capped) == (len(page), False)
        assert [each.status for each in page] == [status] * len(page)
        pages = [op.list(status, limit=7, subscription=subscription)]
        while pages[-1].next is not None:
            pages.append(op.list(status, limit=7, after=pages[-1].next, subscription=subscription))
        assert [each.id for page in pages for each in page] == found[status]
    return found


def figures_agree(op: Operator, found: dict[Status | None, list[int]], subscription: str = "default") -> None:
    """Hold the figures against the lists."""
    stats = next(each for each in op.store.stats().subscriptions if each.name == subscription)
    counted = (stats.pending, stats.processing, stats.dead)
    assert counted == tuple(len(found[each]) for each in (Status.PENDING, Status.PROCESSING, Status.FAILED))
    for event_id in (each for some in found.values() for each in some):
        waits = event_id in found[Status.PENDING] or event_id in found[Status.PROCESSING]
        assert op.store.settled(event_id, [subscription]) is not waits


@dataclass
class Chance:
    """Does to a store, at random, whatever may happen to deliveries."""

    op: Operator
    random: Random
    held: list[Delivery] = field(default_factory=list)
    published: list[Event] = field(default_factory=list)

    def publish(self) -> None:
        """Publish some, a few of them delayed or with a priority."""
        chance = self.random
        news = [
            {
                "type": chance.choice("ab") + "x",
                "priority": chance.choice((0, 0, 0, 3, -2)),
                **({"delay": 5} if chance.random() < 0.1 else {}),
            }
            for _ in range(chance.randint(1, 9))
        ]
        self.published += self.op.publish_all(*news)

    def claim(self) -> None:
        """Claim some, in one block or each in its own, of all types or of one."""
        subscription = self.random.choice(("default", "default", "side"))
        interests = wanting(self.random.choice(("*", "a*", "b*")))
        shared = self.random.random() < 0.6
        self.held += self.op.claim(self.random.randint(1, 12), subscription, interests=interests, shared=shared)

    def settle(self) -> None:
        """Settle some of what was claimed, lost leases among them."""
        self.random.shuffle(self.held)
        some, self.held = self.held[:10], self.held[10:]
        took = self.random.choice((None, 1.5))
        outcomes = (*OUTCOMES, DONE, DONE, DONE)
        self.op.store.settle([Settlement(each.lease, self.random.choice(outcomes), "w", None, took) for each in some])

    def release(self) -> None:
        """Hand one back, for now or later."""
        if self.held:
            later = timedelta(seconds=self.random.choice((0, 2)))
            self.op.store.release([self.held.pop().lease], "w", later)

    def expire(self) -> None:
        """End all leases."""
        self.op.end_leases()
        self.op.store.expire(None, RetryPolicy())

    def wait(self) -> None:
        """Let some seconds pass."""
        self.op.clock.advance(self.random.randint(1, 6))

    def retry(self) -> None:
        """Retry dead letters."""
        self.op.store.retry_dead(DeadFilter(subscription="default"), "me")

    def redeliver(self) -> None:
        """Deliver some again."""
        some = self.random.sample(self.published, min(len(self.published), 3))
        self.op.store.redeliver("default", sorted(each.id for each in some), "me")

    def erase(self) -> None:
        """Erase one."""
        if self.published:
            self.op.store.erase(ids=[self.random.choice(self.published).id], actor="me")

    def rewind(self) -> None:
        """Set the cursor back by up to twenty events."""
        if self.published:
            with suppress(InvalidRequest):  # which lie beyond the cursor
                self.op.store.rewind("default", self.random.choice(self.published[-20:]).id - 1, "me")


@pytest.mark.parametrize("seed", range(6))
def test_lists_agree_with_what_each_event_says(op: Operator, seed: int):
    """Settled, released, expired, retried, redelivered, erased, rewound: an event is in one list at a time (I9)."""
    op.subscription("side", ["a*"])
    chance = Chance(op, Random(seed))
    often = (chance.publish, chance.claim, chance.settle) * 6
    rarely = (chance.release, chance.expire, chance.wait, chance.retry, chance.redeliver, chance.erase, chance.rewind)
    for number in range(90):
        chance.random.choice((*often, *rarely))()
        if number % 6 == 0:
            figures_agree(op, agree(op))
            figures_agree(op, agree(op, "side"), "side")


def test_what_is_done_again_is_listed_by_its_last_end(op: Operator):
    """Completed in an array, redelivered, completed with errors, and the other way about (I9)."""
    first, second, third = op.publish_all(*[{"type": "a"}] * 3)

    def work(*outcomes: Outcome) -> None:
        deliveries = op.claim(3, shared=True)
        told = zip(sorted(deliveries, key=lambda each: each.id), outcomes, strict=True)
        op.store.settle([Settlement(each.lease, outcome, "w", None, 1.0) for each, outcome in told])

    work(DONE, DONE, FLAWED)
    assert [ids(op.list(each).items) for each in ENDED] == [[second.id, first.id], [third.id]]
    op.store.redeliver("default", [first.id, third.id], "me")
    assert [ids(op.list(each).items) for each in ENDED] == [[second.id], []]
    work(FLAWED, DONE)
    assert [ids(op.list(each).items) for each in ENDED] == [[third.id, second.id], [first.id]]
    op.store.redeliver("default", [second.id], "me")
    work(DEAD)
    assert [op.list(each).total for each in (*ENDED, Status.FAILED)] == [1, 1, 1]
    op.store.purge_dead(DeadFilter(), "me")
    assert [op.list(each).total for each in (*ENDED, Status.FAILED)] == [1, 1, 0]
    assert ids(op.list(Status.COMPLETED).items) == [third.id]


def test_after_a_rewind_the_last_end_counts_and_what_was_erased_keeps_its_own(op: Operator):
    """Completed with errors, then again in an array; an erased one does not come again."""
    flawed, *others = op.publish_all(*[{"type": "a"}] * 4)
    told = [FLAWED, DONE, DONE, DONE]
    deliveries = op.claim(4, shared=True)
    op.store.settle([Settlement(each.lease, how, "w", None, 1.0) for each, how in zip(deliveries, told, strict=True)])
    op.store.erase(ids=[others[0].id], actor="me")
    op.store.rewind("default", flawed.id - 1, "me")
    assert agree(op)[Status.COMPLETED] == [others[0].id]
    again = op.claim(4, shared=True)
    assert ids(again) == [flawed.id, others[1].id, others[2].id]
    op.store.settle([Settlement(each.lease, DONE, "w", None, 1.0) for each in again])
    assert agree(op)[Status.COMPLETED_WITH_ERRORS] == []


def test_a_retry_that_is_released_is_pending_and_an_open_block_is_not(op: Operator):
    """Of a block, what is settled has left it; the others are at work, listed newest first."""
    events = op.publish_all(*[{"type": "a"}] * 5)
    deliveries = op.claim(5, shared=True)
    op.settle(deliveries[1], RETRY)
    op.settle(deliveries[3])
    op.store.release([deliveries[4].lease], "w")
    found = agree(op)
    assert found[Status.PROCESSING] == [events[2].id, events[0].id]
    assert found[Status.PENDING] == [events[4].id, events[1].id]
