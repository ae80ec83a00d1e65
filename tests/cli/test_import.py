"""`postbus import`: rows of an existing table become events, each once."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from postbus import EventBus
from tests.kinds import mostly_on_sqlite
from tests.postgres.server import server

TABLE = "orders"
ROWS: list[tuple[Any, ...]] = [
    (3, "2024-03-01T00:00:00+00:00", "order.paid", '{"n": 3}', "c1", "eu,vip"),
    (1, "2024-01-01T00:00:00+00:00", "order.placed", '{"n": 1}', "c1", None),
    (2, "2024-01-01T00:00:00+00:00", "order.placed", '{"n": 2}', None, ""),
    (4, None, "order.lost", "null", None, None),
]
FLAGS = ("--type", "kind", "--payload", "body")


class Old:
    """An existing table, and the bus beside it: in one PostgreSQL database, or in two SQLite files."""

    def __init__(self, kind: str, url: str) -> None:
        """Make the table, empty."""
        self.kind, self.url = kind, url
        self.flags = FLAGS if kind == "postgres" else (*FLAGS, "--from", "sqlite:///old.db")
        stamp = "timestamptz" if kind == "postgres" else "text"
        self.run(
            f"CREATE TABLE orders (id bigint, created_at {stamp}, kind text, body text, customer text, labels text)"
        )

    def run(self, statement: str, rows: list[tuple[Any, ...]] | None = None) -> None:
        """Run a statement, once or for each row."""
        if self.kind == "postgres":
            with psycopg.connect(self.url) as connection:
                cursor = connection.cursor()
                if rows is None:
                    cursor.execute(statement.encode())
                else:
                    cursor.executemany(statement.replace("?", "%s").encode(), rows)
        else:
            connection = apsw.Connection("old.db")
            with connection:
                connection.executemany(statement, rows if rows is not None else [()])
            connection.close()

    def fill(self, rows: list[tuple[Any, ...]]) -> None:
        """Put rows into the table."""
        self.run("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", rows)

    def events(self) -> list[Any]:
        """Return the bus's events, oldest first."""
        bus = EventBus(self.url)
        page = bus.list(limit=10_000)
        bus.shutdown()
        return list(reversed(page.items))


@pytest.fixture
def old(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Old]:
    """Give an existing table of each kind, with the bus's address in the environment."""
    if kind == "sqlite":
        yield Old(kind, "sqlite:///shop.db")
        return
    with server().database() as url:
        monkeypatch.setenv("POSTBUS_URL", url)
        yield Old(kind, url)


def test_rows_become_events_in_their_order(old: Old, data: Callable[..., Any]):
    """By time and id, with type, payload, key, tags, and where they come from (S4.12)."""
    old.fill(ROWS)
    told = data("import", TABLE, *old.flags, "--key", "customer", "--tags", "labels")
    assert (told["rows"], told["imported"], told["known"], told["bad"], told["first_id"]) == (4, 4, 0, 0, 1)
    events = old.events()
    assert [each.payload for each in events] == [{"n": 1}, {"n": 2}, {"n": 3}, None]
    assert [each.uid for each in events] == [f"import:orders:{n}" for n in (1, 2, 3, 4)]
    assert [each.type for each in events] == ["order.placed", "order.placed", "order.paid", "order.lost"]
    assert [each.key for each in events] == ["c1", None, "c1", None]
    assert [each.tags for each in events] == [(), (), ("eu", "vip"), ()]
    assert events[2].metadata == {"imported_from": "orders", "imported_created_at": "2024-03-01T00:00:00+00:00"}
    assert events[3].metadata == {"imported_from": "orders"}


def test_handlers_get_them(old: Old, cli: Callable[..., Any]):
    """They are events like any others (S4.12)."""
    old.fill(ROWS)
    cli("import", TABLE, *old.flags)
    bus = EventBus(old.url)
    seen: list[int] = []
    bus.subscribe("order.placed", lambda event: seen.append(event.payload["n"]))
    bus.run_due()
    bus.shutdown()
    assert sorted(seen) == [1, 2]


