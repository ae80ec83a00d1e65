"""What is SQLite's own: settings of the file, patience with locks, cached statements, and cost that stays flat."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus.errors import Conflict, InvalidRequest, StoreUnavailable, UnsafeStore
from postbus.model import AttemptError, Dead, Done
from postbus.pattern import Interest
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store import exists, open_store
from postbus.store.contract import Claim, DeadFilter, Settlement, Step
from postbus.store.sqlite import connection as connection_module
from postbus.store.sqlite.connection import require_safe_sqlite
from postbus.store.sqlite.store import SqliteStore
from postbus.testing import FrozenClock
from tests.conftest import Crew

EVERYTHING = {
    "subscription": "default",
    "status": None,
    "type": None,
    "tags": (),
    "limit": 100,
    "offset": 0,
    "after": None,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give a place for a file."""
    return tmp_path / "bus.db"


@pytest.fixture
def clock() -> FrozenClock:
    """Give a clock that stands still."""
    return FrozenClock()


@pytest.fixture
def store(path: Path, clock: FrozenClock) -> Iterator[SqliteStore]:
    """Give an open store."""
    store = SqliteStore(path, clock)
    yield store
    store.close()


def other(path: Path) -> apsw.Connection:
    """Open the file as an outsider, after the store has been closed or from a process of its own."""
    return apsw.Connection(str(path))


def publish(store: SqliteStore, count: int, **fields: Any) -> None:
    """Publish many events of a kind."""
    store.publish([draft({"type": "a", **fields}) for _ in range(count)])


def claim(store: SqliteStore, limit: int = 1, **terms: Any) -> Any:
    """Claim from the default subscription."""
    return store.claim(Claim("default", "w", "o", limit=limit, **terms)).deliveries


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_file_sets_itself_up(path: Path, store: SqliteStore):
    """WAL, full synchronisation, incremental vacuum, and all tables at the first opening (S1.5)."""
    publish(store, 1)
    look = other(path)
    tables = {row[0] for row in look.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    assert {"events", "subscriptions", "cursors", "blocks", "deliveries", "skips", "event_log", "dedup"} <= tables
    assert look.pragma("journal_mode") == "wal"
    assert look.pragma("auto_vacuum") == 2
    look.close()
    assert store._database.pragma("synchronous") == 2
    assert {finding.check for finding in store.inspect(deep=False)} >= {"sqlite", "durability"}


def test_a_payload_is_kept_as_json_text(path: Path, store: SqliteStore):
    """Readable by any tool (S1.5)."""
    store.publish([draft({"type": "a", "payload": {"n": [1, None]}})])
    look = other(path)
    assert look.execute("SELECT payload, json_extract(payload, '$.n[0]') FROM events").fetchall() == [
        ('{"n":[1,null]}', 1)
    ]
    look.close()


def test_an_id_is_not_used_again_when_its_event_is_gone(path: Path, store: SqliteStore):
    """The sequence remembers pruned ids, over a restart too (I4)."""
    publish(store, 3)
    store.close()
    look = other(path)
    look.execute("DELETE FROM deliveries")
    look.execute("DELETE FROM events")
    look.close()
    again = SqliteStore(path, FrozenClock())
    assert again.publish([draft({"type": "a"})])[0].id == 4
    again.close()


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        (3_007_000, False), (3_044_005, False), (3_044_006, True), (3_045_000, False), (3_050_006, False),
        (3_050_007, True), (3_051_000, False), (3_051_002, False), (3_051_003, True), (3_053_000, True),
    ],
)  # fmt: skip
def test_a_sqlite_that_can_corrupt_the_file_is_refused(version: int, *, safe: bool):
    """Only versions with the WAL-reset fix are used (I16)."""
    if safe:
        require_safe_sqlite(version)
    else:
        with pytest.raises(UnsafeStore, match="apsw"):
            require_safe_sqlite(version)


