"""Settings of the environment, the URL, the role or the database that would change what postbus stores or finds."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import resources
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from postbus import EventBus, InvalidRequest, UnsafeStore
from postbus.model import Stream
from postbus.store import as_arrow, log_of, open_source
from postbus.store.source import Columns
from postbus.torture.cluster import Bouncer
from tests.postgres.server import Server, query

WORDS = "é ß Ω € 漢字 🙂"
LATIN = "é ß ñ"
UNBOUND = """
    SELECT p.oid::regprocedure::text FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
     WHERE n.nspname = 'postbus' AND p.prosqlbody IS NULL
       AND NOT coalesce(p.proconfig::text LIKE '%%search_path%%', false)
"""
"""The functions whose names are looked up when they run, along the search path of whoever calls them."""
FUNCTIONS = """
    SELECT proname, pg_get_function_identity_arguments(oid), pg_get_function_result(oid) FROM pg_proc
     WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f' AND proname = ANY (%s)
"""
OPERATORS = """
    SELECT oprname, oprleft::regtype::text, oprright::regtype::text, oprresult::regtype::text FROM pg_operator
     WHERE oprname IN ('=', '<', '<=', '>', '>=', '<>', '+', '-', '*', '||', '<<', '>>', '&', '|', '~~')
       AND oprleft::regtype::text || ' ' || oprright::regtype::text ~ '^(bigint|integer|text|bool|smallint|timestamp)'
"""
WAYS = {
    "environment": "PGCLIENTENCODING",
    "role": "ALTER ROLE postgres IN DATABASE {} SET client_encoding = 'LATIN1'",
    "database": "ALTER DATABASE {} SET client_encoding = 'LATIN1'",
    "url": "&client_encoding=LATIN1",
}


@pytest.fixture(params=WAYS)
def latin(request: pytest.FixtureRequest, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the address of a database whose clients are told in some way to speak LATIN1."""
    how = WAYS[request.param]
    if how.startswith("PG"):
        monkeypatch.setenv(how, "LATIN1")
    elif how.startswith("ALTER"):
        alter(url, how)
    else:
        return url + how
    return url


def alter(url: str, statement: str) -> None:
    """Change a setting of the database or of the role in it."""
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(str(conninfo_to_dict(url)["dbname"]))
        connection.execute(sql.SQL(cast("LiteralString", statement)).format(name))


def handled(bus: EventBus) -> list[Any]:
    """Run a bus until it is idle, and return the payloads of all that it handled."""
    payloads: list[Any] = []
    bus.subscribe("*", lambda event: payloads.append(event.payload))
    with bus:
        bus.wait_idle(timeout=20)
    return payloads


def stored(url: str) -> set[tuple[str, ...]]:
    """Return what the database holds, asked by a connection that speaks UTF-8."""
    with psycopg.connect(url, client_encoding="UTF8") as connection:
        return set(connection.execute("SELECT title, payload ->> 'text' FROM postbus.events").fetchall())


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_stored_as_it_is_whatever_encoding_clients_are_told_to_use(latin: str):
    """One event, a few, and many by COPY; read back by postbus, and by anybody (S1.4)."""
    bus = EventBus(latin)
    bus.publish("a", {"text": WORDS}, title=WORDS)
    bus.publish_many([{"type": "a", "payload": {"text": WORDS}, "title": WORDS}] * 3)
    bus.publish_many([{"type": "a", "payload": {"text": WORDS}, "title": WORDS}] * 150)
    with bus.transaction() as tx:
        bus.publish("a", {"text": WORDS}, title=WORDS, connection=tx)
    assert stored(latin) == {(WORDS, WORDS)}
    assert {each.title for each in bus.list(limit=200).items} == {WORDS}
    assert handled(bus) == [{"text": WORDS}] * 155


def test_text_is_read_as_it_is_by_arrow_and_by_the_import(latin: str):
    """The lake's way of reading, and a table of the caller's own, speak UTF-8 too (S1.4)."""
    bus = EventBus(latin)
    bus.publish("a", {"text": WORDS}, title=WORDS)
    bus.shutdown()
    (batch,) = as_arrow(latin, "events", ("id", "title"), 0, 10)
    assert batch.to_pylist()[0]["title"] == WORDS
    with open_source(latin, "postbus.events", Columns("id", "created_at", "title", "type")) as source:
        assert [row.payload for row in source.rows()] == [WORDS]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "UTF8"])
