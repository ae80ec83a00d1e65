"""`bus.dlq`, and DeadLetters on a store alone."""

from datetime import timedelta
from typing import Any

import pytest

from postbus import DeadLetters, Discard, Event, EventBus, InvalidRequest, NotFound, Status, open_store
from postbus.testing import FrozenClock, drain


@pytest.fixture
def dying(still: EventBus) -> EventBus:
    """Give a bus on which everything of type `bad.*` dies."""

    @still.on("bad.*")
    def die(event: Event) -> None:
        raise Discard(f"no {event.type}")

    return still


def kill(bus: EventBus, kind: str = "bad.one") -> Event:
    """Publish an event that dies."""
    event = bus.publish(kind)
    drain(bus)
    return event


def test_dead_letters_are_listed_newest_first_a_hundred_at_a_time(dying: EventBus, clock: FrozenClock):
    """With offset, limit and keyset (S1.12)."""
    events = dying.publish_many([{"type": "bad.one"}] * 105)
    drain(dying)
    page = dying.dlq.list()
    assert (len(page), page.total, page.limit) == (100, 105, 100)
    assert [letter.event.id for letter in page] == [event.id for event in events][::-1][:100]
    assert len(dying.dlq.list(offset=100)) == 5
    assert [letter.event.id for letter in dying.dlq.list(after=page.next)] == [5, 4, 3, 2, 1]
    with pytest.raises(InvalidRequest):
        dying.dlq.list(limit=0)
    with pytest.raises(InvalidRequest):
        dying.dlq.list(offset=-1)


def test_a_dead_letter_is_retried_from_scratch(dying: EventBus):
    """Pending, no retries, no errors; and handled anew (S1.12)."""
    event = kill(dying)
    assert dying.dlq.retry(event.id) == 1
    told = dying.get(event.id)
    assert (told.status, told.retry_count, told.errors) == (Status.PENDING, 0, ())
    assert drain(dying) == 1
    assert dying.get(event.id).deliveries[0].attempt == 1


def test_what_is_not_dead_cannot_be_retried_or_shown(dying: EventBus):
    """NotFound, for what lives and for what never was (S1.12)."""
    alive = dying.publish("good")
    for event_id in (alive.id, 404):
        with pytest.raises(NotFound):
            dying.dlq.retry(event_id)
        with pytest.raises(NotFound):
            dying.dlq.get(event_id)


def test_an_event_may_be_dead_in_several_subscriptions(dying: EventBus):
    """Each is a letter of its own; verbs take one of them or all (S1.12)."""

    @dying.on("bad.*", subscription="other")
    def die(_: Event) -> None:
        raise Discard("no")

    event = kill(dying)
    assert {letter.subscription for letter in dying.dlq.get(event.id)} == {"default", "other"}
    assert dying.dlq.list(subscription="other").total == 1
    assert dying.dlq.retry(event.id, subscription="other") == 1
    assert dying.get(event.id).status is Status.FAILED
    drain(dying)
    assert dying.dlq.retry(event.id) == 2


def test_all_that_match_are_retried(dying: EventBus):
    """By type and subscription, telling how far it is (S1.12)."""
    for kind in ("bad.one", "bad.one", "bad.two"):
        kill(dying, kind)
    told: list[int] = []
    assert dying.dlq.retry_all(type="bad.one", progress=told.append) == 2
    assert told[-1] == 2
    assert dying.dlq.list(type="bad.*").total == 1
    assert dying.dlq.retry_all() == 1


@pytest.mark.parametrize("by", ["created_at", "died_at"])
def test_a_purge_takes_letters_at_least_so_old(dying: EventBus, clock: FrozenClock, by: Any):
    """To the microsecond, the cutoff included (S1.12, S1.13)."""
    first = kill(dying)
    clock.advance(timedelta(microseconds=1))
    second = kill(dying)
    clock.advance(timedelta(days=7) - timedelta(microseconds=1))
    assert dying.dlq.purge(7, by=by) == 1
    assert [letter.event.id for letter in dying.dlq.list()] == [second.id]
    assert dying.get(first.id).status is Status.FAILED
    clock.advance(timedelta(microseconds=1))
    assert dying.dlq.purge(7, by=by) == 1


def test_a_purge_by_death_spares_what_died_late(dying: EventBus, clock: FrozenClock):
    """Old by birth, young by death (S1.13)."""
    dying.publish("bad.one", delay=86_400 * 30)
    clock.advance(86_400 * 30)
    drain(dying)
    assert dying.dlq.purge(7, by="died_at") == 0
    assert dying.dlq.purge(7, by="created_at") == 1


def test_a_purge_can_be_narrowed(dying: EventBus):
    """By type; and nonsense is refused (S1.12)."""
    kill(dying, "bad.one")
    kill(dying, "bad.two")
    assert dying.dlq.purge(0, type="bad.two") == 1
    with pytest.raises(InvalidRequest):
        dying.dlq.purge(-1)
    with pytest.raises(InvalidRequest):
        dying.dlq.purge(1, by="name")  # pyright: ignore[reportArgumentType]
    assert dying.dlq.list().total == 1


def test_an_admin_tool_needs_only_the_store(dying: EventBus, url: str, clock: FrozenClock):
    """List, retry and purge without a bus; its name is in the audit rows (S1.12)."""
    first, second = kill(dying), kill(dying)
    store = open_store(url, clock=clock)
    letters = DeadLetters(store, actor="admin")
    assert letters.list().total == 2
    assert letters.retry(first.id) == 1
    assert letters.purge(0) == 1
    assert dying.get(second.id, include_logs=True).logs[-1].worker_id == "admin"
    store.close()
