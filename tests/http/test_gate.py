"""The gate: what comes alone is done without going to a thread, and nobody else is kept waiting for it."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from postbus import EventBus, NotFound, RetryPolicy, Status, StoreUnavailable
from postbus.http import gate as gate_module
from postbus.http import publishing
from postbus.http.errands import Hand
from postbus.http.gate import Gate
from postbus.pattern import Interest
from postbus.store import log_of
from postbus.store.contract import Claim
from tests.conftest import Crew
from tests.http.serving import Served, place, serving


@pytest.fixture
def served(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server with an empty store."""
    with serving(kind, tmp_path) as served:
        yield served


def test_the_event_loop_writes_nothing_itself(served: Served, monkeypatch: pytest.MonkeyPatch):
    """A commit waits for the disk, and would keep all other requests waiting: a lone event goes to a thread, too."""
    threads: list[str] = []
    publish = served.bus.store.publish

    def noting(drafts: Any) -> Any:
        threads.append(threading.current_thread().name)
        return publish(drafts)

    monkeypatch.setattr(served.bus.store, "publish", noting)
    served.publish()
    assert threads == ["postbus-publish"]


def test_a_lock_held_elsewhere_keeps_nobody_else_waiting(tmp_path: Path, crew: Crew):
    """While another process writes to the file, a publish waits for it, and others are answered at once."""
    with serving("sqlite", tmp_path) as served:
        elsewhere = apsw.Connection(served.bus.store.url.removeprefix("sqlite:///"))
        elsewhere.execute("BEGIN IMMEDIATE")
        crew.start(served.publish)
        began = time.monotonic()
        for _ in range(20):
            assert served.http.get("/livez").status_code == 200
        assert time.monotonic() - began < 10, "they waited for the lock"
        assert served.total() == 0
        elsewhere.execute("ROLLBACK")
        elsewhere.close()
        (event,) = crew.join(30)
        assert served.total() == 1
        assert event["status"] == "PENDING"


# ── what is leased to somebody is his, or comes back ─────────────────────────────────────────────────────────────────


def claim_of(kind: str, limit: int = 1) -> Claim:
    """Return a claim of events of one type."""
    return Claim(
        subscription="default",
        worker_id="w:1",
        owner="http",
        interests=(Interest(kind),),
        limit=limit,
        lease=timedelta(seconds=300),
        policy=RetryPolicy(),
    )


async def never() -> None:
    """Stay."""
    await asyncio.Event().wait()


async def at_once() -> None:
    """Have left already."""


@asynccontextmanager
async def opened(bus: EventBus) -> AsyncGenerator[Gate]:
    """Give a gate without a server around it."""
    gate = Gate(log_of(bus.store))
    async with gate.open():
        yield gate


@pytest.fixture
def bus(kind: str, tmp_path: Path) -> Iterator[EventBus]:
    """Give a bus."""
    with place(kind, tmp_path) as url:
        bus = EventBus(url)
        yield bus
        bus.shutdown()


def status(bus: EventBus, event_id: int) -> Status | None:
    """Return what an event waits for."""
    return bus.get(event_id).status


def test_nobody_there_means_nothing_leased(bus: EventBus, eventually: Callable[[Callable[[], bool]], None]):
    """Who has hung up before his answer was ready gives back what he would have got, whether he waits or not."""
    ids = [bus.publish("a").id, bus.publish("b").id]

    async def main() -> None:
        async with opened(bus) as gate:
            assert not (await gate.claim(claim_of("a"), 0, at_once)).deliveries
            assert not (await gate.claim(claim_of("b"), 5, at_once)).deliveries

    asyncio.run(main())
    eventually(lambda: [status(bus, each) for each in ids] == [Status.PENDING] * 2)


@pytest.mark.parametrize("wait", [0, 10])
def test_cancelled_with_the_answer_there(bus: EventBus, wait: float, monkeypatch: pytest.MonkeyPatch):
    """A request that is ended between its answer and its taking it gives back what it had."""
    event = bus.publish("a")

    async def main() -> None:
        async with opened(bus) as gate:
            hand_out = gate._hand_out

            def then_cancel(*args: Any) -> None:
                hand_out(*args)
                asking.cancel()

            monkeypatch.setattr(gate, "_hand_out", then_cancel)
            asking = asyncio.create_task(gate.claim(claim_of("a"), wait, never))
            with suppress(asyncio.CancelledError):
                await asking
            assert asking.cancelled()

    asyncio.run(main())
    assert status(bus, event.id) is Status.PENDING


