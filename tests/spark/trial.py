"""The processes of a trial of the lake: `python -m tests.spark.trial '{"role": …}'`."""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from postbus import EventBus
from postbus.model import Done, Stream
from postbus.observe import set_probe
from postbus.spark import Lake, session
from postbus.spark.archive import archive, bounds
from postbus.spark.lake import ingest
from postbus.spark.source import open_bus
from postbus.store.contract import Settlement

Config = dict[str, Any]


def publish(config: Config) -> None:
    """Publish until told to stop; on PostgreSQL, some of it in transactions that commit late or not at all."""
    chance, bus, number = random.Random(config["seed"]), EventBus(config["url"]), 0
    while not Path(config["stop"]).exists():
        number += 1
        news = [
            {"type": f"trial.{n % 4}", "payload": {"from": config["seed"], "n": n}}
            for n in range(chance.randint(1, 40))
        ]
        with suppress(InterruptedError), bus.transaction() as tx:
            bus.publish_many(news, connection=tx)
            if config["late"]:
                time.sleep(chance.choice((0, 0, 0.02, 0.3)))
            if chance.random() < 0.1:
                raise InterruptedError
        time.sleep(chance.uniform(0.3, 0.9))
    bus.shutdown()


def work(config: Config) -> None:
    """Settle until told to stop, and nothing is left."""
    bus = EventBus(config["url"])
    while (found := bus.poll_many(200)) or not Path(config["stop"]).exists():
        bus.store.settle([Settlement(each.lease, Done(), each.worker_id, None, 1.0) for each in found])
        time.sleep(0 if found else 0.1)
    bus.shutdown()


def _die(config: Config) -> None:
    """Have this process, and its JVM, end at a probe, or have one of Spark's Python workers end there."""
    left = [config["hit"]]

    def hook(name: str) -> None:
        if name == config["probe"]:
            left[0] -= 1
            if not left[0] and config.get("victim") == "worker":
                for pid in _workers():
                    os.kill(pid, signal.SIGKILL)
            elif not left[0]:
                os.killpg(0, signal.SIGKILL)

    set_probe(hook)


def _workers() -> list[int]:
    """Return two of the Python processes that work for this driver's Spark."""
    groups = {int(each.name): each for each in Path("/proc").iterdir() if each.name.isdigit()}
    found: list[int] = []
    for pid, folder in groups.items():
        with suppress(OSError):
            if b"pyspark.daemon" in (folder / "cmdline").read_bytes() and os.getpgid(pid) == os.getpgrp():
                found.append(pid)
    return found[-2:]


def fill(config: Config) -> None:
    """Ingest what there is."""
    ingest(session("local[2,4]"), config["url"], Lake(config["lake"]), rows=config["rows"])


def tidy(config: Config) -> None:
    """Archive all that may go."""
    spark, lake, store = session("local[2]"), Lake(config["lake"]), open_bus(config["url"])
    archives = Stream(config["stream"])
    for bound in bounds(store, lake, older_than=timedelta(0)):
        if bound.stream is archives:
            archive(spark, config["url"], store, lake, bound)


def main() -> None:
    """Play one role."""
    config = json.loads(sys.argv[1])
    if config.get("probe"):
        _die(config)
    {"publish": publish, "work": work, "fill": fill, "tidy": tidy}[config["role"]](config)


if __name__ == "__main__":
    main()
