"""What one claim does with the log, statement by statement: PostgreSQL's functions, and the store beside them."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, LiteralString, NamedTuple, cast

import psycopg
import pytest

from postbus.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from postbus.model import Mode, Pruned, Stream
from postbus.store import open_store
from postbus.store.contract import Claim, Rewound
from postbus.store.postgres.claim import claim as real_claim
from postbus.store.postgres.schema import roles_statements
from postbus.store.postgres.store import PostgresStore
from tests.conftest import Crew
from tests.postgres.core_actors import POLICY, connect
from tests.postgres.server import Server
from tests.postgres.test_core import prepare

ALL: Final = '[["*", []]]'
CLAIM: Final = "SELECT * FROM postbus.claim($1, $2, $3, $4, $5, $6, $7, $8, 'w', 'o', 't', $9, $10, $11, NULL, NULL)"
FINISH: Final = "SELECT postbus.finish($1::bigint[], $2::bigint[], $3::integer[], $4::real[], 'w')"
UNGIVEN: Final = """
    SELECT subscription, event_id, epoch FROM postbus.audit WHERE action = 'COMPLETED'
    EXCEPT SELECT subscription, event_id, epoch FROM postbus.audit WHERE action = 'PICKED'
"""


class Claimed(NamedTuple):
    """What a claim has answered."""

    state: str
    block: list[int]
    lone: list[int]
    suspect: bool
    suspects: bool
    epochs: list[int]
    events: list[Any]


class Client:
    """A connection, and the verbs in short; and a store on the same database."""

    def __init__(self, url: str) -> None:
        """Connect."""
        self.db = connect(url)
        self.url = url
        self._stores: list[PostgresStore] = []

    @property
    def store(self) -> PostgresStore:
        """The store, opened at the first use."""
        return self._stores[0] if self._stores else self.open()

    def open(self, options: str = "") -> PostgresStore:
        """Open another store, with options for its sessions."""
        found = open_store(self.url + options)
        assert isinstance(found, PostgresStore)
        self._stores.append(found)
        return found

    def close(self) -> None:
        """Close all of it."""
        for each in self._stores:
            each.close()
        self.db.close()

    def run(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        cursor = self.db.execute(sql, parameters or None)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def publish(self, *events: dict[str, Any]) -> list[int]:
        """Append events and return their ids."""
        given = [{"uid": "u", "type": "a", "payload": "1", **each} for each in events]
        return [row[0] for row in self.run("SELECT event_id FROM postbus.append($1, false)", json.dumps(given))]

    def claim(
        self,
        most: int = 1_000,
        *,
        wanted: str = ALL,
        blocked: str = "[]",
        free: int = 10,
        whole: bool = True,
        lease: float = 60,
        allowed: int = 4,
        idle: bool = True,
        wait: bool = False,
        size: int = 0,
    ) -> Claimed:
        """Claim on the subscription default."""
        given = (1, wanted, blocked, most, free, whole, int(lease * 1e6), allowed, idle, wait, size)
        cursor = self.db.execute(CLAIM, given)
        row = cursor.fetchone()
        assert row is not None
        assert cursor.description is not None
        told = dict(zip((each.name for each in cursor.description), row, strict=True))
        places = range(told["size"] or 0)
        lone = told["lone_ids"] or []
        return Claimed(
            told["state"],
            [told["first_id"] + (told["ids"][k] if told["ids"] else k) for k in places],
            lone,
            told["suspect"],
            told["suspects"],
            [told["number"] << 10 | k for k in places] + [each << 10 for each in told["numbers"] or ()],
            json.loads(told["events"] or "[]"),
        )

    def finish(self, claimed: Claimed) -> list[int]:
        """Report all of it as done; return what the fence stopped, by number."""
        ids = claimed.block + claimed.lone
        return self.run(FINISH, claimed.epochs, ids, [1] * len(ids), [1.0] * len(ids))[0][0]

    def missing(self) -> str:
        """Return which ids the cursor has passed without having seen them."""
        return self.run("SELECT missing::text FROM postbus.cursors WHERE subscription = 1")[0][0]


@pytest.fixture(scope="module")
def template(server_of_module: Server) -> str:
    """Give the address of a database that is copied for each test."""
    return prepare(server_of_module)


@pytest.fixture(scope="module")
def server_of_module() -> Server:
    """Give the server."""
    from tests.postgres.server import server  # noqa: PLC0415  the fixture of that name is another

    return server()


@pytest.fixture
def clients(server_of_module: Server, template: str) -> Iterator[Callable[[], Client]]:
    """Give a function that connects to the test's database."""
    name = f"{template.partition('?')[0].rpartition('/')[2]}_copy"
    with psycopg.connect(server_of_module.url(), autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{name.removesuffix("_copy")}"')  # type: ignore[arg-type]
    opened: list[Client] = []

    def client() -> Client:
        opened.append(Client(server_of_module.url(name)))
        return opened[-1]

    yield client
    for each in opened:
        each.close()
    server_of_module.drop(server_of_module.url(name))


@pytest.fixture
def bus(clients: Callable[[], Client]) -> Client:
    """Give one connection."""
    return clients()


def test_a_block_is_claimed_and_settled_as_one(bus: Client):
    """A thousand events are one block and two rows of the audit log, which read as two thousand entries (C1, I13)."""
    ids = bus.publish(*[{}] * 1_000)
    claimed = bus.claim()
    assert claimed.block == ids
    assert bus.finish(claimed) == []
    assert bus.run("SELECT count(*) FROM postbus.event_log") == [(2,)]
    assert bus.run("SELECT action, count(*), min(attempt) FROM postbus.audit GROUP BY 1 ORDER BY 1") == [
        ("COMPLETED", 1_000, 1),
        ("PICKED", 1_000, 1),
    ]
    assert bus.run("SELECT 1 FROM postbus.blocks") == []
    assert bus.claim().state == "empty"


def test_bits_are_settled_once_each(bus: Client):
    """A part of a block, then all of it: the first part is stopped by the fence, bit by bit (I8)."""
    bus.publish(*[{}] * 10)
    claimed = bus.claim()
    part = claimed._replace(block=claimed.block[3:5], epochs=claimed.epochs[3:5])
    assert bus.finish(part) == []
    assert bus.run("SELECT done::text FROM postbus.blocks") == [("\\x1800",)]
    assert bus.finish(claimed) == [4, 5]
    assert bus.finish(claimed) == list(range(1, 11))
    wrong = claimed._replace(block=[each + 1 for each in claimed.block])
    assert bus.finish(wrong) == list(range(1, 11))


def test_the_fence_compares_event_and_subscription(bus: Client):
    """An epoch ends nothing but the event at its place, in its own subscription (I8)."""
    ids = bus.publish({}, {})
    claimed = bus.claim()
    assert bus.finish(claimed._replace(block=ids[::-1])) == [1, 2]
    assert bus.run(FINISH, claimed.epochs, ids, [2, 1], [1.0, 1.0]) == [([1],)]


def test_each_end_is_recorded_under_the_epoch_that_was_given(bus: Client):
    """Of several types, told in any order; else a repeat would be LOST: its epoch has recorded nothing (I8, I13)."""
    chance = random.Random(7)
    for _ in range(4):
        bus.publish(*[{"type": chance.choice(["a", "b", "c"])} for _ in range(300)])
        given = list[Claimed]()
        while (claimed := bus.claim(chance.choice([3, 20, 100]), wanted='[["a", []], ["b", []]]')).state == "claimed":
            given.append(claimed)
        chance.shuffle(given)
        ids, epochs = [each for one in given for each in one.block], [each for one in given for each in one.epochs]
        assert bus.finish(given[0]._replace(block=ids, epochs=epochs)) == []
        assert bus.run(UNGIVEN) == []


def test_late_events_beyond_what_is_read_stay_missing(bus: Client, clients: Callable[[], Client]):
    """More late ones than a claim of one looks at: closing leaves the rest where they are (C3)."""
    slow = clients()
    with slow.db.transaction():
        late = slow.publish(*[{}] * 200)
        early = bus.publish({})
        assert bus.claim().block == early
        assert bus.missing() == f"{{[{late[0]},{late[-1] + 1})}}"
    time.sleep(0.11)
    first = bus.claim(1, whole=False)
    assert first.lone == late[:1]
    assert bus.missing() == f"{{[{late[64]},{late[-1] + 1})}}"
    rest = bus.claim()
    assert sorted([*rest.block, *bus.claim().block]) == late[1:]
    assert bus.missing() == "{}"


def test_ids_of_a_transaction_that_rolled_back_are_given_up(bus: Client, clients: Callable[[], Client]):
    """Not while it is open, and a tenth of a second after at the earliest: the head is asked for that often (C3)."""
    slow = clients()
    with slow.db.transaction():
        gone = slow.publish(*[{}] * 3)
        bus.publish({})
        assert len(bus.claim().block) == 1
        time.sleep(0.11)
        assert bus.claim().state == "empty"
        assert bus.missing() == f"{{[{gone[0]},{gone[-1] + 1})}}"
        raise psycopg.Rollback
    time.sleep(0.11)
    assert bus.claim().state == "empty"
    assert bus.missing() == "{}"


def test_priority_overtakes_a_backlog_and_comes_once(bus: Client):
    """Rows first, those of negative priority last, each in a block of its own; what is delayed waits (S1)."""
    ordinary = bus.publish(*[{}] * 20)
    low, delayed, high = bus.publish({"priority": -1}, {"delay": 10**9}, {"priority": 5})
    assert bus.claim(1, whole=False).lone == [high]
    assert bus.claim(5).block == ordinary[:5]
    last = bus.claim()
    assert (last.block, last.lone) == (ordinary[5:], [low])
    assert bus.claim().state == "empty"
    bus.run("UPDATE postbus.deliveries SET due_at = postbus.now()")
    assert bus.claim().block == [delayed]
    assert bus.claim().state == "empty"
    assert bus.run("SELECT 1 FROM postbus.skips UNION ALL SELECT 1 FROM postbus.deliveries") == []


def test_rows_of_negative_priority_fill_the_room_that_is_left(bus: Client):
    """As many as handlers are free, the most urgent first; alone they come as one block (S1)."""
    lower, low, ordinary = bus.publish({"priority": -2}, {"priority": -1}, {})
    full = bus.claim(1)
    assert (full.block, full.lone) == ([ordinary], [])
    more = bus.publish({})
    one = bus.claim(free=1)
    assert (one.block, one.lone) == (more, [low])
    bus.publish({"priority": -1})
    rest = bus.claim()
    assert (min(rest.block), rest.lone) == (lower, [])
    assert bus.finish(rest) == bus.finish(one) == bus.finish(full) == []
    assert bus.run("SELECT 1 FROM postbus.blocks UNION ALL SELECT 1 FROM postbus.deliveries") == []


def test_what_a_worker_does_not_handle_becomes_rows_for_others(bus: Client):
    """By patterns, tags and blocked interests; a worker of none, or with all blocked, passes nothing (S1)."""
    a, b, c, d = bus.publish({"type": "a.x"}, {"type": "b.y"}, {"type": "a_x"}, {"type": "a.z", "tags": "vip,new"})
    assert bus.claim(wanted="[]").state == "empty"
    assert bus.claim(wanted='[["b.*", []]]', blocked='[["b.*", []]]').state == "empty"
    assert bus.run("SELECT position FROM postbus.cursors") == [(0,)]
    assert bus.claim(wanted='[["a.*", ["vip"]]]').block == [d]
    assert bus.run("SELECT count(*) FROM postbus.deliveries") == [(3,)]
    assert bus.claim(wanted='[["a.*", []]]', blocked='[["a.x", []]]').state == "empty"
    assert bus.claim(wanted='[["a.*", []], ["b.y", []]]').block == [a, b]
    assert bus.claim().block == [c]


def test_an_unwanted_event_is_dropped(bus: Client):
    """A subscription's patterns are read with the events (C1)."""
    bus.run("UPDATE postbus.subscriptions SET patterns = '[\"b\"]' WHERE number = 1")
    (_, wanted, _) = bus.publish({}, {"type": "b"}, {})
    assert bus.claim().block == [wanted]
    assert bus.run("SELECT 1 FROM postbus.deliveries") == []


def test_the_last_attempt_is_in_a_block_of_its_own(bus: Client):
    """As many as handlers are free; the others wait as rows (I12)."""
    ids = bus.publish({}, {"max_retries": 0}, {"max_retries": 0}, {"max_retries": 0}, {})
    claimed = bus.claim(free=2)
    assert (claimed.block, claimed.lone) == ([ids[0], ids[4]], ids[1:3])
    assert bus.claim(free=2).lone == [ids[3]]
    more = bus.publish({}, {})
    assert bus.claim(allowed=1).lone == more


@pytest.mark.parametrize("low", [0, 1])
def test_a_claim_that_leaves_some_of_what_is_due_says_that_there_is_more(bus: Client, low: int):
    """Last attempts wait for a free handler, also beside a row of negative priority: the worker asks again (I10)."""
    bus.publish(*[{"max_retries": 0}] * 3, *[{"priority": -1}] * low)
    assert bus.claim(wanted='[["nobody", []]]').state == "empty"  # it makes rows of all of them
    asked = Claim("default", "w", "o", limit=10, free=2, shared=True)
    first = bus.store.claim(asked)
    assert (len(first.deliveries), first.more) == (2 + low, True)
    second = bus.store.claim(asked)
    assert (len(second.deliveries), second.more) == (1, False)


@pytest.mark.parametrize("low", [0, 1])
def test_a_claim_that_leaves_what_is_too_far_away_says_that_there_is_more(bus: Client, low: int):
    """What is due first decides which ids fit into the block: the rest is due as well, and follows at once (I10)."""
    (far,) = bus.publish({})
    bus.run("SELECT setval('postbus.events_id_seq', 20000)")
    (near, *_) = bus.publish({}, *[{"priority": -1}] * low)
    assert bus.claim(wanted='[["nobody", []]]').state == "empty"
    bus.run("UPDATE postbus.deliveries SET due_at = postbus.now() WHERE event_id = $1", far)
    asked = Claim("default", "w", "o", limit=10, shared=True)
    first = bus.store.claim(asked)
    assert (first.deliveries[0].id, len(first.deliveries), first.more) == (near, 1 + low, True)
    second = bus.store.claim(asked)
    assert ([each.id for each in second.deliveries], second.more) == ([far], False)


def test_a_suspect_runs_alone(bus: Client):
    """Whose lease expired is claimed by itself, and only by who holds nothing else (I7)."""
    ids = bus.publish({}, {})
    claimed = bus.claim(lease=0)
    assert bus.store.expire(None, POLICY) == 2
    assert bus.run("SELECT alone, attempt, retry_count, epoch FROM postbus.deliveries ORDER BY event_id") == [
        (True, 1, 1, claimed.epochs[0]),
        (True, 1, 1, claimed.epochs[1]),
    ]
    fresh = bus.publish({})
    busy = bus.claim(idle=False)
    assert (busy.block, busy.suspects) == (fresh, True)
    first = bus.claim()
    assert (first.lone, first.suspect) == (ids[:1], True)
    second = bus.claim()
    assert (second.lone, second.suspects) == (ids[1:], False)
    assert bus.finish(claimed) == [1, 2]


def test_a_busy_cursor_is_never_answered_as_empty(bus: Client, clients: Callable[[], Client]):
    """The second try waits for it; where rows have come up meanwhile, it lets the lock go (I10)."""
    other = clients()
    ids = bus.publish({}, {})
    with other.db.transaction():
        assert other.claim(1, whole=False).lone == ids[:1]  # and leaves the other as a row
        assert bus.claim().state == "busy"
    again = bus.claim(wait=True)
    assert again.block == ids[1:]


def test_events_come_along_as_far_as_they_fit(bus: Client):
    """An answer that fills the socket's buffer would hold the cursor for a client that stands still (C4)."""
    bus.publish({"payload": '"x"'}, {"payload": json.dumps("y" * 5_000)}, {})
    claimed = bus.claim(size=1_000)
    assert len(claimed.block) == 3
    assert [event[7] for event in claimed.events] == ['"x"']


def test_a_claim_is_refused_under_repeatable_read(bus: Client):
    """Later statements have to see what was committed before they began (C4)."""
    bus.run("SET default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.Error, match="READ COMMITTED"):
        bus.claim()


def test_a_rewind_waits_for_claims_that_hold_rows_and_no_cursor(
    bus: Client, clients: Callable[[], Client], crew: Crew, eventually: Callable[..., Any]
):
    """Else their events would be leased, and above the cursor too (C1)."""
    other, third = clients(), clients()
    ids = bus.publish({}, {})
    store = bus.store
    assert bus.claim(1, whole=False).lone == ids[:1]
    with other.db.transaction():
        taken = other.claim(1, whole=False)
        assert taken.lone == ids[1:]
        crew.start(lambda: store.rewind("default", 0, "operator"))
        eventually(lambda: third.run("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
    assert crew.join() == [Rewound(0, 2, 2, before=ids[1])]
    assert other.finish(taken) == [1]
    assert other.claim().block == ids


def test_a_rewind_ends_leases_and_rows_above_its_target(bus: Client):
    """What comes again is claimed again under new epochs; what lies below stays as it is (C1, I8)."""
    ids = bus.publish(*[{}] * 6)
    before = bus.claim()
    assert bus.finish(before._replace(block=ids[4:5], epochs=before.epochs[4:5])) == []
    assert bus.store.rewind("default", ids[2], "operator") == Rewound(ids[2], 3, 2, before=ids[5])
    assert bus.claim().block == ids[3:]
    assert bus.finish(before) == [4, 5, 6]
    with pytest.raises(InvalidRequest):
        bus.store.rewind("default", ids[5] + 1, "operator")


def test_a_rewind_cuts_what_is_missing_at_its_target(bus: Client, clients: Callable[[], Client]):
    """A late event above it comes once, from the log; one below it, from where it is missing (C1, C3)."""
    slow = clients()
    with slow.db.transaction():
        below = slow.publish({})
        seen = bus.publish({})
        above = slow.publish({})
        last = bus.publish({})
        assert bus.claim().block == seen + last
        bus.store.rewind("default", seen[0], "operator")
        assert bus.missing() == f"{{[{below[0]},{below[0] + 1})}}"
    assert sorted(bus.claim().block) == below + above + last
    assert bus.claim().state == "empty"


def test_prune_keeps_what_is_anywhere(bus: Client, clients: Callable[[], Client]):
    """Above a cursor, missing, in a row, in an unset bit; all else goes (I14)."""
    slow = clients()
    with slow.db.transaction():
        late = slow.publish({})
        ids = bus.publish(*[{}] * 6)
        assert bus.claim(1, whole=False).lone == ids[:1]  # the others are rows
        some = bus.claim(3)
        assert some.block == ids[1:4]
        assert bus.finish(some._replace(block=some.block[:2], epochs=some.epochs[:2])) == []
        above = bus.publish({})
    assert bus.store.prune(Stream.EVENTS, after=0, through=above[0]) == Pruned(2, 6, above[0], done=True)
    left = [row[0] for row in bus.run("SELECT id FROM postbus.events ORDER BY id")]
    assert left == [*late, ids[0], *ids[3:], *above]


def test_what_was_too_scattered_is_found_in_gaps(bus: Client, clients: Callable[[], Client]):
    """Within a second, by maintenance: what committed late becomes rows, what was rolled back is forgotten (C3)."""
    slow, gone = clients(), clients()
    late: list[int] = []
    with slow.db.transaction():
        for _ in range(600):
            late += slow.publish({})
            with gone.db.transaction():
                gone.publish({})
                raise psycopg.Rollback
            bus.publish({})
        assert len(bus.claim().block) == 600
        assert bus.missing() == "{}"
        assert bus.store.expire(None, POLICY) == 0
        assert len(bus.run("SELECT 1 FROM postbus.gaps")) == 1
    assert bus.store.expire(None, POLICY) == 600
    assert bus.run("SELECT 1 FROM postbus.gaps") == []
    assert bus.claim().block == late


def test_the_worker_s_role_can_do_all_of_it(bus: Client):
    """And cannot change the log; a publisher can append to it, and nothing else (S6)."""
    bus.db.execute(cast("LiteralString", roles_statements("postbus")))
    store = bus.open("&options=-c%20role%3Dpostbus_worker")
    bus.run("SET ROLE postbus_worker")
    ids = bus.publish(*[{}] * 4, {"priority": 1})
    assert bus.claim(2, lease=0).block == [ids[4], ids[0]]
    assert store.expire(None, POLICY) == 2
    claimed = bus.claim(idle=False)
    assert bus.finish(claimed._replace(block=claimed.block[:1], epochs=claimed.epochs[:1])) == []
    (mine,) = store.claim(Claim("default", "w", "o")).deliveries
    assert store.extend([mine.lease], timedelta(seconds=1)) == set()
    assert store.release([mine.lease], "w") == 1
    store.reset(ids[2], "default", "a trial", "w")
    assert store.rewind("default", 0, "w").again == 5
    assert len(bus.claim().block) == 5
    for refused in (
        "UPDATE postbus.events SET type = 'x'",
        "DELETE FROM postbus.event_log",
        "SELECT 1 FROM postbus.tokens",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            bus.run(refused)
    bus.run("SET ROLE postbus_publisher")
    bus.publish({})
    bus.run("SELECT postbus.publish('a')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        bus.claim()
    bus.run("RESET ROLE")
    bus.db.execute("DROP OWNED BY postbus_reader, postbus_publisher, postbus_worker")
    with suppress(psycopg.errors.DependentObjectsStillExist):  # other databases of this server may have them
        bus.db.execute("DROP ROLE postbus_reader, postbus_publisher, postbus_worker")


@pytest.mark.parametrize("start", ["now", "beginning", 2])
def test_a_subscription_begins_where_it_is_told(bus: Client, clients: Callable[[], Client], start: str | int):
    """`now` is the last event that is visible; what is still to come below it comes (I5)."""
    slow = clients()
    first = bus.publish({}, {}, {})
    with slow.db.transaction():
        late = slow.publish({})
        seen = bus.publish({})
        bus.store.create_subscription("second", ["*"], [], mode=Mode.QUEUE, lease=None, retry=None, start=start)
    after = bus.publish({})
    expected = {"now": [], "beginning": [*first, *seen], 2: [*first[2:], *seen]}[start] + late + after
    claimed = bus.store.claim(Claim("second", "w", "o", limit=100, shared=True)).deliveries
    assert sorted(each.id for each in claimed) == sorted(expected)


def test_a_claim_whose_answer_is_lost_is_given_back(bus: Client, monkeypatch: pytest.MonkeyPatch):
    """The attempt is given back; what had been settled of it is not (I12)."""
    ids = bus.publish({}, {}, {})

    def cut(db: Any, *given: Any, **terms: Any) -> Any:
        won = real_claim(db, *given, **terms)
        ((epoch, first),) = bus.run("SELECT number << 10, first_id FROM postbus.blocks")
        assert bus.run(FINISH, [epoch], [first], [1], [1.0]) == [([],)]
        db.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return won

    monkeypatch.setattr("postbus.store.postgres.claim.claim", cut)
    with pytest.raises(StoreUnavailable):
        bus.store.claim(Claim("default", "w", "o", limit=10, shared=True))
    bus.store.expire(None, POLICY)
    assert bus.run("SELECT 1 FROM postbus.blocks") == []
    assert bus.run("SELECT attempt FROM postbus.deliveries") == [(0,), (0,)]
    assert bus.claim().block == ids[1:]


def test_what_was_claimed_beside_a_claim_that_failed_is_given_back(bus: Client, monkeypatch: pytest.MonkeyPatch):
    """The one waits for its cursor in vain, and nobody gets the answer to the other (I12)."""
    ids = bus.publish({}, {}, {})

    def wait_in_vain(db: Any, floors: Any, claims: Any, token: str, *, wait: bool) -> Any:
        if wait:
            raise psycopg.errors.LockNotAvailable
        return [*real_claim(db, floors, claims[:1], token, wait=False), None]

    with monkeypatch.context() as patch:
        patch.setattr("postbus.store.postgres.claim.claim", wait_in_vain)
        with pytest.raises(StoreUnavailable):
            bus.store.claim_all([Claim("default", "w", "o", limit=2), Claim("default", "w", "o")])
    assert bus.run("SELECT 1 FROM postbus.blocks") == []
    assert sorted(bus.claim().block) == ids


PLACES: Final = ["above", "row", "leased", "late", "done", "none"]


@pytest.mark.parametrize("where", PLACES)
def test_reset_takes_a_delivery_from_wherever_it_is(bus: Client, clients: Callable[[], Client], where: str):
    """Afterwards it is in one pending row, and a worker that had it is stopped by the fence (C1)."""
    event, claimed = place(bus, clients, where)
    if where in ("done", "none"):
        with pytest.raises(Conflict if where == "done" else NotFound):
            bus.store.reset(event, "default", "a trial", "operator")
        assert bus.run("SELECT 1 FROM postbus.deliveries") == []
        return
    bus.store.reset(event, "default", "a trial", "operator")
    rows = bus.run("SELECT state, due_at <= postbus.now() FROM postbus.deliveries WHERE event_id = $1", event)
    assert rows == [(0, True)]
    assert bus.missing() == "{}"
    assert bus.run("SELECT event_id FROM postbus.skips") == ([(event,)] if where == "above" else [])
    if where == "leased":
        assert bus.finish(claimed) == [1]
    again = bus.claim()
    assert (again.block + again.lone).count(event) == 1
    assert bus.claim().state == "empty"


@pytest.mark.parametrize("where", PLACES)
def test_erase_takes_a_delivery_from_wherever_it_is(bus: Client, clients: Callable[[], Client], where: str):
    """It is never handed out again, a rewind included, and a worker that had it is stopped by the fence (C1)."""
    event, claimed = place(bus, clients, where)
    assert bus.store.erase(ids=[event], actor="operator").ids == (event,)
    told = [row[0] for row in bus.run("SELECT action FROM postbus.audit WHERE event_id = $1 ORDER BY id", event)]
    assert told[-2:] == {"done": ["COMPLETED", "ERASED"], "none": ["ERASED"]}.get(where, ["DISCARDED", "ERASED"])
    assert bus.run("SELECT 1 FROM postbus.deliveries WHERE event_id = $1", event) == []
    if where == "leased":
        assert bus.finish(claimed) == [1]
    time.sleep(0.11)
    assert event not in bus.claim().block
    bus.store.rewind("default", 0, "operator")
    again = bus.claim()
    assert event not in again.block + again.lone
    assert bus.missing() == "{}"


def place(bus: Client, clients: Callable[[], Client], where: str) -> tuple[int, Claimed]:
    """Bring an event, and another, to where a test wants it; return its id and what was claimed."""
    slow = clients()
    with slow.db.transaction():
        (event,) = slow.publish({}) if where == "late" else bus.publish({"delay": 10**9} if where == "row" else {})
        bus.publish({})
        claimed = bus.claim(0 if where == "above" else 1_000)
    if where == "done":
        bus.finish(claimed)
    return 99 if where == "none" else event, claimed
