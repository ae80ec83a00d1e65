"""A program of an older postbus, as far as the schema goes: `python -m tests.upgrade.old '{"version": 1, …}'`.

It knows the migrations up to its version, publishes, polls and finalizes until told to stop, and writes a history.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from postbus import EventBus, LeaseLost, StoreUnavailable
from postbus.store.queries import load_migrations
from postbus.torture.history import INVOKE, History

MIGRATING: Final = {"sqlite": "postbus.store.sqlite.store", "postgres": "postbus.store.postgres.schema"}
"""Which module of each store loads its migrations."""


def know_only(version: int) -> None:
    """Let this process know the schema up to a version."""
    for name in MIGRATING.values():
        module: Any = importlib.import_module(name)
        module.load_migrations = lambda package: load_migrations(package)[:version]


def main() -> None:
    """Work until told to stop."""
    config = json.loads(sys.argv[1])
    know_only(config["version"])
    bus, history, number = EventBus(config["url"]), History(config["history"], "old"), 0
    while not Path(config["stop"]).exists():
        number += 1
        news = [{"type": f"trial.{each}", "payload": each, "uid": f"old-{number}-{each}"} for each in range(3)]
        try:
            with history.calling("publish", uids=[each["uid"] for each in news]) as answer:
                answer["ids"] = [event.id for event in bus.publish_many(news)]
            for delivery in bus.poll_many(2):
                lease = delivery.lease
                told = [lease.event_id, lease.subscription, delivery.attempt, lease.epoch]
                history.note("handle", INVOKE, delivery=told)
                bus.finalize(delivery, success=number % 7 > 0, errors=[] if number % 7 else ["asked to fail"])
        except (StoreUnavailable, LeaseLost):
            time.sleep(0.05)
        time.sleep(0.01)
    bus.store.close()  # not `shutdown`: its statements are of the present schema


if __name__ == "__main__":
    main()
