"""CloudEvents: whatever comes is refused or kept, and given back as it came; whatever is kept can be given."""

import base64
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from postbus.errors import InvalidRequest
from postbus.http.cloudevents import from_binary, from_structured, to_binary, to_structured
from postbus.http.reading import Refused, parsed
from postbus.http.wire import as_json
from postbus.model import Event
from postbus.payload import MAX_PAYLOAD, Draft, draft

__all__ = ["SEEDS", "check"]

_PLAIN: Final = b'"specversion": "1.0", "id": "1", "source": "/s", "type": "t"'
SEEDS: Final = (
    b"{%b}" % _PLAIN,
    b'{%b, "data": {"a": [1]}, "time": "2026-01-01T00:00:00Z", "subject": " ", "n": -5, "b": true, "e": ""}' % _PLAIN,
    b'{%b, "data": "<a/>", "datacontenttype": "application/xml; charset=utf-8"}' % _PLAIN,
    b'{%b, "data": "x", "datacontenttype": "text/plain"}' % _PLAIN,
    b'{%b, "data_base64": "aGVsbG8=", "datacontenttype": "image/png"}' % _PLAIN,
    b'{%b, "datacontenttype": "text/html\\r\\nx: y"}' % _PLAIN,
    b'{%b, "datacontenttype": "text/\\u20ac"}' % _PLAIN,
    b'{"specversion": "1.0", "id": "\\ud800", "source": "\\udfff", "type": "t"}',
    b'{%b, "tags": "a, b", "partitionkey": "k", "traceparent": "00-a-b-01", "x": "\\u0000"}' % _PLAIN,
    b'{"ce-source": "/s", "ce-id": "1", "ce-not-text": "id,x", "ce-x": "{", "ce-data-base64": "true"}',
    b'{"ce-source": "", "ce-id": "1", "ce-type": "other", "ce-specversion": "0.3", "ce-data": "x"}',
    b'{"ce-source": "/s", "ce-id": "1", "ce-a:b c": "x", "ce-\\u20ac": "y", "ce-datacontenttype": "a/b\\r\\nc: d"}',
    b'{"ce-source": "/s", "ce-id": "1", "ce-time": "yesterday"}',
)
MOMENT: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_HEADER: Final = re.compile(r"(?:[!-~](?:[\t -~]*[!-~])?)?")
_BARE: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def check(data: bytes) -> None:
    """Take one text for a CloudEvent, for the metadata of an event, and for the body of one in binary mode."""
    try:
        given = parsed(data, MAX_PAYLOAD)
    except Refused:
        given = None
    _check_structured(given)
    if isinstance(given, dict):
        _check_metadata(given)
    kinds = [given.get("datacontenttype")] if isinstance(given, dict) else []
    for kind in ("application/json", "text/plain", "a/b", *(each for each in kinds if isinstance(each, str))):
        _check_binary({"content-type": kind}, data)


def _check_structured(given: Any) -> None:
    """See that what is taken comes back: in structured mode as it is, in binary mode as text."""
    made = stored(lambda: from_structured(given))
    if made is None:
        return
    event = event_of(made)
    sent = {name: value for name, value in given.items() if value is not None}
    assert given_back(event) == sent
    again = _through_headers(event)
    texts = {name: _text(value) for name, value in sent.items() if not name.startswith("data")}
    assert {name: value for name, value in again.items() if not name.startswith("data")} == texts


def _check_metadata(given: Mapping[str, Any]) -> None:
    """See that metadata of anybody's making does no harm: the event is shown as a CloudEvent all the same."""
    metadata = {str(name)[:255]: str(value)[:1_000] for name, value in given.items()}
    for payload in ({"a": 1}, "aGVsbG8=", "no base64", None):
        made = stored(lambda payload=payload: {"type": "t", "payload": payload, "metadata": metadata, "key": "k"})
        if made is not None:
            event = event_of(made)
            assert from_structured(given_back(event))["type"] == "t"
            assert _through_headers(event)["type"] == "t"


def _check_binary(headers: Mapping[str, str], body: bytes) -> None:
    """See that a body that is taken comes back, byte by byte unless it is JSON."""
    told = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t", **headers}
    made = stored(lambda: from_binary(told, body))
    if made is None:
        return
    given, back = to_binary(event_of(made))
    assert given["content-type"] == headers["content-type"]
    if made.payload == "null":
        assert (body.strip(b" \t\r\n") or b"null", back) == (b"null", b"")
    elif json.loads(made.metadata).get("ce-data-base64") or headers["content-type"].startswith("text/plain"):
        assert back == body


def stored(fields: Any) -> Draft | None:
    """Return what would be stored, None if it is refused; any other error is a finding."""
    try:
        return draft(fields())
    except (InvalidRequest, Refused):
        return None


def event_of(made: Draft) -> Event:
    """Return a draft as the event that it becomes."""
    told = json.loads(made.metadata)
    return Event(1, made.uid, made.type, made.value, made.tags, made.key, None, None, told, MOMENT)


def given_back(event: Event) -> dict[str, Any]:
    """Return an event as its readers get it."""
    return json.loads(as_json(to_structured(event)))


def _through_headers(event: Event) -> dict[str, Any]:
    """Send an event in binary mode, by headers that HTTP can carry; return it as read on the other side."""
    headers, body = to_binary(event)
    for name, value in headers.items():
        assert _BARE.fullmatch(name), f"{name!r} is no header"
        assert _HEADER.fullmatch(value), f"{value!r} is no header's value"
    try:
        again = given_back(event_of(draft(from_binary(headers, body))))
    except InvalidRequest:
        assert "data_base64" in to_structured(event), "bytes may be sent as what they are not; nothing else may"
        return to_structured(event)
    assert _bytes(again) == body
    return again


def _bytes(told: Mapping[str, Any]) -> bytes:
    """Return the data of a CloudEvent as its body."""
    if "data_base64" in told:
        return base64.b64decode(told["data_base64"])
    if "data" not in told:
        return b""
    kind = told.get("datacontenttype", "application/json").partition(";")[0].strip().lower()
    plain = isinstance(told["data"], str) and not re.fullmatch(r"(?:application|text)/(?:[\w.-]+\+)?json", kind)
    return told["data"].encode() if plain else as_json(told["data"])


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