def test_what_is_no_database_is_refused(path: Path):
    """Told apart from an empty file, and left as it is (I16)."""
    path.write_bytes(b"This is a letter, not a database. " * 200)
    before = path.read_bytes()
    with pytest.raises(UnsafeStore, match=r"bus\.db"):
        SqliteStore(path, FrozenClock())
    assert path.read_bytes() == before


def is_found_damaged(path: Path) -> bool:
    """Return whether opening the file, or the deep look at it, tells of the damage."""
    try:
        damaged = SqliteStore(path, FrozenClock())
    except UnsafeStore:
        return True
    try:
        return any(not finding.ok for finding in damaged.inspect(deep=True))
    except UnsafeStore:
        return True
    finally:
        damaged.close()


def test_a_damaged_file_is_found_by_the_deep_look(path: Path, store: SqliteStore):
    """A page of rubbish in the middle is reported or refused, never passed over (I16)."""
    publish(store, 2_000, payload="x" * 100)
    store.close()
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 // 4096 * 4096
    data[middle : middle + 4096] = os.urandom(4096)
    path.write_bytes(data)
    assert is_found_damaged(path)


def test_a_missing_folder_is_refused(tmp_path: Path):
    """UnsafeStore with the path, for trying again is of no use, and nothing made (I16)."""
    with pytest.raises(UnsafeStore, match=r"no folder .*missing"):
        open_store(f"sqlite:///{tmp_path / 'missing' / 'bus.db'}")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///:memory:",
        "sqlite://",
        "sqlite:///",
        "sqlite:bus.db",
        "sqlite://host/x.db",
        "mysql://x/y",
        "bus.db",
        "",
    ],
)
def test_a_url_that_names_no_file_is_refused(url: str):
    """An in-memory database would lose every event, so it is refused too."""
    with pytest.raises(InvalidRequest):
        open_store(url)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a?mode=ro", "'?' after"),
        ("a#b.db", "'#' after"),
        ("100%.db", "'%' after"),
        ("a%2.db", "'%' after"),
        ("a\nb.db", r"'\\n' after"),
        ("bus.db\n", r"'\\n' after"),
        ("a%0Ab.db", "'%0A' after"),
        ("a%00b.db", "'%00' after"),
        ("a%FF.db", "not UTF-8"),
        ("a\udcff.db", "not UTF-8"),
        ("loop.db", "loop of symbolic links"),
        ("loop.db/bus.db", "loop of symbolic links"),
    ],
)
def test_a_url_that_could_mean_another_file_is_refused(tmp_path: Path, name: str, told: str):
    """What a URL's parser would drop or guess at is named, whoever asks, and nothing is made (I16)."""
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    for ask in (open_store, exists):
        with pytest.raises(InvalidRequest, match=told):
            ask(f"sqlite:///{tmp_path}/{name}")
    assert [each.name for each in tmp_path.iterdir()] == ["loop.db"]


def test_a_file_of_any_name_has_a_url_that_leads_to_it(tmp_path: Path, clock: FrozenClock):
    """As a store shows its own: with what would mean something else in a URL escaped."""
    path = tmp_path / "50% of a?b#c é.db"
    with closing(SqliteStore(path, clock)) as store:
        publish(store, 1)
        with closing(open_store(store.url)) as again:
            assert again.stats().events == 1


# ── patience ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_locked_file_is_waited_for(path: Path, store: SqliteStore, crew: Crew):
    """Another process holds the write lock: the publish comes after it, without an error (S1.17)."""
    publish(store, 1)
    holder = other(path)
    holder.execute("BEGIN IMMEDIATE")
    waits = threading.Event()
    patience = connection_module._Patience.__call__

    def notice(self: Any, calls: int) -> bool:
        waits.set()
        return patience(self, calls)

    connection_module._Patience.__call__ = notice
    try:
        crew.start(lambda: store.publish([draft({"type": "a"})]))
        assert waits.wait(10)
        assert crew.results == []
        holder.execute("COMMIT")
        assert crew.join()[0][0].id == 2
    finally:
        connection_module._Patience.__call__ = patience
        holder.close()


