"""Claiming: who gets what, in which order, for how long."""

from collections import Counter
from datetime import timedelta

import pytest

from postbus.errors import NotFound
from postbus.model import Status
from postbus.retry import RetryPolicy
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, LEASE, RETRY, Operator, Site, ids, one_try, wanting


def test_nothing_there_gives_nothing_at_once(op: Operator):
    """An empty store answers with an empty claim (S0.2)."""
    answer = op.ask()
    assert (answer.deliveries, answer.next_due, answer.suspects) == ((), None, False)


def test_a_claim_leases_the_event_and_counts_the_attempt(op: Operator, clock: FrozenClock):
    """PROCESSING, attempt 1, held by this worker until the lease's end (S0.2)."""
    event = op.publish(payload={"n": 1})
    delivery = op.take(worker="host:1")
    stand = op.stand(event)
    assert (delivery.id, delivery.attempt, delivery.worker_id) == (event.id, 1, "host:1")
    assert delivery.lease_until == clock.now() + LEASE
    assert delivery.event.payload == {"n": 1}
    assert delivery.event.status is Status.PROCESSING
    assert (stand.status, stand.attempt, stand.worker_id) == (Status.PROCESSING, 1, "host:1")
    assert (stand.lease_until, stand.lease_expired) == (delivery.lease_until, False)


def test_a_leased_event_is_given_to_nobody_else(op: Operator):
    """Exactly one worker holds it (S0.4, I7)."""
    op.publish()
    op.take(worker="one")
    assert op.claim(worker="two") == []
    assert op.claim(worker="one") == []


def test_the_order_is_priority_then_due_time_then_id(op: Operator, clock: FrozenClock):
    """Whatever the order of publishing, types and tags; what was delayed comes before what is new."""
    late = op.publish("a", delay=2)
    low = op.publish("b", priority=-10)
    first = op.publish("c", tags=["x"])
    second = op.publish("a")
    third = op.publish("c", tags=["y"])
    early = op.publish("b", delay=1)
    high = op.publish("a", priority=1)
    top = op.publish("z", priority=10, delay=3)
    clock.advance(3)
    new, delayed = [first, second, third], [early, late]
    expected = ids([top, high, *delayed, *new, low])
    assert ids(op.claim(8)) == expected


def test_the_order_holds_over_single_claims(op: Operator):
    """One at a time gives the same order as all at once."""
    events = [op.publish(f"t{n % 5}", priority=n % 3 - 1) for n in range(30)]
    expected = [event.id for event in sorted(events, key=lambda event: (-event.priority, event.id))]
    assert [op.take().id for _ in events] == expected


def test_what_is_handed_back_comes_before_new_events_at_once(op: Operator):
    """Also from the process that has just had it, and within the same moment (S0.2)."""
    op.publish()
    second = op.publish()
    op.take()
    op.store.release([op.take().lease], "w")
    op.publish()
    assert op.take().id == second.id


def test_no_more_than_the_limit_is_claimed(op: Operator):
    """The rest stays for others."""
    events = op.publish_all(*[{"type": "a"}] * 10)
    assert ids(op.claim(4)) == ids(events[:4])
    assert ids(op.claim(100)) == ids(events[4:])


def test_patterns_choose_types(op: Operator):
    """Only what some pattern covers is claimed; the rest stays pending."""
    orders = [op.publish("order.placed"), op.publish("order.a.shipped")]
    other = op.publish("invoice.paid")
    assert ids(op.claim(9, interests=wanting("order.*", "user.*"))) == ids(orders)
    assert op.claim(9, interests=wanting("order.*")) == []
    assert op.status(other) is Status.PENDING


def test_any_one_of_the_tags_is_enough(op: Operator):
    """A worker's tags match if one of them is among the event's; without tags all events match."""
    eu = op.publish(tags=["eu", "big"])
    us = op.publish(tags=["us"])
    bare = op.publish()
    assert ids(op.claim(9, interests=wanting("*", tags=["big", "small"]))) == [eu.id]
    assert ids(op.claim(9, interests=wanting("*"))) == [us.id, bare.id]


