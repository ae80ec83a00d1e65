"""A claim and a success are one statement each; connections that break, and statements that are forgotten."""

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import psycopg
import pytest

from postbus.errors import LeaseLost, NotFound, StoreUnavailable
from postbus.model import Delivery, Lease
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store import Log, log_of, open_store
from postbus.store.contract import Claim, Report, Reported, Settled
from postbus.store.postgres.connection import Database
from postbus.torture.proxy import Cut, Proxy
from tests.contract.stores import LEASE, Operator, Site, ids, site_of
from tests.postgres.server import Server, query

POLICY: Final = RetryPolicy(max_retries=5)
ME: Final = "lone:1"
SERIALIZABLE: Final = """
    DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', current_database());
    END $$
"""


@pytest.fixture
def site(tmp_path: Any) -> Iterator[Site]:
    """Give a database whose clock stands still."""
    site = site_of("postgres", tmp_path)
    yield site
    site.close()


@pytest.fixture
def op(site: Site) -> Operator:
    """Give somebody for whom there are ten events; one of them he has completed."""
    op = Operator(site.open(), site.clock)
    op.publish_all(*[{"type": "a", "payload": number} for number in range(10)])
    op.settle(op.take())
    return op


@pytest.fixture
def other(site: Site) -> Operator:
    """Give somebody in another process."""
    return Operator(site.open(), site.clock)


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


def test_claiming_and_completing_begin_no_transaction(op: Operator, begun: list[None]):
    """Each is a statement that commits itself, so that no client holds a cursor while it thinks (C4)."""
    delivery = op.take(worker=ME)
    assert op.settle(delivery) is Settled.APPLIED
    assert begun == []
    assert (delivery.attempt, delivery.event.payload, delivery.lease_until) == (1, 1, op.clock.now() + LEASE)
    assert op.actions(delivery.id) == ["PICKED", "COMPLETED"]


def test_claims_of_many_workers_are_one_statement(op: Operator, begun: list[None]):
    """Each gets its own, in their order, for as long as it asked."""
    claims = [Claim("default", f"w{n}", f"o{n}", limit=n, lease=timedelta(seconds=n)) for n in (1, 3, 2)]
    answers = op.store.claim_all(claims)
    assert begun == []
    assert [ids(each.deliveries) for each in answers] == [[2], [3, 4, 5], [6, 7]]
    epochs = [delivery.epoch for each in answers for delivery in each.deliveries]
    assert epochs == sorted(set(epochs))
    for claim, answer in zip(claims, answers, strict=True):
        assert {each.worker_id for each in answer.deliveries} == {claim.worker_id}
        assert {each.lease_until for each in answer.deliveries} == {op.clock.now() + claim.lease}
    assert op.store.owners() == {"o1", "o2", "o3"}


def test_rows_that_another_holds_are_passed_over(op: Operator, site: Site):
    """Nobody waits for anybody: the next ones are as good."""
    op.store.release([each.lease for each in op.claim(9)], ME)
    site.clock.advance(1)
    with psycopg.connect(site.url) as holder:
        holder.execute("SELECT 1 FROM postbus.deliveries WHERE event_id IN (2, 4) FOR UPDATE")
        assert ids(op.claim(3)) == [3, 5, 6]
    assert ids(op.claim(3)) == [7, 8, 9]
    assert ids(op.claim(4)) == [10]
    assert ids(op.claim(4)) == [2, 4]


def test_a_row_that_comes_up_behind_what_was_taken_is_found(op: Operator, site: Site):
    """A claim begins where the last one stopped; when that finds nothing, it looks from the beginning (I10)."""
    op.store.release([each.lease for each in op.claim(9)], ME)
    site.clock.advance(1)
    assert ids(op.claim(3)) == [2, 3, 4]
    query(site.url, "UPDATE deliveries SET due_at = due_at - interval '1 min' WHERE event_id = 9")
    assert ids(op.claim(3)) == [5, 6, 7]
    assert {*ids(op.claim(3)), *ids(op.claim(3))} == {8, 9, 10}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("level", ["read committed", "serializable"])
