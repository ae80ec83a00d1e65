"""A real server for the tests: uvicorn on a free port of loopback, in a thread; or `postbus serve` as a process."""

import asyncio
import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import uvicorn
from fastapi import FastAPI

from postbus import EventBus
from postbus.http.app import create_app
from postbus.http.serve import KEEP_ALIVE, Guarded, _Server
from postbus.store import log_of
from postbus.tokens import SCOPES, make_token
from tests.contract.stores import Site, site_of
from tests.postgres.server import server as postgres

__all__ = ["JSON", "Served", "command", "place", "process", "serving", "standing_still"]

JSON: Final = {"content-type": "application/json"}
PROGRAM: Final = Path(sys.executable).with_name("postbus")
PATIENCE: Final = 60.0


class Served:
    """A server that runs in this process, and a client of it."""

    def __init__(self, bus: EventBus, **options: Any) -> None:
        """Serve a bus until `stop`."""
        self.bus = bus
        self.app: FastAPI = create_app(bus, **{"auth": False, "local": True, **options})
        listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # No certificates are needed here, and to load them would take longer than to start the server.
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=False)
        config = uvicorn.Config(
            self.app,
            http=Guarded,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,  # with uvicorn's own, whatever should be hung up on would be soon
        )
        self._server = _Server(config, self.app)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config, listening), daemon=True)
        self._thread.start()
        assert self._started.wait(PATIENCE)
        assert self.http.get("/livez").status_code == 200

    def _run(self, config: uvicorn.Config, listening: socket.socket) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await self._server.serve(sockets=[listening])

        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(main())

    def stop(self) -> None:
        """Let nobody wait any longer, and end."""
        self.http.close()
        self.drain()
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def drain(self) -> None:
        """Let nobody wait any longer, as the server does when it is told to end."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.app.state.desk.gate.drain)

    @property
    def at_work(self) -> int:
        """How many requests are being served."""
        return len(self._server.server_state.tasks)

    @property
    def connected(self) -> int:
        """How many connections the server knows of: one that was hung up is one until it has noticed."""
        return len(self._server.server_state.connections)

    # ── what most tests do ───────────────────────────────────────────────────────────────────────────────────────

    def publish(self, **fields: Any) -> dict[str, Any]:
        """Publish an event, which must work."""
        answer = self.http.post("/events", json={"payload": None} | fields)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def claim(self, **query: Any) -> dict[str, Any] | None:
        """Claim as `w:1`, whatever there is; None for 204."""
        answer = self.http.get("/events/subscribe", params={"worker_id": "w:1", "types": "*", **query})
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.status_code == 200 else None

    def take(self, **query: Any) -> dict[str, Any]:
        """Claim what must be there."""
        taken = self.claim(**query)
        assert taken is not None
        return taken

    def act(self, verb: str, event_id: int, **body: Any) -> httpx2.Response:
        """Complete, fail, start, extend or release, as `w:1`."""
        return self.http.post(f"/events/{event_id}/{verb}", json={"worker_id": "w:1", **body})

    def get(self, event_id: int, **query: Any) -> dict[str, Any]:
        """Look at an event."""
        return self.http.get(f"/events/{event_id}", params=query).json()

    def total(self) -> int:
        """Return how many events there are."""
        return self.http.get("/events", params={"limit": 1}).json()["total"]

    def socket(self) -> socket.socket:
        """Connect, past any client."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def token(self, *scopes: str) -> str:
        """Make a token; without scopes, with all of them."""
        return make_token(log_of(self.bus.store), "test", list(scopes or SCOPES))[1]


@contextmanager
def place(kind: str, folder: Path) -> Generator[str]:
    """Give the URL of an empty store of a kind."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'bus.db'}"
        return
    with postgres().database() as url:
        yield url


@contextmanager
def serving(kind: str, folder: Path, **options: Any) -> Generator[Served]:
    """Serve an empty store of a kind until the end of the block."""
    with place(kind, folder) as url:
        served = Served(EventBus(url), **options)
        try:
            yield served
        finally:
            served.stop()


@contextmanager
def standing_still(kind: str, folder: Path, **options: Any) -> Generator[tuple[Served, Site]]:
    """Serve an empty store on which time stands still, and give its clock with it."""
    site = site_of(kind, folder)
    served = Served(EventBus(site.url, clock=site.clock), **options)
    try:
        yield served, site
    finally:
        served.stop()
        site.close()


# ── as a process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `postbus` to its end."""
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False, **options
    )


class Process:
    """`postbus serve` as a process, and what it says."""

    def __init__(self, url: str, *arguments: str) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(
            [PROGRAM, "serve", "--url", url, "--port", "0", *arguments], stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._told = threading.Event()
        self.url = ""
        self._reader.start()
        assert self._told.wait(PATIENCE), self.said
        assert self.url, self.said
        self._await_answer()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line)
            if " at http://" in line and not self.url:
                self.url = line.partition(" at ")[2].split()[0]
                self._told.set()
        self._told.set()

    def _await_answer(self) -> None:
        deadline = time.monotonic() + PATIENCE
        pause = threading.Event()
        for _ in itertools.count():
            try:
                httpx2.get(f"{self.url}/livez", trust_env=False)
            except httpx2.TransportError:
                assert time.monotonic() < deadline, self.said
                pause.wait(0.02)
            else:
                return

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send it a signal; return its exit code, and how many seconds it took to end."""
        self.ask_to_end(number)
        return self.wait()

    def wait(self) -> tuple[int, float]:
        """Wait for its end; return its exit code, and how long it took, less what it waited for a processor."""
        began, waited = time.monotonic(), self._waited()
        late = waited
        while (code := self._process.poll()) is None:
            assert time.monotonic() - began < PATIENCE, self.said
            late = max(late, self._waited())
            time.sleep(0.01)
        took = time.monotonic() - began - (late - waited)
        self._reader.join(PATIENCE)
        return code, took

    def _waited(self) -> float:
        """Return for how many seconds its main thread could have gone on, and others did: on a busy machine, most."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # it has ended, or the system does not tell
            return 0.0

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self.end()
        if self._process.stderr is not None:
            self._process.stderr.close()


@contextmanager
def process(url: str, *arguments: str) -> Generator[Process]:
    """Run `postbus serve` until the end of the block."""
    running = Process(url, *arguments)
    try:
        yield running
    finally:
        running.close()
