"""Dead letters: listed newest first, paged, retried from scratch, purged by age."""

from datetime import timedelta

import pytest

from postbus.model import AttemptError, Dead, DeadLetter, Status
from postbus.store.contract import DeadFilter, Settled, Settlement
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, RETRY, Operator, ids

DAY = timedelta(days=1)


def keys(letters: list[DeadLetter]) -> list[tuple[int, str]]:
    """Return which dead letters these are."""
    return [(letter.event.id, letter.subscription) for letter in letters]


def test_the_newest_event_comes_first(op: Operator, clock: FrozenClock):
    """By the time of publishing, whatever the order of dying (S1.12)."""
    events = []
    for _ in range(4):
        events.append(op.publish())
        clock.advance(1)
    held = op.claim(4)
    for delivery in (held[2], held[0], held[3], held[1]):
        op.settle(delivery, DEAD)
        clock.advance(1)
    assert [letter.event.id for letter in op.dead()] == ids(events)[::-1]


def test_no_dead_letters_is_an_empty_page(op: Operator):
    """Total zero, no next page (S1.12)."""
    op.publish()
    page = op.dead()
    assert (page.items, page.total, page.next, page.total_capped) == ((), 0, None, False)


def test_pages_by_offset_cover_every_letter_once(op: Operator):
    """Offset and limit cut the same list (S1.12)."""
    events = [op.kill() for _ in range(7)]
    pages = [op.dead(limit=3, offset=offset) for offset in (0, 3, 6, 9)]
    assert [letter.event.id for page in pages for letter in page] == ids(events)[::-1]
    assert [page.total for page in pages] == [7] * 4
    assert [len(page) for page in pages] == [3, 3, 1, 0]


def test_pages_by_keyset_cover_every_letter_once(op: Operator):
    """Following `next` visits all, although new letters arrive on the way (S1.12)."""
    events = [op.kill() for _ in range(7)]
    seen: list[int] = []
    after = None
    while True:
        page = op.dead(limit=3, after=after)
        seen += [letter.event.id for letter in page]
        op.kill()
        if page.next is None:
            break
        after = page.next
    assert seen == ids(events)[::-1]


def test_pages_by_keyset_skip_no_letter_of_an_event_that_died_in_several_subscriptions(op: Operator):
    """Three events dead in three subscriptions each: nine letters on pages of two (S1.12)."""
    for name in ("a", "b"):
        op.subscription(name)
    events = op.publish_all(*[{"type": "order.placed"}] * 3)
    for name in ("default", "a", "b"):
        for delivery in op.claim(3, name):
            op.settle(delivery, DEAD)
    seen: list[DeadLetter] = []
    after = None
    for _ in range(20):
        page = op.dead(limit=2, after=after)
        seen += page.items
        if page.next is None:
            break
        after = page.next
    assert sorted(keys(seen)) == sorted((event.id, name) for event in events for name in ("default", "a", "b"))


def test_a_page_is_of_one_subscription_or_type_if_asked(op: Operator):
    """A type may be a pattern (S1.12)."""
    op.subscription("other", ["mail.*"])
    order, mail = op.kill("order.placed"), op.kill("mail.sent")
    op.settle(op.take("other"), DEAD)
    assert keys(list(op.dead(subscription="other"))) == [(mail.id, "other")]
    assert keys(list(op.dead(type="order.*"))) == [(order.id, "default")]
    assert op.dead(type="mail.*").total == 2
    assert keys(list(op.dead(event_id=order.id))) == [(order.id, "default")]
    assert op.dead(subscription="nowhere").total == 0


def test_a_retried_letter_starts_from_scratch(op: Operator, clock: FrozenClock):
    """Pending, due now, no retries, no error, all its attempts before it (S1.12)."""
    event = op.publish()
    op.settle(op.take(), RETRY)
    clock.advance(10)
    op.settle(op.take(), DEAD)
    clock.advance(100)
    assert op.store.retry_dead(DeadFilter(event_id=event.id), "admin") == 1
    stand = op.stand(event)
    assert (stand.status, stand.attempt, stand.retry_count, stand.errors) == (Status.PENDING, 0, 0, ())
    assert op.dead().total == 0
    assert op.take().attempt == 1


