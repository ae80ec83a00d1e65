"""The rest of the contract: transactions, breakers, tidying, watching, closing, and many threads at once."""

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from postbus.breaker import Breaker, BreakerState
from postbus.errors import InvalidEventError, InvalidRequest, PostbusError
from postbus.model import HandlerRecord, Retry, Status
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store import Log
from postbus.store.contract import Claim, Settled, Settlement
from postbus.testing import FrozenClock
from tests.conftest import Crew
from tests.contract.stores import DEAD, DONE, OOPS, RETRY, Operator, Site, ids, replay, wanting
from tests.kinds import on_sqlite


class Changed(Exception):  # noqa: N818  what a caller might raise
    """The caller thought better of it."""


# ── the caller's transaction ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_callers_writes_and_events_commit_together(op: Operator):
    """The block ends: both are there (I2)."""
    with op.store.transaction() as tx:
        tx.execute("CREATE TABLE shop_orders (id INTEGER, name TEXT)")
        tx.execute("INSERT INTO shop_orders VALUES (7, 'book')")
        (event,) = tx.publish([draft({"type": "order.placed", "payload": 7})])
    assert op.take().id == event.id
    with op.store.transaction() as tx:
        assert tx.execute("SELECT id, name FROM shop_orders") == [(7, "book")]


def test_a_transaction_that_raises_leaves_nothing(op: Operator):
    """Neither its events, nor its uids, nor its own writes; and the store works on (I2)."""
    with op.store.transaction() as tx:
        tx.execute("CREATE TABLE shop_orders (id INTEGER)")

    def change_ones_mind() -> None:
        with op.store.transaction() as tx:
            tx.execute("INSERT INTO shop_orders VALUES (7)")
            tx.publish([draft({"type": "brand.new.type", "uid": "u"})])
            raise Changed

    with pytest.raises(Changed):
        change_ones_mind()
    assert op.list().total == 0
    with op.store.transaction() as tx:
        assert tx.execute("SELECT id FROM shop_orders") == []
    assert op.publish("other", uid="u").type == "other"
    event = op.publish("brand.new.type")
    assert event.id in ids(op.take_all())


def test_nobody_sees_a_transactions_events_before_it_commits(site: Site):
    """Another store neither lists nor claims them (I2)."""
    one, two = site.open(), Operator(site.open(), site.clock)
    with one.transaction() as tx:
        tx.publish([draft({"type": "a"})])
        assert two.list().total == 0
        assert two.claim() == []
    assert two.list().total == 1
    assert len(two.claim()) == 1


def test_uids_count_inside_a_transaction(op: Operator):
    """Known ones return the first event; other bodies are refused and undo it all (I2, I3)."""
    first = op.publish("a", uid="u")
    with op.store.transaction() as tx:
        (again,) = tx.publish([draft({"type": "a", "uid": "u"})])
    assert again.id == first.id

    def publish_two() -> None:
        with op.store.transaction() as tx:
            tx.publish([draft({"type": "b"})])
            tx.publish([draft({"type": "other", "uid": "u"})])

    with pytest.raises(InvalidEventError):
        publish_two()
    assert op.list().total == 1


def test_a_store_method_inside_ones_own_transaction_is_refused_not_hung(op: Operator, crew: Crew):
    """It could never finish, so it says what to do instead."""

    def publish_inside() -> None:
        with op.store.transaction():
            op.publish()

    crew.start(publish_inside)
    with pytest.raises(InvalidRequest):
        crew.join()
    assert op.list().total == 0


def test_a_transaction_inside_ones_own_transaction_is_refused_not_hung(op: Operator, crew: Crew):
    """There is one at a time."""

    def nest() -> None:
        with op.store.transaction(), op.store.transaction():
            pass

    crew.start(nest)
    with pytest.raises(InvalidRequest):
        crew.join()
    op.publish()


@on_sqlite
def test_other_writers_wait_for_a_transaction(op: Operator, crew: Crew):
    """They come after it, none fails, and ids rise in that order (S1.17)."""
    with op.store.transaction() as tx:
        crew.start(op.publish, 8)
        (mine,) = tx.publish([draft({"type": "mine"})])
    others = crew.join()
    assert all(event.id > mine.id for event in others)
    assert len(op.take_all()) == 9


# ── breakers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_breaker_never_heard_of_is_closed(store: Log):
    """No row, no failures (S1.20)."""
    assert store.breaker("nobody") == BreakerState()