def test_workers_beside_each_other_never_get_the_same(url: str, level: str):
    """Four processes claim one by one, whatever the database's default: each event has one claim, one end (I7, I9)."""
    if level == "serializable":
        query(url, SERIALIZABLE)
    stores = [log_of(open_store(url)) for _ in range(4)]
    stores[0].publish([draft({"type": f"t{number % 3}", "priority": number % 2}) for number in range(400)])
    epochs: list[Lease] = []

    def work(store: Log, me: str) -> None:
        while found := store.claim(Claim("default", me, me)).deliveries:
            epochs.extend(each.lease for each in found)
            assert all(isinstance(each, Reported) for each in store.report([success(each) for each in found]))

    threads = [threading.Thread(target=work, args=(store, f"w{n}")) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({lease.epoch for lease in epochs}) == len(epochs) == 400
    rows = query(url, "SELECT event_id, action, count(*) FROM audit GROUP BY event_id, action")
    assert Counter(count for _, _, count in rows) == {1: 800}
    for store in stores:
        store.close()


# ── reporting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_reports_together_each_is_answered_for_itself(op: Operator):
    """What stands is finished at once; the stale, the repeated and the unheard-of get a closer look (I8)."""
    stale, standing, repeated = op.claim(3, worker=ME)
    op.store.report([success(repeated)])
    op.store.reset(stale.id, "default", "by hand", "admin")
    assert stale.id in {*ids(op.claim(10, worker="next")), *ids(op.claim(10, worker="next"))}
    reports = [success(stale), success(standing), success(repeated), success(standing)._replace(event_id=999)]
    lost, done, again, unknown = op.store.report(reports)
    assert isinstance(lost, LeaseLost)
    assert isinstance(unknown, NotFound)
    assert isinstance(done, Reported)
    assert isinstance(again, Reported)
    assert (done.repeated, again.repeated) == (False, True)
    assert op.actions(stale.id) == ["PICKED", "RESET", "PICKED"]
    assert op.actions(standing.id) == op.actions(repeated.id) == ["PICKED", "COMPLETED"]


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
    with store._connection() as db:  # type: ignore[attr-defined]
        db.execute("DEALLOCATE ALL")
    assert [each.id for each in store.read_on(before, 100, (Interest("*"),)).events] == [before + 1]
    assert op.settle(op.take(worker=ME)) is Settled.APPLIED
    assert begun == []


def test_forgotten_in_a_transaction_they_do_not_spoil_it(op: Operator):
    """What could not be asked again there is asked psycopg's way, which knows what it made the server forget (I8)."""
    nothing = ("{}", "{}", "{}", "{}", None)
    with op.store._settler.hold() as db:  # type: ignore[attr-defined]
        db.ready().run_plain("finish", nothing)
        db.connection._prepared.clear()
        db.connection.pgconn.exec_(b"DEALLOCATE ALL")
        db.begin()
        assert db.run_plain("finish", nothing) == [([],)]
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
    """Give somebody behind the door."""
    op = Operator(log_of(open_store(proxy.url(site.url), clock=site.clock)), site.clock)
    op.publish_all(*[{"type": "a", "payload": number} for number in range(10)])
    for _ in range(3):
        op.store.report([success(op.take(worker=ME))])
    yield op
    op.store.close()


@pytest.mark.parametrize("when", Cut)
def test_a_claim_cut_in_the_midst_is_an_error_and_given_back(behind: Operator, proxy: Proxy, when: Cut):
    """What it was given is found by its token; while it is still being given, the lease's end gives it back (I10)."""
    proxy.cut(when, ME)
    with pytest.raises(StoreUnavailable):
        behind.claim(worker=ME)
    assert proxy.cuts == 1
    (next_one,) = ids(behind.claim(worker=ME))
    assert next_one in {Cut.BEFORE: [4], Cut.DURING: [4, 5], Cut.AFTER: [4]}[when]
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
    proxy.cut(when, r"COMMIT\x00")
    with pytest.raises(StoreUnavailable):
        behind.store.report([report])
    assert proxy.cuts == 1
    (told,) = behind.store.report([report])
    assert isinstance(told, Reported)
    assert told.repeated or when is not Cut.AFTER
    assert behind.actions(report.event_id) == ["PICKED", "COMPLETED"]
