"""CloudEvents 1.0 over HTTP, both ways: structured, binary and batch mode.

An event keeps what CloudEvents says of it in its metadata, as `ce-…`, so that it can be given back as it came:
`source`, `id`, `subject`, `time`, and whatever extensions it has. Its `uid` is made of `source` and `id`, which name it
together; the extension `partitionkey` is its `key`, and `tags` (as in `a,b`) its tags.
"""

import base64
import binascii
import codecs
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from postbus.errors import InvalidEventError
from postbus.http.wire import as_json, moment_json, moment_of
from postbus.model import Event
from postbus.payload import parse

__all__ = [
    "BATCH",
    "STRUCTURED",
    "from_binary",
    "from_structured",
    "in_utf8",
    "is_binary",
    "to_binary",
    "to_structured",
]

STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
PREFIX: Final = "ce-"
CODED: Final = "ce-data-base64"
BARE: Final = "ce-not-text"
"""Names the attributes that came as JSON numbers or booleans."""
MAX_UID: Final = 255
TEXTS: Final = frozenset({"specversion", "id", "source", "type", "subject", "time", "datacontenttype", "dataschema"})
"""The attributes that are strings whatever they look like."""
TRACES: Final = ("traceparent", "tracestate")
_NAME: Final = re.compile(r"[a-z0-9]{1,255}")
_BARE: Final = re.compile(r"true|false|-?(?:0|[1-9][0-9]{0,9})")
_MEDIA: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+/[\w!#$%&'*+.^`|~-]+(?:[ \t]*;(?:[\t -~]*[!-~])?)?", re.ASCII)
_CHARSET: Final = re.compile(
    r""";[ \t]*charset[ \t]*=[ \t]*"?([\w.:-]{1,40})"?[ \t]*(?:;|$)""", re.ASCII | re.IGNORECASE
)
_KNOWN: Final = re.compile(r"utf-8|ascii|iso8859-\d{1,2}|cp125\d")
_JSON: Final = re.compile(r"(?:application|text)/(?:[\w.-]+\+)?json")


def is_binary(headers: Mapping[str, str]) -> bool:
    """Return whether a request carries a CloudEvent in its headers."""
    return "ce-specversion" in headers


def from_structured(given: object) -> dict[str, Any]:
    """Return the fields of an event to publish; raise InvalidEventError for what is no CloudEvent."""
    if not isinstance(given, dict):
        raise InvalidEventError("a CloudEvent is a JSON object")
    attributes: dict[str, Any] = {str(name): value for name, value in given.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if "data" in attributes and "data_base64" in attributes:
        raise InvalidEventError("a CloudEvent has data or data_base64, not both")
    metadata: dict[str, str] = {}
    payload = attributes.get("data")
    if "data_base64" in attributes:
        payload = attributes["data_base64"]
        _check_base64(payload)
        metadata[CODED] = "true"
    told = {name: value for name, value in attributes.items() if name not in ("data", "data_base64")}
    return _fields(told, payload, metadata)


def from_binary(headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the fields of an event to publish from `ce-…` headers and the body, which is the data."""
    told: dict[str, Any] = {
        name.removeprefix(PREFIX): unquote(value) for name, value in headers.items() if name.startswith(PREFIX)
    }
    kind = headers.get("content-type")
    if kind is not None:
        told["datacontenttype"] = kind
    metadata: dict[str, str] = {}
    payload: Any = None
    if body:
        if _is_json(kind or "application/json"):
            payload = parse(in_utf8(body, kind))
        elif (kind or "").lower().startswith("text/"):
            payload = _text(in_utf8(body, kind))
        else:
            payload = base64.b64encode(body).decode()
            metadata[CODED] = "true"
    return _fields(told, payload, metadata)


def _is_json(kind: str) -> bool:
    return _JSON.fullmatch(kind.partition(";")[0].strip().lower()) is not None


def in_utf8(body: bytes, kind: str | None) -> bytes:
    """Return text as UTF-8, whichever charset its kind names; raise InvalidEventError where it is no text in that."""
    charset = _charset(kind)
    if charset == "utf-8":
        return body
    try:
        return body.decode(charset).encode()
    except UnicodeError:
        raise InvalidEventError(f"the text of this CloudEvent is not {charset}, as its content type says") from None


def _charset(kind: str | None) -> str:
    """Return the name of the charset that a kind of text names, UTF-8 if it names none; raise InvalidEventError."""
    found = _CHARSET.search(kind or "")
    try:
        name = codecs.lookup(found[1]).name if found is not None else "utf-8"
    except LookupError:
        name = ""
    if not _KNOWN.fullmatch(name):
        raise InvalidEventError("the charset of a CloudEvent is utf-8, us-ascii, iso-8859-… or windows-125…")
    return name


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise InvalidEventError("the text of this CloudEvent is not UTF-8") from None


def _check_base64(value: object) -> None:
    try:
        if not isinstance(value, str):
            raise InvalidEventError("data_base64 must be a string")
        base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidEventError("data_base64 is not base64") from None


def _fields(told: Mapping[str, Any], payload: Any, metadata: dict[str, str]) -> dict[str, Any]:
    _check(told)
    given = {name: value for name, value in told.items() if name not in ("specversion", "type") and value is not None}
    metadata |= {PREFIX + name: _attribute(name, value) for name, value in given.items()}
    if bare := [name for name, value in given.items() if not isinstance(value, str)]:
        metadata[BARE] = ",".join(bare)
    fields: dict[str, Any] = {"type": told["type"], "payload": payload, "metadata": metadata}
    fields["uid"] = _uid(told["source"], told["id"])
    if (key := told.get("partitionkey")) is not None:
        fields["key"] = key
    if isinstance(tags := told.get("tags"), str):
        fields["tags"] = [tag.strip() for tag in tags.split(",") if tag.strip()]
    return fields


def _check(told: Mapping[str, Any]) -> None:
    """Raise InvalidEventError unless the attributes are those of a CloudEvent; null is as good as none."""
    if told.get("specversion") != "1.0":
        raise InvalidEventError("a CloudEvent has specversion 1.0")
    for name in ("id", "source", "type"):
        if not isinstance(told.get(name), str) or not told[name]:
            raise InvalidEventError(f"a CloudEvent has a non-empty string for {name}")
    for name in ("subject", "time", "datacontenttype", "dataschema"):
        if not isinstance(told.get(name), str | None) or told.get(name) == "":
            raise InvalidEventError(f"{name} of a CloudEvent is a string that is not empty")
    if (wrong := next((name for name in told if not _NAME.fullmatch(name) or name == "data"), None)) is not None:
        raise InvalidEventError(f"an attribute of a CloudEvent is named by a-z and 0-9, not {wrong!r:.60}")
    if told.get("time") is not None:
        moment_of(told["time"])
    if (kind := told.get("datacontenttype")) is not None and not _MEDIA.fullmatch(kind):
        raise InvalidEventError("datacontenttype of a CloudEvent is a media type such as application/json")


def _attribute(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and -(1 << 31) <= value < 1 << 31:
        return str(value)
    raise InvalidEventError(f"the attribute {name!r:.60} of a CloudEvent is a string, a boolean or a 32-bit integer")


def _uid(source: str, identity: str) -> str:
    """Return the key for deduplication; source and id name the event together."""
    uid = f"{source}#{identity}"
    if len(uid) <= MAX_UID and uid.isprintable() and uid == uid.strip() and "#" not in identity:
        return uid
    try:
        return hashlib.sha256(as_json([source, identity])).hexdigest()
    except UnicodeEncodeError:
        raise InvalidEventError("source and id of a CloudEvent have no lone surrogates, which are no text") from None


def _attributes(event: Event) -> dict[str, str]:
    told: dict[str, str] = {name: event.metadata[name] for name in TRACES if name in event.metadata}
    if event.key is not None:
        told["partitionkey"] = event.key
    if event.tags:
        told["tags"] = ",".join(event.tags)
    return told | (_as_it_came(event) or _of_its_own(event))


def _as_it_came(event: Event) -> dict[str, str] | None:
    """Return what an event said of itself that was published as a CloudEvent; None of another.

    Anybody may write metadata: what does not make a CloudEvent is not taken for one.
    """
    kept = {
        name.removeprefix(PREFIX): value
        for name, value in event.metadata.items()
        if name.startswith(PREFIX) and name not in (CODED, BARE)
    }
    told = kept | {"specversion": "1.0", "type": event.type}
    try:
        _check(told)
    except InvalidEventError:
        return None
    return told


def _of_its_own(event: Event) -> dict[str, str]:
    return {
        "specversion": "1.0",
        "id": event.uid,
        "source": "/events",
        "type": event.type,
        "time": moment_json(event.created_at) or "",
        "datacontenttype": "application/json",
    }


def _coded(event: Event) -> bytes | None:
    """Return the bytes that a payload stands for; None if it is JSON, whatever the metadata claims."""
    if CODED not in event.metadata or not isinstance(event.payload, str) or _as_it_came(event) is None:
        return None
    try:
        return base64.b64decode(event.payload, validate=True)
    except ValueError:
        return None


def to_structured(event: Event) -> dict[str, Any]:
    """Return an event as a CloudEvent in JSON."""
    told: dict[str, Any] = dict(_attributes(event))
    for name in event.metadata.get(BARE, "").split(","):
        if name in told and name not in TEXTS and _BARE.fullmatch(told[name]):
            told[name] = parse(told[name])
    if event.payload is not None:
        told["data" if _coded(event) is None else "data_base64"] = event.payload
    return told


def to_binary(event: Event) -> tuple[dict[str, str], bytes]:
    """Return an event as headers and a body."""
    told, coded = _attributes(event), _coded(event)
    kind = told.pop("datacontenttype", "application/json" if coded is None else "application/octet-stream")
    headers = {PREFIX + name: quote(value, safe="!#$&'()*+,/:;=?@[]~-._") for name, value in told.items()}
    headers["content-type"] = kind
    if coded is not None:
        return headers, coded
    if event.payload is None:
        return headers, b""
    text = event.payload if isinstance(event.payload, str) and not _is_json(kind) else as_json(event.payload).decode()
    try:
        return headers, text.encode(_charset(kind))
    except (InvalidEventError, UnicodeEncodeError):  # anybody may write metadata
        headers["content-type"] = f"{kind.partition(';')[0].strip()}; charset=utf-8"
        return headers, text.encode()