def test_a_breaker_is_shared_by_all_stores(site: Site, clock: FrozenClock):
    """Every part of its state goes through the store (S1.20)."""
    one, two = site.open(), site.open()
    state = BreakerState(3, clock.now(), clock.now() + timedelta(seconds=60))
    assert one.change_breaker("b", lambda _: state) == state
    assert two.breaker("b") == state
    assert two.change_breaker("b", lambda _: BreakerState()) == BreakerState()
    assert one.breaker("b") == BreakerState()


def test_changing_nothing_returns_the_present_state(store: Log):
    """None leaves it as it is (S1.20)."""
    store.change_breaker("b", lambda _: BreakerState(2))
    assert store.change_breaker("b", lambda _: None) == BreakerState(2)
    assert store.breaker("b") == BreakerState(2)
    assert store.breaker("c") == BreakerState()


def test_a_breaker_changes_atomically(site: Site, crew: Crew):
    """Four threads over two stores count two hundred failures: none is lost (S1.20)."""
    breaker = Breaker(failures=1_000)
    stores = [site.open(), site.open()]

    def fail() -> None:
        for turn in range(50):
            stores[turn % 2].change_breaker("b", lambda state: breaker.failed(state, site.clock.now()))

    crew.start(fail, 4)
    crew.join(30)
    assert stores[0].breaker("b").failures == 200


def test_a_change_that_raises_changes_nothing(store: Log):
    """Its error is the caller's, and the state stays (S1.20)."""

    def change(_: BreakerState) -> BreakerState:
        raise Changed

    with pytest.raises(Changed):
        store.change_breaker("b", change)
    assert store.breaker("b") == BreakerState()


# ── housekeeping ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_uid_is_remembered_for_its_window_and_not_for_ever(op: Operator, clock: FrozenClock):
    """Within seven days a repeat is a repeat; after them, once tidied, it is a new event (I3)."""
    first = op.publish("a", uid="u")
    clock.advance(timedelta(days=7))
    op.store.tidy()
    assert op.publish("a", uid="u").id == first.id
    clock.advance(timedelta(seconds=1))
    assert op.store.tidy() >= 1
    assert op.publish("a", uid="u").id > first.id


def test_tidying_a_tidy_store_removes_nothing(op: Operator):
    """A second turn finds nothing, and nothing living is touched."""
    op.publish()
    op.store.tidy()
    assert op.store.tidy() == 0
    assert len(op.claim()) == 1


def test_handlers_not_seen_for_long_are_forgotten(op: Operator, clock: FrozenClock):
    """A process that died without a word does not stay on the list for ever (S1.6)."""
    op.store.register_handlers([HandlerRecord("h", "f", "default", "*", (), "host:1", "p", clock.now())])
    clock.advance(timedelta(days=8))
    op.store.tidy()
    assert op.store.handlers() == ()


def test_after_tidying_thousands_of_unused_kinds_every_event_is_still_delivered(site: Site):
    """Old types, new types and dead ones, by the store that tidied and by another (I10, S1.1)."""
    one, two = Operator(site.open(), site.clock), Operator(site.open(), site.clock)
    one.subscription("s", ["bulk.*"])
    one.publish_all(*({"type": f"bulk.{n}", "priority": 1} for n in range(10_500)))
    while one.ask(1, "s", interests=wanting("other")).more:
        pass
    one.store.delete_subscription("s", "me")
    one.store.delete_subscription("default", "me")
    one.subscription("default")
    dead = one.kill("dead.one")
    retried = one.publish("retry.one")
    one.settle(one.take(), RETRY)
    two.publish("warm.up")
    assert one.store.tidy() > 0
    events = [op.publish(kind) for op in (one, two) for kind in ("bulk.7", "brand.new", "warm.up", "dead.one")]
    one.clock.advance(10)
    taken = ids(two.take_all())
    assert set(taken) >= {*ids(events), retried.id}
    assert len(taken) == len(set(taken))
    assert [letter.event.id for letter in two.dead()] == [dead.id]


# ── watching and closing ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_watch_wakes_for_a_change_made_here_or_elsewhere(site: Site, crew: Crew):
    """A publish in this store or in another wakes it well before its timeout."""
    one, two = site.open(), site.open()
    watch = one.watch()
    for store in (one, two):
        while watch.wait(0):
            pass
        crew.start(lambda: watch.wait(30))
        store.publish([draft({"type": "a"})])
        assert crew.join(5)[-1] is True
    watch.close()


def test_a_watch_sleeps_while_nothing_changes(store: Log, eventually: Callable[..., Any]):
    """Once what came before has been told, it returns False after its time."""
    store.publish([draft({"type": "a"})])
    watch = store.watch()
    eventually(lambda: watch.wait(0.02) is False)
    assert [watch.wait(0.02) for _ in range(20)] == [False] * 20
    watch.close()


