"""A claim that gets what it asks for and a success reported are one statement each, and differ in nothing else."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, LiteralString

import psycopg
import pytest

from postbus.errors import LeaseLost, NotFound, StoreUnavailable
from postbus.model import Delivery, Lease
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store import Store, open_store
from postbus.store.contract import Claim, Report, Reported, Settled
from postbus.store.postgres import store as module
from postbus.store.postgres.connection import Database
from postbus.torture.proxy import Cut, Proxy
from tests.contract.stores import LEASE, Operator, Site, ids, site_of, wanting
from tests.postgres.server import Server, query

POLICY: Final = RetryPolicy(max_retries=5)
ME: Final = "lone:1"
STALLED: Final = """
    CREATE OR REPLACE FUNCTION postbus.now() RETURNS timestamptz LANGUAGE sql VOLATILE
    AS 'SELECT pg_advisory_xact_lock_shared(4711); SELECT clock_timestamp()'
"""
"""Whoever holds that lock stops the others within their statement: they have seen what there is, and taken nothing."""
SERIALIZABLE: Final = """
    DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', current_database());
    END $$
"""
WAITING: Final = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"


@pytest.fixture
def site(tmp_path: Any) -> Iterator[Site]:
    """Give a database whose clock stands still."""
    site = site_of("postgres", tmp_path)
    yield site
    site.close()


@pytest.fixture
def op(site: Site) -> Operator:
    """Give somebody whose claims flow: ten events are there, and one of them he has completed."""
    op = Operator(site.open(), site.clock)
    op.publish_all(*[{"type": "a", "payload": number} for number in range(10)])
    op.settle(op.take())
    return op


@pytest.fixture
def other(site: Site) -> Operator:
    """Give somebody in another process."""
    return Operator(site.open(), site.clock)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give how many each claim got that was tried at once."""
    counts: list[int] = []
    honest = module.claim_at_once

    def counting(*given: Any) -> Any:
        wons = yield from honest(*given)
        counts.append(sum(len(won.taken) for won in wons))
        return wons

    monkeypatch.setattr(module, "claim_at_once", counting)
    return counts


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Give as many as transactions were begun."""
    begun: list[None] = []
    honest = Database.begin

    def begin(self: Database) -> None:
        begun.append(None)
        honest(self)

    monkeypatch.setattr(Database, "begin", begin)
    return begun


def success(delivery: Delivery, **told: Any) -> Report:
    """Return the report of a success."""
    return Report(delivery.id, delivery.subscription, delivery.worker_id, POLICY, epoch=delivery.epoch, **told)


# ── claiming ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_claiming_and_completing_begin_no_transaction(op: Operator, taken: list[int], begun: list[None]):
    """And tell and record what any claim and report do."""
    delivery = op.take(worker=ME)
    (told,) = op.store.report([success(delivery, status_code=200, execution_time_ms=1.5)])
    assert op.settle(op.take()) is Settled.APPLIED
    assert (taken, begun) == ([1, 1], [])
    assert (delivery.attempt, delivery.event.payload, delivery.lease_until) == (1, 1, op.clock.now() + LEASE)
    assert isinstance(told, Reported)
    picked, completed = op.logs(delivery.id)
    assert (picked.worker_id, picked.epoch, picked.attempt) == (ME, delivery.epoch, 1)
    assert told.entry == replace(completed, id=0)
    assert (told.retry_count, told.max_retries, told.repeated) == (0, 5, False)


def test_claims_of_many_workers_are_one_statement(op: Operator, taken: list[int], begun: list[None]):
    """Each gets its own, in their order, for as long as it asked."""
    claims = [Claim("default", f"w{n}", f"o{n}", limit=n, lease=timedelta(seconds=n)) for n in (1, 3, 2)]
    answers = op.store.claim_all(claims)
    assert (taken, begun) == ([6], [])
    assert [ids(each.deliveries) for each in answers] == [[2], [3, 4, 5], [6, 7]]
    epochs = [delivery.epoch for each in answers for delivery in each.deliveries]
    assert epochs == sorted(set(epochs))
    for claim, answer in zip(claims, answers, strict=True):
        assert {each.worker_id for each in answer.deliveries} == {claim.worker_id}
        assert {each.lease_until for each in answer.deliveries} == {op.clock.now() + claim.lease}
    assert op.store.owners() == {"o1", "o2", "o3"}


def test_what_was_slow_to_commit_is_found_though_lower_ones_flow(
    op: Operator, other: Operator, site: Site, taken: list[int]
):
    """Due before what was taken last, it is before the mark; a higher priority is looked at from the beginning."""
    op.settle(op.take(interests=wanting("a")))
    other.publish("urgent", priority=5)
    assert ids(op.claim()) == [11]
    op.clock.advance(5)
    other.publish("urgent", priority=5)
    assert ids(op.claim(2)) == [12, 3]
    late = other.publish("urgent", priority=5)
    query(site.url, "UPDATE deliveries SET due_at = due_at - interval '3 s' WHERE event_id = %s", late.id)
    assert (ids(op.claim(2)), taken[-1]) == ([late.id, 4], 2)


def test_a_lease_that_ran_out_is_ended_by_the_claim_that_meets_it(op: Operator, taken: list[int]):
    """It comes again alone, as a suspect, and is recorded as expired."""
    lost = op.take(worker="lost")
    assert ids(op.claim(8)) == [3, 4, 5, 6, 7, 8, 9, 10]
    op.end_leases()
    later = op.publish("a")
    (again,) = op.claim(9)
    assert taken == [1, 8, 0]
    assert (again.id, again.suspect, again.attempt) == (lost.id, True, 2)
    assert op.actions(lost.id) == ["PICKED", "EXPIRED", "PICKED"]
    assert op.actions(later) == []


def test_less_than_asked_for_is_told_as_that(op: Operator, taken: list[int]):
    """With when more falls due."""
    op.publish("a", delay=30)
    assert ids(op.claim(2)) == [2, 3]
    answer = op.ask(50)
    assert ids(answer.deliveries) == [4, 5, 6, 7, 8, 9, 10]
    assert (answer.more, answer.next_due) == (False, op.clock.now() + timedelta(seconds=30))
    assert taken == [2, 0]


def test_what_another_holds_is_passed_over(op: Operator, site: Site, taken: list[int]):
    """Nobody waits for anybody: the next ones are as good."""
    with psycopg.connect(site.url) as holder:
        holder.execute("SELECT 1 FROM postbus.deliveries WHERE event_id IN (2, 4) FOR UPDATE")
        assert ids(op.claim(3)) == [3, 5, 6]
    assert ids(op.claim()) == [2]
    assert taken == [3, 1]


def test_many_are_not_read_at_once(op: Operator, taken: list[int]):
    """A hundred, but no more: what is claimed has to fit into memory."""
    op.publish_all(*[{"type": "a"}] * 300)
    assert [len(op.claim(count)) for count in (100, 101, 100)] == [100, 101, 100]
    assert taken == [100, 100]


def test_an_old_transaction_that_is_open_does_not_matter(op: Operator, other: Operator, site: Site, taken: list[int]):
    """It holds back what is known to be old; a route that was seen is known all the same."""
    with psycopg.connect(site.url) as idle:
        idle.execute("SELECT pg_current_xact_id()")
        other.publish("b", priority=-1)
        other.subscription("others", ["c"])
        other.publish("c")
        op.take_all(interests=wanting("nothing"))
        op.claim(1)
        assert (ids(op.claim(2)), taken[-1]) == ([3, 4], 2)


@pytest.fixture
def meanwhile(url: str, eventually: Callable[..., object]) -> Callable[..., None]:
    """Give a function that runs one thing, and SQL when that is in the midst of its statement."""
    query(url, STALLED)

    def meanwhile(first: Callable[[], object], then: LiteralString) -> None:
        with psycopg.connect(url, autocommit=True) as holder:
            holder.execute("SELECT pg_advisory_lock(4711)")
            thread = threading.Thread(target=first)
            thread.start()
            eventually(lambda: query(url, WAITING) == [(1,)])
            query(url, then)
        thread.join(30)

    return meanwhile


@pytest.fixture
def flowing(url: str) -> Iterator[Store]:
    """Give a store with two events left, whose claims flow."""
    store = open_store(url)
    store.publish([draft({"type": "a"}) for _ in range(3)])
    store.report([success(store.claim(Claim("default", ME, "o")).deliveries[0])])
    yield store
    store.close()


def test_what_changes_while_it_is_being_claimed_is_claimed_as_it_is(
    flowing: Store, meanwhile: Callable[..., None], taken: list[int]
):
    """The statement has seen it, waits, and then finds it changed: it is not lost, nor given twice (I7)."""
    answers: list[Delivery] = []
    meanwhile(
        lambda: answers.extend(flowing.claim(Claim("default", ME, "o", limit=2)).deliveries),
        "UPDATE deliveries SET epoch = 77, retry_count = 1 WHERE event_id = 2",
    )
    assert taken == [0]
    assert [(each.id, each.attempt, each.event.retry_count) for each in answers] == [(2, 1, 1), (3, 1, 0)]
    assert [row.action.value for row in flowing.logs(2)] == ["PICKED"]


@pytest.mark.parametrize(
    ("change", "answer", "end"),
    [
        (
            "UPDATE deliveries SET due_at = due_at + interval '1 min' WHERE event_id = 2",
            Reported,
            ["PICKED", "COMPLETED"],
        ),
        ("UPDATE deliveries SET epoch = epoch + 1 WHERE event_id = 2", LeaseLost, ["PICKED"]),
    ],
    ids=["extended", "taken over"],
)
def test_what_changes_while_it_is_being_completed_is_judged_as_it_is(
    flowing: Store, meanwhile: Callable[..., None], change: LiteralString, answer: type, end: list[str]
):
    """A lease that runs on is completed; one that has passed to another is lost, and nothing changes (I8)."""
    (delivery,) = flowing.claim(Claim("default", ME, "o")).deliveries
    answers: list[object] = []
    meanwhile(lambda: answers.extend(flowing.report([success(delivery)])), change)
    assert [type(each) for each in answers] == [answer]
    assert [row.action.value for row in flowing.logs(2)] == end


@pytest.mark.timeout(120)
@pytest.mark.parametrize("level", ["read committed", "serializable"])
def test_workers_beside_each_other_never_get_the_same(url: str, level: str):
    """Four processes claim one by one, whatever the database's default: each event has one claim, one end (I7, I9)."""
    if level == "serializable":
        query(url, SERIALIZABLE)
    stores = [open_store(url) for _ in range(4)]
    stores[0].publish([draft({"type": f"t{number % 3}", "priority": number % 2}) for number in range(400)])
    epochs: list[Lease] = []

    def work(store: Store, me: str) -> None:
        while found := store.claim(Claim("default", me, me)).deliveries:
            epochs.extend(each.lease for each in found)
            assert all(isinstance(each, Reported) for each in store.report([success(each) for each in found]))

    threads = [threading.Thread(target=work, args=(store, f"w{n}")) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({lease.epoch for lease in epochs}) == len(epochs) == 400
    rows = query(url, "SELECT event_id, action, count(*) FROM event_log GROUP BY event_id, action")
    assert Counter(count for _, _, count in rows) == {1: 800}
    for store in stores:
        store.close()


# ── reporting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_reports_together_each_is_answered_for_itself(op: Operator, begun: list[None]):
    """What stands is finished at once; the stale, the repeated and the unheard-of get a closer look (I8)."""
    stale, standing, repeated = op.claim(3, worker=ME)
    op.store.report([success(repeated)])
    op.store.reset(stale.id, "default", "by hand", "admin")
    op.take(worker="next")
    begun.clear()
    reports = [success(stale), success(standing), success(repeated), success(standing)._replace(event_id=999)]
    lost, done, again, unknown = op.store.report(reports)
    assert isinstance(lost, LeaseLost)
    assert isinstance(unknown, NotFound)
    assert isinstance(done, Reported)
    assert isinstance(again, Reported)
    assert (done.repeated, again.repeated, len(begun)) == (False, True, 1)
    assert op.actions(stale.id) == ["PICKED", "RESET", "PICKED"]
    assert op.actions(standing.id) == op.actions(repeated.id) == ["PICKED", "COMPLETED"]


def test_a_success_after_the_lease_ran_out_is_accepted_while_nobody_has_it(op: Operator, begun: list[None]):
    """At once too; and the error of the attempt that was given up stays."""
    delivery = op.take(worker=ME)
    op.clock.advance(LEASE)
    assert op.store.expire(None, POLICY) == 1
    begun.clear()
    (told,) = op.store.report([success(delivery)])
    assert isinstance(told, Reported)
    assert (told.retry_count, begun) == (1, [])
    (end,) = (each for each in op.get(delivery.id).deliveries if each.subscription == "default")
    assert [each.type for each in end.errors] == ["LeaseExpired"]


# ── connections that break ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_the_server_has_forgotten_is_prepared_anew(op: Operator, begun: list[None]):
    """After a rollback psycopg has it forget every statement: publishing, reading, reporting go on, once each (I1)."""
    store = op.store
    for each in (store._publisher, store._claimer, store._settler):  # type: ignore[attr-defined]
        with each.hold() as db:
            db.ready().execute("DEALLOCATE ALL")
    begun.clear()
    before = store.read_on(0, 100, (Interest("*"),)).reached
    store.publish([draft({"type": "a"})])
    with store._connection() as (db, _):  # type: ignore[attr-defined]
        db.execute("DEALLOCATE ALL")
    assert [each.id for each in store.read_on(before, 100, (Interest("*"),)).events] == [before + 1]
    (told,) = store.report([success(op.take(worker=ME))])
    assert isinstance(told, Reported)
    assert begun == []


def test_forgotten_in_a_transaction_they_do_not_spoil_it(op: Operator):
    """What could not be asked again there is asked psycopg's way, which knows what it made the server forget (I8)."""
    nothing = ("{}", "{}", "{}", "{}", "{}", "{}", None)
    with op.store._settler.hold() as db:  # type: ignore[attr-defined]
        db.ready().run_plain("finish_all", nothing)
        db.connection._prepared.clear()
        db.connection.pgconn.exec_(b"DEALLOCATE ALL")
        db.begin()
        assert db.run_plain("finish_all", nothing) == []
        db.commit()


def test_a_publish_that_was_answered_is_told_as_that_though_its_notice_was_not(op: Operator):
    """Told that it failed, its publisher would store the event once more (I1)."""
    with op.store._publisher.hold() as db:  # type: ignore[attr-defined]
        db._sql = {**db._sql, "notify": "SELECT pg_terminate_backend(pg_backend_pid())"}
        db.close()
    for _ in range(3):
        (event,) = op.store.publish([draft({"type": "b", "payload": 7})])
        assert op.store.get(event.id, "default") is not None
    assert len(op.store.read_on(0, 100, (Interest("b"),)).events) == 3


def test_a_commit_that_fails_is_no_publish_though_its_rows_came_before(op: Operator, site: Site):
    """The server tells a statement's rows before it has tried to commit them (I1)."""
    with psycopg.connect(site.url, autocommit=True) as outside:
        outside.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'"
        )
        outside.execute(
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON postbus.events DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    with pytest.raises(psycopg.errors.RaiseException, match="no"):
        op.store.publish([draft({"type": "b"})])
    assert op.store.read_on(0, 100, (Interest("b"),)).events == []


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """Give a door before the server."""
    proxy = Proxy(server.socket)
    yield proxy
    proxy.close()


@pytest.fixture
def behind(site: Site, proxy: Proxy) -> Iterator[Operator]:
    """Give somebody behind the door, whose claims flow."""
    op = Operator(open_store(proxy.url(site.url), clock=site.clock), site.clock)
    op.publish_all(*[{"type": "a", "payload": number} for number in range(10)])
    for _ in range(3):
        op.store.report([success(op.take(worker=ME))])
    yield op
    op.store.close()


@pytest.mark.parametrize("when", Cut)
def test_a_claim_cut_in_the_midst_is_an_error_and_its_lease_runs_out(behind: Operator, proxy: Proxy, when: Cut):
    """Whether it had happened nobody knows; the event comes to somebody either way, and the claims go on (I10)."""
    proxy.cut(when, ME)
    with pytest.raises(StoreUnavailable):
        behind.claim(worker=ME)
    assert proxy.cuts == 1
    (next_one,) = ids(behind.claim(worker=ME))
    assert next_one in {Cut.BEFORE: [4], Cut.DURING: [4, 5], Cut.AFTER: [5]}[when]
    behind.end_leases()
    seen: set[int] = set()
    while found := behind.claim():
        seen.add(found[0].id)
        behind.settle(found[0])
    assert seen == set(range(4, 11))


@pytest.mark.parametrize("when", Cut)
def test_a_report_cut_in_the_midst_can_be_told_again(behind: Operator, proxy: Proxy, when: Cut):
    """The epoch says whether it had been recorded: either way it ends completed, once (I8, I9)."""
    report = success(behind.take(worker=ME))
    proxy.cut(when, ME)
    with pytest.raises(StoreUnavailable):
        behind.store.report([report])
    assert proxy.cuts == 1
    (told,) = behind.store.report([report])
    assert isinstance(told, Reported)
    assert told.repeated or when is not Cut.AFTER
    assert behind.actions(report.event_id) == ["PICKED", "COMPLETED"]
