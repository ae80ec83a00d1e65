"""A bus behind HTTP: everything a publisher, a worker and an operator do, and nothing made up."""

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from postbus import Discard, Event, EventBus, RetryPolicy, Status
from postbus.breaker import Breaker
from postbus.cli.app import app
from postbus.config import Settings
from postbus.errors import (
    Conflict,
    EventBusShutdownError,
    InvalidEventError,
    InvalidPayloadError,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OutcomeUnknown,
    PostbusError,
    StoreUnavailable,
)
from postbus.http import AsyncClient, Client, create_app
from postbus.model import Stream
from postbus.store import log_of, open_store
from postbus.store.remote.store import RemoteStore
from tests.http.between import answering, losing
from tests.http.serving import Served, serving
from tests.kinds import on_sqlite

QUICK: Final = RetryPolicy(max_retries=1, base_delay=0.01)
Connect = Callable[..., Client]


# ── publishing, polling, operating ───────────────────────────────────────────────────────────────────────────────────


def test_an_event_goes_there_and_back_whole(remote: Client, server: Served):
    """What is published behind HTTP is in the store as it was given, and is shown so (S2.1)."""
    given: dict[str, Any] = {
        "tags": ["eu", "big"],
        "key": "k",
        "title": "t",
        "description": "d",
        "metadata": {"a": "b"},
    }
    event = remote.publish(
        "order.placed", {"wide": 2**70, "n": [1, 1.0, True, None]}, priority=3, max_retries=7, **given
    )
    stored = server.bus.get(event.id, include_logs=True)
    assert (event.payload, event.tags, event.priority, event.max_retries) == (stored.payload, ("eu", "big"), 3, 7)
    assert remote.get(event.id, include_logs=True) == stored
    assert type(remote.get(event.id).payload["n"][1]) is float
    assert list(remote.list(tags=["big"])) == list(server.bus.list(tags=["big"]))


def test_a_polled_event_is_leased_extended_released_and_finalized(remote: Client, server: Served):
    """An own loop works behind HTTP as it does on the database (S2.2, S2.3); its lease is no server's (I7)."""
    event = remote.publish("a", {"n": 1})
    first = remote.poll()
    assert first is not None
    assert (first.id, first.attempt, first.worker_id) == (event.id, 1, remote.worker_id)
    assert server.bus.store.owners() == {"http"}
    remote.extend(first)
    remote.release(first)
    with pytest.raises(LeaseLost):
        remote.release(first)
    again = remote.poll()
    assert again is not None
    remote.finalize(again, status_code=200, execution_time_ms=2.5)
    remote.finalize(again)
    with pytest.raises(LeaseLost):
        remote.finalize(again, success=False)
    last = remote.get(event.id, include_logs=True).logs[-1]
    assert (last.status, last.status_code, last.execution_time_ms) == (Status.COMPLETED, 200, 2.5)
    assert remote.poll() is None


def test_a_failed_event_dies_and_is_retried_and_purged_from_elsewhere(connect: Connect):
    """Dead letters are looked at, revived and removed behind HTTP, and the log says by whom (S1.12, I13)."""
    remote = connect(retry=RetryPolicy(max_retries=0), worker_id="desk:1")
    event = remote.publish("a")
    for life in (1, 2):
        delivery = remote.poll()
        assert delivery is not None
        remote.finalize(delivery, success=False, errors=["no such card"])
        (letter,) = remote.dlq.get(event.id)
        assert (letter.attempts, letter.errors[0].message) == (1, "no such card")
        assert remote.dlq.list().total == 1
        if life == 1:
            assert remote.dlq.retry(event.id) == 1
    told: list[int] = []
    assert remote.dlq.purge(0, progress=told.append) == 1
    assert told == [1]
    with pytest.raises(NotFound):
        remote.dlq.get(event.id)
    rows = [(row.action, row.worker_id) for row in remote.get(event.id, include_logs=True).logs]
    assert rows[2] == ("RETRIED", "desk:1")
    assert rows[-1] == ("PURGED", "desk:1")


