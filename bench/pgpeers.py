"""What users with PostgreSQL would pick instead, each in its own words and at its best documented settings.

All of them run on one server with fsync and synchronous_commit on, a worker process each. None keeps an audit row of
what was claimed; PgQueuer logs how each job ended. Graphile Worker and pg-boss live in `node/peers.mjs`.
"""

import asyncio
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from procrastinate import App, PsycopgConnector

from bench import load, pace
from bench.child import LONGEST, start
from bench.measure import Call
from bench.postgres import URL

__all__ = ["dispatch", "drain", "feed", "node", "node_versions", "publish", "publish_paced", "sustain"]

BATCH: Final = 1_000
WARM_UP: Final = 20
NODE: Final = Path(__file__).resolve().parent / "node"
Handler = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


class Peer(Protocol):
    """What the measures ask of a peer."""

    async def open(self) -> None:
        """Connect, and make the schema unless it is there."""
        ...

    async def add(self, payloads: Sequence[dict[str, Any]]) -> None:
        """Enqueue all of them in one call."""
        ...

    async def work(self, handle: Handler) -> None:
        """Handle what comes until `stop`; return when all that was handled is settled."""
        ...

    def stop(self) -> None:
        """Let `work` come to its end."""
        ...

    async def left(self) -> int:
        """Return how many are not settled."""
        ...


class _PgQueuer:
    """As its performance guide says: asyncpg, a pool, uvloop, its own autovacuum settings, a large batch."""

    def __init__(self, batch_size: int = BATCH, max_concurrent_tasks: int = 0) -> None:
        self._limits = {"batch_size": batch_size, "max_concurrent_tasks": max_concurrent_tasks}

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(os.environ[URL], min_size=2, max_size=10)
        self._queries = Queries.from_asyncpg_pool(self._pool)
        if not await self._queries.schema_is_installed():
            await self._queries.install()
            await self._queries.optimize_autovacuum()
        self._pgq = PgQueuer.from_asyncpg_pool(self._pool)

    async def add(self, payloads: Sequence[dict[str, Any]]) -> None:
        count = len(payloads)
        await self._queries.enqueue([load.TYPE] * count, [json.dumps(each).encode() for each in payloads], [0] * count)

    async def work(self, handle: Handler) -> None:
        @self._pgq.entrypoint(load.TYPE)
        async def run(job: Job) -> None:
            await handle(json.loads(job.payload or b""))

        await self._pgq.run(**self._limits)

    def stop(self) -> None:
        self._pgq.shutdown.set()

    async def left(self) -> int:
        async with asyncpg.create_pool(os.environ[URL], min_size=1, max_size=1) as pool:
            return await pool.fetchval("SELECT count(*) FROM pgqueuer")


class _Procrastinate:
    """Asynchronous tasks, as many at once as its pool has connections to end them on."""

    def __init__(self, concurrency: int = 5) -> None:
        self._concurrency = concurrency
        self._app = App(connector=PsycopgConnector(conninfo=os.environ[URL], min_size=1, max_size=concurrency))

    async def open(self) -> None:
        await self._app.open_async()
        if not await self._app.check_connection_async():
            await self._app.schema_manager.apply_schema_async()

    async def add(self, payloads: Sequence[dict[str, Any]]) -> None:
        await self._app.configure_task(load.TYPE).batch_defer_async(*({"payload": each} for each in payloads))

    async def work(self, handle: Handler) -> None:
        @self._app.task(name=load.TYPE)
        async def run(payload: dict[str, Any]) -> None:
            await handle(payload)

        options: Any = {"concurrency": self._concurrency, "delete_jobs": "successful", "install_signal_handlers": False}
        self._worker = asyncio.ensure_future(self._app.run_worker_async(**options))
        await asyncio.wait([self._worker])

    def stop(self) -> None:
        self._worker.cancel()

    async def left(self) -> int:
        return len(list(await self._app.job_manager.list_jobs_async()))


PEERS: Final[dict[str, Callable[..., Peer]]] = {"pgqueuer": _PgQueuer, "procrastinate": _Procrastinate}


# ── measures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def publish(peer: str, batches: int, size: int) -> dict[str, float]:
    """Enqueue batches, a transaction each."""

    async def measure() -> dict[str, float]:
        queue = await _opened(peer)
        given = [[load.order(number) for number in range(size)] for _ in range(batches + 1)]
        await queue.add(given.pop())
        began = time.perf_counter()
        for payloads in given:
            await queue.add(payloads)
        return {"rate": batches * size / (time.perf_counter() - began)}

    return _run(measure())


