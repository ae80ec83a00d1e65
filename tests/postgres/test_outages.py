"""The server crashes, connections break in the midst of a commit: nothing is lost, nothing is stored twice."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postbus import Event, EventBus, OutcomeUnknown, Status, StoreUnavailable
from postbus.observe import set_probe
from postbus.payload import drafts
from postbus.retry import RetryPolicy
from postbus.store import lookups, open_store
from postbus.store.contract import Claim, Transaction
from postbus.torture.proxy import Cut, Proxy
from tests.conftest import Crew
from tests.crash.processes import Child, Trial, until
from tests.postgres.server import Server, query

COMMIT = r"COMMIT\x00"
"""The statement, and not the level READ COMMITTED that transactions begin with."""
PUBLISH = r"trial\.event"
"""A small publish is one statement, and its own transaction: known by what it stores."""
SETTLE = r"postbus_finish_"
"""So is what finishes a delivery: known by the name of its prepared statement."""
GROUP = r"(?s)trial\.event.*trial\.event"
"""Several publishers' events, stored together."""
ENDED = """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
SOON = 10
"""Within so many seconds of the server everybody is at work again."""
OPTIONS = {"lease": 3, "prefetch": 20, "poll_interval": 0.5}
MANY = 1_000_000


@pytest.fixture
def trial(url: str, tmp_path: Path) -> Iterator[Trial]:
    """Give a trial on a database of its own."""
    trial = Trial(tmp_path, url)
    yield trial
    trial.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """Give a door before the server."""
    proxy = Proxy(server.socket)
    yield proxy
    proxy.close()


@pytest.fixture
def other(server: Server) -> Iterator[Proxy]:
    """Give a second one."""
    proxy = Proxy(server.socket)
    yield proxy
    proxy.close()


@pytest.fixture
def bus(url: str, proxy: Proxy) -> Iterator[EventBus]:
    """Give a bus behind the door."""
    bus = EventBus(proxy.url(url), poll_interval=0.2)
    yield bus
    bus.shutdown(timeout=5)


@pytest.fixture
def direct(url: str) -> Iterator[EventBus]:
    """Give a bus with nothing between it and the server."""
    bus = EventBus(url)
    yield bus
    bus.shutdown(timeout=5)


def crew(trial: Trial, **urls: str) -> list[Child]:
    """Start two publishers, who ask again by uid what they got no answer to, and two workers."""
    made = [
        trial.start(role, name=f"{role}-{number}", url=url, stubborn=True, count=MANY, pace=0.002, options=OPTIONS)
        for role, url in urls.items()
        for number in range(2)
    ]
    for each in made:
        each.hear()
    return made


def progress(trial: Trial) -> Callable[[], bool]:
    """Return what tells that both publishers have been acknowledged, and workers have worked, since now."""
    files = [*(trial.folder / f"journal-publish-{number}" for number in range(2)), trial.executions_file]

    def sizes() -> list[int]:
        return [file.stat().st_size if file.exists() else 0 for file in files]

    # A publisher that waits writes one line ("invoke") and then none: more than a line is an answer.
    enough = [size + 400 for size in sizes()]
    return lambda: all(now > then for now, then in zip(sizes(), enough, strict=True))


def finish(trial: Trial, made: list[Child]) -> None:
    """End the crew in good order and drain what is left; nobody may have died of what happened."""
    for each in made:
        assert not each.ended(), each.errors()
    for each in made[:2]:
        each.kill()
    for each in made[2:]:
        each.kill(15)
    trial.run("drain", options=OPTIONS)


def report(trial: Trial, capsys: pytest.CaptureFixture[str], what: str, slowest: float) -> None:
    """Print the figures of the trial."""
    database = trial.database()
    with capsys.disabled():
        print(  # noqa: T201  the figures are what a trial is for
            f"\n{what}: {len(trial.journal().acknowledged)} acknowledged, {len(database.events)} stored, "
            f"{len(trial.logged('publish_refused'))} asked again, "
            f"{sum(row.action == 'EXPIRED' for row in database.audit)} expiries, back after {slowest:.1f} s at most"
        )


@pytest.mark.timeout(600)
@pytest.mark.slow  # postbus torture database-crash has one in the quick tests
@pytest.mark.parametrize("times", [2, 20])
def test_a_server_that_crashes_under_load_loses_and_doubles_nothing(
    server: Server, trial: Trial, times: int, capsys: pytest.CaptureFixture[str]
):
    """Immediate stop and start: lost 0, copies 0, all at work again within 10 s by themselves (S4.10, I1, I2, I3)."""
    chance = random.Random(f"restarts {times}")
    made = crew(trial, publish=trial.url, work=trial.url)
    slowest = 0.0
    for _ in range(times):
        until(progress(trial), "the crew is at work")
        server.stop("immediate")
        try:
            threading.Event().wait(chance.choice([0, 0.3, 1.5]))
        finally:
            server.start()
        began = time.monotonic()
        until(progress(trial), "all are at work again", seconds=SOON)
        slowest = max(slowest, time.monotonic() - began)
    finish(trial, made)
    report(trial, capsys, f"{times} crashes of the server", slowest)
    assert trial.logged("publish_refused"), "nobody noticed a thing: was there load?"
    assert trial.verdicts(allowed=4) == []


@pytest.mark.timeout(600)
@pytest.mark.slow  # postbus torture cut-in-commit has one in the quick tests
@pytest.mark.parametrize("times", [6, 54])
def test_a_connection_cut_during_commit_loses_and_doubles_nothing(
    trial: Trial, proxy: Proxy, other: Proxy, times: int, capsys: pytest.CaptureFixture[str]
):
    """Before, during and after it: lost 0, copies 0 when asked again by uid, and all go on (S4.10, I1, I2, I3)."""
    made = crew(trial, publish=proxy.url(trial.url), work=other.url(trial.url))
    slowest = 0.0
    for number in range(times):
        until(progress(trial), "the crew is at work")
        door, request = ((proxy, PUBLISH), (other, COMMIT))[number % 2]
        door.cut(list(Cut)[number // 2 % 3], request)
        assert door.wait(10), "nobody committed"
        began = time.monotonic()
        until(progress(trial), "all are at work again", seconds=SOON)
        slowest = max(slowest, time.monotonic() - began)
    finish(trial, made)
    report(trial, capsys, f"{times} commits cut", slowest)
    assert len(trial.logged("publish_refused")) >= times // 2
    assert trial.verdicts() == []


@pytest.mark.parametrize("when", Cut)
@pytest.mark.parametrize("uid", [None, "u"])
def test_a_publish_whose_answer_is_lost_is_stored_once_and_acknowledged(
    url: str, bus: EventBus, proxy: Proxy, when: Cut, uid: str | None
):
    """The store looks what became of the commit: the event is returned that is there, or stored now (I1, I3)."""
    bus.publish("trial.event", "before")
    proxy.cut(when, PUBLISH)
    event = bus.publish("trial.event", "cut", uid=uid)
    assert proxy.cuts == 1
    assert query(url, "SELECT id, uid, payload::text FROM events ORDER BY id DESC LIMIT 1") == [
        (event.id, event.uid, '"cut"')
    ]
    assert query(url, "SELECT count(*) FROM events") == [(2,)]
    assert bus.get(event.id).created_at == event.created_at


@pytest.mark.parametrize("when", Cut)
def test_publishers_of_a_group_whose_answer_is_lost_are_all_acknowledged(
    url: str, bus: EventBus, proxy: Proxy, crew: Crew, when: Cut
):
    """Each event is there once, under the id that its publisher is told, with chosen uids among them (I1, I3)."""
    told: dict[int, int] = {}

    def publish(number: int) -> None:
        told[number] = bus.publish("trial.event", number, uid=f"u{number}" if number % 3 else None).id

    bus.publish("trial.event", -1)
    proxy.cut(when, GROUP)
    for number in range(40):
        crew.start(lambda number=number: publish(number))
    crew.join(30)
    assert proxy.cuts == 1, "no two were stored together"
    stored = {
        int(payload): number for number, payload in query(url, "SELECT id, payload::text FROM events WHERE id > 1")
    }
    assert stored == told
    assert query(url, "SELECT count(*) FROM events") == [(41,)]


@pytest.mark.parametrize("when", Cut)
def test_a_batch_whose_answer_is_lost_is_stored_once_and_acknowledged(url: str, bus: EventBus, proxy: Proxy, when: Cut):
    """With uids that are known already, and with some that come twice (I1, I2, I3)."""
    first = bus.publish("trial.event", 0, uid="u0")
    batch = [{"type": "trial.event", "payload": n, **({"uid": f"u{n % 90}"} if n < 100 else {})} for n in range(90)]
    batch += [{"type": "trial.event", "payload": n} for n in range(100, 300)]
    batch.append({"type": "trial.event", "payload": 7, "uid": "u7"})
    proxy.cut(when, PUBLISH)
    events = bus.publish_many(batch)
    assert proxy.cuts == 1
    assert events[0].id == first.id
    assert events[-1].id == events[7].id
    assert [each.payload for each in events] == [each["payload"] for each in batch]
    assert query(url, "SELECT count(*), count(DISTINCT uid) FROM events") == [(290, 290)]


def test_a_publish_whose_outcome_cannot_be_looked_up_says_so(server: Server, bus: EventBus, proxy: Proxy):
    """The server is gone with the answer: OutcomeUnknown, never the promise that nothing was stored (I1)."""
    bus.publish("trial.event")
    proxy.cut(Cut.BEFORE, "cut here", lambda: server.stop("immediate"))  # which of the two it was, nobody can tell
    try:
        with pytest.raises(OutcomeUnknown, match="with a uid"):
            bus.publish("trial.event", "cut here", uid="u")
        with pytest.raises(StoreUnavailable) as refused:
            bus.publish("trial.event")
        assert not isinstance(refused.value, OutcomeUnknown), "nothing was asked of the server"
    finally:
        server.start()
    assert bus.publish("trial.event", "cut here", uid="u").payload == "cut here"


def test_a_publish_that_is_stored_and_cannot_be_read_again_says_so(url: str, bus: EventBus, proxy: Proxy):
    """The event that a uid stands for is read behind the commit: nobody says then that nothing was stored (I1)."""
    bus.publish("trial.event", uid="known")
    proxy.cut(Cut.BEFORE, r"events_by_id|FROM postbus\.events")
    with pytest.raises(OutcomeUnknown, match="with a uid"):
        bus.publish_many([{"type": "trial.event", "uid": "known"}, {"type": "trial.event", "uid": "new"}])
    assert proxy.cuts == 1
    assert query(url, "SELECT uid FROM events ORDER BY id") == [("known",), ("new",)]


def test_a_commit_still_on_its_way_when_the_connection_is_lost_is_not_done_twice(
    url: str, bus: EventBus, proxy: Proxy, connect: Callable[..., psycopg.Connection[Any]]
):
    """Its session, which waits for a lock, is ended before it is looked for: it can commit no more (I3)."""
    bus.publish("trial.event")
    with bus.store._publisher.hold() as db:  # type: ignore[attr-defined]
        lost = db.connection.pid
    blocker = connect(autocommit=False)
    blocker.execute("LOCK TABLE postbus.events IN SHARE MODE")
    proxy.cut(Cut.DURING, PUBLISH)
    answers: list[Event] = []
    publisher = threading.Thread(target=lambda: answers.append(bus.publish("trial.event", "cut")))
    publisher.start()
    assert proxy.wait(10)
    blocked = "SELECT pid = %s FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    until(lambda: query(url, blocked, lost) == [(False,)], "the publish waits, again")
    blocker.rollback()
    publisher.join(20)
    assert query(url, "SELECT id FROM events WHERE payload::text = '\"cut\"'") == [(answers[0].id,)]


@pytest.mark.parametrize("when", Cut)
def test_a_settle_cut_during_commit_can_be_told_again(bus: EventBus, proxy: Proxy, when: Cut):
    """The epoch says whether it had been recorded: either way it ends completed, once (I8, I9)."""
    for _ in range(2):
        event = bus.publish("trial.event")
    first, delivery = bus.poll_many(2)
    bus.finalize(first, success=True)  # from here on the statement is prepared
    proxy.cut(when, SETTLE)
    try:
        bus.finalize(delivery, success=True)
    except StoreUnavailable:
        bus.finalize(delivery, success=True)
    assert proxy.cuts == 1
    assert [row.action.value for row in bus.get(event.id, include_logs=True).logs] == ["PICKED", "COMPLETED"]


def test_what_was_claimed_when_the_server_went_is_handed_back_when_it_is_there(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
):
    """Its events could not be read: it is leased to nobody, and would be so until the lease ends (I10)."""
    honest = lookups.rows_of

    def crash(db: Any, ids: Any) -> Any:
        server.stop("immediate")
        return honest(db, ids)

    with closing(open_store(url)) as store:
        store.publish(drafts([{"type": "a"}] * 100))
        claim = Claim("default", "w", "o", limit=100, shared=True, lease=timedelta(hours=1))
        with monkeypatch.context() as patch:
            patch.setattr(lookups, "rows_of", crash)
            with pytest.raises(StoreUnavailable):
                store.claim(claim)
        server.start()
        store.expire(None, RetryPolicy())
        again = store.claim(claim).deliveries
        assert [each.attempt for each in again] == [1] * 100


def test_connections_that_died_in_the_pool_do_not_surface(bus: EventBus, proxy: Proxy, crew: Crew):
    """A firewall forgets idle connections: whoever comes next is served, with one refusal at most (S4.10)."""
    crew.start(lambda: bus.publish("trial.event"), 10)
    crew.join()
    proxy.cut_all()
    refusals = 0
    for number in range(20):
        try:
            bus.publish("trial.event", uid=f"u{number}")
            bus.stats()
        except StoreUnavailable:
            refusals += 1
    assert refusals <= 2


def test_a_store_that_is_away_is_a_clean_error_and_comes_back(
    server: Server, url: str, eventually: Callable[..., object]
):
    """StoreUnavailable within seconds, for whoever opens and whoever is open; then all goes on (S4.10, I16)."""
    bus = EventBus(url)
    bus.publish("trial.event")
    server.stop("immediate")
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            bus.publish("trial.event")
        with pytest.raises(StoreUnavailable):
            EventBus(url).stats()
        assert time.monotonic() - began < 60
    finally:
        server.start()

    def published() -> bool:
        try:
            bus.publish("trial.event", uid="back")
        except StoreUnavailable:
            return False
        return True

    eventually(published)
    assert bus.list().total == 2
    bus.shutdown()


def test_a_transaction_whose_connection_died_is_not_acknowledged(url: str, direct: EventBus):
    """The server ends the session between the last statement and the commit: an error, and nothing is there (I1)."""

    def publish_and_die() -> None:
        with direct.transaction() as tx:
            direct.publish("trial.event", connection=tx)
            ((pid,),) = tx.execute("SELECT pg_backend_pid()")
            query(url, "SELECT pg_terminate_backend(%s, 5000)", pid)

    with pytest.raises(StoreUnavailable):
        publish_and_die()
    assert query(url, "SELECT count(*) FROM events") == [(0,)]
    assert direct.publish("trial.event").id > 0


def test_a_batch_whose_connection_died_before_its_commit_is_not_acknowledged(
    url: str, bus: EventBus, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
):
    """Cut between its parts, a large batch is nowhere and its publisher is told; asked again, it is stored (I1, I2)."""
    monkeypatch.setattr("postbus.store.postgres.append.BATCH_BYTES", 10_000)
    batch = [{"type": "trial.event", "payload": number, "uid": f"u{number}"} for number in range(300)]
    bus.publish("trial.event")
    proxy.cut(Cut.BEFORE, r"u299")
    with pytest.raises(StoreUnavailable) as refused:
        bus.publish_many(batch)
    assert not isinstance(refused.value, OutcomeUnknown)
    assert query(url, "SELECT count(*) FROM events") == [(1,)]
    assert len(bus.publish_many(batch)) == 300
    assert query(url, "SELECT count(*) FROM events") == [(301,)]


@pytest.mark.parametrize("when", [Cut.DURING, Cut.AFTER])
def test_a_transaction_of_the_caller_s_own_whose_answer_is_lost_says_that_it_may_have_happened(
    bus: EventBus, proxy: Proxy, when: Cut
):
    """What else stood in it the store does not know, and cannot do again (I1)."""

    def publish() -> None:
        with bus.transaction() as tx:
            bus.publish("trial.event", uid="u", connection=tx)
            proxy.cut(when, COMMIT)

    with pytest.raises(OutcomeUnknown):
        publish()
    assert proxy.cuts == 1


def test_an_outcome_whose_connection_died_before_its_commit_is_not_acknowledged(bus: EventBus, proxy: Proxy):
    """All sessions end right before COMMIT: its worker is told, nothing is stored, and it can be told again (I1)."""
    event = bus.publish("trial.event")
    delivery = bus.poll()
    assert delivery is not None
    set_probe(lambda name: proxy.cut_all() if name == "committing" else None)
    try:
        with pytest.raises(StoreUnavailable):
            bus.finalize(delivery, success=True)
    finally:
        set_probe(None)
    assert [row.action.value for row in bus.get(event.id, include_logs=True).logs] == ["PICKED"]
    bus.finalize(delivery, success=True)
    assert bus.get(event.id).status is Status.COMPLETED


@pytest.mark.parametrize("when", Cut)
def test_a_follower_whose_commit_got_no_answer_does_nothing_twice(
    url: str, bus: EventBus, direct: EventBus, proxy: Proxy, when: Cut, eventually: Callable[..., None]
):
    """Whether its transaction was stored it does not know, and looks where it stands before it goes on (I5, I6)."""
    query(url, "CREATE TABLE public.effects (n SERIAL, event_id BIGINT)")
    ids = [direct.publish("trial.event").id for _ in range(5)]
    calls: list[int] = []

    @bus.follow("projection", "trial.*", start="beginning")
    def project(event: Event, tx: Transaction) -> None:
        tx.execute("INSERT INTO public.effects (event_id) VALUES (%s)", (event.id,))
        calls.append(event.id)

    def cut(name: str) -> None:
        if name == "checkpointing" and calls == ids[:3]:
            proxy.cut(when, COMMIT)

    set_probe(cut)
    try:
        with bus:
            eventually(lambda: direct.store.position("projection") >= ids[-1])
    finally:
        set_probe(None)
    assert proxy.cuts == 1
    assert [row[0] for row in query(url, "SELECT event_id FROM public.effects ORDER BY n")] == ids
    assert calls.count(ids[2]) == 2 or when is not Cut.BEFORE, "the first time it was not stored"


def test_a_follower_that_buried_an_event_and_got_no_answer_leaves_it_dead(
    bus: EventBus, direct: EventBus, proxy: Proxy, eventually: Callable[..., None]
):
    """What may be a dead letter already is not handled once more (I5)."""
    ids = [direct.publish("trial.event", max_retries=0).id for _ in range(3)]
    calls: list[int] = []

    @bus.follow("reader", "trial.*", start="beginning")
    def see(event: Event) -> None:
        calls.append(event.id)
        if calls == ids[:2]:
            raise ValueError("not this one")

    def cut(name: str) -> None:
        if name == "committing" and calls == ids[:2] and proxy.cuts == 0:
            proxy.cut(Cut.AFTER, COMMIT)

    set_probe(cut)
    try:
        with bus:
            eventually(lambda: direct.store.position("reader") >= ids[-1])
    finally:
        set_probe(None)
    assert proxy.cuts == 1
    assert calls == ids
    assert [each.event.id for each in direct.dlq.list().items] == [ids[1]]


@pytest.mark.parametrize("restarted", [False, True], ids=["ended", "restarted"])
def test_sessions_that_an_administrator_ended_while_idle_do_not_surface(
    server: Server,
    url: str,
    direct: EventBus,
    restarted: bool,  # noqa: FBT001
):
    """The server says goodbye on each idle connection: the next publish, poll or look takes a new one (S4.10)."""
    for _ in range(3):
        direct.publish("trial.event")
    direct.stats()
    if restarted:
        server.stop("fast")
        server.start()
    else:
        query(url, ENDED)
    assert direct.publish("trial.event").id == 4
    assert direct.poll() is not None
    assert direct.stats().head == 4