def test_subscriptions_are_made_paused_and_deleted_from_elsewhere(remote: Client, server: Served):
    """An operator needs no database (S2.2)."""
    made = remote.subscriptions.create("billing", ["order.*"], lease=2.5, retry=QUICK)
    assert (made.lease, made.retry) == (timedelta(seconds=2.5), QUICK)
    assert remote.subscriptions.list() == server.bus.subscriptions.list()
    with pytest.raises(Conflict, match="billing"):
        remote.subscriptions.create("billing")
    remote.publish("order.placed")
    remote.subscriptions.pause("billing")
    assert remote.poll(subscription="billing") is None
    remote.subscriptions.resume("billing")
    delivery = remote.poll(subscription="billing")
    assert delivery is not None
    assert delivery.retry == QUICK
    assert remote.subscriptions.delete("billing") == 1
    with pytest.raises(NotFound, match="billing"):
        remote.poll(subscription="billing")


def test_an_orphan_is_reset_from_elsewhere(remote: Client):
    """Its old lease is void, and the log says why (S2.5)."""
    event = remote.publish("a")
    held = remote.poll()
    assert held is not None
    remote.reset(event.id, "its worker is gone")
    with pytest.raises(LeaseLost):
        remote.extend(held)
    row = remote.get(event.id, include_logs=True).logs[-1]
    assert (row.action, row.error_message, row.worker_id) == ("RESET", "its worker is gone", remote.worker_id)


def test_figures_positions_and_followers_stand_are_told(remote: Client, server: Served, eventually: Callable[..., Any]):
    """What the database knows of followers, a remote bus tells: whether one has passed an event (S0.9)."""
    server.bus.follow("sales", start="beginning")(print)
    event = remote.publish("a")
    remote.wait_for("sales", event.id, timeout=10)
    with pytest.raises(NotFound, match="nobody"):
        remote.wait_for("nobody", 1)
    eventually(lambda: remote.stats().checkpoints[0].lag == 0)
    assert remote.stats().head == event.id
    assert remote.store.span(Stream.EVENTS) == server.bus.store.span(Stream.EVENTS)
    assert list(remote.store.standing("sales")) == []


def test_a_large_page_is_put_together_from_several(remote: Client):
    """Over what a server sends at once, nothing is missed and nothing doubled."""
    events = remote.publish_many({"type": "a", "payload": n} for n in range(1_203))
    page = remote.list(limit=1_200)
    assert [event.id for event in page] == [event.id for event in events[:2:-1]]
    assert (page.limit, page.total, page.next) == (1_200, 1_203, page.items[-1].id)
    assert [event.payload for event in remote.list(limit=1_000, after=page.next)] == [2, 1, 0]
    assert [event.payload for event in remote.list(limit=2, offset=1)] == [1_201, 1_200]


@on_sqlite
def test_a_batch_that_is_too_large_for_one_request_is_refused_whole(remote: Client):
    """All or none is not promised for parts: nothing is stored (I2)."""
    with pytest.raises(InvalidRequest, match="10,000 events"):
        remote.publish_many({"type": "a"} for _ in range(10_001))
    with pytest.raises(InvalidRequest, match="in parts"):
        remote.publish_many({"type": "a", "payload": "x" * 1_000_000} for _ in range(9))
    assert remote.stats().events == 0
    assert len(remote.publish_many({"type": "a"} for _ in range(10_000))) == 10_000


# ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_handlers_run_behind_http(connect: Connect, eventually: Callable[..., Any]):
    """Plain and async, several in parallel, retried and dead by their policy, and waited for (S1.1, S1.9)."""
    bus, seen = connect(retry=QUICK), list[tuple[str, int]]()

    @bus.on("order.*")
    def order(event: Event) -> None:
        seen.append(("plain", event.payload))

    @bus.on("order.*", subscription="mail")
    async def mail(event: Event) -> None:
        await asyncio.sleep(0)
        seen.append(("async", event.payload))

    @bus.on("bad.*")
    def refuse(event: Event) -> None:
        raise ValueError("never")

    bus.start()
    assert bus.publish("order.placed", 1, wait=True, timeout=20).status is Status.COMPLETED
    assert sorted(seen) == [("async", 1), ("plain", 1)]
    bad = bus.publish("bad.one")
    bus.publish_many({"type": "order.placed", "payload": n} for n in range(2, 302))
    bus.wait_idle(30)
    assert sorted(seen) == sorted((kind, n) for n in range(1, 302) for kind in ("async", "plain"))
    (letter,) = bus.dlq.get(bad.id)
    assert [error.message for error in letter.errors] == ["never", "never"]
    assert "refuse" in (letter.errors[0].handler or "")


