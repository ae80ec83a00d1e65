"""What no client should send: the same 4xx on both stores, never 5xx, nothing stored, others are served meanwhile."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from postbus.http import serve
from postbus.http.app import ROUTES
from tests.conftest import Crew
from tests.http.serving import JSON, Served, serving
from tests.kinds import MOSTLY_SQLITE

NOT_JSON: Final = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e400": "1e400",
    "-1e400": "-1e400",
    "1e200000": "1e200000",
    "digits": "1" * 5_000,
    "twice": '{"a": 1, "a": 2}',
    "twice-within": '[{"b": {"a": 1, "a": 1}}]',
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep-objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "control": '"\x01"',
    "raw-nul": '"\x00"',
    "half": '{"a": ',
    "python": "{'a': 1}",
    "comment": "/* */ 1",
    "trailing": "[1,]",
}
NOT_KEPT: Final = {
    "nul": r'"a\u0000b"',
    "nul-key": r'{"\u0000": 1}',
    "surrogate": r'"\ud800"',
    "surrogate-key": r'{"\udfff": 1}',
    "surrogates-swapped": r'"\udc00\ud800"',
    "deep-65": "[" * 65 + "]" * 65,
    "deep-600": "[" * 600 + "]" * 600,
}
BAD_UTF8: Final = [b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', '"é"'.encode("latin-1"), '"a"'.encode("utf-16")]
TEXTS: Final = {"nul": r"a\u0000b", "surrogate": r"\ud800"}


@pytest.fixture(scope="module", params=MOSTLY_SQLITE)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give one server to all tests here: it outlives them."""
    with serving(request.param, tmp_path_factory.mktemp("poison")) as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_is_stored(served: Served) -> Iterator[None]:
    """See to it that what was refused left nothing behind, and the server serves on."""
    before = state(served)
    yield
    assert state(served) == before


def state(served: Served) -> list[Any]:
    """Return what the store holds."""
    store = served.bus.store
    names = [each["name"] for each in served.http.get("/subscriptions").json()["subscriptions"]]
    return [served.total(), names, len(store.logs(1)), served.http.get("/dlq").json()["total"]]


def send(served: Served, path: str, body: str | bytes, headers: dict[str, str] = JSON) -> tuple[int, str]:
    """Post raw bytes; return the status and which problem it is."""
    content = body.encode() if isinstance(body, str) else body
    answer = served.http.post(path, content=content, headers=headers)
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == answer.status_code
    return answer.status_code, told["type"].removeprefix("/problems/")


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_is_not_json_is_not_taken_for_it(served: Served, name: str):
    """As a payload, as one of a batch and as the whole body: 400 on both stores."""
    text = NOT_JSON[name]
    bodies = {"/events": f'{{"payload": {text}}}', "/events/batch": f'[{{"payload": 1}}, {{"payload": {text}}}]'}
    assert {send(served, path, body) for path, body in bodies.items()} == {(400, "not-json")}
    for path in ("/events", "/events/batch", "/events/1/complete", "/events/1/fail", "/subscriptions"):
        assert send(served, path, text) == (400, "not-json")


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_a_store_would_change_is_not_kept(served: Served, name: str):
    """JSON that PostgreSQL cannot hold, or nests too deep, is 422 on both stores."""
    text = NOT_KEPT[name]
    assert send(served, "/events", f'{{"payload": {text}}}') == (422, "invalid-payload")
    assert send(served, "/events/batch", f'[{{"payload": 1}}, {{"payload": {text}}}]') == (422, "invalid-payload")
    for path in ("/events", "/events/batch", "/events/1/complete", "/events/1/fail", "/subscriptions"):
        assert send(served, path, text)[0] == 422
    event = f'{{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": {text}}}'
    kinds = {"content-type": "application/cloudevents+json"}
    assert send(served, "/events", event, kinds) == (422, "invalid-payload")


