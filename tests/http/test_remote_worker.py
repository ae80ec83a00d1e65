"""`postbus worker --url http://…`: real processes, and a server that is killed under them and comes back."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from postbus import EventBus, Status, StoreUnavailable
from postbus.http import Client
from postbus.store import log_of
from postbus.tokens import make_token
from tests.http.serving import PATIENCE, PROGRAM, Process, place, process

SHOP: Final = """
import os, time
from pathlib import Path
from postbus import EventBus

bus = EventBus(poll_interval=0.2, lease=2)

@bus.on("note")
def note(event):
    with open("notes", "a") as file:
        file.write(f"{event.id} {os.getpid()}\\n")

@bus.on("slow")
def slow(event):
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.02)
"""
KILLS: Final = 3


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """Give the address of an empty store, with a module of handlers in a folder of its own."""
    (tmp_path / "shop.py").write_text(SHOP)
    with place(kind, tmp_path) as url:
        yield url


@contextmanager
def working(server: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `postbus worker` against a server until the end of the block."""
    with (folder / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            [PROGRAM, "worker", "shop:bus", "--url", server],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stderr=log,
            text=True,
            env=os.environ | environment,
        )
    try:
        yield worker
    finally:
        if worker.poll() is None:
            worker.terminate()
        worker.wait(PATIENCE)


def notes(folder: Path) -> list[tuple[int, int]]:
    """Return which event was noted by which process."""
    lines = (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []
    return [(int(event), int(pid)) for event, pid in map(str.split, lines)]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Publisher:
    """Publishes one event after another from elsewhere, each again until it is acknowledged."""

    def __init__(self, server: str) -> None:
        """Begin."""
        self.acknowledged: dict[str, int] = {}
        self.refused = 0
        self._bus = Client(server)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            uid = f"event-{len(self.acknowledged)}"
            try:
                self.acknowledged[uid] = self._bus.publish("note", {"n": uid}, uid=uid).id
            except StoreUnavailable:
                self.refused += 1

    def end(self) -> None:
        """Publish the last one, and no more."""
        self._ending.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._bus.shutdown()


@pytest.mark.slow  # postbus torture kill-server has one in the quick tests
def test_a_server_that_is_killed_and_comes_back_loses_nothing(url: str, tmp_path: Path, eventually: Callable[..., Any]):
    """Killed three times amid publishing and handling: every acknowledged event is there once and ends (I1, I3, I10).

    The worker is one and the same process all the time.
    """
    port = free_port()
    server = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        running: list[Process] = [stack.enter_context(process(url, "--port", str(port)))]
        worker = stack.enter_context(working(server, tmp_path))
        publisher = Publisher(server)
        for turn in range(1, KILLS + 1):
            eventually(
                lambda most=20 * turn: len(publisher.acknowledged) > most and len(notes(tmp_path)) > most, PATIENCE
            )
            assert running[-1].end(signal.SIGKILL)[0] == -signal.SIGKILL
            running.append(stack.enter_context(process(url, "--port", str(port))))
        before = len(publisher.acknowledged)
        eventually(lambda: len(publisher.acknowledged) > before + 20, PATIENCE)
        publisher.end()
        bus = EventBus(url)
        stack.callback(bus.shutdown)
        eventually(lambda: bus.list(status=Status.COMPLETED).total >= len(publisher.acknowledged), PATIENCE)
        events = {event.uid: event for event in bus.list(limit=100_000)}
        assert {uid: events[uid].id for uid in publisher.acknowledged} == publisher.acknowledged
        assert {event.status for event in events.values()} == {Status.COMPLETED}
        assert bus.stats().events == len(events)
        noted = notes(tmp_path)
        assert {event.id for event in events.values()} <= {event_id for event_id, _ in noted}
        assert len({pid for _, pid in noted}) == 1
        worker.terminate()
        assert worker.wait(PATIENCE) == 0


def test_a_worker_that_is_asked_to_end_finishes_what_it_has_begun(
    url: str, tmp_path: Path, eventually: Callable[..., Any]
):
    """The handler that runs is let finish and is settled; its lease was kept alive meanwhile (S1.14, S2.5)."""
    with process(url) as server, working(server.url, tmp_path) as worker:
        bus = Client(server.url)
        event = bus.publish("slow")
        eventually((tmp_path / "begun").exists, PATIENCE)
        claimed = bus.get(event.id).deliveries[0].lease_until
        assert claimed is not None
        eventually(lambda: (bus.get(event.id).deliveries[0].lease_until or claimed) > claimed, PATIENCE)
        worker.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert worker.wait(PATIENCE) == 0
        told = bus.get(event.id, include_logs=True)
        assert (told.status, [row.action for row in told.logs]) == (Status.COMPLETED, ["PICKED", "COMPLETED"])
        assert bus.store.handlers() == ()
        bus.shutdown()


def test_a_worker_brings_its_token_by_the_environment(url: str, tmp_path: Path, eventually: Callable[..., Any]):
    """With work and read it handles what a publisher brings; the secret is in nobody's log (I17)."""
    bus = EventBus(url)
    (_, publish), (_, work) = (make_token(log_of(bus.store), "t", each) for each in (["publish"], ["work", "read"]))
    with process(url, "--require-token") as server:
        with working(server.url, tmp_path, POSTBUS_TOKEN=work) as worker:
            publisher = Client(server.url, token=publish)
            event = publisher.publish("note")
            eventually(lambda: bus.get(event.id).status is Status.COMPLETED, PATIENCE)
            publisher.shutdown()
            worker.terminate()
            assert worker.wait(PATIENCE) == 0
        log = (tmp_path / "worker.log").read_text()
        assert '"worker_ready"' in log
        assert not any(secret in text for secret in (publish, work) for text in (log, "".join(server.said)))
    bus.shutdown()
