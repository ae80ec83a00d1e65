"""What a server holds for its clients is bounded, whatever they ask for, and whether they read it or not."""

import json
import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
import pytest

from postbus import Discard, EventBus
from postbus.dashboard import room
from postbus.http import buffers
from postbus.http import serve as serve_module
from postbus.http.app import ROUTES
from postbus.http.serve import GRACE
from tests.conftest import Crew
from tests.http.serving import Process, Served, place, process, serving
from tests.kinds import mostly_on_sqlite

LARGE: Final = "x" * 1_000_000
MB: Final = 1_000_000
LINUX: Final = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of memory")
ADDRESSES: Final = {"event_id": "1", "name": "default"}
ASKED: Final = {
    "/events/subscribe": {"worker_id": "w:1", "types": "*", "limit": 100},
    "/events": {"limit": 500},
    "/dlq": {"limit": 500},
    "/stream": {"after": 0, "limit": 200},
    "/events/{event_id}": {"include_logs": True},
    "/wake": {"wait": 0},
}
PAGES: Final = ("", "events", "events/1", "dead", "subscriptions", "workers", "pipeline", "system")


@pytest.fixture
def served(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server with an empty store."""
    with serving(kind, tmp_path) as served:
        yield served


def publish(bus: EventBus, count: int) -> None:
    """Publish large events, a few at a time."""
    for _ in range(count // 10):
        bus.publish_many([{"type": "large", "payload": LARGE}] * 10)


def memory(server: Process, field: str) -> int:
    """Return how many bytes of memory a server has (`VmRSS`) or had at most (`VmHWM`)."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return 1024 * int(next(each.split()[1] for each in status.splitlines() if each.startswith(field)))


@contextmanager
def asking(url: str, path: str) -> Iterator[socket.socket]:
    """Ask for something and read nothing of the answer; the kernel takes in little of it, too."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
    where = urlsplit(url)
    with connection:
        connection.connect((where.hostname, where.port))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
        yield connection


@mostly_on_sqlite
@LINUX
def test_clients_that_read_nothing_cost_little_memory(kind: str, tmp_path: Path):
    """Six streams of 150 events of 1 MB that nobody reads: below 300 MB, and the next client is served."""
    with place(kind, tmp_path) as url, process(url) as server, ExitStack() as stack:
        publish(stack.enter_context(EventBus(url)), 150)
        for _ in range(6):
            connection = stack.enter_context(asking(server.url, "/stream?after=0"))
            assert select.select([connection], [], [], 30)[0]
        answer = httpx2.get(f"{server.url}/stream", params={"after": 0, "limit": 150}, trust_env=False, timeout=60)
        assert answer.text.count("\nid: ") == 150
        assert memory(server, "VmHWM") < 300 * MB


@mostly_on_sqlite
@LINUX
def test_no_get_route_takes_much_memory(kind: str, tmp_path: Path):
    """Every GET route, over 200 events of 1 MB, pending, leased and dead: 64 MB at most beyond what there was."""
    with place(kind, tmp_path) as url, process(url) as server:
        with EventBus(url) as bus:
            publish(bus, 200)
            for delivery in [each for _ in range(10) for each in bus.poll_many(4)]:
                bus.finalize(delivery, success=False, errors=[Discard("no")], retry=False)
            bus.poll_many(4)
        with httpx2.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            assert all(http.get(f"/dashboard/{each}").status_code == 200 for each in ("", "system"))  # loads modules
            taken = dict(measured(server, http))
    assert {path: size // MB for path, size in taken.items() if size > 64 * MB} == {}


def measured(server: Process, http: httpx2.Client) -> Iterator[tuple[str, int]]:
    """Ask every GET route, and give what the server had in memory beyond what it had before."""
    paths = {each.path for each in ROUTES if "GET" in (each.methods or ())}
    assert ASKED.keys() <= paths
    asked = [(path, ASKED.get(path, {})) for path in sorted(paths)]
    asked += [(f"/dashboard/{page}", {}) for page in PAGES]
    for path, query in [
        *asked,
        ("/events", {"limit": 100, "type": "l*"}),
        ("/events", {"limit": 100, "status": "FAILED"}),
    ]:
        before = memory(server, "VmRSS")
        Path(f"/proc/{server.pid}/clear_refs").write_text("5")
        answer = http.get(re.sub(r"\{(\w+)\}", lambda found: ADDRESSES.get(found[1], "conflict"), path), params=query)
        assert answer.status_code in (200, 404), (path, answer.text)
        yield f"{path} {query}", memory(server, "VmHWM") - before


def test_a_short_page_is_led_on_from(served: Served):
    """Pages that bytes have cut short lead to the rest by `next` and by `Link`: every event once."""
    ids = [served.publish(payload=LARGE)["id"] for _ in range(7)]
    seen: list[int] = []
    path: str | None = "/events?limit=7"
    while path is not None:
        answer = served.http.get(path)
        seen += [each["id"] for each in answer.json()["events"]]
        assert (answer.json()["next"] is None) == ("link" not in answer.headers)
        path = re.sub(r"<(.*)>.*", r"\1", answer.headers["link"]) if "link" in answer.headers else None
    assert seen == ids[::-1]
    leased = [each["id"] for _ in range(2) for each in (served.take(limit=7))["events"]]
    assert sorted(leased) == ids


def test_streams_that_stand_still_make_room(served: Served, monkeypatch: pytest.MonkeyPatch, eventually: Any):
    """Where all streams together hold too much, those are hung up on that have taken nothing for longest."""
    monkeypatch.setattr(buffers, "MOST_HELD", 8 * MB)
    monkeypatch.setattr(buffers, "STALLED", 0.0)
    for _ in range(12):
        served.publish(payload=LARGE)
    with asking(served.url, "/stream?after=0") as first:
        assert select.select([first], [], [], 30)[0]
        assert eventually(lambda: served.app.state.desk.gate.streams.size > 3 * MB)
        answer = served.http.get("/stream", params={"after": 0, "limit": 12})
        assert answer.text.count("\nid: ") == 12
        assert eventually(lambda: served.app.state.desk.gate.streams.size == 0)
        first.settimeout(10)
        assert is_cut_off(first)


def is_cut_off(connection: socket.socket) -> bool:
    """Return whether what comes has an end."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_an_answer_that_nobody_takes_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch, eventually: Any):
    """After a while the connection is cut, and what was left of the answer is freed."""
    monkeypatch.setattr(serve_module, "UNTAKEN_SECONDS", 0.3)
    for _ in range(4):
        served.publish(payload=LARGE)
    before = served.connected
    with asking(served.url, "/events?limit=4"):
        assert eventually(lambda: served.connected == before + 1)
        assert eventually(lambda: served.connected == before)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_ends_soon_whoever_waits_and_whoever_does_not_read(kind: str, tmp_path: Path, crew: Crew):
    """SIGTERM with 50 unread streams and 50 long polls: the server ends well within 5 s, and logs no traceback."""
    with place(kind, tmp_path) as url, process(url) as server, ExitStack() as stack:
        publish(stack.enter_context(EventBus(url)), 20)
        for _ in range(50):
            stack.enter_context(asking(server.url, "/events/subscribe?worker_id=w:1&types=none&wait=60"))
        unread = [stack.enter_context(asking(server.url, "/stream?after=0")) for _ in range(50)]
        assert all(select.select([each], [], [], 30)[0] for each in unread)
        code, seconds = server.end()
        assert code == 0
        assert seconds < 5
        assert not [line for line in server.said if "Traceback" in line or '"level": "error"' in line], server.said


def test_after_sigterm_a_server_says_that_it_leaves(tmp_path: Path, eventually: Callable[..., Any]):
    """For the time of `--drain` it serves on, /readyz is 503 and /livez 200; then it ends."""
    with place("sqlite", tmp_path) as url, process(url, "--drain", "3s") as server:
        with httpx2.Client(base_url=server.url, trust_env=False) as http:
            assert http.get("/readyz").status_code == 200
            began = time.monotonic()
            server.ask_to_end()
            assert eventually(lambda: http.get("/readyz").status_code == 503)
            assert http.get("/livez").status_code == 200
            assert http.post("/events", json={"payload": 1}).status_code == 201
        code, _ = server.wait()
        assert code == 0
        assert 3 <= time.monotonic() - began < GRACE


# ── bodies that are refused ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1_400_000, 2 * MB, 6 * MB])
def test_who_sends_too_much_gets_to_read_why(served: Served, size: int):
    """413 reaches a client that sends all of its body before it reads: it is not cut off in the midst of it."""
    for _ in range(5):
        with served.socket() as connection:
            head = f"POST /events HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
            for _ in range(size // 50_000):
                connection.sendall(b"x" * 50_000)
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "/problems/too-large"


def test_a_form_that_comes_slowly_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Who signs in has a deadline as well; nobody can keep connections by forms that never end."""
    monkeypatch.setattr(room, "FORM_SECONDS", 0.3)
    with served.socket() as connection:
        head = f"POST /dashboard/dead/act HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nOrigin: {served.url}\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\nact=".encode())
        assert connection.recv(65_536).startswith(b"HTTP/1.1 422 ")


def test_who_goes_on_sending_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch, eventually: Any):
    """What is taken in after a 413 is bounded by time as well: nobody keeps a connection by a body that never ends."""
    monkeypatch.setattr(serve_module, "LINGER_SECONDS", 0.3)
    before = served.connected
    with served.socket() as connection:
        head = f"POST /events HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 99999999\r\n\r\n".encode())
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413 ")
        assert eventually(lambda: served.connected == before)


@pytest.mark.parametrize("path", ["/dashboard/sign-in", "/events", "/events/batch", "/events/claim"])
def test_who_hangs_up_in_the_midst_of_a_body_leaves_no_traceback(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture, eventually: Any
):
    """That a client went away is no fault of the server's; nothing is written to its log."""
    with serving("sqlite", tmp_path, auth=True, local=False) as served:
        kind = "application/json" if path.startswith("/events") else "application/x-www-form-urlencoded"
        before, token = served.connected, served.token()
        with served.socket() as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nAuthorization: Bearer {token}\r\n"
            connection.sendall(f"{head}Content-Type: {kind}\r\nContent-Length: 100\r\n\r\nto".encode())
            assert eventually(lambda: served.at_work == 1)
        assert eventually(lambda: (served.at_work, served.connected) == (0, before))
    assert [each for each in caplog.records if each.exc_info] == []