def test_a_file_that_stays_locked_is_unavailable_and_nothing_is_stored(
    path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
):
    """After its patience StoreUnavailable, never 'database is locked'; later it works again (S1.17)."""
    publish(store, 1)
    monkeypatch.setattr(connection_module, "BUSY_SECONDS", 0.05)
    holder = other(path)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        publish(store, 1)
    with pytest.raises(StoreUnavailable, match="locked"):
        claim(store)
    holder.execute("ROLLBACK")
    holder.close()
    assert store.stats().events == 1
    publish(store, 1)
    assert len(claim(store, 9)) == 2


def test_a_full_disk_stores_nothing_and_says_so(store: SqliteStore):
    """SQLITE_FULL is StoreUnavailable, the batch is undone, and room makes it work again (I2, I16)."""
    publish(store, 1)
    db = store._database
    pages = db.pragma("page_count")
    db.pragma("max_page_count", pages + 4)
    with pytest.raises(StoreUnavailable, match="full"):
        publish(store, 200, payload="x" * 1_000)
    db.pragma("max_page_count", 1_000_000)
    assert store.stats().events == 1
    publish(store, 1)
    assert len(claim(store, 9)) == 2


def test_a_store_opened_before_a_fork_is_refused_in_the_child(store: SqliteStore, monkeypatch: pytest.MonkeyPatch):
    """Two processes must not share a connection (I16)."""
    monkeypatch.setattr(store, "_pid", os.getpid() + 1)
    with pytest.raises(StoreUnavailable, match="fork"):
        publish(store, 1)


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Meter:
    """Counts the steps of SQLite's machine that the store's connections take."""

    def __init__(self, store: SqliteStore) -> None:
        """Watch the writer and one reader that stands for all."""
        with store._read():
            pass
        self._connections = [store._database._apsw, *(reader._apsw for reader in store._readers)]
        self.steps = 0
        self.scans = 0

    def of(self, action: Callable[[], Any]) -> int:
        """Return the steps an action takes."""
        self.steps = self.scans = 0
        for connection in self._connections:
            connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._count)
        try:
            action()
        finally:
            for connection in self._connections:
                connection.trace_v2(0, None)
        return self.steps

    def _count(self, event: dict[str, Any]) -> None:
        status = event["stmt_status"]
        self.steps += status["SQLITE_STMTSTATUS_VM_STEP"]
        self.scans += status["SQLITE_STMTSTATUS_FULLSCAN_STEP"]


def steps_of_a_claim(path: Path, backlog: int, **fields: Any) -> int:
    """Return the steps of a claim of one event with a backlog behind it, once what is scheduled has been passed."""
    store = SqliteStore(path, FrozenClock())
    publish(store, 15)
    publish(store, backlog, **fields)
    meter = Meter(store)
    interests = (Interest("a"),)
    for _ in range(8):
        claim(store, interests=interests)
    steps = meter.of(lambda: claim(store, interests=interests))
    assert steps > 0
    store.close()
    return steps


@pytest.mark.parametrize(
    "fields", [{}, {"delay": 86_400}, {"tags": ["common"]}, {"type": "other"}], ids=["due", "tomorrow", "tags", "types"]
)
def test_a_claim_takes_the_same_steps_whatever_the_backlog(tmp_path: Path, fields: dict[str, Any]):
    """A hundred or five thousand behind it, due, scheduled, tagged or of another type: the cost is flat (S0.10)."""
    small = steps_of_a_claim(tmp_path / "small.db", 100, **fields)
    large = steps_of_a_claim(tmp_path / "large.db", 5_000, **fields)
    assert large <= small * 1.1 + 20


