"""NOTIFY is a hint: with it events are noticed at once, without it within the poll interval."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from postbus import Event, EventBus, EventBusShutdownError
from postbus.model import Done
from postbus.payload import draft
from postbus.store import log_of, open_store
from postbus.store.contract import Claim, Settlement
from postbus.store.postgres.address import Address
from postbus.store.postgres.listen import Notifier
from postbus.store.postgres.reader import PostgresReader
from tests.postgres.server import query

POLL = 2.0
LISTENERS = """
    SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN%' ORDER BY pid
"""
Eventually = Callable[..., Any]


class Worker:
    """A bus that handles, and tells how long after its publishing an event was handled."""

    def __init__(self, url: str, **options: Any) -> None:
        """Start it; `publish` goes through another bus, as from another process."""
        self.bus = EventBus(url, poll_interval=POLL, **options)
        self.publisher = EventBus(url, **options)
        self._handled = threading.Event()
        self.bus.subscribe("*", self._handle)
        self.bus.start()

    def _handle(self, _: Event) -> None:
        self._handled.set()

    def latency(self) -> float:
        """Publish, and return how long it took until the handler ran."""
        self._handled.clear()
        began = time.monotonic()
        self.publisher.publish("a")
        assert self._handled.wait(30), "it was never handled"
        return time.monotonic() - began

    def close(self) -> None:
        """Shut both down."""
        self.bus.shutdown(timeout=5)
        self.publisher.shutdown(timeout=5)


@pytest.fixture
def make_worker(url: str) -> Iterator[Callable[..., Worker]]:
    """Give a function that starts a worker."""
    made: list[Worker] = []

    def make(**options: Any) -> Worker:
        made.append(Worker(url, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def listeners(url: str) -> list[int]:
    """Return the backends that listen."""
    return [pid for (pid,) in query(url, LISTENERS)]


def test_an_event_published_elsewhere_is_noticed_at_once(
    url: str, make_worker: Callable[..., Worker], eventually: Eventually
):
    """Long before the poll interval is over (S3.12)."""
    worker = make_worker()
    eventually(lambda: listeners(url))
    worker.latency()
    assert sorted(worker.latency() for _ in range(9))[4] < POLL / 4


def test_a_listener_that_was_killed_comes_back(url: str, make_worker: Callable[..., Worker], eventually: Eventually):
    """Meanwhile events come within the poll interval, afterwards at once again (S3.12, I10)."""
    worker = make_worker()
    (killed,) = eventually(lambda: listeners(url))
    query(url, "SELECT pg_terminate_backend(%s)", killed)
    assert worker.latency() < POLL + 1
    (again,) = eventually(lambda: [pid for pid in listeners(url) if pid != killed])
    assert again != killed
    eventually(lambda: worker.latency() < POLL / 4)


def test_every_backend_killed_at_once_is_survived(url: str, make_worker: Callable[..., Worker], eventually: Eventually):
    """Claimer, settler and listener connect anew; the next event is handled (S4.10, I10)."""
    worker = make_worker()
    worker.latency()
    query(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    worker.publisher.shutdown()
    worker.publisher = EventBus(url)
    assert worker.latency() < 2 * POLL + 2


def test_without_listening_events_come_by_polling(url: str, make_worker: Callable[..., Worker]):
    """`listen=False` opens no listener, sends nothing, and is only slower (S3.12)."""
    worker = make_worker(listen=False)
    worker.latency()
    assert worker.latency() < POLL + 1
    assert listeners(url) == []


def test_a_bus_that_only_follows_needs_nobody_to_listen_for_it(url: str, eventually: Eventually):
    """Its followers do that themselves, and hear of an event at once, and of being resumed (S3.12, S4.3)."""
    bus, publisher = EventBus(url, poll_interval=60.0), EventBus(url)
    came: list[int] = []
    bus.follow("seen", "*")(lambda event: came.append(event.id))

    def is_paused() -> bool:
        publisher.subscriptions.pause("seen")
        return bus._followers["seen"]._paused

    bus.start()
    publisher.publish("a")
    eventually(lambda: len(came) == 1)
    publisher.publish("a")
    eventually(lambda: len(came) == 2)
    eventually(is_paused)
    publisher.publish("a")
    publisher.subscriptions.resume("seen")
    eventually(lambda: len(came) == 3)
    assert "postbus-listen" not in [thread.name for thread in threading.enumerate()]
    bus.shutdown()
    publisher.shutdown()


@contextmanager
def busy_follower(url: str) -> Iterator[EventBus]:
    """Give a bus whose follower is in the midst of its handler, until the end of the block."""
    bus, begun, end = EventBus(url), threading.Event(), threading.Event()

    @bus.follow("slow", "*", lease=2.0)
    def wait(_: Event) -> None:
        begun.set()
        end.wait(30)

    bus.start()
    bus.publish("a")
    assert begun.wait(30)
    try:
        yield bus
    finally:
        end.set()
        bus.shutdown()


def test_a_follower_that_outlasts_its_shutdown_listens_no_more(url: str, eventually: Eventually):
    """Its handler ends when it ends; nobody would ever take what the server has to tell it."""
    with busy_follower(url) as bus:
        assert not bus.shutdown(timeout=0.2)
    readers = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    eventually(lambda: not query(url, f"{readers} AND query LIKE '%events WHERE id > $1%'"))


def test_a_follower_that_outlasts_its_shutdown_lets_another_lead_at_its_end(url: str, eventually: Eventually):
    """What it holds past its handler nobody else would let go of, as long as its process lives (S4.7, I10)."""
    with busy_follower(url) as bus:
        assert not bus.shutdown(timeout=0.2)
    ours = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'postbus' AND datname = current_database()"
    eventually(lambda: not query(url, ours))


def test_a_notice_that_outlasts_the_closing_leaves_no_connection(url: str, eventually: Eventually):
    """Whoever closes does not wait for long, and what is under way then hangs up itself."""
    notifier = Notifier(Address.of(url))
    with notifier._busy:
        notifier.tell_soon()
        notifier.close()
    eventually(lambda: not notifier._loop._thread.is_alive())
    notifier.tell()
    assert notifier._db.lost


@pytest.mark.parametrize("verb", ["publish", "claim", "settle"])
def test_whoever_comes_too_late_opens_no_connection_of_a_closed_store(
    url: str, monkeypatch: pytest.MonkeyPatch, verb: str, eventually: Eventually
):
    """A thread that found it open and goes on after the close is told: nobody would close its connection any more."""
    store = log_of(open_store(url))
    store.publish([draft({"type": "a"})])
    claim = Claim("default", "w", "w")
    (delivery,) = store.claim_all([claim])[0].deliveries
    store.close()
    for check in ("_usable", "_writable"):
        monkeypatch.setattr(store, check, lambda: None)
    late: dict[str, Callable[[], object]] = {
        "publish": lambda: store.publish([draft({"type": "a"})]),
        "claim": lambda: store.claim_all([claim]),
        "settle": lambda: store.settle([Settlement(delivery.lease, Done(), "w")]),
    }
    with pytest.raises(EventBusShutdownError):
        late[verb]()
    open_ones = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'postbus' AND datname = current_database()"
    eventually(lambda: query(url, open_ones) == [])  # a session ends some time after its client has hung up


def test_a_busy_follower_takes_what_it_is_told(url: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever its handler does meanwhile: see `attend`."""
    attended = threading.Event()
    monkeypatch.setattr(PostgresReader, "attend", lambda _: attended.set())
    with busy_follower(url):
        attended.clear()
        assert attended.wait(30)