def test_a_watch_can_be_woken_and_closed_by_others(store: Log, crew: Crew):
    """Neither a wake nor a close leaves anybody waiting."""
    watch = store.watch()
    watch.wake()
    assert watch.wait(30) is True
    crew.start(lambda: watch.wait(30))
    watch.close()
    crew.join(5)
    watch.close()


def test_closing_twice_is_safe_and_closes_the_watches(site: Site, crew: Crew):
    """Everything is given back once (S1.14)."""
    store = site.open()
    watch = store.watch()
    crew.start(lambda: watch.wait(30))
    store.close()
    store.close()
    crew.join(5)


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.publish([draft({"type": "a"})]),
        lambda store: store.claim(Claim("default", "w", "o")),
        lambda store: store.get(1, "default"),
        lambda store: store.stats(),
        lambda store: store.transaction().__enter__(),
    ],
)
def test_a_closed_store_says_so(store: Log, use: Callable[[Log], Any]):
    """A clear error of postbus's own, not the driver's (S1.14)."""
    store.close()
    with pytest.raises(PostbusError, match="closed"):
        use(store)


def test_what_was_stored_is_there_after_closing_and_opening(site: Site):
    """Pending, leased, retrying, dead and completed come back as they were (I1)."""
    op = Operator(site.open(), site.clock)
    events = op.publish_all(*[{"type": "a", "payload": n} for n in range(5)])
    held = op.claim(4)
    op.settle(held[1], RETRY)
    op.settle(held[2], DEAD)
    op.settle(held[3], DONE)
    before = [op.get(event) for event in events]
    rows = [op.logs(event) for event in events]
    op.store.close()
    anew = Operator(site.open(), site.clock)
    assert [anew.get(event) for event in events] == before
    assert [anew.logs(event) for event in events] == rows
    assert anew.settle(held[0]) is Settled.APPLIED


def test_the_store_tells_the_time_it_was_given(store: Log, clock: FrozenClock):
    """One clock decides (S2.2)."""
    before = store.now()
    clock.advance(5)
    assert store.now() - before == timedelta(seconds=5)
    assert store.now() == clock.now()


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failing_publish_does_not_fail_its_neighbours(op: Operator, crew: Crew):
    """Sixty-three good ones beside a uid conflict, all committed together: one error, sixty-three events (I2)."""
    op.publish("a", uid="taken")
    bar = threading.Barrier(64)
    failures: list[InvalidEventError] = []

    def publish(number: int) -> None:
        bar.wait()
        if number:
            op.publish("good", payload=number)
        else:
            with pytest.raises(InvalidEventError) as caught:
                op.publish("bad", uid="taken")
            failures.append(caught.value)

    for number in range(64):
        crew.start(lambda number=number: publish(number))
    crew.join(30)
    assert len(failures) == 1
    good = [event.payload for event in op.list(type="good").items]
    assert sorted(good) == list(range(1, 64))
    assert op.list(type="bad").total == 0


def test_no_two_workers_get_the_same_delivery(site: Site, crew: Crew):
    """Six threads over two stores, four hundred events: each is claimed once, and all of them are (S0.4, I7)."""
    stores = [site.open(), site.open()]
    events = stores[0].publish([draft({"type": f"t{n % 9}"}) for n in range(400)])

    def claim(number: int) -> list[int]:
        op = Operator(stores[number % 2], site.clock)
        return ids(op.take_all(worker=f"w{number}"))

    for number in range(6):
        crew.start(lambda number=number: claim(number))
    taken = [event_id for mine in crew.join(30) for event_id in mine]
    assert sorted(taken) == ids(events)


def test_ids_are_unique_and_visible_in_order_with_many_publishers(site: Site, crew: Crew):
    """Each thread's own ids rise, no two share one, and every event has its delivery (I3, I4)."""
    stores = [site.open(), site.open()]

    def publish(number: int) -> list[int]:
        store = stores[number % 2]
        return [store.publish([draft({"type": f"t{n % 5}"})])[0].id for n in range(20)]

    for number in range(8):
        crew.start(lambda number=number: publish(number))
    lists = crew.join(30)
    assert all(mine == sorted(mine) for mine in lists)
    assert len({event_id for mine in lists for event_id in mine}) == 160
    assert len(Operator(stores[0], site.clock).take_all()) == 160