def test_the_order_of_an_events_tags_makes_no_difference_to_the_queue(op: Operator):
    """Two events with the same set of tags stand in one line."""
    first, second = op.publish(tags=["a", "b"]), op.publish(tags=["b", "a"])
    assert ids(op.claim(9, interests=wanting("*", tags=["b"]))) == [first.id, second.id]


def test_several_interests_with_their_own_tags(op: Operator):
    """Each pattern goes with its own tags."""
    wanted = op.publish("order.placed", tags=["eu"])
    op.publish("order.placed", tags=["us"])
    also = op.publish("user.made", tags=["us"])
    interests = wanting("order.*", tags=["eu"]) + wanting("user.*")
    assert ids(op.claim(9, interests=interests)) == [wanted.id, also.id]


def test_what_is_blocked_is_not_claimed_although_wanted(op: Operator):
    """An open breaker's events stay untouched: pending, no attempt (S1.20)."""
    blocked = op.publish("mail.send")
    free = op.publish("order.placed")
    assert ids(op.claim(9, blocked=wanting("mail.*"))) == [free.id]
    assert (op.stand(blocked).status, op.stand(blocked).attempt) == (Status.PENDING, 0)
    assert ids(op.claim(9)) == [blocked.id]


def test_an_unknown_subscription_is_not_found(op: Operator):
    """Claiming from what does not exist says so."""
    with pytest.raises(NotFound, match="nowhere"):
        op.claim(subscription="nowhere")


def test_a_paused_subscription_yields_nothing_until_it_is_resumed(op: Operator):
    """Nothing is claimed, nothing is burnt, and it all comes afterwards."""
    event = op.publish()
    op.store.pause_subscription("default", paused=True)
    assert op.claim() == []
    assert op.stand(event).attempt == 0
    op.store.pause_subscription("default", paused=False)
    assert ids(op.claim()) == [event.id]


def test_epochs_only_rise(op: Operator):
    """Every claim draws a number nobody had before, over all events and subscriptions (I7)."""
    op.subscription("other")
    op.publish_all(*[{"type": "a"}] * 5)
    seen: list[int] = []
    for _ in range(3):
        for name in ("default", "other"):
            taken = op.claim(9, name)
            seen += [delivery.epoch for delivery in taken]
            op.store.release([delivery.lease for delivery in taken], "w")
    assert len(seen) == 30
    assert seen == sorted(set(seen))


def test_epochs_rise_over_a_restart(site: Site):
    """A store opened anew goes on where the last one ended (I7)."""
    first = Operator(site.open(), site.clock)
    first.publish()
    before = first.take()
    first.store.close()
    second = Operator(site.open(), site.clock)
    second.end_leases()
    assert second.take().epoch > before.epoch


def test_an_expired_lease_is_claimed_again_as_one_more_attempt(op: Operator, clock: FrozenClock):
    """At the lease's end, not before, the very next claim takes it over (S0.3, S0.6, I10)."""
    event = op.publish()
    lost = op.take(worker="dead")
    clock.advance(LEASE - timedelta(microseconds=1))
    assert op.claim(worker="heir") == []
    clock.advance(timedelta(microseconds=1))
    assert op.stand(event).lease_expired
    again = op.take(worker="heir")
    assert (again.id, again.attempt, again.suspect) == (event.id, 2, True)
    assert again.epoch > lost.epoch
    assert again.lease_until == clock.now() + LEASE
    assert (op.stand(event).retry_count, op.stand(event).lease_expired) == (1, False)


def test_an_expired_attempt_is_recorded_with_its_worker(op: Operator):
    """The error list says which attempt was lost, and with whom (S1.10, I11)."""
    event = op.publish()
    op.take(worker="dead:1")
    op.end_leases()
    op.take(worker="heir:2")
    (error,) = op.stand(event).errors
    assert (error.attempt, error.worker_id) == (1, "dead:1")
    assert op.actions(event) == ["PICKED", "EXPIRED", "PICKED"]


def test_no_delivery_comes_twice_in_one_claim_that_meets_an_expired_lease(op: Operator):
    """Ending a lease on the way must not hand out its neighbours twice (I7)."""
    lost = op.publish()
    op.take()
    events = op.publish_all(*[{"type": "order.placed"}] * 5)
    op.end_leases()
    taken = op.claim(10, alone=False)
    assert ids(taken) == ids(events)
    assert len({delivery.epoch for delivery in taken}) == 5
    assert op.claim(10, alone=False) == []
    assert op.status(lost) is Status.PENDING