def test_a_handler_is_woken_at_once(connect: Connect, server: Served, eventually: Callable[..., Any]):
    """One that looks by itself once in an hour gets what another process publishes now."""
    bus, seen = connect(poll_interval=3_600), list[int]()
    bus.subscribe("*", lambda event: seen.append(event.id))
    bus.start()
    for _ in range(3):
        event = server.bus.publish("a")
        eventually(lambda event=event: event.id in seen)


def test_retries_come_when_they_are_due_without_being_published_anew(connect: Connect):
    """A worker knows from its last claim when to look again (S1.9)."""
    bus, attempts = connect(poll_interval=0.2, retry=RetryPolicy(max_retries=3, base_delay=0.05)), list[int]()

    @bus.on("*")
    def third_time(event: Event) -> None:
        attempts.append(event.retry_count)
        if len(attempts) < 3:
            raise ValueError("not yet")

    bus.start()
    assert bus.publish("a", wait=True, timeout=20).status is Status.COMPLETED
    assert attempts == [0, 1, 2]


def test_remote_handlers_are_known_to_the_database(connect: Connect, server: Served):
    """`doctor` must not say that nobody handles what a remote worker does; one that ends is forgotten (S0.9, S1.6)."""
    bus = connect(worker_id="far:1")
    bus.subscribe("order.*", print, tags=["eu"])
    bus.publish("order.placed", tags=["eu"])
    assert server.bus.stats().unhandled == {"default/order.placed": 1}
    bus.start()
    (record,) = server.bus.store.handlers()
    assert (record.pattern, record.tags, record.worker_id) == ("order.*", ("eu",), "far:1")
    assert abs(record.seen_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert connect().store.handlers() == (record,)
    bus.shutdown()
    assert server.bus.store.handlers() == ()


def test_a_handlers_subscription_is_made_and_widened(remote: Client):
    """As on the database: the events of both handlers come (S2.2)."""
    seen: list[str] = []
    for pattern in ("order.*", "mail.*"):
        remote.subscribe(pattern, lambda event: seen.append(event.type), subscription="s")
    assert remote.subscriptions.get("s").patterns == ("order.*", "mail.*")
    remote.publish_many([{"type": "order.a"}, {"type": "mail.b"}, {"type": "other"}])
    assert remote.run_due() == 2
    assert sorted(seen) == ["mail.b", "order.a"]


def test_a_breaker_is_shared_over_http(connect: Connect, server: Served):
    """Failures counted by four threads in two processes elsewhere are all counted (S1.20)."""
    breaker, stores = Breaker(failures=1_000), [connect().store, connect().store]

    def fail(store: Any) -> None:
        for _ in range(20):
            store.change_breaker("b", lambda state: breaker.failed(state, store.now()))

    threads = [threading.Thread(target=fail, args=(stores[n % 2],)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.bus.store.breaker("b").failures == 80
    assert stores[0].change_breaker("b", lambda _: None).failures == 80


def test_an_open_breaker_stops_a_remote_handler(connect: Connect, server: Served):
    """What is down is left alone: its events stay pending, with no attempt burnt (S1.20)."""
    bus = connect(retry=RetryPolicy(max_retries=0))

    @bus.on("mail.*", breaker=Breaker(failures=2, reset_after=3_600))
    def send(event: Event) -> None:
        raise OSError("down")

    bus.publish_many({"type": "mail.send"} for _ in range(5))
    bus.run_due()
    assert bus.dlq.list().total == 2
    assert [event.retry_count for event in bus.list(status=Status.PENDING)] == [0, 0, 0]


def test_coroutines_have_the_same_bus(server: Served):
    """An AsyncClient publishes, handles and shuts down (S2.1)."""

    async def main() -> list[Any]:
        seen: list[Any] = []
        async with AsyncClient(server.url, poll_interval=0.1) as bus:

            @bus.on("a")
            async def handle(event: Event) -> None:
                seen.append(event.payload)

            done = await bus.publish("a", 7, wait=True, timeout=20)
            seen.append((await bus.get(done.id)).status)
        return seen

    assert asyncio.run(main()) == [7, Status.COMPLETED]


# ── what only the database can do ────────────────────────────────────────────────────────────────────────────────────


def in_a_transaction(event: Event, tx: Any) -> None:
    """Be a handler that writes with its outcome."""


@on_sqlite
@pytest.mark.parametrize(
    "use",
    [
        lambda bus: bus.transaction(),
        lambda bus: bus.publish("a", connection=object()),
        lambda bus: bus.follow("f")(print),
        lambda bus: bus.subscribe("a", in_a_transaction, transactional=True),
        lambda bus: log_of(bus.store, "pruning").prune(Stream.EVENTS, after=0, through=1),
        create_app,
        lambda bus: bus.store.expire(["p"], RetryPolicy()),
    ],
)
def test_what_needs_the_database_says_so(remote: Client, use: Callable[[Client], Any]):
    """One sentence instead of something that only looks as if it worked; nothing was made on the way."""
    with pytest.raises(InvalidRequest, match="needs the database itself"):
        use(remote)
    assert [each.name for each in remote.subscriptions.list()] == ["default"]


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_lets_in_and_is_never_shown(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """By argument or POSTBUS_TOKEN; in no repr, no error and no log entry (I17)."""
    caplog.set_level(logging.DEBUG)
    with serving(kind, tmp_path, auth=True, local=False) as served:
        publisher, worker = served.token("publish"), served.token("work", "read")
        bus = Client(served.url, token=publisher)
        assert bus.publish("a").id == 1
        with pytest.raises(InvalidRequest, match="scope work") as refused:
            bus.poll()
        monkeypatch.setenv("POSTBUS_TOKEN", worker)
        other = Client(served.url)
        seen: list[int] = []
        other.subscribe("*", lambda event: seen.append(event.id))
        assert other.run_due() == 1
        with pytest.raises(InvalidRequest, match="scope publish"):
            other.publish("a")
        monkeypatch.delenv("POSTBUS_TOKEN")
        stranger = Client(served.url)
        with pytest.raises(InvalidRequest, match="POSTBUS_TOKEN"):
            stranger.publish("a")
        shown = [repr(bus), repr(bus.settings), str(bus.settings), repr(other.store), str(refused.value), caplog.text]
        for secret in (publisher, worker):
            assert not any(secret in text for text in shown)
        for each in (bus, other, stranger):
            each.shutdown()
    assert seen == [1]


def test_a_token_in_the_settings_file_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """postbus.toml may hold it; printing the settings does not."""
    monkeypatch.chdir(tmp_path)
    Path("postbus.toml").write_text('url = "http://127.0.0.1:1"\ntoken = "postbus_x_secret"\n')
    settings = Settings.load()
    assert settings.token is not None
    assert settings.token.get_secret_value() == "postbus_x_secret"
    assert "secret" not in repr(settings).replace("SecretStr", "")


# ── trouble ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("use", "error", "told"),
    [
        (lambda bus: bus.get(404), NotFound, "404"),
        (lambda bus: bus.list(after="x"), InvalidRequest, "after"),
        (lambda bus: bus.dlq.retry(404), NotFound, "404"),
        (lambda bus: bus.publish("b", uid="u"), InvalidEventError, "stands for"),
        (lambda bus: bus.publish("a", {1, 2}), InvalidPayloadError, "set"),
        (lambda bus: bus.poll(subscription="nowhere"), NotFound, "nowhere"),
        (lambda bus: bus.reset(404, "again"), NotFound, "404"),
        (lambda bus: bus.reset(1, "again", "nowhere"), Conflict, "nowhere"),
        (lambda bus: bus.subscriptions.rewind("nowhere", 0), NotFound, "nowhere"),
        (lambda bus: bus.poll(worker_id="w" * 300), InvalidRequest, "worker_id"),
        (lambda bus: bus.poll(worker_id="\ud800"), InvalidRequest, "JSON"),
    ],
)
def test_errors_are_the_ones_the_store_would_raise(
    remote: Client, use: Callable[[Client], Any], error: type[Exception], told: str
):
    """Whoever catches postbus's own errors need not know where the store is (S1.14)."""
    remote.publish("a", uid="u")
    with pytest.raises(error, match=told):
        use(remote)


@on_sqlite
def test_a_publish_whose_answer_was_lost_is_repeated_and_stored_once(connect: Connect, server: Served):
    """Three answers in a row are lost on the way: the event is there once, with the id that is returned (I1, I3)."""
    with losing(server.url, "/store/publish", 3) as (place, asked):
        bus = connect(place)
        event = bus.publish("a", {"n": 1})
        assert asked.count("/store/publish") == 4
        assert [each.id for each in server.bus.list()] == [event.id]
        bus.shutdown()


@on_sqlite
def test_a_settlement_whose_answer_was_lost_is_repeated_and_recorded_once(connect: Connect, server: Served):
    """The same outcome again changes nothing (I9, I13)."""
    with losing(server.url, "/events/settle", 1) as (place, asked):
        bus = connect(place)
        event = bus.publish("a")
        delivery = bus.poll()
        assert delivery is not None
        bus.finalize(delivery)
        assert asked.count("/events/settle") == 2
        assert [row.action for row in server.bus.get(event.id, include_logs=True).logs] == ["PICKED", "COMPLETED"]
        bus.shutdown()


@on_sqlite
@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("/events/claim", lambda bus: bus.poll()),
        ("/store/dead/retry", lambda bus: bus.dlq.retry_all()),
        ("/store/reset", lambda bus: bus.reset(1, "why")),
    ],
)
def test_what_would_have_another_effect_is_not_repeated(
    connect: Connect, server: Served, path: str, use: Callable[[Client], Any]
):
    """A claim that was lost would be another claim: the caller is told that it is not known what happened."""
    with losing(server.url, path, 1) as (place, asked):
        bus = connect(place)
        bus.publish("a", delay=3_600 if path == "/store/reset" else None)
        with pytest.raises(OutcomeUnknown):
            use(bus)
        assert asked.count(path) == 1
        bus.shutdown()


def test_a_publish_whose_answers_are_all_lost_may_have_happened(connect: Connect, server: Served):
    """It is repeated with the same uid; where no answer comes at all, nobody says that nothing was stored (I1, I3)."""
    with losing(server.url, "/store/publish", 4) as (place, asked):
        bus = connect(place)
        with pytest.raises(OutcomeUnknown):
            bus.publish("a")
        assert asked.count("/store/publish") == 4
        assert bus.list().total == 1
        bus.shutdown()


def test_a_server_that_is_not_there_is_unavailable():
    """Told as a store that is away, after a few tries; and the bus opens all the same (S1.14)."""
    bus = Client("http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9"):
        bus.publish("a")
    bus.shutdown()
    with pytest.raises(EventBusShutdownError):
        bus.publish("a")
    with pytest.raises(EventBusShutdownError):
        bus.store.stats()


@pytest.mark.parametrize(
    ("status", "body", "error", "told"),
    [
        (502, b"<html>bad gateway</html>", OutcomeUnknown, "502"),
        (503, b"", OutcomeUnknown, "503"),
        (404, b"<html>not here</html>", InvalidRequest, "is a postbus server there"),
        (302, b"", InvalidRequest, "302"),
        (503, b'{"type":"/problems/unavailable","detail":"Try again"}', StoreUnavailable, "Try again"),
        (503, b'{"type":"/problems/outcome-unknown","detail":"maybe"}', OutcomeUnknown, "maybe"),
        (500, b'{"type":"/problems/internal","detail":"a bug"}', PostbusError, "a bug"),
        (400, b'{"type":"/problems/new-kind","detail":"x"}', InvalidRequest, "400"),
        (200, b"<html>log in</html>", StoreUnavailable, "does not speak"),
        (200, b'{"events": "some"}', StoreUnavailable, "does not speak"),
    ],
)
def test_answers_of_what_stands_between_are_told_apart(status: int, body: bytes, error: type[Exception], told: str):
    """A gateway's error is the store away, a page that is no postbus is a wrong address."""
    with answering(status, body) as place:
        store = RemoteStore(place)
        with pytest.raises(error, match=told):
            store.stats()
        store.close()


def test_the_clock_is_the_servers_where_they_differ():
    """An hour ahead there is an hour ahead here; within the second that a server tells, this host's is finer."""
    for ahead in (timedelta(hours=1), timedelta(0)):
        told = datetime.now(UTC) + ahead + timedelta(seconds=1)
        with answering(200, b"[]", Date=format_datetime(told, usegmt=True)) as place:
            store = RemoteStore(place)
            assert store.owners() == set()
            assert abs(store.now() - datetime.now(UTC) - ahead) < timedelta(seconds=60)
            store.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80",
        "http://host:0",
        "http://host:99999",
        "http://u:p@host",
        "http://host/?a=b",
        "https://#x",
    ],
)
def test_a_url_that_cannot_be_is_refused(url: str):
    """At once, without repeating what may be a secret."""
    with pytest.raises(InvalidRequest) as refused:
        open_store(url)
    assert "p@" not in str(refused.value)


