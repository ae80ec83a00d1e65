"""The HTTP queue, and the limit it is held against: the same FastAPI and uvicorn, doing one bare insert a request.

Server and clients are processes of their own. The clients speak plain HTTP/1.1 on kept connections and look at no more
of an answer than they must, so that it is the servers that are measured.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import orjson

from bench import load, postgres

__all__ = ["bare", "publish", "serve_bare", "work"]

URL: Final = os.environ.get(postgres.URL, "sqlite:///postbus.db")
IS_POSTGRES: Final = not URL.startswith("sqlite:")
PATIENCE: Final = 30.0
WARM_UP: Final = 50
OURS: Final = "from postbus.cli import main; main()"
POOL: Final = 16

Client = Callable[["Connection", int], Coroutine[Any, Any, int]]


def publish(count: int, clients: int) -> dict[str, float]:
    """Publish through `postbus serve`; return requests a second."""
    with _Server([sys.executable, "-c", OURS, "serve", "--url", URL]) as port:
        return {"rate": asyncio.run(_load(port, count, clients, _post))}


def bare(count: int, clients: int) -> dict[str, float]:
    """Insert through the bare app; return requests a second."""
    with _Server([sys.executable, "-m", "bench.child", "bench.http:serve_bare"]) as port:
        return {"rate": asyncio.run(_load(port, count, clients, _post))}


def work(count: int, clients: int) -> dict[str, float]:
    """Claim and complete through `postbus serve`; return requests a second, of which each event takes two."""
    with _Server([sys.executable, "-c", OURS, "serve", "--url", URL]) as port:
        asyncio.run(_load(port, (count + WARM_UP) // 100 + 1, 4, _post_batch))
        return {"rate": asyncio.run(_load(port, count, clients, _claim_and_complete))}


# ── the bare app ─────────────────────────────────────────────────────────────────────────────────────────────────────


def serve_bare(port: int) -> dict[str, float]:
    """Serve an app that stores what is posted, in the plainest way that is durable."""
    import uvicorn  # noqa: PLC0415  only here
    from fastapi import FastAPI, Request, Response  # noqa: PLC0415

    state: dict[str, Any] = {}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state["insert"], close = await (_postgres_insert() if IS_POSTGRES else _sqlite_insert())
        yield
        await close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/events", status_code=201)
    async def post(request: Request) -> Response:
        given = orjson.loads(await request.body())
        number = await state["insert"](given["type"], orjson.dumps(given["payload"]).decode())
        return Response(orjson.dumps({"id": number, **given}), 201, media_type="application/json")

    uvicorn.run(app, port=port, log_config=None, access_log=False)
    return {}


async def _sqlite_insert() -> tuple[Any, Any]:
    """Return what inserts in the event loop itself: with one writer at a time, a thread would only cost."""
    import apsw  # noqa: PLC0415

    db = apsw.Connection("bare.db")
    list(db.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"))
    db.execute("CREATE TABLE e (id INTEGER PRIMARY KEY, t, p)")

    async def insert(kind: str, payload: str) -> int:
        return db.execute("INSERT INTO e (t, p) VALUES (?, ?) RETURNING id", (kind, payload)).fetchall()[0][0]

    async def close() -> None:
        db.close()

    return insert, close


async def _postgres_insert() -> tuple[Any, Any]:
    """Return what inserts on one of a few connections, so that the server can commit several at once."""
    from psycopg_pool import AsyncConnectionPool  # noqa: PLC0415

    pool = AsyncConnectionPool(URL, min_size=1, max_size=POOL, kwargs={"autocommit": True}, open=False)
    await pool.open()
    async with pool.connection() as db:
        await db.execute("CREATE TABLE e (id bigserial PRIMARY KEY, t text NOT NULL, p json NOT NULL)")

    async def insert(kind: str, payload: str) -> int:
        async with pool.connection() as db:
            cursor = await db.execute("INSERT INTO e (t, p) VALUES (%s, %s) RETURNING id", (kind, payload))
            row = await cursor.fetchone()
        return row[0] if row else 0

    return insert, pool.close


# ── the load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Server:
    """A server in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        where = (
            [orjson.dumps({"port": self._port}).decode()] if "bench.child" in command else ["--port", str(self._port)]
        )
        self._command = [*command, *where]

    def __enter__(self) -> int:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # noqa: S603
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self._port
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        self._process.kill()
        raise RuntimeError(f"{self._command} does not serve")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)


class Connection:
    """A kept connection that asks and reads one answer after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak over a stream."""
        self._reader = reader
        self._writer = writer

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        told = await self._reader.readuntil(b"\r\n\r\n")
        status = int(told[9:12])
        start = told.find(b"content-length: ")
        length = int(told[start + 16 : told.find(b"\r", start)]) if start >= 0 else 0
        return status, await self._reader.readexactly(length)


async def _load(port: int, count: int, clients: int, each: Client) -> float:
    """Have clients share `count` turns, after a few to warm up; return requests a second."""
    connections = [Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(clients)]
    await _share(connections, min(WARM_UP, count), each)
    began = time.perf_counter()
    requests = await _share(connections, count, each)
    return requests / (time.perf_counter() - began)


async def _share(connections: list[Connection], count: int, each: Client) -> int:
    left = iter(range(count))

    async def run(connection: Connection) -> int:
        requests = 0
        for number in left:
            requests += await each(connection, number)
        return requests

    return sum(await asyncio.gather(*map(run, connections)))


def _require(status: int, wanted: int) -> None:
    if status != wanted:
        raise RuntimeError(f"answered with {status}, not {wanted}")


async def _post(connection: Connection, number: int) -> int:
    body = orjson.dumps({"type": load.TYPE, "payload": load.order(number)})
    status, _ = await connection.ask("POST", "/events", body)
    _require(status, 201)
    return 1


async def _post_batch(connection: Connection, _: int) -> int:
    status, _ = await connection.ask("POST", "/events/batch", orjson.dumps(load.events(100)))
    _require(status, 201)
    return 1


async def _claim_and_complete(connection: Connection, number: int) -> int:
    del number
    me = f"bench:{id(connection)}"
    status, told = await connection.ask("GET", f"/events/subscribe?types=*&worker_id={me}")
    _require(status, 200)
    event = orjson.loads(told)
    done = orjson.dumps({"worker_id": me, "epoch": event["epoch"], "execution_time_ms": 1, "status_code": 200})
    status, _ = await connection.ask("POST", f"/events/{event['id']}/complete", done)
    _require(status, 200)
    return 2
