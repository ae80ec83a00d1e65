"""What Spark jobs bring is published once, all or nothing; what Spark streams fail at goes on like any delivery."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from postbus.errors import Conflict, InvalidEventError, NotFound
from postbus.model import AttemptError, Dead, Mode, Retry, Status, Stream
from postbus.payload import draft, drafts
from postbus.retry import RetryPolicy
from postbus.store import Log
from postbus.store.contract import Failure
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, OOPS, Operator, Site, ids, one_try, replay

POLICY = RetryPolicy(max_retries=2)
LATER = Retry(timedelta(seconds=10), OOPS)


def bring(store: Log, news: Sequence[dict[str, Any]], query: str = "q", batch: int = 0, step: int = 1_000) -> int:
    """Lay events by in a part of their own and return its number."""
    part = store.begin_part(query, batch)
    ready = drafts(news)
    for first in range(0, len(ready), step):
        store.stage(part, first, ready[first : first + step])
    return part


def numbered(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return events that can be told apart."""
    return [{"type": "a", "payload": number, **fields} for number in range(count)]


def payloads(op: Operator) -> list[Any]:
    """Return the payloads of the log, in its order."""
    return [event.payload for event in reversed(op.list(limit=10_000).items)]


# ── the sink ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_laid_by_is_seen_by_nobody_until_it_is_published(op: Operator):
    """Then it is there, in the order of its parts, and can be claimed (P.2, I2)."""
    one = bring(op.store, numbered(3), step=2)
    two = bring(op.store, [{"type": "b", "payload": "last"}])
    assert op.list().total == 0
    assert op.claim(10) == []
    assert op.store.publish_parts("q", 0, {one: 3, two: 1}) == 4
    assert payloads(op) == [0, 1, 2, "last"]
    assert len(op.take_all()) == 4


def test_every_field_comes_through(op: Operator, clock: FrozenClock):
    """As if it had been published by itself (P.2)."""
    full = {
        "type": "order.placed",
        "payload": {"text": 'tab\t"quote" \\ back\nslash', "wide": 2**70, "none": None, "é": [1.5, True]},
        "tags": ["b", "a\\c"],
        "key": "k\\1",
        "title": "two\nlines",
        "description": "a\ttab",
        "metadata": {"a": "b\\n"},
        "uid": "u\\1",
        "priority": 3,
        "max_retries": 7,
    }
    later = {"type": "later", "at": clock.now() + timedelta(hours=1)}
    waits = {"type": "waits", "delay": 60}
    part = bring(op.store, [full, later, waits])
    assert op.store.publish_parts("q", 0, {part: 3}) == 3
    (stored, second, third) = reversed(op.list().items)
    for name, value in full.items():
        assert getattr(stored, name) == (tuple(value) if name == "tags" else value), name
    assert op.get(second).next_retry_at == clock.now() + timedelta(hours=1)
    assert op.get(third).next_retry_at == clock.now() + timedelta(seconds=60)
    assert ids(op.take_all()) == [stored.id]


def test_a_batch_is_published_once(op: Operator):
    """Brought again, by whichever attempt, it changes nothing and leaves nothing behind (P.2, I3)."""
    first = bring(op.store, numbered(2))
    assert op.store.publish_parts("q", 7, {}) == 0
    assert op.store.publish_parts("q", 0, {first: 2}) == 2
    again = bring(op.store, numbered(2))
    assert again != first
    assert op.store.publish_parts("q", 0, {again: 2}) is None
    assert op.store.publish_parts("q", 0, {first: 2}) is None
    assert payloads(op) == [0, 1]
    with pytest.raises(Conflict):
        op.store.stage(again, 2, [draft({"type": "a"})])


