"""CloudEvents 1.0: what the official SDK sends is what it reads back, in every mode."""

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from cloudevents.core.bindings.http import (
    HTTPMessage,
    from_http_event,
    to_binary_event,
    to_structured_event,
)
from cloudevents.core.v1.event import CloudEvent

from tests.http.serving import Served, serving
from tests.kinds import MOSTLY_SQLITE

STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
SPEC_BATCH: Final = [
    {
        "specversion": "1.0",
        "type": "com.example.someevent",
        "source": "/mycontext/4",
        "id": "B234-1234-1234",
        "time": "2018-04-05T17:31:00Z",
        "comexampleextension1": "value",
        "comexampleothervalue": 5,
        "datacontenttype": "application/vnd.apache.thrift.binary",
        "data_base64": "aGVsbG8=",
    },
    {
        "specversion": "1.0",
        "type": "com.example.someotherevent",
        "source": "/mycontext/9",
        "id": "C234-1234-1234",
        "time": "2018-04-05T17:31:05Z",
        "comexampleextension1": "value",
        "comexampleothervalue": 5,
        "datacontenttype": "application/json",
        "data": {"appinfoA": "abc", "appinfoB": 123, "appinfoC": True},
    },
]
XML_BATCH: Final = [
    {
        "specversion": "1.0",
        "type": "com.example.xml",
        "source": "/mycontext/4",
        "id": "X1",
        "datacontenttype": "application/xml",
        "data": '<much wow="xml"/>',
    },
    SPEC_BATCH[1] | {"id": "X2"},
]


@pytest.fixture(scope="module", params=MOSTLY_SQLITE)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give one server to all tests here; each event has an id of its own."""
    with serving(request.param, tmp_path_factory.mktemp("cloudevents")) as served:
        yield served


def event_of(identity: str, data: Any = None, **more: Any) -> CloudEvent:
    """Return an event as the SDK makes it."""
    attributes = {
        "id": identity,
        "source": "/shop/eu",
        "type": "order.placed",
        "subject": "order/7",
        "time": datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
        "datacontenttype": "application/json",
    }
    return CloudEvent(attributes | more, data)


def send(served: Served, message: HTTPMessage) -> dict[str, Any]:
    """Publish what the SDK wrote; return what the server says of it."""
    answer = served.http.post("/events", content=message.body, headers=message.headers)
    assert answer.status_code == 201, answer.text
    return answer.json()


def read(served: Served, event_id: int, mode: str) -> CloudEvent:
    """Return an event as the SDK reads it."""
    if mode == "binary":
        answer = served.http.get(f"/events/{event_id}", params={"ce": "binary"})
    else:
        answer = served.http.get(f"/events/{event_id}", headers={"accept": STRUCTURED})
        assert answer.headers["content-type"].startswith(STRUCTURED)
    assert answer.status_code == 200
    found = from_http_event(HTTPMessage(dict(answer.headers), answer.content))
    assert isinstance(found, CloudEvent)
    return found


@pytest.mark.parametrize("back", ["structured", "binary"])
@pytest.mark.parametrize("write", [to_structured_event, to_binary_event])
@pytest.mark.parametrize("data", [{"order_id": 7, "deep": {"é": ["\U0001f600", None, 1.5]}}, "text", None], ids=str)
def test_what_the_sdk_publishes_it_reads_back(served: Served, write: Any, back: str, data: Any):
    """Attributes and data are the same, whichever mode each way."""
    kind = "text/plain" if isinstance(data, str) else "application/json"
    event = event_of(f"{write.__name__}-{back}-{data}", data, datacontenttype=kind)
    made = send(served, write(event))
    assert (made["type"], made["payload"]) == ("order.placed", data)
    found = read(served, made["id"], back)
    assert found.get_attributes() == event.get_attributes()
    assert found.get_data() == data


@pytest.mark.parametrize("back", ["structured", "binary"])
@pytest.mark.parametrize("write", [to_structured_event, to_binary_event])
def test_extension_attributes_come_back(served: Served, write: Any, back: str):
    """Whatever extensions it has, with text beyond ASCII, spaces, quotes and percent signs in them."""
    more = {
        "traceparent": "00-a-b-01",
        "partitionkey": "customer-7",
        "myext1": 'Euro € 😀 100% "q" a\\b',
        "tags": "a,b",
    }
    event = event_of(f"ext-{write.__name__}-{back}", {"a": 1}, **more)
    made = send(served, write(event))
    assert (made["key"], made["tags"]) == ("customer-7", "a,b")
    assert read(served, made["id"], back).get_attributes() == event.get_attributes()


@pytest.mark.parametrize("back", ["structured", "binary"])
@pytest.mark.parametrize("write", [to_structured_event, to_binary_event])
def test_bytes_come_back(served: Served, write: Any, back: str):
    """Data that is no JSON travels as data_base64, or as the body."""
    data = bytes(range(256))
    event = event_of(f"bytes-{write.__name__}-{back}", data, datacontenttype="application/octet-stream")
    made = send(served, write(event))
    assert base64.b64decode(made["payload"]) == data
    found = read(served, made["id"], back)
    assert found.get_data() == data
    assert found.get_attributes() == event.get_attributes()


@pytest.mark.parametrize("batch", [SPEC_BATCH, XML_BATCH], ids=["spec", "xml"])
@pytest.mark.parametrize("path", ["/events", "/events/batch"])
def test_the_specs_own_batch_comes_back(served: Served, batch: list[dict[str, Any]], path: str):
    """Two events, one with a string or bytes for data and one with JSON, as the JSON format's example has them."""
    items = [each | {"source": f"{each['source']}{path}"} for each in batch]
    headers = {"content-type": f"{BATCH}; charset=utf-8"}
    answer = served.http.post(path, content=json.dumps(items).encode(), headers=headers)
    assert answer.status_code == 201
    assert len(answer.json()["events"]) == 2
    listed = served.http.get("/events", headers={"accept": BATCH}, params={"limit": 2})
    assert listed.status_code == 200
    assert listed.headers["content-type"].startswith(BATCH)
    assert listed.json() == items[::-1]