def test_a_rare_tag_is_found_without_wading_through_the_others(tmp_path: Path):
    """One event among thousands of the same type: the claim goes to its route (S0.10)."""
    steps: list[int] = []
    interests = (Interest("*", frozenset(["rare"])),)
    for backlog in (100, 5_000):
        store = SqliteStore(tmp_path / f"{backlog}.db", FrozenClock())
        publish(store, backlog, tags=["common"])
        publish(store, 3, tags=["rare"])
        claim(store, interests=interests)
        meter = Meter(store)
        steps.append(meter.of(lambda store=store: claim(store, interests=interests)))
        store.close()
    assert steps[1] <= steps[0] * 1.1 + 20


def kill_all(store: SqliteStore) -> None:
    """Make dead letters of all that is due."""
    while taken := claim(store, 500):
        store.settle([Settlement(each.lease, Dead(AttemptError("E", "m")), "w") for each in taken])


def test_a_page_of_dead_letters_takes_steps_for_its_own_rows(tmp_path: Path):
    """Ten letters of two hundred or of three thousand; only the total, which has a cap, is counted (S1.18)."""
    steps: list[int] = []
    for dead in (200, 3_000):
        store = SqliteStore(tmp_path / f"{dead}.db", FrozenClock())
        publish(store, dead)
        kill_all(store)
        meter = Meter(store)

        def page(store: SqliteStore = store) -> None:
            assert len(store.dead_letters(DeadFilter(), limit=10, offset=0, after=None)) == 10

        page()
        steps.append(meter.of(page))
        assert meter.scans <= dead + 20
        store.close()
    assert steps[1] - steps[0] <= 20 * (3_000 - 200)


def test_recovery_takes_steps_for_what_was_stuck_alone(tmp_path: Path, clock: FrozenClock):
    """Fifty stuck leases among a hundred or five thousand pending events cost the same (S1.15, S1.18)."""
    steps: list[int] = []
    for backlog in (100, 5_000):
        store = SqliteStore(tmp_path / f"{backlog}.db", clock)
        publish(store, 50)
        assert len(claim(store, 50)) == 50
        publish(store, backlog)
        meter = Meter(store)
        steps.append(meter.of(lambda store=store: store.expire(["o"], RetryPolicy())))
        assert store.owners() == set()
        store.close()
    assert steps[1] <= steps[0] * 1.2 + 50


def test_a_batch_is_one_commit(store: SqliteStore):
    """A thousand events, one synchronisation of the file (S1.18)."""
    commits: list[int] = []
    store._database._apsw.set_commit_hook(lambda: bool(commits.append(1)))
    publish(store, 1_000)
    assert len(commits) == 1


def test_statements_are_prepared_once_and_kept(store: SqliteStore):
    """After the first round of publish, claim, settle and read, no statement is prepared anew (S1.19)."""

    def live() -> None:
        publish(store, 3)
        taken = claim(store, 2)
        store.settle([Settlement(each.lease, Dead(AttemptError("E", "m")), "w") for each in taken])
        store.get(taken[0].id, "default")
        store.dead_letters(DeadFilter(), limit=10, offset=0, after=None)
        store.extend([each.lease for each in claim(store, 9)], RetryPolicy().delay(2))

    def misses() -> int:
        return sum(db._apsw.cache_stats()["misses"] for db in (store._database, *store._readers))

    live()
    live()
    before = misses()
    for _ in range(5):
        live()
    assert misses() == before