def test_a_letter_remembers_when_it_was_last_retried(op: Operator, clock: FrozenClock):
    """Dead again, it tells its newest death and its last retry (S1.12, S1.13)."""
    event = op.kill()
    clock.advance(50)
    retried = clock.now()
    op.store.retry_dead(DeadFilter(event_id=event.id), "admin")
    clock.advance(50)
    op.settle(op.take(), DEAD)
    (letter,) = op.dead()
    assert (letter.last_retry_at, letter.died_at, letter.attempts) == (retried, clock.now(), 1)


def test_the_history_of_a_retried_letter_stays(op: Operator):
    """The audit log has its first life and its second (I11, I13)."""
    event = op.kill()
    op.store.retry_dead(DeadFilter(event_id=event.id), "admin")
    op.settle(op.take(), DONE)
    assert op.actions(event) == ["PICKED", "FAILED", "RETRIED", "PICKED", "COMPLETED"]
    assert op.logs(event)[2].worker_id == "admin"
    assert op.status(event) is Status.COMPLETED


def test_a_lease_from_before_the_death_is_void_after_the_retry(op: Operator):
    """The second life has epochs of its own (I8)."""
    event = op.publish()
    old = op.take()
    op.settle(old, DEAD)
    op.store.retry_dead(DeadFilter(event_id=event.id), "admin")
    assert op.settle(old, DONE) is Settled.LOST
    assert op.status(event) is Status.PENDING


def test_retrying_concerns_the_letters_meant(op: Operator):
    """One subscription, one type, one event, or all of them (S1.12)."""
    op.subscription("other")
    mail, order = op.publish("mail.sent"), op.publish("order.placed")
    for name in ("default", "other"):
        for delivery in op.claim(2, name):
            op.settle(delivery, DEAD)
    assert op.store.retry_dead(DeadFilter(event_id=mail.id, subscription="other"), "me") == 1
    assert (op.status(mail), op.status(mail, "other")) == (Status.FAILED, Status.PENDING)
    assert op.store.retry_dead(DeadFilter(type="mail.*"), "me") == 1
    assert op.store.retry_dead(DeadFilter(event_id=order.id), "me") == 2
    assert op.store.retry_dead(DeadFilter(), "me") == 0


def test_what_is_not_dead_is_not_retried(op: Operator):
    """Pending, leased and completed ones are left alone, and so is what was never there."""
    pending, leased = op.publish(delay=9), op.publish()
    op.take()
    for event_id in (pending.id, leased.id, 404):
        assert op.store.retry_dead(DeadFilter(event_id=event_id), "me") == 0
    assert op.status(leased) is Status.PROCESSING


@pytest.mark.parametrize("by", ["created_at", "died_at"])
def test_the_cutoff_of_a_purge_includes_the_moment_itself(op: Operator, clock: FrozenClock, by: str):
    """At the microsecond it goes, a microsecond younger it stays (S1.12, S1.13)."""
    first = op.kill()
    clock.advance(timedelta(microseconds=1))
    second = op.kill()
    moment = op.dead(event_id=first.id).items[0].died_at
    assert op.store.purge_dead(DeadFilter(before=moment, by=by), "admin") == 1
    assert [letter.event.id for letter in op.dead()] == [second.id]


def test_a_purge_goes_by_publishing_or_by_death(op: Operator, clock: FrozenClock):
    """An old event that died today is young by death and old by birth (S1.13)."""
    event = op.publish()
    clock.advance(DAY * 10)
    op.settle(op.take(), DEAD)
    cutoff = clock.now() - DAY
    assert op.store.purge_dead(DeadFilter(before=cutoff, by="died_at"), "admin") == 0
    assert op.store.purge_dead(DeadFilter(before=cutoff, by="created_at"), "admin") == 1
    assert op.dead().total == 0
    assert op.get(event).id == event.id


