"""What the recordings are made on: a place where time stands still, and a shop in it that has a bit of everything."""

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus, RetryPolicy, figures, observe
from postbus.clock import SystemClock
from tests.contract.stores import Site, site_of

__all__ = ["follow_sales", "place", "stocked"]


@contextmanager
def place(kind: str) -> Generator[Site]:
    """Give an empty store in a working folder of its own; the clock of every bus and command stands still with it.

    At the end of the block all is as it was: environment, folder, clock, log and metrics.
    """
    with tempfile.TemporaryDirectory(prefix="golden-") as folder, pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith("POSTBUS_"):
                patch.delenv(name)
        patch.chdir(folder)
        site = site_of(kind, Path(folder))
        patch.setattr(SystemClock, "now", lambda _: site.clock.now())
        patch.setattr(figures, "listener", None)
        patch.setattr(observe, "binding", False)
        patch.setattr(observe.logger, "handlers", [*observe.logger.handlers])
        patch.setattr(observe.logger, "propagate", observe.logger.propagate)
        level = observe.logger.level
        try:
            yield site
        finally:
            observe.logger.setLevel(level)
            site.close()


def follow_sales(site: Site) -> None:
    """Follow the orders as `sales` to their end: the first of bob's is dead, and his others are parked behind it."""
    bus = EventBus(site.url, worker_id="shop:1", clock=site.clock, poll_interval=0.1)

    @bus.follow("sales", "order.*", on_error="park_key", retry={"max_retries": 0})
    def sell(event: Any) -> None:
        if event.key == "bob":
            raise ValueError("bob has no account")

    with bus:
        bus.wait_for("sales", bus.stats().head, timeout=60)


@contextmanager
def stocked(site: Site) -> Generator[None]:
    """Have a shop with an event in each state, and a process with a handler, until the end of the block."""
    retry = RetryPolicy(max_retries=1, base_delay=10, max_delay=10, multiplier=1)
    bus = EventBus(site.url, worker_id="shop:2", clock=site.clock, poll_interval=3_600, retry=retry)
    bus.subscriptions.create("mail", "user.*", tags=["eu"], lease=90, retry=retry)
    bus.subscriptions.create("sales", "order.*", "ordered")
    bus.subscriptions.create("lake", mode="spark")
    bus.publish(
        "order.placed",
        {"order_id": 1},
        tags=["eu", "new"],
        key="ann",
        title="Order 1",
        description="Two books",
        metadata={"source": "shop"},
        uid="order-1",
        priority=2,
    )
    bus.publish_many([{"type": "order.placed", "key": "bob"}, {"type": "order.placed", "key": "bob"}])
    bus.publish_many([{"type": name} for name in ("payment.due", "payment.late", "note")])
    bus.publish("report.due", delay=3_600)
    bus.publish_many([{"type": "user.added", "tags": ["eu"]}, {"type": "user.added"}])
    bus.publish_many([{"type": "payment.due"}, {"type": "payment.due"}])
    for delivery in bus.poll_many(10, types=["payment.due"]):
        bus.finalize(delivery, success=False, errors=["no such card"], retry=False)
    for delivery in bus.poll_many(1, types=["payment.late"]):
        bus.finalize(delivery, success=False, errors=["no answer"], status_code=503)
    done, flawed = bus.poll_many(2, types=["user.added"])
    bus.finalize(done, status_code=200, execution_time_ms=12.5)
    bus.finalize(flawed, errors=["no avatar"])
    bus.poll(types=["note"])
    follow_sales(site)
    bus.subscribe("parcel.*", _ship, tags=["eu"])
    site.clock.advance(30)
    with bus:
        yield


def _ship(event: Any) -> None:
    """Do nothing: no parcel is ever sent."""