def test_publishing_claiming_and_settling_at_once_ends_everything_exactly_once(site: Site, crew: Crew):
    """Retries and releases on the way: afterwards the audit rows account for every event (S1.1, I9, I13)."""
    stores = [site.open(), site.open()]
    total, publishers = 240, 4
    finished = threading.Event()
    ended: Counter[int] = Counter()
    lock = threading.Lock()

    def publish(number: int) -> None:
        for n in range(total // publishers):
            stores[number % 2].publish([draft({"type": f"t{n % 7}", "payload": n})])

    def work(number: int) -> None:
        op = Operator(stores[number % 2], site.clock)
        while not finished.is_set():
            for delivery in op.claim(5, worker=f"w{number}"):
                turn = (delivery.id + delivery.attempt) % 4
                if turn == 0 and delivery.attempt == 1:
                    assert op.settle(delivery, Retry(timedelta(0), OOPS)) is Settled.APPLIED
                    continue
                assert op.settle(delivery, DEAD if turn == 1 else DONE) is Settled.APPLIED
                with lock:
                    ended[delivery.id] += 1
                    if len(ended) == total:
                        finished.set()

    for number in range(publishers):
        crew.start(lambda number=number: publish(number))
        crew.start(lambda number=number: work(number))
    crew.join(60)
    assert set(ended.values()) == {1}
    op = Operator(stores[0], site.clock)
    for event_id in ended:
        stand, told = op.stand(event_id), replay(op.logs(event_id))["default"]
        assert stand.status in (Status.COMPLETED, Status.FAILED)
        assert (stand.status, stand.attempt) == (told.status, told.attempt)


def test_readers_and_writers_are_not_disturbed_by_operations_that_fail(site: Site, crew: Crew):
    """While refused publishes are rolled back, nobody else misses a subscription, a route or a delivery (I2, S1.1)."""
    store = site.open()
    store.publish([draft({"type": "a", "uid": "u"})])

    def refuse() -> None:
        for _ in range(60):
            with pytest.raises(InvalidEventError):
                store.publish([draft({"type": "b", "uid": "u"})])

    def publish() -> None:
        for n in range(60):
            (event,) = store.publish([draft({"type": f"t{n % 3}"})])
            assert store.get(event.id, "default").deliveries

    def work() -> None:
        for _ in range(60):
            assert store.subscriptions()
            taken = store.claim(Claim("default", "w", "o", limit=3)).deliveries
            store.settle([Settlement(each.lease, DONE, "w") for each in taken])

    for each in (refuse, refuse, publish, work, work):
        crew.start(each)
    crew.join(60)


def test_publishers_and_workers_are_not_disturbed_by_changes_of_subscriptions(site: Site, crew: Crew):
    """Made, paused and deleted elsewhere meanwhile: no event is left without its delivery (S1.1, I10)."""
    store, other = site.open(), Operator(site.open(), site.clock)

    def change() -> None:
        for n in range(25):
            other.subscription(f"s{n}", ["never.*"])
            other.store.pause_subscription(f"s{n}", paused=True)
            other.store.delete_subscription(f"s{n}", "me")

    def publish() -> None:
        for n in range(60):
            (event,) = store.publish([draft({"type": f"t{n}"})])
            assert [each.subscription for each in store.get(event.id, "default").deliveries] == ["default"]

    def work() -> None:
        for _ in range(60):
            assert any(each.name == "default" for each in store.subscriptions())
            assert store.stats().subscriptions
            taken = store.claim(Claim("default", "w", "o", limit=3)).deliveries
            store.settle([Settlement(each.lease, RETRY, "w") for each in taken])

    for each in (change, publish, publish, work, work):
        crew.start(each)
    crew.join(60)


def test_upkeep_and_claims_do_not_end_a_lease_twice(site: Site, crew: Crew):
    """Two upkeeps and two claimers meet the same expired leases: each is counted once (I12, I13)."""
    op = Operator(site.open(), site.clock)
    other = Operator(site.open(), site.clock)
    events = op.publish_all(*[{"type": "a"}] * 60)
    op.claim(60)
    op.end_leases()
    bar = threading.Barrier(4)

    def expire(store: Log) -> None:
        bar.wait()
        while store.expire(None, RetryPolicy(), limit=7):
            pass

    def claim(mine: Operator) -> None:
        bar.wait()
        mine.take_all(worker="heir")

    for each in (op, other):
        crew.start(lambda each=each: expire(each.store))
        crew.start(lambda each=each: claim(each))
    crew.join(30)
    op.take_all(worker="last")
    for event in events:
        assert op.actions(event) == ["PICKED", "EXPIRED", "PICKED"]
        assert op.stand(event).retry_count == 1