def test_a_purged_letter_leaves_its_event_and_its_audit_rows(op: Operator, clock: FrozenClock):
    """Gone for good from the dead letters, still told of in the log (I13)."""
    event = op.kill()
    assert op.store.purge_dead(DeadFilter(), "admin") == 1
    assert op.actions(event) == ["PICKED", "FAILED", "PURGED"]
    assert op.logs(event)[-1].worker_id == "admin"
    assert op.status(event) is Status.FAILED
    clock.advance(DAY)
    assert op.claim() == []
    assert op.store.retry_dead(DeadFilter(event_id=event.id), "admin") == 0


def test_a_purge_concerns_the_letters_meant(op: Operator):
    """One subscription or type, and never what is not dead."""
    op.subscription("other")
    op.kill("mail.sent")
    op.settle(op.take("other"), DEAD)
    order = op.publish("order.placed")
    assert op.store.purge_dead(DeadFilter(type="order.*"), "me") == 0
    assert op.store.purge_dead(DeadFilter(subscription="other"), "me") == 1
    assert [letter.subscription for letter in op.dead()] == ["default"]
    assert op.status(order) is Status.PENDING


def test_letters_can_be_meant_by_what_they_died_of(op: Operator, monkeypatch: pytest.MonkeyPatch):
    """The last attempt's error decides, its numbers folded, however many at a time errors are read."""
    monkeypatch.setattr("postbus.store.lookups.LONGEST_LOOK", 2)
    events = op.publish_all(*[{"type": "a"}] * 6)
    for number, delivery in enumerate(op.claim(6)):
        message = "no address" if number % 3 else f"order {number} is unknown"
        op.settle(delivery, Dead(AttemptError("ValueError", message)))
    unknown = DeadFilter(fault="ValueError: order <n> is unknown")
    assert op.dead(fault=unknown.fault).total == 2
    assert op.dead(fault="KeyError: order <n> is unknown").total == 0
    assert op.store.retry_dead(unknown, "me") == 2
    assert [letter.event.id for letter in op.dead()] == [events[place].id for place in (5, 4, 2, 1)]
    assert op.store.purge_dead(DeadFilter(type="a", fault="ValueError: no address"), "me") == 4


def test_progress_is_told_while_many_are_changed(op: Operator):
    """The last figure is the total."""
    for _ in range(3):
        op.kill()
    told: list[int] = []
    assert op.store.retry_dead(DeadFilter(), "me", told.append) == 3
    assert told[-1] == 3
    for _ in range(3):
        op.settle(op.take(), DEAD)
    told.clear()
    assert op.store.purge_dead(DeadFilter(), "me", told.append) == 3
    assert told[-1] == 3


def test_more_than_a_chunk_is_retried_and_purged(op: Operator):
    """Thousands go in several transactions, each letter once (S1.12)."""
    op.publish_all(*[{"type": "a"}] * 2_500)

    def bury() -> None:
        op.store.settle([Settlement(delivery.lease, DEAD, "w") for delivery in op.take_all()])
        assert op.dead(limit=1).total == 2_500

    bury()
    assert op.store.retry_dead(DeadFilter(), "me") == 2_500
    bury()
    assert op.store.purge_dead(DeadFilter(), "me") == 2_500


def test_a_purged_event_still_tells_how_often_it_was_retried(op: Operator, clock: FrozenClock):
    """What was recorded when it died stays true (S1.13)."""
    event = op.publish()
    op.settle(op.take(), RETRY)
    clock.advance(10)
    op.settle(op.take(), DEAD)
    before = op.stand(event)
    assert (before.attempt, before.retry_count) == (2, 1)
    assert op.store.purge_dead(DeadFilter(), "me") == 1
    after = op.stand(event)
    assert (after.status, after.attempt, after.retry_count) == (Status.FAILED, 2, 1)
