"""Many clients on one server: each event goes to one worker, and a server that is killed loses nothing (I1, I7)."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postbus import EventBus, Status
from tests.http.crowd import Crowd, Link
from tests.http.serving import place

SERVE = [sys.executable, "-c", "from postbus.cli import main; main()", "serve"]
PATIENCE = 60.0


class Host:
    """A server on one port, started again after it was killed."""

    def __init__(self, url: str, folder: Path) -> None:
        """Choose the port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._url = url
        self._log = folder / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Serve, and return once it does."""
        environment = os.environ | {"POSTBUS_URL": self._url}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*SERVE, "--port", str(self.port)], env=environment, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        pytest.fail(f"the server did not come up: {self._log.read_text()}")

    def kill(self) -> None:
        """End it without a word."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)

    def stop(self) -> None:
        """End it politely."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE)

    def resident(self) -> int:
        """Return how much memory it takes, in kB."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """Give the address of an empty store."""
    with place(kind, tmp_path) as url:
        yield url


@pytest.fixture
def host(url: str, tmp_path: Path) -> Iterator[Host]:
    """Give a server that is not started yet."""
    host = Host(url, tmp_path)
    try:
        yield host
    finally:
        host.stop()


async def _fill(port: int) -> None:
    """Have SQLite's page cache full from the start: it grows with the file until then, as it is meant to."""
    async with Link(port) as link:
        for _ in range(70):
            assert (await link.ask("POST", "/events", {"tags": "ballast", "payload": "x" * 1_000_000}))[0] == 201


async def _gather(crowd: Crowd, workers: int, publishers: int, meanwhile: Callable[[], None]) -> None:
    """Have the crowd at work while something is done; then let the workers finish what there is."""
    working = [asyncio.create_task(crowd.work(name)) for name in range(workers)]
    publishing = [asyncio.create_task(crowd.publish(name)) for name in range(publishers)]
    await asyncio.to_thread(meanwhile)
    crowd.stopping = True
    await asyncio.gather(*publishing)
    await asyncio.gather(*working)


def _check(url: str, crowd: Crowd) -> None:
    """Hold the log against what was acknowledged: all of it is there, under its id, and finished."""
    bus = EventBus(url)
    try:
        kept, after = {}, None
        while True:
            page = bus.list(limit=1_000, after=after)
            kept |= {event.uid: event for event in page if "ballast" not in event.tags}
            after = page.next
            if after is None:
                break
        missing = [uid for uid, number in crowd.acknowledged.items() if uid not in kept or kept[uid].id != number]
        assert missing == []
        unfinished = [event.id for event in kept.values() if event.status is not Status.COMPLETED]
        assert unfinished == []
    finally:
        bus.shutdown()


SMALL = (20, 5, 3.0)
LARGE = pytest.param((200, 50, 60.0), marks=[pytest.mark.slow, pytest.mark.timeout(900)])


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_each_event_goes_to_one_worker(
    host: Host, url: str, size: tuple[int, int, float], capsys: pytest.CaptureFixture[str]
):
    """Nobody waits much longer than asked for, and the server's memory stays as it is."""
    workers, publishers, seconds = size
    host.start()
    crowd = Crowd(host.port, wait=5.0 if seconds > 10 else 1.0)
    sizes: list[int] = []

    def look() -> None:
        for _ in range(6):
            time.sleep(seconds / 6)
            sizes.append(host.resident())

    if seconds > 10:
        asyncio.run(_fill(host.port))
    asyncio.run(_gather(crowd, workers, publishers, look))
    _check(url, crowd)
    repeats = {event: count for event, count in Counter(event for event, _ in crowd.claims).items() if count > 1}
    assert repeats == {}
    assert len(crowd.claims) == len(crowd.completed) == len(crowd.acknowledged)
    assert crowd.lost == 0
    with capsys.disabled():
        late = f"slowest {crowd.slowest:.2f} s over its wait, {sizes[1]:,} to {sizes[-1]:,} kB"
        print(f"\n{workers} workers, {publishers} publishers, {len(crowd.claims):,} events: {late}")  # noqa: T201
    if seconds > 10:
        assert crowd.slowest < 1.0
        assert sizes[-1] < 1.1 * sizes[1]


@pytest.mark.slow  # postbus torture kill-server has one in the quick tests
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, 20], ids=["few", "many"])
def test_a_server_that_is_killed_loses_no_acknowledged_event(host: Host, url: str, kills: int):
    """Under the load of a crowd, again and again; what was claimed and not answered for comes again after its lease."""
    workers, publishers = (200, 50) if kills > 2 else (20, 5)
    bus = EventBus(url)
    bus.subscriptions.delete("default")
    bus.subscriptions.create("default", "*", lease=3)
    bus.shutdown()
    host.start()
    crowd = Crowd(host.port, wait=4.0)

    def kill() -> None:
        for _ in range(kills):
            time.sleep(1.5)
            host.kill()
            host.start()

    asyncio.run(_gather(crowd, workers, publishers, kill))
    assert len(crowd.acknowledged) > kills
    _check(url, crowd)
    assert set(crowd.acknowledged.values()) <= {event for event, _ in crowd.claims}
    epochs = Counter(crowd.claims)
    assert max(epochs.values()) == 1
