"""`postbus pipeline …` and `postbus erase`, as people call them, and the application that runs it all."""

import json
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from postbus import EventBus
from postbus.cli.app import app
from postbus.model import Stream
from postbus.spark import Lake
from postbus.spark.service import Service, serve_health
from postbus.store import open_store
from tests.kinds import on_sqlite

pytestmark = on_sqlite
Call = Callable[..., Any]


@pytest.fixture
def call(spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Give a function that runs a command in a folder of its own; it must end well unless said otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTBUS_URL", url)

    def call(*words: str, code: int = 0) -> Any:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return call


def shop(bus: EventBus) -> list[int]:
    """Publish ten orders of two customers; all are done but a dead one and the last."""
    news = [{"type": f"order.{n % 2}", "payload": {"n": n}, "key": f"c{n % 2}"} for n in range(10)]
    events = [event.id for event in bus.publish_many(news)]
    first, *rest = bus.poll_many(9)
    bus.finalize(first, success=False, retry=False, errors=["no stock"])
    for delivery in rest:
        bus.finalize(delivery, success=True)
    return events


def test_the_whole_pipeline_by_its_commands(bus: EventBus, call: Call, tmp_path: Path):
    """Ingest, report, archive, replay, compact, erase: each says what it did (P.3, P.4, P.5, P.6, P.7)."""
    events = shop(bus)
    assert json.loads(call("pipeline", "ingest", "--lake", "lake", "-o", "json").stdout) == {
        "events": 10,
        "audit": 18,
        "lake": str(tmp_path / "lake"),
    }
    told = json.loads(call("pipeline", "report", "--lake", "lake", "-o", "json").stdout)
    assert "no stock" in json.dumps(told)
    call("pipeline", "report", "--lake", "lake", "-o", "html", "--to", "report.html")
    assert "<svg" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default" in call("pipeline", "report").stdout

    archive = ["pipeline", "archive", "--lake", "lake", "--older-than", "0s", "-o", "json"]
    would = json.loads(call(*archive, "--dry-run").stdout)
    assert (would[0]["stream"], would[0]["would_go_through"], would[0]["removed"]) == ("events", events[-1], None)
    assert bus.list().total == 10
    did = json.loads(call(*archive).stdout)
    assert [row["removed"] for row in did] == [row["would_remove"] for row in would] == [8, 16]
    assert {event.id for event in bus.list()} == {events[0], events[-1]}
    call("pipeline", "archive", "--lake", "lake", "--older-than", "soon", code=2)

    replay = ["pipeline", "replay", "--lake", "lake", "--type", "order.1", "--to", str(events[-1])]
    seen = call(*replay, "--dry-run", "-o", "json")
    assert [(row["type"], row["events"]) for row in json.loads(seen.stdout)] == [("order.1", 5)]
    assert "5 events would be replayed" in seen.stderr
    assert "add --yes" in call(*replay, code=2).stderr
    assert "name the lake" in call("pipeline", "replay", "--dry-run", code=2).stderr
    assert "5 events replayed" in call(*replay, "--yes").stderr
    assert "another, empty bus" in call(*replay, "--yes", "--keep-uids", code=2).stderr
    call(*replay, "--yes", "--into", "bus", "--target", "sqlite:///copy.db", "--keep-uids")
    copy = EventBus("sqlite:///copy.db")
    assert [event.payload["n"] for event in copy.list()] == [9, 7, 5, 3, 1]
    copy.shutdown()
    assert "needs --target" in call(*replay, "--yes", "--into", "parquet", code=2).stderr
    call(*replay, "--yes", "--into", "parquet", "--target", "files")
    assert list((tmp_path / "files").glob("*.parquet"))
    call(*replay, "--from", str(events[-1]), "--yes", "--into", "subscription", "--target", "default")

    assert "SEGMENTS" in call("pipeline", "compact", "--lake", "lake").stdout
    erase = ["erase", "--key", "c1", "--lake", "lake", "-o", "json"]
    assert json.loads(call(*erase, "--dry-run").stdout) == [
        {"where": "live", "events": 6, "audit_rows": 0},
        {"where": "lake", "events": 5, "audit_rows": 0},
    ]
    assert json.loads(call(*erase, "--yes").stdout) == {
        "events": 10,
        "changed": 10,
        "segments_rewritten": 1,
    }
    assert [(row["events"], row["audit_rows"]) for row in json.loads(call(*erase, "--dry-run").stdout)] == [(0, 0)] * 2
    assert "--uid or --key" in call("erase", "--yes", code=2).stderr


def test_what_cannot_be_is_said(call: Call, tmp_path: Path):
    """No bus, a file on a cluster, a format that is not there: a line each, nothing made (P.7)."""
    there = ["pipeline", "ingest", "--lake", "lake"]
    assert "there is no bus" in call(*there, "--url", "sqlite:///none.db", code=1).stderr
    open_store(f"sqlite:///{tmp_path / 'bus.db'}").close()
    assert "is a file of one host" in call(*there, "--master", "spark://host:7077", code=2).stderr
    assert "has no delta" in call(*there, "--format", "delta", code=2).stderr
    assert not (tmp_path / "lake" / "events" / "data").exists()


def ask(port: int, path: str) -> tuple[int, str]:
    """Ask the application how it is."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_application_does_it_all_and_tells_how_it_is(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """Ingest, compact, archive in one cycle; alive, ready, and figures for Prometheus (P.3, P.5, P.7)."""
    shop(bus)
    lake = Lake(tmp_path / "lake")
    service = Service(spark, url, lake, every=1, older_than=timedelta(0), housekeeping=0)
    server = serve_health(service.health, "127.0.0.1", 0)
    port = server.server_port
    assert ask(port, "/readyz") == (503, "starting")
    service.cycle()
    assert ask(port, "/readyz") == (200, "ready")
    assert ask(port, "/livez") == (200, "alive")
    assert ask(port, "/else")[0] == 404
    _, figures = ask(port, "/metrics")
    assert 'postbus_lake_rows_total{stream="events"} 10' in figures
    assert 'postbus_archive_removed_rows_total{stream="events"} 8' in figures
    assert 'postbus_lake_lag{stream="audit"} 0' in figures
    server.shutdown()
    server.server_close()
    assert bus.list().total == 2
    assert lake.read(spark, Stream.EVENTS).count() == 10


def test_a_store_that_is_away_is_waited_for(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """The application goes on when it is back, and is not ready meanwhile (P.7)."""
    shop(bus)
    service = Service(spark, url, Lake(tmp_path / "lake"), every=0.01)
    real, seen = service.cycle, list[Any]()

    def cycle() -> None:
        from postbus.errors import StoreUnavailable  # noqa: PLC0415

        seen.append(service.health.ready)
        if len(seen) == 1:
            raise StoreUnavailable("the server is away")
        real()
        service.stop()

    service.cycle = cycle
    service.run()
    assert (service.health.failures, service.health.cycles, service.health.ready) == (1, 1, True)
