"""The demo's shop after the show: it stays open, with a dashboard, and whoever looks may kill its workers."""

import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Final

from postbus.bus import EventBus
from postbus.cli.console import say
from postbus.cli.supervise import Supervisor
from postbus.errors import InvalidRequest
from postbus.loop import Loop
from postbus.model import Event
from postbus.retry import RetryPolicy

__all__ = ["WORKERS", "crew", "stay_open"]

WORKERS: Final = 3
TICK: Final = 0.1
POISON: Final = 0.02
"""Which part of the payments cannot be taken."""


def crew(folder: Path, url: str, hear: Callable[[str, Mapping[str, object]], None], log: IO[bytes]) -> Supervisor:
    """Return what keeps the shop's worker processes running."""
    return Supervisor(
        "postbus.cli.demo_shop:open_bus",
        WORKERS,
        hear,
        environment={"POSTBUS_URL": url},
        settings=False,
        cwd=str(folder),
        log=log,
    )


def _count(event: Event) -> None:
    """Count an order, as a read model would."""
    del event


def stay_open(folder: Path, port: int) -> None:
    """Publish a few orders a second, and serve the dashboard until SIGINT or SIGTERM."""
    try:
        from postbus.http.serve import serve  # noqa: PLC0415  an extra
    except ImportError as error:
        raise InvalidRequest(f"the dashboard needs more packages: pip install 'postbus[server]' ({error})") from None
    url = f"sqlite:///{folder}/shop.db"
    bus, chance = EventBus(url), random.Random()  # noqa: S311  no secret
    bus.follow("revenue", "order.*", start="now")(_count)  # for the dashboard to show
    with (folder / "workers.log").open("ab") as log:
        workers = crew(folder, url, lambda event, fields: say(f"{event.replace('_', ' ')} {fields['pid']}"), log)

        def turn() -> float:
            workers.turn()
            bus.publish("order.placed", {"order_id": chance.randrange(10_000), "flaky": chance.choice((0, 0, 0, 1, 2))})
            if chance.random() < POISON:
                bus.publish("payment.due", {"card": "4111", "currency": "EUR"}, tags=["poison"])
            return TICK

        def kill() -> None:
            if pids := workers.pids:
                os.kill(chance.choice(pids), signal.SIGKILL)

        business = Loop("shop", turn)
        business.start()
        try:
            serve(
                bus, "127.0.0.1", port, require_token=False, policy=RetryPolicy(), lease=60,
                ready=lambda where: say(f"\nThe shop stays open: {where}/dashboard (Ctrl-C ends it)"), kill=kill,
            )  # fmt: skip
        finally:
            business.stop()
            workers.stop(signal.SIGKILL)