def test_many_expired_leases_do_not_hide_what_is_pending(op: Operator):
    """A claimer who holds something gets the others, and is told of the suspects."""
    op.publish_all(*[{"type": "a"}] * 20)
    op.claim(20)
    fresh = op.publish_all(*[{"type": "a"}] * 3)
    op.end_leases()
    answer = op.ask(4, alone=False)
    assert ids(answer.deliveries) == ids(fresh)
    assert op.ask(4, alone=False).suspects


def test_a_suspect_comes_alone(op: Operator):
    """What may have killed its worker is run with nothing beside it, although more is due and asked for."""
    suspect = op.publish()
    op.take()
    op.end_leases()
    op.publish_all(*[{"type": "order.placed"}] * 5)
    op.store.expire(None, RetryPolicy())
    (delivery,) = op.claim(10)
    assert (delivery.id, delivery.suspect) == (suspect.id, True)
    assert len(op.claim(10, worker="other")) == 5


def test_a_suspect_waits_for_somebody_who_holds_nothing(op: Operator):
    """A busy claimer gets other work and is told that a suspect waits."""
    suspect = op.publish()
    op.take()
    op.end_leases()
    other = op.publish()
    op.store.expire(None, RetryPolicy())
    answer = op.ask(10, alone=False)
    assert ids(answer.deliveries) == [other.id]
    assert answer.suspects
    assert op.ask(10, alone=False).suspects
    assert ids(op.claim(10)) == [suspect.id]
    assert not op.ask(10, alone=False).suspects


def test_suspects_come_one_at_a_time(op: Operator):
    """Of several, each is claimed by itself."""
    events = op.publish_all(*[{"type": "a"}, {"type": "b"}, {"type": "a"}])
    op.claim(3)
    op.end_leases()
    op.store.expire(None, RetryPolicy())
    claims = [op.claim(10, worker=f"w{n}") for n in range(3)]
    assert [len(each) for each in claims] == [1, 1, 1]
    assert sorted(each[0].id for each in claims) == ids(events)


def test_a_suspect_that_fails_properly_is_no_suspect_any_more(op: Operator, clock: FrozenClock):
    """Once its worker lived to report, it runs beside others again."""
    event = op.publish()
    op.take()
    op.end_leases()
    op.settle(op.take(), RETRY)
    clock.advance(10)
    other = op.publish()
    taken = op.claim(10)
    assert ids(taken) == [event.id, other.id]
    assert not any(delivery.suspect for delivery in taken)


def test_a_released_suspect_is_still_a_suspect(op: Operator):
    """Handing it back proves nothing."""
    op.publish()
    op.take()
    op.end_leases()
    op.store.release([op.take().lease], "w")
    assert op.take().suspect


def test_suspects_keep_to_patterns_and_blocks(op: Operator):
    """Nobody gets a suspect he did not ask for."""
    op.publish("mail.send")
    op.take()
    op.end_leases()
    op.store.expire(None, RetryPolicy())
    assert op.claim(interests=wanting("order.*")) == []
    assert op.claim(blocked=wanting("mail.*")) == []
    assert op.take(interests=wanting("mail.*")).suspect


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_an_event_that_kills_every_worker_dies_after_its_attempts(op: Operator, retries: int):
    """Exactly as many attempts as allowed, crashes counted, then a dead letter with each of them (S0.8, I12)."""
    event = op.publish()
    policy = RetryPolicy(max_retries=retries)
    attempts = 0
    while op.claim(policy=policy):
        attempts += 1
        op.end_leases()
    assert attempts == retries + 1
    assert op.status(event) is Status.FAILED
    (letter,) = op.dead()
    assert letter.attempts == retries + 1
    assert [error.attempt for error in letter.errors] == list(range(1, retries + 2))


def test_upkeep_buries_what_has_used_up_its_attempts_as_a_claim_would(op: Operator, clock: FrozenClock):
    """Whichever comes first, claim or upkeep: the last attempt that expires is the end (S0.8, I12)."""
    event = op.publish()
    op.take()
    op.end_leases()
    assert op.store.expire(None, one_try()) == 1
    assert op.status(event) is Status.FAILED
    assert op.dead().items[0].died_at == clock.now()
    assert op.claim() == []