@pytest.mark.parametrize("body", BAD_UTF8)
def test_what_is_not_utf8_is_refused(served: Served, body: bytes):
    """Bytes are not guessed at."""
    for path, text in (("/events", b'{"payload": %b}' % body), ("/events", body), ("/events/1/fail", body)):
        assert send(served, path, text) == (400, "not-json")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("field", ["title", "description", "tags", "uid", "key", "type", "metadata", "at"])
def test_poison_in_an_events_other_fields_is_refused(served: Served, field: str, text: str):
    """A NUL or half a character is 422 wherever it stands."""
    values = [f'"{text}"']
    if field == "metadata":
        values = [f'{{"{text}": "a"}}', f'{{"a": "{text}"}}']
    elif field == "tags":
        values += [f'["{text}"]']
    for value in values:
        assert send(served, "/events", f'{{"{field}": {value}}}') == (422, "invalid-event")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("verb", ["complete", "fail", "start", "extend", "release"])
def test_poison_in_a_report_is_refused(served: Served, verb: str, text: str):
    """In the worker's name, in its errors, in the subscription's name."""
    bodies = [f'{{"worker_id": "{text}"}}', f'{{"worker_id": "w", "subscription": "{text}"}}']
    if verb == "fail":
        bodies += [f'{{"worker_id": "w", "{name}": "{text}"}}' for name in ("error_message", "error_type", "traceback")]
    if verb == "complete":
        bodies += [f'{{"worker_id": "w", "errors": [{{"message": "{text}"}}]}}']
    for body in bodies:
        assert send(served, f"/events/1/{verb}", body) == (422, "invalid-request")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_poison_in_a_subscription_is_refused(served: Served, text: str):
    """In its name, its patterns and its tags."""
    for field, value in (("name", f'"{text}"'), ("patterns", f'["{text}"]'), ("tags", f'["{text}"]')):
        body = {"name": '"n"', field: value}
        inside = ", ".join(f'"{each}": {body[each]}' for each in body)
        assert send(served, "/subscriptions", f"{{{inside}}}") == (422, "invalid-request")


QUERIES: Final = [
    "/events/subscribe?types=*&worker_id={}",
    "/events/subscribe?worker_id=w&tags={}",
    "/events/subscribe?worker_id=w&types={}",
    "/events/subscribe?worker_id=w&types=*&subscription={}",
    "/events/subscribe?worker_id=w&types=*&limit={}",
    "/events/subscribe?worker_id=w&types=*&wait={}",
    "/events/1?subscription={}",
    "/events?tags={}",
    "/events?type={}",
    "/events?status={}",
    "/events?cursor={}",
    "/events?limit={}",
    "/events?offset={}",
    "/dlq?cursor={}",
    "/dlq?subscription={}",
    "/dlq?type={}",
    "/stream?after={}",
    "/stream?types={}",
    "/stream?tags={}",
    "/readyz?verbose={}",
    "/events/{}",
    "/dlq/{}",
    "/subscriptions/{}",
    "/problems/{}",
]


@pytest.mark.parametrize("path", QUERIES)
@pytest.mark.parametrize("value", ["%00", "a%00b", "%ff", "%ed%a0%80", "%c0%80"])
def test_poison_in_an_address_is_refused(served: Served, path: str, value: str):
    """A NUL, or bytes that are no UTF-8, are 400 wherever they stand: never read as something else."""
    answer = served.http.get(path.format(value))
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-request")


@pytest.mark.parametrize("number", ["9223372036854775808", "9999999999999999999", "-1", "9" * 5_000, "0x1", "1e3", "٣"])
def test_numbers_out_of_bounds_are_refused(served: Served, number: str):
    """In paths and queries alike: 422 (or 404 for a path that is none), not an overflow in a store."""
    for path in ("/events/{}", "/dlq/{}", "/events?limit={}", "/events?offset={}", "/stream?after={}&limit=1"):
        assert served.http.get(path.format(number)).status_code == 422, path
    for path in ("/events/{}/complete", "/events/{}/fail", "/events/{}/start"):
        assert served.http.post(path.format(number), json={"worker_id": "w"}).status_code == 422, path
    assert served.http.post(f"/events/{number}/reset").status_code == 422
    assert served.http.post(f"/dlq/{number}/retry").status_code == 422
    for path in ("/events?cursor={}", "/dlq?cursor={}"):
        assert served.http.get(path.format(number)).status_code == 422, path