def test_an_empty_batch_is_one(served: Served):
    """The JSON format allows it; nothing is stored."""
    before = served.total()
    answer = served.http.post("/events", content=b"[]", headers={"content-type": BATCH})
    assert (answer.status_code, answer.json()) == (201, {"events": []})
    assert served.total() == before


def test_a_batch_of_cloudevents_is_all_or_nothing(served: Served):
    """One that is none stops the others (I2)."""
    before = served.total()
    items = [SPEC_BATCH[0] | {"id": "new"}, {"specversion": "1.0", "id": "x"}]
    answer = served.http.post("/events", content=json.dumps(items).encode(), headers={"content-type": BATCH})
    assert answer.status_code == 422
    assert served.total() == before


def test_source_and_id_name_one_event(served: Served):
    """The same twice, in any mode, is one event; another source with that id is another (I3)."""
    event = event_of("dup", {"a": 1})
    first = send(served, to_structured_event(event))
    before = served.total()
    assert send(served, to_structured_event(event))["id"] == first["id"]
    assert send(served, to_binary_event(event))["id"] == first["id"]
    item = [json.loads(to_structured_event(event).body)]
    many = served.http.post("/events", content=json.dumps(item).encode(), headers={"content-type": BATCH})
    assert many.json()["events"][0]["id"] == first["id"]
    assert served.total() == before
    assert send(served, to_structured_event(event_of("dup", {"a": 1}, source="/elsewhere")))["id"] != first["id"]


def test_two_that_only_look_alike_are_two(served: Served):
    """Source `a#b` with id `c` is not source `a` with id `b#c`."""
    first = send(served, to_structured_event(event_of("c", {"a": 1}, source="a#b")))
    second = send(served, to_structured_event(event_of("b#c", {"a": 1}, source="a")))
    assert first["id"] != second["id"]


def test_an_event_that_was_none_is_shown_as_one(served: Served):
    """What was published otherwise has the required attributes too."""
    made = served.publish(type="plain", payload={"a": 1}, tags="x", key="k")
    for mode in ("structured", "binary"):
        found = read(served, made["id"], mode)
        assert (found.get_id(), found.get_type(), found.get_specversion()) == (made["uid"], "plain", "1.0")
        assert found.get_data() == {"a": 1}
        assert (found.get_extension("tags"), found.get_extension("partitionkey")) == ("x", "k")