def test_a_wal_that_has_grown_is_brought_into_the_file(store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch):
    """However many commits there are, the WAL is written from its start again, and everything is there."""
    monkeypatch.setattr(connection_module, "CHECKPOINT_PAGES", 40)
    wal = path.with_name(f"{path.name}-wal")
    before = path.stat().st_size
    for _ in range(600):
        publish(store, 1)
    assert path.stat().st_size > before
    assert wal.stat().st_size < 2_000_000
    assert store.stats().events == 600


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_the_same_by_whatever_name_and_from_wherever(
    tmp_path: Path, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
):
    """A program that has changed its folder, or came by a link, reads the same file and knows who else is alive."""
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.db").symlink_to(tmp_path / "there" / "bus.db")
    monkeypatch.chdir(tmp_path / "there")
    one = SqliteStore(Path("bus.db"), clock)
    monkeypatch.chdir(tmp_path / "elsewhere")
    two = SqliteStore(Path("link.db"), clock)
    publish(one, 1)
    publish(two, 1)
    assert [store.stats().events for store in (one, two)] == [2, 2]
    with one.hold("it"), pytest.raises(Conflict), two.hold("it"):
        pass
    with one.mark_alive("one"), two.mark_alive("two"):
        beside = {each.name for each in (tmp_path / "there").iterdir()}
        assert {each.name for each in (tmp_path / "there" / "bus.db-alive").iterdir()} == {"one", "two"}
    assert beside == {"bus.db", "bus.db-wal", "bus.db-shm", "bus.db-alive", "bus.db-held"}
    one.close()
    two.close()
    assert [each.name for each in (tmp_path / "elsewhere").iterdir()] == ["link.db"]


# ── a file that is not the one that was opened ───────────────────────────────────────────────────────────────────────


def remove(path: Path) -> None:
    """Remove the file."""
    path.unlink()


def move_away(path: Path) -> None:
    """Give the file another name."""
    path.rename(path.with_name("moved.db"))


def replace(path: Path) -> None:
    """Put another bus's file into its place, as a restored backup would be."""
    backup = path.with_name("backup.db")
    SqliteStore(backup, FrozenClock()).close()
    backup.replace(path)


def remove_wal(path: Path) -> None:
    """Remove its WAL."""
    Path(f"{path}-wal").unlink()


@pytest.mark.parametrize("strike", [remove, move_away, replace, remove_wal])
def test_a_file_that_was_removed_or_replaced_takes_no_more(
    path: Path, store: SqliteStore, strike: Callable[[Path], None]
):
    """Every verb that writes is refused, and says what to do; nothing is acknowledged into a file nobody opens (I1)."""
    publish(store, 2)
    (delivery,) = claim(store)
    step = Step("default", 0, 1, "w")
    strike(path)

    def in_transaction() -> None:
        with store.transaction() as tx:
            tx.publish([draft({"type": "a"})])

    for write in (
        lambda: publish(store, 1),
        in_transaction,
        lambda: claim(store),
        lambda: store.settle([Settlement(delivery.lease, Done(), "w")]),
        lambda: store.move(step),
    ):
        with pytest.raises(UnsafeStore, match=r"removed or replaced .* restart"):
            write()


@pytest.mark.parametrize("strike", [remove, move_away, replace, remove_wal])
def test_a_file_that_was_replaced_within_a_transaction_acknowledges_nothing(
    path: Path, store: SqliteStore, strike: Callable[[Path], None]
):
    """It is compared again behind the commit, which went into a file that nobody opens any more (I1)."""

    def write() -> None:
        with store.transaction() as tx:
            tx.publish([draft({"type": "a"})])
            strike(path)

    with pytest.raises(UnsafeStore, match=r"removed or replaced .* restart"):
        write()


def test_a_file_that_is_replaced_while_it_is_written_to_is_not_acknowledged(
    path: Path, store: SqliteStore, crew: Crew, eventually: Callable[..., Any]
):
    """However a publish and the replacement meet: what was acknowledged had been stored before it (I1)."""
    acknowledged: list[int] = []

    def work() -> None:
        with suppress(UnsafeStore):
            while True:
                acknowledged.append(store.publish([draft({"type": "a"})])[0].id)

    crew.start(work, 4)
    eventually(lambda: len(acknowledged) > 20)
    kept = path.with_name("kept.db")
    os.link(path, kept)
    os.link(f"{path}-wal", f"{kept}-wal")
    replace(path)
    crew.join()
    store.close()
    survivor = SqliteStore(kept, FrozenClock())
    assert survivor.list(**{**EVERYTHING, "limit": 1}).total >= len(acknowledged)
    survivor.close()