@pytest.mark.parametrize("last", ["x", "-1", "1.0", "9" * 20, "0" * 5_000, "9" * 5_000, "", "1,2"])
def test_a_last_event_id_that_is_none_is_refused(served: Served, last: str):
    """It is a position, or 422."""
    with served.http.stream("GET", "/stream?limit=1", headers={"last-event-id": last}) as answer:
        assert answer.status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        {"worker_id": "w", "epoch": 2**63},
        {"worker_id": "w", "epoch": -1},
        {"worker_id": "w", "epoch": 10**4_000},
        {"worker_id": "w", "status_code": 2**31},
        {"worker_id": "w", "execution_time_ms": -1},
        {"worker_id": "w", "execution_time_ms": 10**400},
        {"worker_id": "w", "execution_time_ms": True},
        {"worker_id": "w", "execution_time_ms": "1"},
        {"worker_id": ""},
        {"worker_id": "w" * 256},
        {"worker_id": 7},
        {"worker_id": "w", "surprise": 1},
        {},
        [],
        "w",
        None,
        7,
    ],
)
def test_a_report_has_known_fields_of_known_kinds(served: Served, body: Any):
    """Nothing is guessed, cut or left out: 422 that names the field."""
    for verb in ("complete", "fail"):
        status, name = send(served, f"/events/1/{verb}", json.dumps(body))
        assert (status, name) == (422, "invalid-request")


@pytest.mark.parametrize(
    "body",
    [
        {"surprise": 1},
        {"surprise": None},
        {"": None},
        {"id": 7},
        {"type": ""},
        {"type": "a*"},
        {"type": "a" * 256},
        {"type": 7},
        {"title": "t" * 65_537},
        {"tags": ["a,b"]},
        {"tags": [7]},
        {"tags": {"a": 1}},
        {"tags": ",".join(f"t{number}" for number in range(33))},
        {"tags": "t" * 129},
        {"uid": " a"},
        {"uid": "a\nb"},
        {"metadata": {"a": 1}},
        {"metadata": []},
        {"delay": -1},
        {"delay": 10**400},
        {"delay": "1"},
        {"delay": False},
        {"at": "tomorrow"},
        {"at": "2030-01-01T00:00:00"},
        {"at": "0001-01-01T00:00:00+14:00"},
        {"at": "2030-01-01T00:00:00Z", "delay": 1},
        {"priority": 11},
        {"priority": 1.5},
        {"max_retries": -1},
        {"max_retries": True},
        [],
        "event",
        None,
        7,
    ],
)
def test_an_event_has_known_fields_of_known_kinds(served: Served, body: Any):
    """422, alone and as one of a batch, whose other events are not stored either (I2)."""
    assert send(served, "/events", json.dumps(body)) == (422, "invalid-event")
    assert send(served, "/events/batch", json.dumps([{"payload": "good"}, body])) == (422, "invalid-event")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "", "json"])
