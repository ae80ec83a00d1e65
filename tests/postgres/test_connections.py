"""How many connections a process opens: what docs/postgresql.md says, so that `max_connections` can be reckoned."""

import threading
from collections.abc import Callable
from typing import Any

from postbus import EventBus
from tests.postgres.server import query

COUNT = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'postbus'"


def connections(url: str) -> int:
    """Return how many connections the product has open."""
    return query(url, COUNT)[0][0]


def test_a_publisher_has_two_however_many_threads_publish(url: str, crew: Any, eventually: Callable[..., Any]):
    """All threads share one connection, and one rings the bell (S4.10)."""
    bus = EventBus(url)
    crew.start(lambda: [bus.publish("a") for _ in range(20)], count=16)
    crew.join()
    bus.publish_many([{"type": "a"}] * 500)
    eventually(lambda: connections(url) == 2)
    bus.shutdown()
    eventually(lambda: connections(url) == 0)


def test_a_worker_has_seven_at_most_and_one_for_each_transaction_that_runs(url: str, eventually: Callable[..., Any]):
    """Publisher, notifier, claimer, settler, listener, and one or two of the pool (S4.10)."""
    bus = EventBus(url, concurrency=4)
    inside, go_on = threading.Semaphore(0), threading.Event()

    @bus.on("plain")
    def plain(_: Any) -> None:
        pass

    @bus.on("booked", transactional=True)
    def book(_: Any, tx: Any) -> None:
        tx.execute("SELECT 1")
        inside.release()
        go_on.wait(30)

    with bus:
        bus.publish_many([{"type": "plain"}] * 500)
        bus.wait_idle(timeout=30)
        assert 4 <= connections(url) <= 7
        bus.publish_many([{"type": "booked"}] * 4)
        assert all(inside.acquire(timeout=10) for _ in range(4))
        held = connections(url)
        go_on.set()
        assert 8 <= held <= 11
        bus.wait_idle(timeout=30)
    eventually(lambda: connections(url) == 0)