def test_closing_does_no_harm_to_the_file_in_its_place(path: Path, store: SqliteStore):
    """Neither to it nor to its WAL, whose names are those of the old one (I1)."""
    publish(store, 5)
    replace(path)
    Path(f"{path}-wal").unlink()
    Path(f"{path}-shm").unlink()
    successor = SqliteStore(path, FrozenClock())
    publish(successor, 3)
    with pytest.raises(UnsafeStore):
        publish(store, 1)
    store.close()
    publish(successor, 3)
    assert successor.list(**EVERYTHING).total == 6
    assert all(finding.ok for finding in successor.inspect(deep=True))
    successor.close()


def test_another_file_by_the_name_of_one_in_use_is_not_opened(path: Path, store: SqliteStore):
    """To read or to write, by this bus or a second: it would be given the WAL and its index of the first (I1)."""
    publish(store, 5)
    replace(path)
    with pytest.raises(UnsafeStore, match=r"removed or replaced .* restart"):
        store.stats()
    with pytest.raises(UnsafeStore, match=r"removed or replaced .* restart"):
        SqliteStore(path, FrozenClock())
    store.close()
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    successor = SqliteStore(path, FrozenClock())
    publish(successor, 3)
    assert successor.stats().events == 3
    successor.close()


LOOKED_AT = """
import fcntl, os, struct, sys
from postbus import EventBus
bus = EventBus(sys.argv[1])
bus.publish("a")
index = os.open(sys.argv[1].removeprefix("sqlite:///") + "-shm", os.O_RDWR)
asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 128, 1, 0)
kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(index, fcntl.F_GETLK, asked))
print({fcntl.F_UNLCK: "free", fcntl.F_RDLCK: "shared"}[kind])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no locks that their own process sees")
def test_a_second_sqlite_in_the_process_does_not_cut_off_what_is_mapped(path: Path):
    """It finds the index of the WAL locked: else it would make it empty, and the process end with SIGBUS (I16)."""
    told = subprocess.run(
        [sys.executable, "-c", LOOKED_AT, f"sqlite:///{path}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout == "shared\n"


def test_the_index_is_let_go_with_the_last_connection(path: Path):
    """Its lock does not keep the last one from removing it and the WAL, nor is a descriptor left (I16)."""
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        one, two = SqliteStore(path, FrozenClock()), SqliteStore(path, FrozenClock())
        publish(one, 1)
        assert two.stats().events
        one.close()
        publish(two, 1)
        two.close()
        assert not Path(f"{path}-shm").exists()
        assert not Path(f"{path}-wal").exists()
    assert len(list(Path("/dev/fd").iterdir())) <= before


SECOND_LIBRARY = """
import sqlite3, subprocess, sys
from postbus import EventBus, UnsafeStore
bus = EventBus(sys.argv[1])
bus.publish("a")
second = sqlite3.connect(sys.argv[1].removeprefix("sqlite:///"))
second.execute("SELECT count(*) FROM events").fetchall()
second.close()
look = "import sys; from postbus import EventBus; bus = EventBus(sys.argv[1]); bus.stats(); bus.shutdown()"
subprocess.run([sys.executable, "-c", look, sys.argv[1]], check=True)
try:
    given = bus.publish("b").id
except UnsafeStore as error:
    print(error)
else:
    look = look.replace("bus.stats()", f"print('there', bus.get({given}).id)")
    subprocess.run([sys.executable, "-c", look, sys.argv[1]], check=True)
"""


def test_a_second_sqlite_in_the_process_is_noticed_when_it_has_dropped_the_locks(path: Path):
    """Python's own module closes the file, another process takes itself for the last: refused, not lost (I1).

    Where Python's is a version that sees our lock on the index, neither removes the WAL, and nothing is to be refused.
    """
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SECOND_LIBRARY, f"sqlite:///{path}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "another SQLite library" in told.stdout or "there 2" in told.stdout, told.stderr