def test_a_second_run_stores_only_what_is_new(old: Old, data: Callable[..., Any]):
    """Rows imported before are known by their uid (S4.12, I3)."""
    old.fill(ROWS[:2])
    assert data("import", TABLE, *old.flags)["imported"] == 2
    old.fill(ROWS[2:])
    told = data("import", TABLE, *old.flags)
    assert (told["imported"], told["known"]) == (2, 2)
    assert data("import", TABLE, *old.flags)["known"] == 4
    assert len(old.events()) == 4


@mostly_on_sqlite
def test_one_killed_in_the_middle_goes_on_without_copies(
    old: Old, command: Callable[..., Any], data: Callable[..., Any], eventually: Callable[..., Any]
):
    """Batches are whole, and the next run begins where the last one was killed (S4.12, I2, I3)."""
    count = 9_500
    old.fill([(n, "2024-01-01T00:00:00+00:00", "a.b", json.dumps({"n": n}), None, None) for n in range(count)])
    bus = EventBus(old.url)
    process = command("import", TABLE, *old.flags)
    eventually(lambda: bus.list(limit=1).total or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    stored = bus.list(limit=1).total
    bus.shutdown()
    assert stored % 1_000 in (0, 500)
    told = data("import", TABLE, *old.flags)
    assert (told["known"], told["imported"]) == (stored, count - stored)
    assert {each.payload["n"] for each in old.events()} == set(range(count))
    assert len(old.events()) == count


def test_bad_rows_are_named_and_the_others_stored(old: Old, cli: Callable[..., Any]):
    """Nothing of their batch is lost; the exit code tells (S4.12, I2)."""
    bad = [
        (7, "2024-01-07", "a.b", "{not json", None, None),
        (8, "2024-01-08", "with*star", "1", None, None),
        (9, "2024-01-09", None, "1", None, None),
        (None, "2024-01-10", "a.b", "1", None, None),
        (11, "2024-01-11", "a.b", '{"a": 1, "a": 2}', None, None),
    ]
    old.fill([*ROWS, *bad])
    result = cli("import", TABLE, *old.flags, "-o", "json", expect=1)
    told = json.loads(result.stdout)
    assert (told["rows"], told["imported"], told["bad"]) == (9, 4, 5)
    assert [each["id"] for each in told["errors"]] == ["7", "8", "9", "None", "11"]
    assert "row 7: the payload is not JSON" in result.stderr
    assert len(old.events()) == 4
    old.run("DELETE FROM orders WHERE id IS NULL OR id > 7")
    old.run("UPDATE orders SET body = '7' WHERE id = 7")
    cli("import", TABLE, *old.flags)
    assert [each.payload for each in old.events()][-1] == 7


def test_two_rows_with_one_id_are_not_both_stored(old: Old, cli: Callable[..., Any]):
    """The second, with another body, is a bad row; its neighbours are stored (S4.12, I3)."""
    old.fill([*ROWS, (1, "2024-05-01", "order.placed", '{"n": "other"}', None, None)])
    told = json.loads(cli("import", TABLE, *old.flags, "-o", "json", expect=1).stdout)
    assert (told["imported"], told["bad"], told["errors"][0]["id"]) == (4, 1, "1")


def test_a_dry_run_counts_and_stores_nothing(old: Old, cli: Callable[..., Any], folder: Path):
    """It checks every row, and does not even make the bus (S4.12)."""
    old.fill([*ROWS, (7, "2024-01-07", "a.b", "{not json", None, None)])
    told = json.loads(cli("import", TABLE, *old.flags, "--dry-run", "-o", "json", expect=1).stdout)
    assert (told["rows"], told["imported"], told["bad"], told["dry_run"]) == (5, 4, 1, True)
    assert not (folder / "shop.db").exists()
    cli("import", TABLE, *old.flags, expect=1)
    told = json.loads(cli("import", TABLE, *old.flags, "--dry-run", "-o", "json", expect=1).stdout)
    assert (told["imported"], told["known"]) == (0, 4)


def test_one_type_for_all_and_other_names(old: Old, data: Callable[..., Any]):
    """`=TYPE` names the type itself; quotes, spaces and capitals in names do no harm (S4.12)."""
    old.run('CREATE TABLE "Old; ""orders""" ("the id" text, "At" text, "say ""what""" text)')
    old.run('INSERT INTO "Old; ""orders""" VALUES (?, ?, ?)', [("x'1", "2024", "[1]")])
    flags = ["--type", "=order.placed", "--payload", 'say "what"', "--id", "the id", "--created-at", "At"]
    flags += [each for each in old.flags if each not in FLAGS]
    assert data("import", '"Old; ""orders"""', *flags)["imported"] == 1
    (event,) = old.events()
    assert (event.type, event.payload) == ("order.placed", [1])


def test_an_expression_is_no_column(old: Old, cli: Callable[..., Any], folder: Path):
    """Names are names: what would be SQL is looked for as a column, and not found."""
    old.fill(ROWS)
    for payload in ("body || 'x'", 'body" FROM orders; DROP TABLE orders; --', "nosuch"):
        flags = [payload if each == "body" else each for each in old.flags]
        cli("import", TABLE, *flags, expect=2)
    cli("import", "orders; DROP TABLE orders", *old.flags, expect=2)
    cli("import", "nosuch", *old.flags, expect=2)
    assert not (folder / "shop.db").exists() or old.kind == "postgres"
    cli("import", TABLE, *old.flags)


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_file_that_is_not_there_is_not_made(kind: str, cli: Callable[..., Any], folder: Path):
    """Reading makes nothing."""
    assert "there is no file" in cli("import", TABLE, *FLAGS, "--from", "sqlite:///nosuch.db", expect=1).stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_table_in_the_buss_own_file_is_read_beside_it(kind: str, data: Callable[..., Any]):
    """Without `--from` the table is looked for where the bus is (S4.12)."""
    bus = EventBus("sqlite:///shop.db")
    with bus.transaction() as tx:
        tx.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, created_at TEXT, kind TEXT, body TEXT)")
        for number in range(2_500):
            tx.execute("INSERT INTO orders VALUES (?, '2024', 'a.b', ?)", (number, str(number)))
    bus.shutdown()
    assert data("import", TABLE, *FLAGS)["imported"] == 2_500
    assert data("import", TABLE, *FLAGS)["known"] == 2_500