def test_a_claim_without_waiting_is_answered_however_many_wait(bus: EventBus, monkeypatch: pytest.MonkeyPatch):
    """Those in front would else be asked for again and again, and those behind not until they have left."""
    monkeypatch.setattr(gate_module, "MOST", 3)

    async def main() -> None:
        async with opened(bus) as gate:
            waiting = [asyncio.create_task(gate.claim(claim_of("a"), 30, never)) for _ in range(5)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(10):
                assert not (await gate.claim(claim_of("a"), 0, never)).deliveries
            for each in waiting:
                each.cancel()

    asyncio.run(main())


def test_who_was_answered_is_forgotten(bus: EventBus):
    """Whatever is asked for, and however many kinds of it: nothing stays behind."""

    async def main() -> None:
        async with opened(bus) as gate:
            for number in range(1_200):
                await gate.claim(claim_of(f"kind.{number}"), 0, never)
            assert not gate._rooms

    asyncio.run(main())
    assert len(getattr(bus.store, "_looked", ())) <= 1_001


def test_a_hand_goes_on_after_an_error():
    """Whoever comes next is served all the same."""
    hand, done = Hand("test"), threading.Event()
    hand.give(partial(setattr, None, "nothing", 1))
    hand.give(done.set)
    assert done.wait(10)
    hand.close()


# ── nobody waits for what is large ───────────────────────────────────────────────────────────────────────────────────


def test_what_is_large_is_taken_apart_in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Validating a million values takes a while: by whatever way they come, not in the loop that serves the others."""
    seen: list[str] = []
    drafts = publishing.drafts

    def noting(fields: Any) -> Any:
        seen.append(threading.current_thread().name)
        return drafts(fields)

    monkeypatch.setattr(publishing, "drafts", noting)
    payload = [[] for _ in range(40_000)]
    event = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": payload}
    headers = {"ce-specversion": "1.0", "ce-id": "2", "ce-source": "/s", "ce-type": "t"}
    served.publish(type="t", payload=1)
    answers = [
        served.http.post("/events", json={"type": "t", "payload": payload}),
        served.http.post("/events", json=event, headers={"content-type": "application/cloudevents+json"}),
        served.http.post("/events", json=payload, headers=headers),
        served.http.post("/events/batch", json=[{"type": "t", "payload": payload}]),
        served.http.post("/events/batch", json=[{"type": "t", "payload": payload}], params={"partial": "true"}),
    ]
    assert [each.status_code for each in answers] == [201, 201, 201, 201, 207]
    assert len(seen) == 6
    assert len(set(seen[1:]) & {seen[0]}) == 0, seen


def test_of_a_part_that_failed_only_that_part_is_told(served: Served, monkeypatch: pytest.MonkeyPatch):
    """What was stored of a partial batch is told as stored, also if the store was away for another of its items."""
    publish = served.bus.store.publish

    def failing(drafts: Any) -> Any:
        if any(each.type == "b" for each in drafts):
            raise StoreUnavailable("away") if len(drafts) == 1 else NotFound("asked one by one")
        return publish(drafts)

    monkeypatch.setattr(served.bus.store, "publish", failing)
    answer = served.http.post("/events/batch", json=[{"type": each} for each in "abc"], params={"partial": "true"})
    assert answer.status_code == 207
    assert [each["status"] for each in answer.json()["results"]] == [201, 503, 201]
    assert served.total() == 2


def test_who_hangs_up_while_the_store_is_locked_gets_nothing(tmp_path: Path, eventually: Callable[..., None]):
    """Also without waiting for anything: its event is another's at once, not after the lease."""
    with serving("sqlite", tmp_path) as served:
        served.publish(type="a")
        elsewhere = apsw.Connection(served.bus.store.url.removeprefix("sqlite:///"))
        elsewhere.execute("BEGIN IMMEDIATE")
        others = served.connected
        with served.socket() as asking:
            asking.sendall(b"GET /events/subscribe?worker_id=w&types=a HTTP/1.1\r\nhost: localhost\r\n\r\n")
            eventually(lambda: served.at_work == 1)
            asking.shutdown(socket.SHUT_RDWR)
        eventually(lambda: served.connected == others)  # what it has not noticed, it cannot heed
        elsewhere.execute("ROLLBACK")
        elsewhere.close()
        eventually(lambda: served.at_work == 0)
        eventually(lambda: served.claim() is not None)
