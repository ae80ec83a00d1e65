"""Named SQL: each name once, each used, each fit for the schema; and claims that go through indexes."""

import ast
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import apsw
import pytest

import postbus.store.sqlite
from postbus.store.queries import load_migrations, load_queries
from postbus.store.sqlite.connection import SQL

DIALECT = Path(str(resources.files(postbus.store.sqlite)))
SOURCES = [*DIALECT.glob("*.py"), *DIALECT.parent.glob("*.py")]
METHODS = {"run", "rows", "iterate", "value", "many", "count"}


@pytest.fixture
def fresh() -> Iterator[apsw.Connection]:
    """Give an empty database with the newest schema."""
    connection = apsw.Connection(":memory:")
    for _, _, sql in load_migrations("postbus.store.sqlite"):
        connection.execute(sql)
    yield connection
    connection.close()


def parameters(sql: str) -> int:
    """Return how many parameters a statement takes, numbered or not."""
    numbered = [int(number) for number in re.findall(r"\?(\d+)", sql)]
    return max(numbered) if numbered else sql.count("?")


def names_in(path: Path) -> Iterator[str]:
    """Yield every text that could be the name of a query: none is pasted together."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def called_in(path: Path) -> Iterator[str]:
    """Yield the names given as the first argument of a query method."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield node.args[0].value


def test_every_query_is_used():
    """A statement nobody runs is not kept."""
    mentioned = {name for path in SOURCES for name in names_in(path)}
    assert set(SQL) - mentioned == set()


def test_every_query_that_is_used_exists():
    """No method asks for a name that the file does not define."""
    called = {name for path in SOURCES for name in called_in(path)}
    assert called - set(SQL) == set()


def test_names_are_unique():
    """The file defines each name once, which loading it checks."""
    text = (DIALECT / "queries.sql").read_text(encoding="utf-8")
    names = re.findall(r"^-- name: (\w+)\s*$", text, re.MULTILINE)
    assert len(names) == len(set(names)) == len(load_queries("postbus.store.sqlite"))


@pytest.mark.parametrize("name", sorted(SQL))
def test_every_query_prepares_against_a_fresh_schema(fresh: apsw.Connection, name: str):
    """Tables, columns and indexes it names are there, and it is one statement (S1.5)."""
    fresh.execute(f"EXPLAIN {SQL[name]}", (0,) * parameters(SQL[name]))
    assert ";" not in SQL[name]


@pytest.mark.parametrize("name", sorted(SQL))
def test_no_query_selects_every_column(name: str):
    """Columns stand by name, so that a new one does not change what code gets."""
    assert not re.search(r"SELECT\s+\*", SQL[name], re.IGNORECASE)


def plan(fresh: apsw.Connection, name: str) -> list[str]:
    """Return the steps of a query's plan."""
    return [row[3] for row in fresh.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", (0,) * parameters(SQL[name]))]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("due_any", "deliveries_any (subscription=? AND alone=? AND priority=? AND"),
        ("due_kind", "deliveries_due (subscription=? AND alone=? AND kind=? AND priority=? AND"),
    ],
)
def test_a_claims_probe_is_one_exact_index_range(fresh: apsw.Connection, name: str, index: str):
    """Subscription, priority and due time are sought in the index; nothing is scanned or sorted (S0.10)."""
    steps = plan(fresh, name)
    probes = [step for step in steps if index in step]
    assert len(probes) == 1, steps
    assert re.search(r"due_at[<>]", probes[0])
    assert not any("SCAN deliveries" in step or "TEMP B-TREE" in step for step in steps)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("specials", "events_special"),
        ("any_special", "events_special"),
        ("dead_below", "deliveries_dead"),
        ("completed_top", "event_log_completed"),
        ("overdue_blocks", "blocks_due"),
        ("blocks_of", "blocks_owner"),
        ("blocks_around", "blocks_ids"),
        ("log_back", "event_log_event"),
        ("arrays_of", "event_log_arrays"),
        ("find_uid", "PRIMARY KEY"),
        ("drop_old_uids", "dedup_age"),
    ],
)
def test_lists_and_upkeep_go_through_their_indexes(fresh: apsw.Connection, name: str, index: str):
    """No claim, list, expiry or audit look-up reads a whole table (S0.10, S1.18)."""
    assert any(step.startswith("SEARCH") and index in step for step in plan(fresh, name)), plan(fresh, name)


def test_a_page_of_dead_letters_comes_straight_off_the_index(fresh: apsw.Connection):
    """In order already: nothing is sorted, so a page costs the same among many (S1.12, S1.18)."""
    assert not any("TEMP B-TREE" in step for step in plan(fresh, "dead_below"))