def test_only_the_parts_named_are_published(op: Operator):
    """What a failed attempt or a dead driver left under the same batch is dropped (P.2, I3)."""
    left, good = bring(op.store, numbered(5)), bring(op.store, [{"type": "a", "payload": "good"}])
    other = bring(op.store, [{"type": "a", "payload": "other"}], batch=1)
    assert op.store.publish_parts("q", 0, {good: 1}) == 1
    assert payloads(op) == ["good"]
    with pytest.raises(Conflict):
        op.store.stage(left, 5, [draft({"type": "a"})])
    assert op.store.publish_parts("q", 1, {other: 1}) == 1


def test_batches_and_queries_are_told_apart(op: Operator):
    """The same number in another stream is another batch (P.2)."""
    for query, batch in (("q", 0), ("q", 1), ("r", 0)):
        part = bring(op.store, [{"type": "a", "payload": f"{query}{batch}"}], query, batch)
        assert op.store.publish_parts(query, batch, {part: 1}) == 1
    assert payloads(op) == ["q0", "q1", "r0"]


def test_a_part_that_is_not_complete_stops_the_batch(op: Operator):
    """A row less, a part dropped, a part of another batch: nothing is published, and it can be brought again (I2)."""
    good, short = bring(op.store, numbered(2)), bring(op.store, numbered(2))
    elsewhere = bring(op.store, numbered(1), batch=5)
    for parts in ({good: 2, short: 3}, {good: 2, elsewhere: 1}, {good: 2, 999: 1}):
        with pytest.raises(Conflict):
            op.store.publish_parts("q", 0, parts)
    op.store.drop_parts([short])
    with pytest.raises(Conflict):
        op.store.publish_parts("q", 0, {good: 2, short: 2})
    assert op.list().total == 0
    again = bring(op.store, numbered(2))
    assert op.store.publish_parts("q", 0, {again: 2}) == 2


def test_a_uid_that_is_known_stores_nothing(op: Operator):
    """Known from the log, from another part or from the same one: one uid, one event (P.2, I3)."""
    op.publish("a", payload=1, uid="one")
    news = [{"type": "a", "payload": number, "uid": uid} for number, uid in ((1, "one"), (2, "two"), (2, "two"))]
    first, second = bring(op.store, news), bring(op.store, [*news, {"type": "a", "payload": 3}])
    assert op.store.publish_parts("q", 0, {first: 3, second: 4}) == 2
    assert payloads(op) == [1, 2, 3]
    assert len(op.take_all()) == 3


def test_a_uid_with_another_body_stops_the_batch(op: Operator):
    """Nothing is published, and the uid is named (P.2, I2, I3)."""
    op.publish("a", payload=1, uid="mine")
    part = bring(op.store, [{"type": "a", "payload": "new"}, {"type": "a", "payload": 2, "uid": "mine"}])
    with pytest.raises(InvalidEventError, match="mine"):
        op.store.publish_parts("q", 0, {part: 2})
    assert op.list().total == 1
    op.store.drop_parts([part])
    good = bring(op.store, [{"type": "a", "payload": "new"}])
    assert op.store.publish_parts("q", 0, {good: 1}) == 1


def test_every_subscription_that_wants_it_gets_a_delivery(op: Operator):
    """Fan-out is the same as for any publish (P.2)."""
    op.subscription("eu", ["order.*"], tags=["eu"])
    news = [{"type": "order.placed", "tags": ["eu"]}, {"type": "order.placed"}, {"type": "other", "tags": ["eu"]}]
    part = bring(op.store, news)
    op.store.publish_parts("q", 0, {part: 3})
    assert len(op.take_all()) == 3
    (delivery,) = op.take_all("eu")
    assert delivery.event.tags == ("eu",)


def test_a_large_batch_comes_in_order(op: Operator):
    """However many statements it takes, ids rise as rows were brought (P.2)."""
    count = 25_000
    part = bring(op.store, numbered(count), step=10_000)
    assert op.store.publish_parts("q", 0, {part: count}) == count
    span = op.store.span(Stream.EVENTS)
    assert op.store.ahead(Stream.EVENTS, 0, count - 1) < span.head
    assert [op.get(number).payload for number in (1, 10_001, count)] == [0, 10_000, count - 1]
    assert op.store.stats().subscriptions[0].pending == count


