"""From every schema there has been to the present one, while programs of the old version are at work."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus import EventBus
from postbus.store import open_store
from postbus.store.queries import load_migrations
from postbus.torture import checker
from postbus.torture.history import INVOKE, History, read
from tests.postgres.server import query, server
from tests.upgrade.old import MIGRATING

ROOT = Path(__file__).resolve().parents[2]
LATER = {"sqlite": "CREATE TABLE more (n INTEGER) STRICT", "postgres": "CREATE TABLE postbus.more (n bigint);"}
"""A migration that is to come: without one there is nothing to migrate from, as long as there is only the first."""
NEWEST = {kind: len(load_migrations(f"postbus.store.{kind}")) + 1 for kind in LATER}
VERSIONS = [
    pytest.param(version, marks=[pytest.mark.slow] if version > 1 else []) for version in range(1, max(NEWEST.values()))
]
"""The oldest in the quick run, every other one in the long one."""
Old = Callable[[int], "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def _later(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the migration that is to come; programs of old versions know nothing of it."""
    migrations = [*load_migrations(f"postbus.store.{kind}"), (NEWEST[kind], "later", LATER[kind])]
    monkeypatch.setattr(f"{MIGRATING[kind]}.load_migrations", lambda _: migrations)


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """Give the address of a database with nothing in it."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'old.db'}"
    else:
        with server().database(empty=True) as empty:
            yield empty


@pytest.fixture
def old(url: str, tmp_path: Path) -> Iterator[Old]:
    """Give a function that starts a program of an older version."""
    started: list[subprocess.Popen[bytes]] = []

    def start(version: int) -> "subprocess.Popen[bytes]":
        told = {"version": version, "url": url, "history": str(tmp_path / "history"), "stop": str(tmp_path / "stop")}
        started.append(subprocess.Popen([sys.executable, "-m", "tests.upgrade.old", json.dumps(told)], cwd=ROOT))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def version_of(url: str) -> int:
    """Return the number of the schema that is there, read past the product."""
    if url.startswith("sqlite"):
        connection = apsw.Connection(url.removeprefix("sqlite:///"))
        found = connection.pragma("user_version")
        connection.close()
        return int(found)
    return int(query(url, "SELECT value FROM meta WHERE key = 'schema_version'")[0][0])


def shape_of(url: str, folder: Path) -> Any:
    """Return all that makes up a schema."""
    if url.startswith("sqlite"):
        connection = apsw.Connection(url.removeprefix("sqlite:///"))
        found = connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
        connection.close()
        return found
    server().tool("pg_dump", "--schema-only", "--schema=postbus", f"--file={folder / 'shape.sql'}", url)
    text = (folder / "shape.sql").read_text()
    return re.sub(r"^\\(un)?restrict .*$", "", text, flags=re.MULTILINE)  # a word of its own in every dump


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_database_is_migrated_while_old_programs_work(
    url: str, kind: str, version: int, old: Old, tmp_path: Path, eventually: Callable[..., Any]
):
    """Nothing published before, during or after is lost, or handled twice without a cause (S4.11, I1, I2, I9, I11)."""
    program = old(version)
    history = tmp_path / "history"

    def written() -> int:
        return history.stat().st_size if history.exists() else 0

    eventually(lambda: written() > 4_000)
    assert version_of(url) == min(version, NEWEST[kind])
    bus = EventBus(url)
    bus.stats()  # the first use opens it, and migrates
    assert version_of(url) == NEWEST[kind]
    before = written()
    eventually(lambda: written() > before + 4_000)
    assert program.poll() is None, "the old program did not survive"
    new = History(history, "new")
    with new.calling("publish", uids=["new"]) as answer:
        answer["ids"] = [bus.publish("trial.1", uid="new").id]
    (tmp_path / "stop").touch()
    assert program.wait(60) == 0
    while (delivery := bus.poll()) is not None or unfinished(bus):
        if delivery is not None:
            lease = delivery.lease
            new.note("handle", INVOKE, delivery=[lease.event_id, lease.subscription, delivery.attempt, lease.epoch])
            bus.finalize(delivery)
    bus.shutdown()
    told, database = read([history]), checker.read_database(url)
    assert checker.check(checker.journal(told), checker.executions(told), database) == []
    assert len(database.events) > 30


def unfinished(bus: EventBus) -> int:
    """Return how much is still to be done."""
    return sum(each.pending + each.processing for each in bus.stats().subscriptions)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_migrated_schema_is_that_of_a_fresh_one(
    url: str, kind: str, version: int, old: Old, tmp_path: Path, eventually: Callable[..., Any]
):
    """Table for table, function for function, index for index (S4.11)."""
    program = old(version)
    eventually((tmp_path / "history").exists)
    (tmp_path / "stop").touch()
    assert program.wait(60) == 0
    open_store(url).close()
    if kind == "sqlite":
        fresh = f"sqlite:///{tmp_path / 'fresh.db'}"
        open_store(fresh).close()
        assert shape_of(url, tmp_path) == shape_of(fresh, tmp_path)
    else:
        with server().database(empty=True) as fresh:
            open_store(fresh).close()
            assert shape_of(url, tmp_path) == shape_of(fresh, tmp_path)
