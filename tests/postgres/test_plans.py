"""What a worker or a page asks for costs the same however long the log and the queue have become."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final, LiteralString, cast

import pytest

from postbus.model import Outcome, Status
from postbus.payload import draft
from postbus.retry import RetryPolicy
from postbus.store import Log, log_of, open_store
from postbus.store.contract import Settlement
from postbus.testing import FrozenClock
from tests.contract.stores import DEAD, DONE, RETRY, Operator, wanting
from tests.crash.processes import until
from tests.postgres.server import query, server

REPEAT: Final = 8
"""Often enough that a statement is prepared and its plan has become the one for any parameters."""
READ: Final = """
    SELECT coalesce(sum(t.seq_scan), 0)::bigint,
           coalesce(sum(t.seq_tup_read), 0)::bigint + (SELECT coalesce(sum(i.idx_tup_read), 0)::bigint
               FROM pg_stat_user_indexes AS i WHERE i.schemaname = 'postbus' AND i.relname = ANY (%s))
    FROM pg_stat_user_tables AS t WHERE t.schemaname = 'postbus' AND t.relname = ANY (%s)
"""
LARGE: Final = ["events", "deliveries", "event_log", "dedup"]
OTHERS: Final = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


def stock(store: Log, count: int) -> None:
    """Fill a store: most events pending, some of them later, a few thousand leased, dead, completed and retrying.

    All but the last 5,000 were passed by somebody who handles none of them.
    """
    op = Operator(store, FrozenClock())
    for start in range(0, count, 5_000):
        if start == count - 5_000:
            while op.ask(1, interests=wanting("nothing.*")).more:
                pass
        store.publish(
            [
                draft(
                    {
                        "type": f"order.{number % 20}",
                        "payload": number,
                        "tags": [f"t{number % 3}"],
                        **({"uid": f"u{number}"} if number % 10 == 0 else {}),
                        **({"delay": 86_400} if number % 4 == 0 else {}),
                    }
                )
                for number in range(start, start + 5_000)
            ]
        )
    for outcome in (DEAD, DONE, RETRY, None):
        taken = op.claim(1_000, lease=timedelta(hours=1))
        if outcome is not None:
            store.settle([Settlement(delivery.lease, outcome, "w") for delivery in taken])


@pytest.fixture(
    scope="module",
    params=[
        (50_000, "analyzed"),
        (50_000, "never analyzed"),
        pytest.param((1_000_000, "analyzed"), marks=[pytest.mark.slow, pytest.mark.timeout(1_200)]),
    ],
    ids=lambda param: f"{param[0]} {param[1]}",
)
def large(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the address of a bus with a long log and a long queue, whose statistics are good or missing."""
    count, statistics = request.param
    with server().database() as url:
        for table in LARGE:
            query(url, cast("LiteralString", f"ALTER TABLE {table} SET (autovacuum_enabled = off)"))
        store = log_of(open_store(url))
        stock(store, count)
        store.close()
        if statistics == "analyzed":
            query(url, "ANALYZE")
        yield url


def settle(op: Operator, outcome: Outcome) -> None:
    """Claim some and settle them."""
    op.store.settle([Settlement(delivery.lease, outcome, "w") for delivery in op.claim(10)])


WORK: Final[dict[str, tuple[Callable[[Operator], object], int]]] = {
    "claim": (lambda op: op.claim(10), 2_000),
    "claim one of a rare type": (lambda op: op.claim(1, interests=wanting("order.7")), 2_000),
    "claim what is not there": (lambda op: op.claim(1, interests=wanting("nothing.*")), 2_000),
    "complete": (lambda op: settle(op, DONE), 4_000),
    "retry": (lambda op: settle(op, RETRY), 4_000),
    "bury": (lambda op: settle(op, DEAD), 4_000),
    "extend": (lambda op: op.store.extend([each.lease for each in op.claim(10)], timedelta(seconds=60)), 4_000),
    "release": (lambda op: op.store.release([each.lease for each in op.claim(10)], "w"), 4_000),
    "expire": (lambda op: op.store.expire(None, RetryPolicy()), 2_000),
    "owners": (lambda op: op.store.owners(), 4_000),
    "work": (lambda op: op.store.work("default", wanting("order.7")), 6_000),
    "publish": (lambda op: op.publish("order.3", uid="the same"), 2_000),
    "publish a batch": (lambda op: op.publish_all(*[{"type": "order.3"}] * 150), 4_000),
    "get": (lambda op: op.get(777), 2_000),
    "dead letters": (lambda op: op.dead(limit=50), 12_000),
    "dead letters of a type": (lambda op: op.dead(limit=50, type="order.1"), 12_000),
    "next page of dead letters": (lambda op: op.dead(limit=50, after=op.dead(limit=50).next), 24_000),
    "list": (lambda op: op.list(limit=50), 22_000),
    "list a later page": (lambda op: op.list(limit=50, after=20_000), 22_000),
    **{f"list {status.value}": (lambda op, status=status: op.list(status, limit=50), 24_000) for status in Status},
}
"""What is asked for, and how many rows it may look at: a list counts to 10,000 (and looks at as many pending rows, to
sort them), the rest looks at what it takes, and at what is leased or waits for a retry."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WORK)
def test_no_work_scans_a_table(large: str, name: str):
    """Claim, settle, extend, pages: no sequential scan, and rows read by what is asked, not by what is there (S4.1)."""
    work, most = WORK[name]
    scans, read = cost(large, lambda store: work(Operator(store, FrozenClock())))
    assert scans == 0
    assert read <= most * REPEAT, f"{read // REPEAT} rows each time"


def test_following_scans_nothing(large: str):
    """The head by the pins, and a page of the log after the last event seen, whether live or in haste (S4.1, S3.13)."""

    def follow(store: Log) -> None:
        reader = store.reader()
        try:
            for after in (49_700, 49_800, 49_900):
                assert len(reader.read_on(after, 100, wanting("*")).events) == 100
        finally:
            reader.close()

    scans, read = cost(large, follow)
    assert scans == 0
    assert read <= 3_000 * REPEAT, f"{read // REPEAT} rows each time"


def cost(url: str, work: Callable[[Log], object]) -> tuple[int, int]:
    """Do something several times; return how many sequential scans of large tables that took, and the rows read."""
    before = counted(url)
    store = log_of(open_store(url))
    try:
        for _ in range(REPEAT):
            work(store)
    finally:
        store.close()
    after = counted(url)
    return after[0] - before[0], after[1] - before[1]


def counted(url: str) -> tuple[int, int]:
    """Return the server's own counters, once every other session has ended and so has told its own."""
    until(lambda: query(url, OTHERS) == [(0,)], "the store's sessions have ended")
    (row,) = query(url, READ, LARGE, LARGE)
    return row