@pytest.mark.parametrize("path", ["/events", "/events/batch", "/events/1/complete", "/subscriptions"])
def test_another_content_type_is_refused(served: Served, path: str, kind: str):
    """Only JSON is JSON: 415."""
    assert send(served, path, "{}", {"content-type": kind}) == (415, "unsupported-media-type")


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "x"])
def test_a_coded_body_is_refused(served: Served, coding: str):
    """What is said to be packed is not read as if it were not: 415."""
    for path in ("/events", "/events/batch", "/events/1/complete"):
        found = send(served, path, "{}", JSON | {"content-encoding": coding})
        assert found == (415, "unsupported-media-type")


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=x", "text/plain; version=1.x", ";;,=", "*", ""]
)
def test_an_odd_accept_is_answered_all_the_same(served: Served, accept: str):
    """With figures, or an event, in the format that needs no asking for."""
    assert served.http.get("/metrics", headers={"accept": accept}).status_code == 200
    assert served.http.get("/events", headers={"accept": accept}).status_code == 200


def test_a_batch_has_500_events_at_most(served: Served):
    """One more is 422, and so is none; nothing is stored."""
    assert send(served, "/events/batch", json.dumps([{}] * 501))[0] == 422
    assert send(served, "/events/batch", "[]")[0] == 422
    assert send(served, "/events/batch?partial=true", json.dumps([{}] * 501))[0] == 422