def test_a_client_goes_to_a_server(tmp_path: Path):
    """A file's URL makes no file, and is refused."""
    with pytest.raises(InvalidRequest, match="http://"):
        Client(f"sqlite:///{tmp_path}/x.db")
    assert list(tmp_path.iterdir()) == []


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)


def test_a_client_needs_nothing_of_what_a_server_needs():
    """Without FastAPI, uvicorn and the rest the client is imported and opened; the server's names are still told."""
    code = """
import sys
for name in ("fastapi", "starlette", "uvicorn", "jinja2", "prometheus_client", "psycopg"):
    sys.modules[name] = None
from postbus import EventBus
from postbus.http import AsyncClient, Client
assert "create_app" in __import__("postbus.http", fromlist=["x"]).__all__
for bus in (Client("http://127.0.0.1:9"), EventBus("http://127.0.0.1:9")):
    print(bus.store.url)
    bus.shutdown()
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["http://127.0.0.1:9"] * 2


@pytest.mark.parametrize(("missing", "works"), [(("httpx2", "httpx"), False), (("httpx",), True)])
def test_without_an_http_client_it_says_what_to_install(missing: tuple[str, ...], *, works: bool):
    """The package is wanted only where a server is asked, and its name is told."""
    code = f"""
import sys
for name in {missing!r}:
    sys.modules[name] = None