def drain(peer: str, count: int) -> dict[str, float]:
    """Handle a backlog with a handler that does nothing, until the last of it is settled."""

    async def measure() -> dict[str, float]:
        queue = await _opened(peer)
        for begin in range(0, count, BATCH):
            await queue.add([load.order(number) for number in range(begin, min(begin + BATCH, count))])
        handled = 0

        async def handle(_: dict[str, Any]) -> None:
            nonlocal handled
            handled += 1
            if handled == count:
                queue.stop()

        began = time.perf_counter()
        await queue.work(handle)
        took = time.perf_counter() - began
        _check((handled, await queue.left()), (count, 0))
        return {"rate": count / took}

    return _run(measure())


def dispatch(peer: str, count: int) -> dict[str, float]:
    """Return quantiles of the time from the call that enqueues, in another process, to the handler's first line."""

    async def measure() -> dict[str, float]:
        queue = await _opened(peer)
        took: list[float] = []

        async def handle(payload: dict[str, Any]) -> None:
            took.append((time.monotonic_ns() - payload["at"]) / 1e9)
            if len(took) == count + WARM_UP:
                queue.stop()

        with start(Call("bench.pgpeers:publish_paced", {"peer": peer, "count": count + WARM_UP}), Path()) as publisher:
            await queue.work(handle)
            publisher.communicate()
        return pace.quantiles(took[WARM_UP:])

    return _run(measure())


def publish_paced(peer: str, count: int) -> dict[str, float]:
    """Enqueue one by one, at the pace of `pace.pauses`."""

    async def measure() -> dict[str, float]:
        queue = await _opened(peer)
        for number, pause in enumerate(pace.pauses(count)):
            await asyncio.sleep(pause)
            await queue.add([{"at": time.monotonic_ns(), **load.order(number)}])
        return {}

    return _run(measure())


def sustain(peer: str, seconds: float, concurrency: int, options: dict[str, int]) -> dict[str, float]:
    """Return how many handlers of 1 ms a second end while another process publishes as many: see `pace.Feed`.

    Where the peer's `options` let more than `concurrency` start, the others wait in the handler.
    """

    async def measure() -> dict[str, float]:
        queue = await _opened(peer, **options)
        gate = asyncio.Semaphore(concurrency)
        with pace.Feed(Call("bench.pgpeers:feed", {"peer": peer})) as feed:

            async def handle(_: dict[str, Any]) -> None:
                async with gate:
                    await asyncio.sleep(0.001)
                feed.handled()

            worker = asyncio.create_task(queue.work(handle))
            rate = await asyncio.to_thread(feed.rate, seconds)
            queue.stop()
            await worker
        return {"rate": rate}

    return _run(measure())


def feed(peer: str) -> dict[str, float]:
    """Enqueue what `pace.Feed` asks for."""

    async def measure() -> dict[str, float]:
        queue = await _opened(peer)
        for count in pace.wanted():
            await queue.add([load.order(number) for number in range(count)])
        return {}

    return _run(measure())


# ── Node ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def node(measure: str, **arguments: Any) -> dict[str, float]:
    """Have `node/peers.mjs` take a measure of one of its peers, as in `graphile.drain`."""
    done = subprocess.run(  # noqa: S603  a script of our own
        [_node(), str(NODE / "peers.mjs"), measure, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=LONGEST,
    )
    return json.loads(done.stdout.splitlines()[-1])


def node_versions() -> dict[str, str]:
    """Return the versions of the peers on Node and of Node itself; nothing unless all of them are installed."""
    names = ("graphile-worker", "pg-boss", "node")
    manifests = [NODE / "node_modules" / name / "package.json" for name in names]
    if not all(each.exists() for each in (*manifests, Path(_node()))):
        return {}
    return {name: json.loads(each.read_text("utf-8"))["version"] for name, each in zip(names, manifests, strict=True)}


def _node() -> str:
    return str(NODE / "node_modules" / ".bin" / "node")


# ── ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _opened(peer: str, **options: int) -> Peer:
    queue = PEERS[peer](**options)
    await queue.open()
    return queue


def _run(measure: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    logging.disable(logging.WARNING)
    return uvloop.run(measure)


def _check(found: object, expected: object) -> None:
    """Refuse a figure for work that was not done."""
    if found != expected:
        raise RuntimeError(f"expected {expected!r}, found {found!r}")