@pytest.mark.parametrize(
    ("event_retries", "subscription", "bus", "allowed"),
    [(None, None, 2, 3), (None, 1, 2, 2), (0, 1, 2, 1), (4, None, 0, 5)],
)
def test_a_crash_counts_by_the_events_the_subscriptions_or_the_bus_policy(
    op: Operator, event_retries: int | None, subscription: int | None, bus: int, allowed: int
):
    """The event's own number goes before its subscription's, that before the bus's (S0.8, I12)."""
    retry = None if subscription is None else RetryPolicy(max_retries=subscription)
    op.subscription("s", retry=retry)
    event = op.publish(max_retries=event_retries)
    attempts = 0
    while found := op.claim(subscription="s", policy=RetryPolicy(max_retries=bus)):
        assert found[0].max_retries == allowed - 1
        attempts += 1
        op.end_leases()
    assert attempts == allowed
    assert op.status(event, "s") is Status.FAILED


def test_a_subscription_may_have_a_lease_of_its_own(op: Operator, clock: FrozenClock):
    """It goes before the claimer's (S2.5)."""
    op.subscription("slow", lease=timedelta(minutes=5))
    op.publish()
    assert op.take("slow").lease_until == clock.now() + timedelta(minutes=5)
    clock.advance(299)
    assert op.claim(subscription="slow") == []
    clock.advance(1)
    assert len(op.claim(subscription="slow")) == 1


def test_the_claim_tells_when_the_next_event_falls_due(op: Operator, clock: FrozenClock):
    """With nothing due now, the nearest time of what was asked for is known."""
    op.publish("a", delay=60)
    op.publish("a", delay=20)
    op.publish("b", delay=5)
    assert op.ask(interests=wanting("a")).next_due == clock.now() + timedelta(seconds=20)


def test_scheduled_events_do_not_hold_up_what_is_due(op: Operator):
    """A thousand for tomorrow before one for now (S0.3)."""
    op.publish_all(*[{"type": "a", "delay": 86_400}] * 1_000)
    event = op.publish("a")
    assert ids(op.claim(10)) == [event.id]


def test_everything_is_claimed_over_more_routes_than_are_probed_at_once(op: Operator):
    """Three hundred types, each with its tags: claims go round until all is taken, none twice (I7)."""
    news = [{"type": f"type.{n % 300}", "tags": [f"tag{n % 7}"]} for n in range(900)]
    events = op.publish_all(*news)
    taken: list[int] = []
    while found := op.claim(10):
        taken += ids(found)
    assert sorted(taken) == ids(events)


def test_with_many_routes_each_gets_its_turn(op: Operator):
    """Of two hundred lines, twenty long, every one has moved before any has been emptied."""
    op.publish_all(*({"type": f"line.{n % 200}"} for n in range(4_000)))
    served: Counter[str] = Counter()
    for _ in range(60):
        served.update(delivery.event.type for delivery in op.claim(10))
    assert len(served) == 200
    assert max(served.values()) < 20


def test_priority_goes_first_over_many_routes_too(op: Operator):
    """With hundreds of routes on either level, the higher level comes first."""
    op.publish_all(*({"type": f"low.{n}", "priority": -1} for n in range(100)))
    high = op.publish_all(*({"type": f"high.{n}", "priority": 1} for n in range(100)))
    taken: list[int] = []
    while len(taken) < 100:
        taken += ids(op.claim(10))
    assert sorted(taken) == ids(high)


def test_expired_leases_among_many_routes_are_found(op: Operator):
    """Leases that ran out on hundreds of routes all come back (I10)."""
    events = op.publish_all(*({"type": f"type.{n}"} for n in range(150)))
    assert len(op.take_all(worker="dead")) == 150
    op.end_leases()
    taken: set[int] = set()
    for _ in range(400):
        taken |= set(ids(op.claim(10, worker="heir")))
    assert taken == set(ids(events))


def test_dead_letters_are_not_claimed(op: Operator, clock: FrozenClock):
    """However long one waits (S0.3)."""
    op.publish()
    op.settle(op.take(), DEAD)
    clock.advance(timedelta(days=365))
    assert op.claim() == []