def test_a_connection_of_the_caller_s_own_stores_the_right_text_in_any_encoding(url: str, encoding: str):
    """What the connection's encoding cannot express is stored all the same (S4.3)."""
    bus = EventBus(url)
    with psycopg.connect(url, client_encoding=encoding) as connection:
        event = bus.publish("a", {"text": WORDS}, title=WORDS, uid="once", connection=connection)
        again = bus.publish("a", {"text": LATIN}, title=LATIN, uid="twice", connection=connection)
    assert (event.title, again.title) == (WORDS, LATIN)
    assert stored(url) == {(WORDS, WORDS), (LATIN, LATIN)}
    bus.shutdown()


def test_what_the_caller_s_own_encoding_cannot_express_is_not_read_wrongly(url: str):
    """A uid known already returns its event, or an error that names the setting to change (S4.3)."""
    bus = EventBus(url)
    bus.publish("a", LATIN, uid="latin")
    bus.publish("a", WORDS, uid="words")
    with psycopg.connect(url, client_encoding="LATIN1") as connection:
        assert bus.publish("a", LATIN, uid="latin", connection=connection).payload == LATIN
        with pytest.raises(InvalidRequest, match="client_encoding"):
            bus.publish("a", WORDS, uid="words", connection=connection)
        connection.rollback()
    with (
        psycopg.connect(url, client_encoding="SQL_ASCII") as connection,
        pytest.raises(InvalidRequest, match="encoding"),
    ):
        bus.publish("a", LATIN, uid="latin", connection=connection)
    bus.shutdown()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_hold_unicode_is_refused(server: Server, encoding: str):
    """Named with its encoding, and with what to do, before anything is made in it (I16)."""
    name = f"enc_{encoding.lower()}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        made = f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
        connection.execute(cast("LiteralString", made))
    with pytest.raises(UnsafeStore, match=f"encoding {encoding}.*UTF8"):
        EventBus(server.url(name)).stats()
    with psycopg.connect(server.url(name)) as connection:
        assert connection.execute("SELECT to_regnamespace('postbus')").fetchone() == (None,)
    server.drop(server.url(name))


# ── how literals are read ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("statement", ["ALTER DATABASE {} SET {}", "ALTER ROLE postgres IN DATABASE {} SET {}"])
def test_backslashes_are_plain_characters_whatever_the_database_says(server: Server, statement: str):
    """With standard_conforming_strings off the schema is made, and patterns match, as ever (S4.1)."""
    with server.database(empty=True) as url:
        alter(url, statement.replace("{} SET {}", "{} SET standard_conforming_strings = off"))
        alter(url, "ALTER DATABASE {} SET escape_string_warning = off")
        bus = EventBus(url)
        bus.subscriptions.create("some", ["a_b\\.*"])
        for kind in ("a_b.c", "axb.c"):
            bus.publish(kind, "\\n")
        with psycopg.connect(url) as connection:
            bus.publish("a_b.d", "\\n", connection=connection)
            connection.execute("SELECT postbus.publish('a_b.e', '\"\\\\\\\\n\"')")
        assert handled(bus) == ["\\n"] * 4


# ── where names are looked up ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shadowed(url: str) -> Iterator[str]:
    """Give a database whose clients find functions and operators that raise before those of PostgreSQL."""
    root = resources.files("postbus.store.postgres")
    files = [root / "queries.sql", *(root / "migrations").iterdir()]
    words = list(set(re.findall(r"\w+", " ".join(file.read_text() for file in files))))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA shadow")
        for name, takes, gives in connection.execute(FUNCTIONS, (words,)).fetchall():
            shadow(connection, f'FUNCTION shadow."{name}"({takes}) RETURNS {gives}', f"function {name}")
        for number, (name, left, right, gives) in enumerate(connection.execute(OPERATORS).fetchall()):
            shadow(connection, f"FUNCTION shadow.op{number}({left}, {right}) RETURNS {gives}", f"operator {name}")
            operator = (
                f"CREATE OPERATOR shadow.{name} (FUNCTION = shadow.op{number}, LEFTARG = {left}, RIGHTARG = {right})"
            )
            connection.execute(cast("LiteralString", operator))
        assert query(url, "SELECT count(*) > 60 FROM pg_proc WHERE pronamespace = 'shadow'::regnamespace") == [(True,)]
    alter(url, "ALTER DATABASE {} SET search_path = shadow, pg_catalog, public")
    yield url
    alter(url, "ALTER DATABASE {} RESET search_path")