@pytest.mark.parametrize("kind", ["sqlite"])
def test_the_old_file_is_not_changed(kind: str, old: Old, cli: Callable[..., Any], folder: Path):
    """It is opened for reading alone (S4.12)."""
    old.fill(ROWS)
    before = (folder / "old.db").read_bytes()
    cli("import", TABLE, *old.flags)
    assert (folder / "old.db").read_bytes() == before


@pytest.mark.parametrize("kind", ["postgres"])
def test_columns_of_postgresqls_own_types(kind: str, old: Old, data: Callable[..., Any]):
    """Payloads of jsonb, uuid ids, arrays and jsonb lists of tags, names with a schema (S4.12)."""
    old.run("CREATE SCHEMA shop")
    old.run(
        "CREATE TABLE shop.audit AS SELECT gen_random_uuid() AS id, '2024-01-01 12:00+02'::timestamptz AS created_at,"
        " '{\"n\": 1.50}'::jsonb AS body, ARRAY['eu', 'vip'] AS labels, '[\"a\"]'::jsonb AS words, 7 AS customer"
    )
    flags = ("--type", "=audited", "--payload", "body", "--key", "customer")
    assert data("import", "shop.audit", *flags, "--tags", "labels")["imported"] == 1
    (event,) = old.events()
    assert (event.payload, event.tags, event.key) == ({"n": 1.5}, ("eu", "vip"), "7")
    assert event.metadata["imported_created_at"] == "2024-01-01T10:00:00+00:00"
    old.run("CREATE VIEW shop.v AS SELECT *, '2'::text AS second FROM shop.audit")
    assert data("import", "shop.v", *flags, "--tags", "words", "--id", "second")["imported"] == 1
    assert old.events()[-1].tags == ("a",)