def test_leftovers_go_after_a_day_and_batches_are_known_for_a_month(op: Operator, clock: FrozenClock):
    """What a dead job staged is dropped by housekeeping; a batch brought again within a month is known (P.2)."""
    done = bring(op.store, numbered(1))
    op.store.publish_parts("q", 0, {done: 1})
    left = bring(op.store, numbered(3), batch=1)
    clock.advance(timedelta(hours=23))
    op.store.tidy()
    op.store.stage(left, 3, [draft({"type": "a"})])
    clock.advance(timedelta(hours=2))
    assert op.store.tidy() >= 4
    with pytest.raises(Conflict):
        op.store.publish_parts("q", 1, {left: 4})
    clock.advance(timedelta(days=28))
    op.store.tidy()
    assert op.store.publish_parts("q", 0, {bring(op.store, numbered(1)): 1}) is None
    clock.advance(timedelta(days=2))
    op.store.tidy()
    assert op.store.publish_parts("q", 0, {bring(op.store, numbered(1)): 1}) == 1


def test_workers_of_other_processes_are_told(site: Site):
    """A watch in another process hears of what a job has published (P.2)."""
    job, worker = site.open(), site.open()
    watch = worker.watch()
    watch.wait(0.2)
    part = bring(job, numbered(1))
    while watch.wait(0.2):
        pass
    job.publish_parts("q", 0, {part: 1})
    assert watch.wait(5)
    watch.close()


# ── what failed in a stream ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stream(op: Operator) -> Operator:
    """Give an operator whose store has a Spark stream `s` as its only subscriber."""
    op.store.delete_subscription("default", "test")
    op.store.consumer("s", Stream.EVENTS, 0)
    return op


def test_a_failure_becomes_a_delivery_with_one_attempt_behind_it(stream: Operator, clock: FrozenClock):
    """Due as told, with its error, claimed like any other; the audit log tells the same story (P.1, I13)."""
    event = stream.publish("order.placed", tags=["eu"], priority=2)
    assert stream.store.divert("s", [Failure(event.id, LATER, 12.5)], POLICY, "spark") == 1
    stand = stream.stand(event, "s")
    assert (stand.status, stand.attempt, stand.retry_count) == (Status.PENDING, 1, 1)
    assert [error.message for error in stand.errors] == ["oops"]
    assert stream.actions(event) == ["PICKED", "FAILED"]
    assert stream.logs(event)[-1].execution_time_ms == 12.5
    assert vars(replay(stream.logs(event))["s"]) | {"expired": None} == {
        "status": Status.PENDING,
        "attempt": 1,
        "retry_count": 1,
        "expired": None,
    }
    assert stream.claim(1, "s") == []
    clock.advance(10)
    delivery = stream.take("s")
    assert (delivery.id, delivery.attempt) == (event.id, 2)
    stream.settle(delivery, DONE)
    assert stream.status(event, "s") is Status.COMPLETED


def test_a_failure_without_retries_is_a_dead_letter(stream: Operator):
    """By the policy, by the event's own word, or because it was discarded; and it can be revived (P.1, I9)."""
    plain, own, fine = stream.publish(), stream.publish(max_retries=0), stream.publish(max_retries=1)
    assert stream.store.divert("s", [Failure(own.id, LATER), Failure(fine.id, LATER)], POLICY, "spark") == 2
    assert stream.store.divert("s", [Failure(plain.id, LATER)], one_try(), "spark") == 1
    discarded = stream.publish()
    assert stream.store.divert("s", [Failure(discarded.id, Dead(OOPS))], POLICY, "spark") == 1
    dead = {each.event.id: each for each in stream.dead(subscription="s")}
    assert dead.keys() == {plain.id, own.id, discarded.id}
    assert all((each.attempts, [error.message for error in each.errors]) == (1, ["oops"]) for each in dead.values())
    assert stream.status(fine, "s") is Status.PENDING
    from postbus.dlq import DeadLetters  # noqa: PLC0415

    assert DeadLetters(stream.store).retry(plain.id) == 1
    assert stream.take("s").id == plain.id