@pytest.mark.parametrize(
    "wrong",
    [
        {"specversion": "0.3"},
        {"specversion": None},
        {"id": ""},
        {"id": 7},
        {"source": ""},
        {"type": ""},
        {"time": "yesterday"},
        {"time": "2026-01-01T00:00:00"},
        {"time": "2026-W01-1T00:00:00Z"},
        {"time": "20260101T000000Z"},
        {"time": "2026-01-01T00:00:00+0200"},
        {"time": "2026-01-01 00:00:00Z"},
        {"time": "2026-01-01_00:00:00Z"},
        {"time": "2026-01-01T00:00Z"},
        {"time": "2026-01-01T24:00:00Z"},
        {"time": "2026-02-30T00:00:00Z"},
        {"time": "2026-01-01T00:00:61Z"},
        {"time": "2026-01-01T00:00:00,5Z"},
        {"time": "2026-01-01T00:00:00+24:00"},
        {"time": "2026-01-01T00:00:0\u0663Z"},
        {"time": ""},
        {"subject": ""},
        {"dataschema": ""},
        {"datacontenttype": ""},
        {"Upper": "x"},
        {"with_underscore": "x"},
        {"nested": {"a": 1}},
        {"number": 1.5},
        {"number": 2**31},
        {"data_base64": "?"},
        {"data_base64": 7},
        {"data": 1, "data_base64": "aGVsbG8="},
        {"datacontenttype": "text"},
        {"datacontenttype": "text/€"},
        {"datacontenttype": "text/html\r\nset-cookie: a=b"},
        {"id": "\ud800"},
        {"source": "\ud800"},
    ],
)
def test_what_is_no_cloudevent_is_refused(served: Served, wrong: dict[str, Any]):
    """422, in structured mode and in a batch; nothing is stored."""
    before = served.total()
    body = {"specversion": "1.0", "id": "w", "source": "/s", "type": "t"} | wrong
    for kind, content in ((STRUCTURED, body), (BATCH, [body])):
        answer = served.http.post("/events", content=json.dumps(content).encode(), headers={"content-type": kind})
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-event")
    assert served.total() == before


@pytest.mark.parametrize("missing", ["ce-id", "ce-source", "ce-type"])
def test_binary_mode_needs_its_headers(served: Served, missing: str):
    """422, and nothing is stored."""
    headers = dict(to_binary_event(event_of("binary-missing", {"a": 1})).headers)
    del headers[missing]
    before = served.total()
    assert served.http.post("/events", content=b"{}", headers=headers).status_code == 422
    assert served.total() == before


def test_binary_mode_with_json_that_is_none_is_refused(served: Served):
    """The data is what its content type says."""
    headers = dict(to_binary_event(event_of("binary-broken", {"a": 1})).headers)
    for body in (b"{", b"NaN", b'"\xff"', '{"a": 1}'.encode("utf-16"), b'\xef\xbb\xbf{"a": 1}'):
        assert 400 <= served.http.post("/events", content=body, headers=headers).status_code < 500


@pytest.mark.parametrize(
    "metadata",
    [
        {"ce-data-base64": "true"},
        {"ce-source": "/s", "ce-id": "1", "ce-data-base64": "true"},
        {"ce-source": "/s", "ce-id": "1", "ce-not-text": "id,x", "ce-x": "{"},
        {"ce-source": "/s", "ce-id": "", "ce-time": "yesterday"},
        {"ce-source": "/s", "ce-id": "1", "ce-a:b c": "x", "ce-€": "y"},
        {"ce-source": "/s", "ce-id": "1", "ce-datacontenttype": "text/html\r\nset-cookie: a=b"},
        {"ce-source": "/s", "ce-id": "1", "ce-specversion": "0.3", "ce-type": "other"},
    ],
)
def test_metadata_of_anybodys_making_leaves_an_event_readable(served: Served, metadata: dict[str, str]):
    """Whoever publishes chooses it: neither the event nor the page it stands on can be spoilt for others (I17)."""
    made = served.publish(type="plain", payload={"a": 1}, metadata=metadata)
    for mode in ("structured", "binary"):
        found = read(served, made["id"], mode)
        assert (found.get_type(), found.get_specversion(), found.get_data()) == ("plain", "1.0", {"a": 1})
    listed = served.http.get("/events", headers={"accept": BATCH}, params={"limit": 1})
    assert [each["data"] for each in listed.json()] == [{"a": 1}]


