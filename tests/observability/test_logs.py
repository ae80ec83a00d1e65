"""What is logged while a handler runs says at which event; elsewhere and unasked, nothing is added."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from postbus import observe
from postbus.cli.logs import log_to_stderr
from postbus.observe import bound, logger
from postbus.testing import temporary_bus


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Give what a worker writes to stderr."""
    before = logger.handlers[:], logger.level, logger.propagate
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    log_to_stderr()
    yield stderr
    logger.handlers[:], logger.level, logger.propagate = before


def test_a_worker_logs_json_that_names_the_event_at_hand(log: io.StringIO):
    """Whatever is logged below `postbus` in a handler; what is said explicitly wins, and outside nothing is added."""
    with temporary_bus() as bus:

        @bus.on("order.placed", subscription="shipping")
        async def ship(event: object) -> None:
            logging.getLogger("postbus.shop").info("packed", extra={"boxes": 2})

        @bus.on("order.placed")
        def note(event: object) -> None:
            logging.getLogger("postbus.shop").info("noted", extra={"event_id": "my own"})

        bus.publish("order.placed")
        bus.run_due()
    logging.getLogger("postbus.shop").info("idle")
    entries = {each["event"]: each for each in map(json.loads, log.getvalue().splitlines())}
    told = {name: entries["packed"][name] for name in ("event_id", "event_type", "attempt", "subscription", "boxes")}
    assert told == {
        "event_id": 1,
        "event_type": "order.placed",
        "attempt": 1,
        "subscription": "shipping",
        "boxes": 2,
    }
    assert entries["noted"]["event_id"] == "my own"
    assert entries["noted"]["subscription"] == "default"
    assert "event_id" not in entries["idle"]


def test_nothing_is_bound_unless_somebody_asked():
    """A bus in an application of its own does not keep what nobody logs."""
    seen: list[object] = []
    with temporary_bus() as bus:
        bus.subscribe("*", lambda _: seen.append(dict(bound())))
        bus.publish("a")
        bus.run_due()
        observe.bind_events()
        bus.publish("b")
        bus.run_due()
    assert seen == [{}, {"event_id": 2, "event_type": "b", "attempt": 1, "subscription": "default"}]


def test_a_failed_attempt_is_logged_with_the_trace_of_its_event(log: io.StringIO):
    """So that whoever reads of a failure finds what led to it."""
    with temporary_bus() as bus:

        @bus.on("*")
        def fail(event: object) -> None:
            raise ValueError("bad")

        bus.publish("order.placed", metadata={"traceparent": "00-a-b-01"})
        bus.run_due()
    entry = next(each for each in map(json.loads, log.getvalue().splitlines()) if each["event"] == "attempt_failed")
    assert (entry["traceparent"], entry["event_type"], entry["error_type"]) == (
        "00-a-b-01",
        "order.placed",
        "ValueError",
    )
