"""`postbus worker --metrics`: many processes, one address, and no count that goes backwards."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus, InvalidRequest
from postbus.cli.worker import parse_address
from tests.observability.reading import Told, read
from tests.postgres.server import server

PROGRAM = Path(sys.executable).with_name("postbus")
SHOP = """
import os
from postbus import EventBus, RetryPolicy

bus = EventBus(poll_interval=0.1, retry=RetryPolicy(max_retries=1, base_delay=0, max_delay=0))

@bus.on("note")
def note(event):
    with open("notes", "a") as file:
        file.write(f"{os.getpid()}\\n")

@bus.on("bad")
def bad(event):
    raise ValueError("bad")
"""


class Worker:
    """`postbus worker` as a process, and what it logs."""

    def __init__(self, folder: Path, url: str, *options: str) -> None:
        """Start it with an address for its figures."""
        (folder / "shop.py").write_text(SHOP)
        environment = {**os.environ, "POSTBUS_URL": url, "POSTBUS_METRICS": "127.0.0.1:0"}
        command = [PROGRAM, "worker", "shop:bus", *options]
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        self.log: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in self._process.stderr or ():
            self.log.append(json.loads(line))

    def named(self, event: str) -> list[dict[str, Any]]:
        """Return the entries of one name."""
        return [each for each in tuple(self.log) if each["event"] == event]

    def told(self) -> Told:
        """Ask for its figures."""
        return read(self.named("metrics_served")[0]["address"])

    def end(self) -> None:
        """Stop it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._reading.join(10)
        if self._process.stderr is not None:
            self._process.stderr.close()


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """Give an empty store of each kind."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'shop.db'}"
        return
    with server().database() as url:
        yield url


def test_figures_of_all_processes_survive_the_kill_of_one(
    url: str, tmp_path: Path, eventually: Callable[..., Any], kind: str
):
    """Two children, one of them killed: every attempt is counted once, and no count is ever lower than before."""
    worker = Worker(tmp_path, url, "--processes", "2")
    bus = EventBus(url)
    try:
        eventually(lambda: len(worker.named("worker_ready")) == 2, within=60)
        bus.publish_many([{"type": "note"}] * 300 + [{"type": "bad"}])
        eventually(lambda: worker.told().settled() == {"completed": 300, "retried": 1, "dead": 1}, within=60)
        before = worker.told()
        killed = (tmp_path / "notes").read_text().split()[0]  # one that has counted something
        os.kill(int(killed), signal.SIGKILL)
        seen = [worker.told().settled()["completed"]]
        while len(worker.named("worker_ready")) < 3:
            seen.append(worker.told().settled()["completed"])
        assert set(seen) == {300}
        bus.publish_many([{"type": "note"}] * 100)
        eventually(lambda: worker.told().settled() == {"completed": 400, "retried": 1, "dead": 1}, within=60)
        dead = {"subscription": "default", "state": "dead"}  # the store's word, which is a few seconds old
        after = eventually(lambda: (now := worker.told()).value("postbus_deliveries", **dead) == 1 and now, within=60)
    finally:
        bus.shutdown()
        worker.end()
    counted = [each for each in before.families.values() if each.type in ("counter", "histogram")]
    for sample in (sample for each in counted for sample in each.samples):
        assert (after.value(sample.name, **sample.labels) or 0) >= sample.value, sample
    assert after.value("postbus_worker_restarts_total") == 1
    assert (after.value("postbus_worker_processes"), after.value("postbus_worker_processes_wanted")) == (2, 2)
    assert after.value("postbus_up") == 1
    assert after.value("postbus_handler_seconds_count", subscription="default", handler="shop.note") == 400
    assert after.value("postbus_wait_seconds_count", subscription="default") == 401
    (build,) = after.families["postbus_build_info"].samples
    assert build.labels["store"] == {"sqlite": "sqlite", "postgres": "postgresql"}[kind]
    noted = (tmp_path / "notes").read_text().split()
    assert len(noted) == 400
    assert len(set(noted[300:]) - {killed}) >= 1


@pytest.mark.parametrize("address", ["9464", ":9464", "localhost:", "localhost:x", "localhost:70000"])
def test_an_address_is_a_host_and_a_port(address: str):
    """What is none is refused; nothing is served where nobody asked for it."""
    with pytest.raises(InvalidRequest):
        parse_address(address)
    assert parse_address("[::1]:9464") == ("::1", 9464)


def test_an_address_that_is_taken_is_exit_2(tmp_path: Path):
    """A worker whose figures cannot be seen says so, and does not start."""
    command = [PROGRAM, "worker", "shop:bus", "--metrics", "203.0.113.1:9464"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "cannot serve metrics at 203.0.113.1:9464" in ran.stderr