def test_a_page_that_was_published_is_no_page_of_this_site(served: Served):
    """Its publisher chooses its kind; a browser shows it apart from the dashboard, and runs nothing in it (I17)."""
    event = event_of("page", "<script src=/events/1?ce=binary></script>", datacontenttype="text/html")
    made = send(served, to_structured_event(event))
    answer = served.http.get(f"/events/{made['id']}", params={"ce": "binary"})
    assert answer.headers["content-type"] == "text/html"
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_text_of_any_kind_comes_back_bare_in_binary_mode(served: Served):
    """XML in a string is XML in a body, and not a JSON string of it."""
    answer = served.http.post(
        "/events", content=json.dumps(XML_BATCH[0] | {"id": "bare"}).encode(), headers={"content-type": STRUCTURED}
    )
    found = served.http.get(f"/events/{answer.json()['id']}", params={"ce": "binary"})
    assert (found.content, found.headers["content-type"]) == (b'<much wow="xml"/>', "application/xml")


@pytest.mark.parametrize(
    "moment",
    [
        "2026-01-02t03:04:05z",
        "2016-12-31T23:59:60Z",
        "2026-01-02T03:04:05.123456789-23:59",
        "2026-01-02T03:04:05+00:00",
    ],
)
def test_a_time_is_rfc_3339_in_all_its_forms(served: Served, moment: str):
    """Lower case and leap seconds, too; it comes back as it was sent."""
    body = {"specversion": "1.0", "id": moment, "source": "/time", "type": "t", "time": moment}
    made = served.http.post("/events", content=json.dumps(body).encode(), headers={"content-type": STRUCTURED})
    assert made.status_code == 201, made.text
    told = served.http.get(f"/events/{made.json()['id']}", headers={"accept": STRUCTURED}).json()
    assert told["time"] == moment


def test_an_event_without_data_has_none(served: Served):
    """In binary mode its body is empty, in structured mode it has no `data`."""
    body = {"specversion": "1.0", "id": "bare", "source": "/none", "type": "t"}
    made = served.http.post("/events", content=json.dumps(body).encode(), headers={"content-type": STRUCTURED}).json()
    assert served.http.get(f"/events/{made['id']}", params={"ce": "binary"}).content == b""
    assert served.http.get(f"/events/{made['id']}", headers={"accept": STRUCTURED}).json() == body


@pytest.mark.parametrize(
    ("charset", "text"),
    [("utf-8", "é€"), ("UTF-8", "é€"), ("iso-8859-1", "é"), ('"latin1"', "é"), ("windows-1252", "é€")],
)
def test_text_is_read_in_the_charset_that_it_names(served: Served, charset: str, text: str):
    """In every mode; in binary mode it comes back in the same."""
    coding = charset.strip('"')
    headers = {"ce-specversion": "1.0", "ce-id": charset, "ce-type": "t"}
    for kind, data in ((f"text/plain; charset={charset}", text), (f"application/json; charset={charset}", f'"{text}"')):
        sent = headers | {"content-type": kind, "ce-source": kind}
        made = served.http.post("/events", content=data.encode(coding), headers=sent)
        assert (made.status_code, made.json().get("payload")) == (201, text), made.text
        back = served.http.get(f"/events/{made.json()['id']}", params={"ce": "binary"})
        assert (back.headers["content-type"], back.content.decode(coding)) == (kind, data)
    body = {"specversion": "1.0", "id": charset, "source": "/structured", "type": "t", "data": text}
    for kind, value in ((STRUCTURED, body), (BATCH, [body | {"source": "/batch"}])):
        content = json.dumps(value, ensure_ascii=False).encode(coding)
        made = served.http.post("/events", content=content, headers={"content-type": f"{kind}; charset={charset}"})
        told = made.json()
        assert (made.status_code, told.get("events", [told])[0]["payload"]) == (201, text)


@pytest.mark.parametrize("charset", ["hex", "zip", "unicode_escape", "none-such", "idna", "iso-2022-jp", "utf-16"])
def test_another_charset_is_refused(served: Served, charset: str):
    """422: what is not known to be a charset of text is not tried."""
    binary = {"ce-specversion": "1.0", "ce-id": "c", "ce-source": "/c", "ce-type": "t"}
    for kind, headers in (("text/plain", binary), (STRUCTURED, {})):
        sent = headers | {"content-type": f"{kind}; charset={charset}"}
        answer = served.http.post("/events", content=b"{}", headers=sent)
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-event")