def test_a_replayed_batch_diverts_nothing_twice(stream: Operator, clock: FrozenClock):
    """Neither what waits, nor what is leased, dead, completed or purged (I9, I11)."""
    events = [stream.publish() for _ in range(5)]
    failures = [Failure(event.id, Retry(timedelta(0), OOPS)) for event in events]
    assert stream.store.divert("s", failures, POLICY, "spark") == 5
    waiting, leased, dead, completed, purged = events
    for delivery in sorted(stream.claim(5, "s"), key=lambda each: each.id):
        match delivery.id:
            case leased.id:
                pass
            case waiting.id:
                stream.store.release([delivery.lease], "w")
            case completed.id:
                stream.settle(delivery, DONE)
            case _:
                stream.settle(delivery, DEAD)
    from postbus.store.contract import DeadFilter  # noqa: PLC0415

    stream.store.purge_dead(DeadFilter(event_id=purged.id), "test")
    before = {event.id: stream.actions(event) for event in events}
    clock.advance(1)
    assert stream.store.divert("s", failures, POLICY, "spark") == 0
    assert {event.id: stream.actions(event) for event in events} == before
    assert [stream.status(each, "s") for each in (leased, dead, completed)] == [
        Status.PROCESSING,
        Status.FAILED,
        Status.COMPLETED,
    ]


def test_a_subscription_made_anew_begins_anew(stream: Operator, clock: FrozenClock):
    """What its namesake had finished may fail in it again (I9)."""
    event = stream.publish()
    stream.store.divert("s", [Failure(event.id, Retry(timedelta(0), OOPS))], POLICY, "spark")
    stream.settle(stream.take("s"), DONE)
    stream.store.delete_subscription("s", "test")
    clock.advance(1)
    stream.store.consumer("s", Stream.EVENTS, 0)
    assert stream.store.divert("s", [Failure(event.id, LATER)], POLICY, "spark") == 1


def test_what_cannot_be_diverted_is_said_or_left(stream: Operator):
    """An unknown subscription raises; an event that is not there is passed over (P.1)."""
    event = stream.publish()
    with pytest.raises(NotFound):
        stream.store.divert("none", [Failure(event.id, LATER)], POLICY, "spark")
    assert stream.store.divert("s", [], POLICY, "spark") == 0
    assert stream.store.divert("s", [Failure(event.id + 7, LATER), Failure(event.id, LATER)], POLICY, "spark") == 1


def test_failures_by_the_thousand(stream: Operator, clock: FrozenClock):
    """Each under an epoch of its own, in as many transactions as it takes (I7)."""
    events = stream.publish_all(*[{"type": f"t{number % 7}"} for number in range(2_500)])
    told = AttemptError("ValueError", "x" * 100, traceback="t" * 500)
    failures = [Failure(event.id, Retry(timedelta(0), told)) for event in events]
    assert stream.store.divert("s", failures, POLICY, "spark") == 2_500
    assert stream.store.divert("s", failures, POLICY, "spark") == 0
    taken = stream.take_all("s")
    assert sorted(ids(taken)) == ids(events)
    assert len({each.epoch for each in taken}) == 2_500


def test_another_process_claims_what_was_diverted(site: Site):
    """Its routes are known there, whoever registered them (I10)."""
    driver, worker = Operator(site.open(), site.clock), Operator(site.open(), site.clock)
    driver.store.create_subscription("s", ["*"], [], mode=Mode.SPARK, lease=None, retry=None, start="now")
    assert worker.claim(1, "s") == []
    event = driver.publish("brand.new", tags=["x", "a"])
    driver.store.divert("s", [Failure(event.id, Retry(timedelta(0), OOPS))], POLICY, "spark")
    assert worker.take("s").id == event.id
