"""`GET /metrics`: the server and its store in figures, as Prometheus reads them."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from postbus import Discard, EventBus, StoreUnavailable, figures
from postbus.figures import DEPTH, METRICS, Figures
from postbus.http import metrics
from postbus.http.metrics import Exposed, Looked, Metrics
from tests.http.serving import serving
from tests.kinds import on_sqlite
from tests.observability.reading import Told, read

FORBIDDEN = {"id", "event_id", "uid", "worker_id", "worker", "type", "event_type", "key", "url"}


def test_a_server_tells_of_itself_and_of_its_store(kind: str, tmp_path: Path):
    """What was published over HTTP is counted; depths, ages and lags are the store's; all of it parses."""
    with serving(kind, tmp_path) as served:
        served.publish(type="order.placed")
        assert served.http.post("/events/batch", json=[{"type": "a"}, {"type": "b"}]).status_code == 201
        served.publish(type="later", delay=3_600)
        told = read(served.url)
    assert told.value("postbus_events_published_total") == 4
    assert told.value("postbus_up") == 1
    states = {state: told.value("postbus_deliveries", subscription="default", state=state)
              for state in ("pending", "scheduled", "processing", "dead")}  # fmt: skip
    assert states == {"pending": 4, "scheduled": 1, "processing": 0, "dead": 0}
    assert told.value("postbus_oldest_seconds", subscription="default") is not None
    assert told.value("postbus_unhandled_deliveries", subscription="default") == 4
    assert told.value("postbus_last_minute", action="published") == 4
    assert told.value("postbus_http_requests_total", method="POST", path="/events", status="201") == 2
    (build,) = told.families["postbus_build_info"].samples
    assert build.labels["store"] == {"sqlite": "sqlite", "postgres": "postgresql"}[kind]
    assert build.value == 1


@on_sqlite
def test_what_http_workers_report_is_counted_once(kind: str, tmp_path: Path):
    """Completed, completed with errors, retried and dead, whoever reports it; a repeat is not counted again."""
    with serving(kind, tmp_path) as served:
        for _ in range(3):
            served.publish(type="a")
        done = served.take()
        for _ in range(2):
            assert served.act("complete", done["id"], epoch=done["epoch"]).status_code == 200
        served.act("fail", served.take()["id"], error_message="no")
        served.act("fail", served.take()["id"], error_message="no", retry=False)
        told = read(served.url)
    counted = {each: told.value("postbus_deliveries_settled_total", subscription="default", outcome=each)
               for each in ("completed", "retried", "dead")}  # fmt: skip
    assert counted == {"completed": 1, "retried": 1, "dead": 1}


@on_sqlite
def test_what_cannot_be_stored_is_not_counted(kind: str, tmp_path: Path):
    """A batch with one wrong event stores none, and counts none."""
    with serving(kind, tmp_path) as served:
        assert served.http.post("/events/batch", json=[{"type": "a"}, {"type": "*"}]).status_code == 422
        assert read(served.url).value("postbus_events_published_total") == 0


@on_sqlite
def test_handlers_beside_a_server_are_told_of_by_it(kind: str, tmp_path: Path):
    """An app with a bus that has handlers shows their outcomes and times, and the lag of its followers."""
    bus = EventBus(f"sqlite:///{tmp_path / 'bus.db'}")

    @bus.on("good")
    def good(event: object) -> None:
        pass

    @bus.on("bad")
    def bad(event: object) -> None:
        raise Discard("no")

    @bus.follow("sales")
    def sell(event: object) -> None:
        pass

    told = Metrics(bus)
    bus.publish_many([{"type": "good"}, {"type": "good"}, {"type": "bad"}])
    with bus:
        bus.wait_idle(10)
        page = Told(told.written("")[0].decode())
    assert page.settled() == {"completed": 2, "dead": 1}
    assert page.value("postbus_wait_seconds_count", subscription="default") == 3
    assert page.value("postbus_handler_seconds_count", subscription="default", handler=bus.handlers[0].name) == 2
    assert page.value("postbus_lag_events", subscription="sales") == 0
    assert page.value("postbus_follower_stopped", subscription="sales") == 0
    assert page.value("postbus_deliveries", subscription="default", state="dead") == 1


@on_sqlite
def test_what_followers_leave_behind_is_told(kind: str, tmp_path: Path):
    """Dead letters, and what is parked behind them: an alert on dead letters sees them too."""
    bus = EventBus(f"sqlite:///{tmp_path / 'bus.db'}")

    @bus.follow("sales", on_error="park_key")
    def sell(event: object) -> None:
        raise Discard("no")

    told = Metrics(bus)
    *_, last = bus.publish_many([{"type": "a", "key": "k"}] * 3)
    with bus:
        bus.wait_for("sales", last.id, timeout=10)
        page = Told(told.written("")[0].decode())
    assert page.value("postbus_deliveries", subscription="sales", state="dead") == 1
    assert page.value("postbus_deliveries", subscription="sales", state="parked") == 2


