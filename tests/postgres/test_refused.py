"""Addresses that cannot work: refused at once, with what is wrong and what to do, and never tried again for good."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from postbus import EventBus, InvalidRequest, StoreUnavailable, UnsafeStore
from postbus.store.postgres import address as module
from postbus.store.postgres.address import KEYWORDS
from postbus.torture.cluster import Bouncer
from tests.postgres.server import Server, query

ROLES = "CREATE ROLE barred SUPERUSER NOLOGIN; CREATE ROLE guest SUPERUSER LOGIN PASSWORD 'right'"
ASKED = "local all guest scram-sha-256\n"


@pytest.fixture
def roles(server: Server) -> Iterator[None]:
    """Have one role that may not log in, and one that needs a password."""
    file = server.data / "pg_hba.conf"
    before = file.read_text()
    query(server.url(), ROLES)
    file.write_text(ASKED + before)
    query(server.url(), "SELECT pg_reload_conf()")
    yield
    file.write_text(before)
    query(server.url(), "SELECT pg_reload_conf()")
    query(server.url(), "DROP ROLE barred; DROP ROLE guest")


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda url: url.replace("/test_", "/no_such_"), 'database "no_such_.*" does not exist'),
        (lambda url: url.replace("//postgres@", "//nobody@"), 'role "nobody" does not exist'),
        (lambda url: url.replace("//postgres@", "//barred@"), 'role "barred" is not permitted to log in'),
        (lambda url: url.replace("//postgres@", "//guest:wrong@"), 'password authentication failed for user "guest"'),
        (lambda url: url.replace("//postgres@", "//guest@"), "no password supplied"),
    ],
    ids=["no database", "no role", "no login", "wrong password", "no password"],
)
def test_an_address_that_is_refused_for_good_is_not_a_store_that_is_away(
    url: str, wrong: Callable[[str], str], told: str
):
    """UnsafeStore says which value is wrong, and that it must be corrected; no secret is in it (S4.4, S4.10)."""
    with pytest.raises(UnsafeStore, match=f"{told}.*correct") as refused:
        EventBus(wrong(url)).stats()
    assert "wrong" not in str(refused.value)


def test_a_connection_that_cannot_be_begun_is_closed(
    url: str, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
):
    """Whoever keeps the error keeps no connection by it, which others would be refused for the sake of (S4.10)."""
    monkeypatch.setattr(module, "SESSION", "SELECT 1 / 0")
    with pytest.raises(psycopg.Error, match="division") as kept:
        EventBus(url).stats()
    assert kept.value is not None
    open_ones = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'postbus' AND datname = current_database()"
    assert eventually(lambda: not query(url, open_ones))


def test_a_server_that_is_only_away_is_one(tmp_path: Path):
    """There may be a server later (S4.10)."""
    with pytest.raises(StoreUnavailable):
        EventBus(f"postgresql://postgres@/x?host={tmp_path}").stats()


@pytest.mark.timeout(90)
def test_a_worker_whose_role_may_no_longer_log_in_ends(url: str):
    """Its process says why, instead of trying for good (S4.10)."""
    query(url, "CREATE ROLE fired SUPERUSER LOGIN")
    bus = EventBus(url.replace("//postgres@", "//fired@"), poll_interval=0.1, shutdown_timeout=1)

    @bus.on("fire")
    def fire(event: Any) -> None:
        query(url, "ALTER ROLE fired NOLOGIN")
        query(url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'fired'")

    bus.publish("fire")
    began = time.monotonic()
    try:
        with pytest.raises(UnsafeStore, match="not permitted to log in"):
            bus.run()
        assert time.monotonic() - began < 60, "it went on until it was ended, and its shutdown was refused"
    finally:
        query(url, "DROP OWNED BY fired; DROP ROLE fired")


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schema", ["user", "select", "order", "pg_events", "left"])
def test_a_schema_that_cannot_be_named_without_quotes_is_refused(url: str, schema: str):
    """Before anything is asked of the server (S4.1)."""
    with pytest.raises(InvalidRequest, match="schema="):
        EventBus(f"{url}&schema={schema}")


def test_the_keywords_are_those_of_the_server(url: str):
    """None is missing (S4.1)."""
    words = query(url, "SELECT word, catcode::text FROM pg_get_keywords()")
    assert [word for word, kind in words if kind in "RT" and not KEYWORDS.fullmatch(word)] == []


@pytest.mark.parametrize("schema", ["values", "row", "events", "now", "e", "g", "publish"])
def test_a_schema_may_have_the_name_of_anything_else(url: str, schema: str):
    """Other keywords, and names that stand in postbus's own statements (S4.1)."""
    bus = EventBus(f"{url}&schema={schema}")
    handled: list[Any] = []
    bus.subscribe("*", lambda event: handled.append(event.payload))
    bus.publish("a", 1)
    bus.publish_many([{"type": "a", "payload": 2, "uid": "u"}] * 2)
    with bus:
        bus.wait_idle(timeout=20)
    assert handled == [1, 2]


# ── poolers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def pooler(server: Server, url: str, settings: str) -> Generator[str]:
    """Give the address of the database through a pooler with settings of its own."""
    bouncer = Bouncer(server, settings=settings)
    try:
        yield bouncer.url(str(conninfo_to_dict(url)["dbname"]))
    finally:
        bouncer.remove()


@pytest.mark.skipif(Bouncer.program() is None, reason="pgbouncer is not installed")
@pytest.mark.parametrize("settings", ["", "ignore_startup_parameters = options"])
def test_a_transaction_pooler_that_nobody_told_of_is_refused(server: Server, url: str, settings: str):
    """With `direct_url` named as what to give, and no setting left behind in the pooler's connections (S4.10)."""
    with pooler(server, url, settings) as pooled:
        with pytest.raises(InvalidRequest, match="direct_url"):
            EventBus(pooled).stats()
        with psycopg.connect(pooled, autocommit=True) as connection:
            assert connection.execute("SHOW search_path").fetchone() == ('"$user", public',)
        bus = EventBus(pooled, direct_url=url)
        assert bus.publish("a").id == 1
        bus.shutdown()


@pytest.mark.skipif(Bouncer.program() is None, reason="pgbouncer is not installed")
def test_a_database_that_the_pooler_does_not_know_is_named(server: Server, url: str):
    """PgBouncer's own words for it are understood (S4.10)."""
    with pooler(server, url, "") as pooled:
        strange = pooled.replace("/test_", "/no_such_")
        with pytest.raises(UnsafeStore, match=r"does not exist|no such database"):
            EventBus(strange, direct_url=strange, listen=False).stats()