@pytest.mark.parametrize("size", [20_000, 1_000_000])
def test_a_huge_query_is_refused(served: Served, size: int):
    """Whether one value or thousands of them."""
    for query in ("tags=" + "a" * size, "&".join(["tags=a"] * (size // 7)), "a" * size):
        with served.socket() as connection:
            connection.sendall(f"GET /events?{query} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def head(served: Served, *more: str, path: str = "/events") -> bytes:
    """Return the head of a POST, ready to be sent by hand."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{served.port}", "Content-Type: application/json", *more, "", ""]
    return "\r\n".join(lines).encode()


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the other side hangs up."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def others_are_served(served: Served) -> bool:
    """Return whether a request of somebody else is answered."""
    return served.http.get("/events?limit=1").status_code == 200


def test_a_gigabyte_announced_is_refused_before_it_is_sent(served: Served):
    """413 on the announcement alone, and the connection is closed."""
    with served.socket() as connection:
        connection.sendall(head(served, "Content-Length: 1073741824"))
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")
    assert others_are_served(served)


def test_a_body_that_was_not_announced_is_refused_where_it_is_too_much(served: Served):
    """413 as soon as the limit is passed: its end is not waited for."""
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with served.socket() as connection:
        connection.sendall(head(served, "Transfer-Encoding: chunked"))
        for _ in range(1_310_720 // 65_536):
            connection.sendall(chunk)
        assert others_are_served(served)
        connection.sendall(chunk)
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")


def test_a_gigabyte_streamed_is_refused_as_soon_as_it_is_too_much(served: Served, crew: Crew):
    """413 within the first megabytes; somebody else is answered while it comes."""
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    sent = 0
    with served.socket() as connection:
        connection.sendall(head(served, "Transfer-Encoding: chunked"))
        crew.start(lambda: read_all(connection))
        try:
            while sent < 1_073_741_824:
                connection.sendall(chunk)
                sent += 65_536
                if sent == 655_360:
                    assert others_are_served(served)
        except OSError:  # hung up on
            pass
        (answer,) = crew.join(60)
    assert sent < 33_554_432
    assert not answer or answer.startswith(b"HTTP/1.1 413 ")
    assert others_are_served(served)


def drip(connection: socket.socket, text: bytes, over: threading.Event) -> bool:
    """Send a byte at a time until hung up on; return whether that came."""
    connection.settimeout(0.1)
    for byte in text:
        try:
            connection.sendall(bytes([byte]))
            if connection.recv(65_536) == b"":
                return True
        except TimeoutError:
            if over.is_set():
                return False
        except OSError:
            return True
    return False


def test_whoever_is_slow_with_the_head_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch, crew: Crew):
    """Twenty who send a byte now and then keep nobody from being served, and lose their connections."""
    monkeypatch.setattr(serve, "HEAD_SECONDS", 1.0)
    over = threading.Event()
    text = head(served, "X-Slow: " + "x" * 10_000)

    def slow() -> bool:
        with served.socket() as connection:
            return drip(connection, text, over)

    crew.start(slow, 20)
    began = time.monotonic()
    while time.monotonic() - began < 1.0:
        assert others_are_served(served)
    assert all(crew.join(60))


def test_whoever_says_nothing_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch):
    """A connection is for asking."""
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.3)
    with served.socket() as connection:
        assert read_all(connection) == b""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/events", "application/json"),
        ("/events", "application/cloudevents+json"),
        ("/events/batch", "application/json"),
        ("/events/1/complete", "application/json"),
        ("/subscriptions", "application/json"),
    ],
)
def test_whoever_is_slow_with_the_body_is_hung_up_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
):
    """408, and the connection is closed; others are served meanwhile."""
    monkeypatch.setattr(served.app.state.desk, "body_seconds", 0.5)
    with served.socket() as connection:
        text = head(served, "Content-Length: 100", path=path).replace(b"application/json", kind.encode())
        connection.sendall(text + b"{")
        assert others_are_served(served)
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "text",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /events HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"\x00" * 1_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_http_does_no_harm(served: Served, monkeypatch: pytest.MonkeyPatch, text: bytes):
    """It is refused or hung up on, never 5xx, and nothing is taken from it."""
    monkeypatch.setattr(serve, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(served.app.state.desk, "body_seconds", 1.0)
    with served.socket() as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert others_are_served(served)


def test_an_endless_head_is_hung_up_on(served: Served):
    """A header without end is cut off after a bounded number of bytes, whatever the time left."""
    sent = 0
    with served.socket() as connection:
        try:
            connection.sendall(head(served)[:-2] + b"X-Long: ")
            while sent < 67_108_864:
                connection.sendall(b"x" * 65_536)
                sent += 65_536
        except OSError:
            pass
    assert sent < 16_777_216
    assert others_are_served(served)


ODD: Final = (
    b"\xe9=\xff",
    b"postbus_session=\xe9.99999999999.\xff",
    b"\x80",
    b"[",
    b"Bearer \xe9",
    b"text/\xff; charset=\xff",
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, bytes]]:
    """Give a server that asks for tokens, with two events, and the header with one for every scope."""
    with serving("sqlite", tmp_path_factory.mktemp("guarded"), auth=True, local=False) as served:
        served.bus.publish_many([{"type": "a"}] * 2)
        yield served, f"Authorization: Bearer {served.token()}".encode()


@pytest.mark.parametrize(
    "name",
    ["cookie", "authorization", "host", "accept", "last-event-id", "idempotency-key", "content-type", "traceparent",
     "origin", "ce-specversion", "content-encoding", "sec-fetch-site", "hx-request", "content-length"],
)  # fmt: skip
def test_a_header_of_any_bytes_is_no_fault_of_ours(guarded: tuple[Served, bytes], name: str):
    """On every route, with a token and without: it is refused or passed over, never a 5xx."""
    served, token = guarded
    asked = [(method, each.path) for each in ROUTES for method in each.methods or ()]
    asked += [("GET", f"/dashboard/{each}") for each in ("", "events", "events/1", "dead", "sign-in", "workers")]
    asked += [("POST", "/dashboard/sign-in"), ("GET", "/events?limit=1"), ("GET", "/dlq?limit=1")]
    asked = [each for each in asked if each[1] not in ("/stream", "/wake")]
    for value in ODD:
        for method, path in asked:
            for lines in ([], [token]):
                address = path.replace("{event_id}", "1").replace("{name}", "default")
                sent = [f"{method} {address} HTTP/1.1".encode(), *lines, name.encode() + b": " + value]
                sent += [b"Connection: close"] + [b"Host: localhost"] * (name != "host")
                with served.socket() as connection:
                    connection.sendall(b"\r\n".join(sent) + b"\r\n\r\n")
                    answer = connection.recv(65_536)
                assert not answer or answer.split(b" ")[1][:1] in b"1234", (method, path, value, answer[:400])