def test_names_and_labels_follow_the_rules():
    """Counters end in _total, times are seconds, and no label is an id or an event's type."""
    for metric in METRICS:
        assert metric.name.startswith("postbus_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")
        assert not FORBIDDEN & set(metric.labels)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_buckets_add_up():
    """A histogram's buckets grow, and the last holds all that was observed."""
    own = Figures()
    for seconds in (0.0005, 0.01, 0.2, 0.2, 10_000.0):
        own.handled("default", "shop.ship", seconds)
    told = Told(Exposed("worker", own.samples).written("")[0].decode())
    samples = told.families["postbus_handler_seconds"].samples
    counts = [each.value for each in samples if each.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 5)
    labels = {"subscription": "default", "handler": "shop.ship"}
    assert told.value("postbus_handler_seconds_bucket", le="0.01", **labels) == 2
    assert told.value("postbus_handler_seconds_sum", **labels) == pytest.approx(10_000.4105)


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────

DEPTHS = {(DEPTH.name, ("default", "pending")): (7.0,)}


class Asked:
    """A store that is asked for its figures, and may fail."""

    def __init__(self) -> None:
        """Begin sound."""
        self.times = 0
        self.error: Exception | None = None

    def __call__(self) -> figures.Samples:
        """Answer."""
        self.times += 1
        if self.error is not None:
            raise self.error
        return DEPTHS


def test_the_store_is_asked_at_most_every_few_seconds():
    """Many who ask at once share one answer."""
    asked = Asked()
    looked = Looked(asked)
    for _ in range(10):
        looked.samples()
    assert asked.times == 1


@pytest.mark.parametrize("error", [StoreUnavailable("it is down"), RuntimeError("a bug")])
def test_a_failing_store_is_told_of_as_down(error: Exception, monkeypatch: pytest.MonkeyPatch):
    """Its figures are left out, not repeated from before; the process's own go on; back again, it is up."""
    monkeypatch.setattr(metrics, "REMEMBER", 0.0)
    asked, own = Asked(), Figures()
    looked = Looked(asked)
    page = Exposed("server", lambda: {**own.samples(), **looked.samples()})

    def told() -> Told:
        own.published(1)
        return Told(page.written("")[0].decode())

    assert (told().value("postbus_up"), told().value(DEPTH.name, subscription="default", state="pending")) == (1, 7)
    asked.error = error
    down = told()
    assert (down.value("postbus_up"), down.value(DEPTH.name, subscription="default", state="pending")) == (0, None)
    assert down.value("postbus_events_published_total") == 3
    asked.error = None
    assert told().value("postbus_up") == 1


def test_a_store_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch):
    """After a moment it counts as down; it is not asked again while the question stands."""
    monkeypatch.setattr(metrics, "PATIENCE", 0.05)
    monkeypatch.setattr(metrics, "REMEMBER", 0.0)
    free, times = threading.Event(), []

    def ask() -> figures.Samples:
        times.append(time.monotonic())
        free.wait(30)
        return DEPTHS

    looked = Looked(ask)
    assert [looked.samples()[figures.UP.name, ()] for _ in range(3)] == [(0.0,)] * 3
    assert len(times) == 1
    free.set()
    monkeypatch.setattr(metrics, "PATIENCE", 30)
    assert looked.samples()[figures.UP.name, ()] == (1.0,)


@on_sqlite
def test_a_store_that_takes_long_to_count_is_up(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It answers: the last count is told while the next is made, and of several who ask none begins another."""
    bus = EventBus(f"sqlite:///{tmp_path / 'bus.db'}")
    bus.publish("a")
    stats, free, times = bus.store.stats, threading.Event(), list[int]()

    def slow() -> Any:
        times.append(1)
        free.wait(30)
        return stats()

    monkeypatch.setattr(bus.store, "stats", slow)
    monkeypatch.setattr(metrics, "PATIENCE", 0.5)
    monkeypatch.setattr(metrics, "REMEMBER", 0.0)
    monkeypatch.setattr(figures, "MOMENT", 0.01)
    page = Metrics(bus)

    def told() -> tuple[float | None, float | None]:
        shown = Told(page.written("")[0].decode())
        return shown.value("postbus_up"), shown.value("postbus_events")

    assert [told() for _ in range(3)] == [(1, None)] * 3
    assert len(times) == 1
    free.set()
    monkeypatch.setattr(figures, "MOMENT", 30)
    monkeypatch.setattr(metrics, "PATIENCE", 30)
    assert told() == (1, 1)
    free.clear()
    bus.publish("a")
    monkeypatch.setattr(figures, "MOMENT", 0.01)
    assert told() == (1, 1)
    free.set()
    bus.shutdown()
    assert told() == (0, None)