from postbus import EventBus
from postbus.errors import InvalidRequest
try:
    print(EventBus("http://127.0.0.1:9").store.url)
except InvalidRequest as error:
    print(error)
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert ("http://127.0.0.1:9" in done.stdout) is works
    assert works or "pip install 'postbus[client]'" in done.stdout


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def _run(*arguments: str, expect: int = 0) -> Any:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == expect, (arguments, done.output, done.exception)
    return done


def test_commands_take_a_servers_url(connect: Connect, server: Served):
    """Publish, look, retry, pause and count, from where the database cannot be reached."""
    where = ("--url", server.url)

    def data(*arguments: str) -> Any:
        return json.loads(_run(*arguments, *where, "-o", "json").stdout)

    assert data("publish", "order.placed", '{"n": 7}')["id"] == 1
    bus = connect()

    @bus.on("*")
    def refuse(event: Event) -> None:
        raise Discard("no such card")

    bus.run_due()
    assert [event["status"] for event in data("events", "list")] == ["FAILED"]
    assert [row["action"] for row in data("events", "show", "1")["logs"]] == ["PICKED", "FAILED"]
    assert data("dlq", "list")[0]["errors"][0]["message"] == "no such card"
    assert data("dlq", "retry", "1")["retried"] == 1
    assert data("stats")["subscriptions"][0]["pending"] == 1
    _run("subscriptions", "pause", "default", *where)
    assert data("subscriptions", "list")[0]["paused"] is True
    assert server.bus.subscriptions.get("default").paused
    for command in ("token list", "migrate", "serve", "doctor", "tail", "restore-mark", "erase --key k"):
        assert "needs the database itself" in _run(*command.split(), *where, expect=2).stderr


def test_an_event_bus_without_a_url_goes_where_the_environment_says(server: Served, monkeypatch: pytest.MonkeyPatch):
    """POSTBUS_URL decides, http:// like any other."""
    monkeypatch.setenv("POSTBUS_URL", server.url)
    bus = EventBus()
    assert bus.publish("a").id == server.bus.get(1).id
    bus.shutdown()