def shadow(connection: psycopg.Connection[Any], head: str, what: str) -> None:
    """Make a function that raises whenever it is called."""
    body = f"LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'shadowed {what}'; END $$"
    with suppress(psycopg.Error):  # takes or gives what no function of ours may
        connection.execute(cast("LiteralString", f"CREATE {head} {body}"))


def test_no_function_of_the_role_s_own_schemas_stands_in_for_postgresql_s(shadowed: str):
    """Publishing in every way, handling, following and looking, with a search path that would mislead (S4.1)."""
    bus = EventBus(shadowed)
    followed: list[int] = []
    bus.follow("copy")(lambda event: followed.append(event.id))
    booked: list[int] = []

    @bus.on("booked", subscription="books", transactional=True)
    def book(event: Any, tx: Any) -> None:
        bus.publish("noted", connection=tx)
        booked.append(event.id)

    bus.publish("a", tags=["x", "y"])
    bus.publish_many([{"type": "b", "uid": f"u{n}", "delay": 0.01} for n in range(3)])
    bus.publish_many([{"type": "c", "tags": ["t"]} for _ in range(150)])
    bus.publish_many([{"type": f"kind.{n}"} for n in range(150)])
    with bus.transaction() as tx:
        bus.publish("booked", connection=tx)
    with psycopg.connect(shadowed) as connection:
        bus.publish("d", uid="mine", connection=connection)
        bus.publish("d", uid="mine", connection=connection)
        connection.execute("SELECT postbus.publish('e', '{}')")
    assert not bus.stats().dead
    assert len(handled(bus)) == 1 + 3 + 150 + 150 + 1 + 1 + 1 + len(booked)
    assert len(booked) == 1
    assert len(followed) == 308
    assert query(shadowed, "SELECT count(*) FROM deliveries") == [(0,)]


@pytest.mark.skipif(Bouncer.program() is None, reason="pgbouncer is not installed")
def test_behind_a_pooler_too_names_are_postgresql_s(server: Server, shadowed: str):
    """Its connections have no settings of ours: every look at the database brings them along (S4.1, S4.10)."""
    bouncer = Bouncer(server)
    try:
        bus = EventBus(bouncer.url(str(conninfo_to_dict(shadowed)["dbname"])), direct_url=shadowed)
        first = bus.publish("a", uid="u")
        assert bus.publish("a", uid="u").id == first.id
        with bus.transaction() as tx:
            bus.publish("b", connection=tx)
        assert bus.store.span(Stream.EVENTS).head == 3
        assert log_of(bus.store).activity(Stream.EVENTS, 0, 3, timedelta(hours=1))
        assert len(handled(bus)) == 2
    finally:
        bouncer.remove()


def test_a_schema_is_made_and_migrated_where_other_functions_come_first(server: Server):
    """The migration's own statements are read as they were written (S4.1)."""
    with server.database(empty=True) as url:
        query(
            url,
            "CREATE SCHEMA shadow; CREATE FUNCTION shadow.md5(text) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'",
        )
        query(
            url,
            "CREATE FUNCTION shadow.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'",
        )
        alter(url, "ALTER DATABASE {} SET search_path = shadow, pg_catalog, public")
        bus = EventBus(url)
        bus.publish("a")
        assert len(handled(bus)) == 1


def test_every_function_of_the_schema_says_where_its_names_are_looked_up(url: str):
    """Bound when it was made, or with a search path of its own: it may run in anybody's session (S4.1)."""
    assert query(url, UNBOUND) == []


def test_statements_of_the_caller_s_own_find_his_tables_by_his_search_path(url: str, eventually: Callable[..., Any]):
    """In a transaction on the bus's connection, before and after postbus's own statements in it (S4.3)."""
    query(url, "CREATE SCHEMA shop; CREATE TABLE shop.ledger (id bigint)")
    alter(url, "ALTER DATABASE {} SET search_path = shop, public")
    bus = EventBus(url)
    with bus.transaction() as tx:
        tx.execute("INSERT INTO ledger VALUES (1)")
        bus.publish("a", connection=tx)
        tx.execute("INSERT INTO ledger VALUES (2)")
        tx.execute("CREATE TABLE more (id bigint)")
        bus.publish("a", connection=tx)
    with bus.transaction() as tx:
        assert tx.execute("SELECT count(*) FROM ledger") == [(2,)]
    assert query(url, "SELECT schemaname::text FROM pg_tables WHERE tablename = 'more'") == [("shop",)]
    assert len(handled(bus)) == 2
