"""The one validator for every edge: what may be published, and how it is kept.

JSON only, and only what comes back exactly as it went in. Refused, the same everywhere: NaN and infinities, NUL,
lone surrogates, keys that are not strings, more than 64 levels, more than 1 MiB, and whatever Python's json would
change without a word (tuples, subclasses of str or int, sets, dates, duplicate keys).

Payloads are kept as text. Integers beyond 64 bits are legal JSON that orjson would read back as floats; a text that
holds one starts with a space, which tells `decode` to read it with the standard library instead.
"""

import json
import marshal
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from math import isfinite
from typing import Any, Final, NamedTuple, NoReturn, cast

import orjson
import uuid_utils

from postbus.errors import InvalidEventError, InvalidPayloadError
from postbus.model import Json, NewEvent

__all__ = ["MAX_DEPTH", "MAX_PAYLOAD", "Draft", "decode", "draft", "drafts", "drafts_of_text", "encode", "parse"]

MAX_DEPTH: Final = 64
MAX_PAYLOAD: Final = 1_048_576
MAX_TYPE: Final = 255
MAX_TAGS: Final = 32
MAX_TAG: Final = 128
MAX_TEXT: Final = 65_536
MAX_PRIORITY: Final = 10
MAX_DIGITS: Final = 4_300
FIELDS: Final = frozenset(field.name for field in fields(NewEvent))
_SIMPLE: Final = frozenset({"type", "payload"})
BITS_A_DIGIT: Final = 3.3219
ENCODE_CHUNK: Final = 100
_WIDE: Final = 1 << 63
_PLAIN: Final = frozenset({str, dict, list, int, float, bool, type(None)})
_DICT: Final[Any] = dict
_BOXES: Final[frozenset[type[Any]]] = frozenset({dict, list})
_STRICT: Final = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


class Draft(NamedTuple):
    """A validated event, ready to be stored. `supplied` tells whether the producer chose the uid."""

    uid: str
    type: str
    payload: str
    value: Json
    """What the payload's text reads back as: a copy of the caller's object."""
    supplied: bool = False
    tags: tuple[str, ...] = ()
    key: str | None = None
    title: str | None = None
    description: str | None = None
    metadata: str = "{}"
    delay: timedelta | None = None
    at: datetime | None = None
    priority: int = 0
    max_retries: int | None = None


def encode(payload: Json) -> str:
    """Return the text to store for a payload; raise InvalidPayloadError if it would not come back the same."""
    return _encode([payload])[0][0]


def _encode(payloads: list[Json]) -> list[tuple[str, Json]]:
    """Return for each payload the text to store and what it reads back as.

    The checks are done in C, for all at once: orjson writes and reads them back, equality finds what changed on the
    way, and marshal, which knows exact types only, what equality overlooks (an IntEnum equals its number).
    Only when one of them fails is each payload gone through value by value, to say what is wrong with it.
    """
    _check_shape(payloads)
    try:
        # Decoded one by one: kept as bytes, each would hold on to orjson's larger buffer, at four times the cost.
        texts = [orjson.dumps(payload, option=_STRICT).decode() for payload in payloads]
        joined = f"[{','.join(texts)}]"
        values: list[Json] = orjson.loads(joined)
        marshal.dumps(payloads)
        good = values == payloads and not ("\\" in joined and "\\u0000" in joined)
    except (TypeError, ValueError):
        good, texts, values = False, [], []
    if not good:
        return [_encode_carefully(payload) for payload in payloads]
    for text in texts:
        _check_size(text)
    return list(zip(texts, values, strict=True))


def _encode_carefully(payload: Json) -> tuple[str, Json]:
    wide = _check(payload)
    text = " " + json.dumps(payload, separators=(",", ":")) if wide else orjson.dumps(payload).decode()
    _check_size(text)
    return text, decode(text)


def _check_size(text: str) -> None:
    if len(text) <= MAX_PAYLOAD // 4:  # no character takes more than four bytes
        return
    if (size := len(text.encode())) > MAX_PAYLOAD:
        raise InvalidPayloadError(
            f"the payload has {size:,} bytes of JSON, the limit is {MAX_PAYLOAD:,}: "
            "store it elsewhere and publish a reference"
        )


def _check_shape(payloads: list[Json]) -> None:
    """Raise InvalidPayloadError for what is too deep or has too many parts to be written at all."""
    level: list[Any] = [payload for payload in payloads if type(payload) in _BOXES]
    most = MAX_PAYLOAD * len(payloads)
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        if len(level) > most:
            raise InvalidPayloadError(f"the payload has more than {MAX_PAYLOAD:,} parts")
        level = [
            part for box in level for part in (box.values() if type(box) is _DICT else box) if type(part) in _BOXES
        ]
    raise InvalidPayloadError(f"the payload is nested more than {MAX_DEPTH} levels deep")


def decode(text: str) -> Json:
    """Return the payload that `encode` made this text from."""
    return orjson.loads(text) if text[0] != " " else json.loads(text)


def parse(text: str | bytes, *, limit: int = MAX_PAYLOAD) -> Json:
    """Return the value of JSON text from outside (bytes are UTF-8), refusing what Python would change on reading.

    Raises InvalidPayloadError for text that is not JSON, too large or too deep, for duplicate keys and for numbers
    that overflow; the result still has to pass `encode`.
    """
    if len(text) > limit:
        raise InvalidPayloadError(f"the payload is larger than {limit:,} bytes")
    try:
        told = text if isinstance(text, str) else text.decode()  # or Python guesses at UTF-16 and UTF-32 too
        if (same := _same(told)) is not None:
            return same[0]
        return json.loads(told, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise InvalidPayloadError(f"the payload is nested more than {MAX_DEPTH} levels deep") from None
    except InvalidPayloadError:
        raise
    except ValueError as error:
        raise InvalidPayloadError(f"the payload is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise InvalidPayloadError("the payload has an object with the same key twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise InvalidPayloadError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise InvalidPayloadError("the payload has a number too large for a float")
    return value


def _check(payload: Json) -> bool:
    """Raise InvalidPayloadError unless every part is plain JSON; return whether an integer is wider than 64 bits.

    The payload's shape has been checked, so this ends.
    """
    wide = False
    parts: list[Any] = [payload]
    while parts:
        part = parts.pop()
        wide |= _check_one(part)
        if isinstance(part, dict):
            parts.extend(cast("dict[str, Any]", part).values())
        elif isinstance(part, list):
            parts.extend(cast("list[Any]", part))
    return wide


def _check_one(value: Any) -> bool:
    kind = cast("type[object]", type(value))
    if kind is str:
        _check_text(value)
    elif kind is dict:
        for key in value:
            _check_key(key)
    elif kind is int:
        return not -_WIDE <= value < 2 * _WIDE and _check_wide(value)
    elif kind is float and not isfinite(value):
        raise InvalidPayloadError(f"{value} is not JSON: publish null or a string")
    elif kind not in _PLAIN:
        raise InvalidPayloadError(_why_not(value))
    return False


def _check_wide(value: int) -> bool:
    if value.bit_length() > MAX_DIGITS * BITS_A_DIGIT:
        raise InvalidPayloadError(f"an integer of more than {MAX_DIGITS:,} digits cannot be read back")
    return True


def _check_text(value: str) -> None:
    if "\0" in value:
        raise InvalidPayloadError("the payload has a NUL character, which PostgreSQL cannot keep")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidPayloadError("the payload has a lone surrogate, which is not Unicode text") from None


def _check_key(key: object) -> None:
    if type(key) is not str:
        raise InvalidPayloadError(f"object keys must be strings, not {type(key).__name__} ({key!r:.40})")
    _check_text(key)


def _why_not(value: object) -> str:
    name = type(value).__name__
    if isinstance(value, tuple):
        return "a tuple would come back as a list: publish a list"
    if isinstance(value, (str, int, float, dict, list)):
        return f"{name} is a subclass that would come back as a plain one: convert it first"
    if hasattr(value, "model_dump"):
        return f"{name} is a model, not JSON: publish its model_dump(mode='json')"
    if is_dataclass(value):
        return f"{name} is a dataclass, not JSON: publish dataclasses.asdict(it)"
    return f"{name} is not JSON: convert it first (dates as isoformat(), sets as sorted lists)"


def draft(new: NewEvent | Mapping[str, Any]) -> Draft:
    """Validate an event to publish; raise InvalidEventError or InvalidPayloadError, naming what is wrong."""
    return drafts([new])[0]


def drafts(events: Iterable[NewEvent | Mapping[str, Any]]) -> list[Draft]:
    """Validate events to publish, all or none: the first that is wrong raises."""
    given = [_given(new) for new in events]
    encoded: list[tuple[str, Json]] = []
    for start in range(0, len(given), ENCODE_CHUNK):
        encoded += _encode([each.get("payload") for each in given[start : start + ENCODE_CHUNK]])
    return [_draft(each, text, value) for each, (text, value) in zip(given, encoded, strict=True)]


def drafts_of_text(events: Iterable[Mapping[str, Any]]) -> list[Draft]:
    """Validate events whose payloads are JSON text from outside (None: null), as `drafts` does those of values.

    What is kept is the text that `encode` makes of it: the same JSON, perhaps with other spaces.
    """
    given = [_given(new) for new in events]
    encoded = [_encode_text(each.get("payload")) for each in given]
    _check_shape([value for _, value in encoded])
    return [_draft(each, text, value) for each, (text, value) in zip(given, encoded, strict=True)]


def _encode_text(text: object) -> tuple[str, Json]:
    """Return the text to store and its value, less the look at the depth.

    Text that comes back the same from being read and written in C is what it seems to be: a key given twice, an
    integer too wide or a number too large would not.
    """
    if text is None:
        return "null", None
    if not isinstance(text, str):
        raise InvalidPayloadError(f"the payload must be JSON text, not {type(text).__name__}")
    if len(text) <= MAX_PAYLOAD and (same := _same(text)) is not None:
        _check_size(text)
        return text, same[0]
    return _encode([parse(text)])[0]


def _same(text: str) -> tuple[Json] | None:
    """Return the value of a text that is written again just as it was read."""
    try:
        value: Json = orjson.loads(text)
        same = orjson.dumps(value).decode() == text and not ("\\" in text and "\\u0000" in text)
    except (TypeError, ValueError):
        return None
    return (value,) if same else None


def _draft(given: Mapping[str, Any], text: str, value: Json) -> Draft:
    get = given.get
    if given.keys() <= _SIMPLE:
        # Most events are a type and a payload.
        return Draft(_uid(None), _type_of(get("type")), text, value)
    kind, tags, uid, key, title, description = map(get, ("type", "tags", "uid", "key", "title", "description"))
    delay, at, priority, max_retries = map(get, ("delay", "at", "priority", "max_retries"))
    metadata = get("metadata")
    if delay is not None or at is not None:
        delay, at = _when(delay, at)
    return Draft(
        _uid(uid),
        _type_of(kind),
        text,
        value,
        uid is not None,
        () if tags is None or tags == () else _tags(tags),
        None if key is None else _name(key, "key", MAX_TYPE),
        None if title is None else _text(title, "title", MAX_TEXT),
        None if description is None else _text(description, "description", MAX_TEXT),
        "{}" if metadata is None else _metadata(metadata),
        delay,
        at,
        0 if priority is None else _whole(priority, "priority", -MAX_PRIORITY, MAX_PRIORITY),
        None if max_retries is None else _whole(max_retries, "max_retries", 0, 1_000_000),
    )


def _given(new: object) -> Mapping[str, Any]:
    """Return the fields by name; raise InvalidEventError if it is no event, or has a field that events have not."""
    if isinstance(new, NewEvent):
        return {name: getattr(new, name) for name in FIELDS}
    if type(new) is not dict and not isinstance(new, Mapping):
        raise InvalidEventError(f"an event is a NewEvent or a mapping of its fields, not {type(new).__name__}")
    given = cast("Mapping[str, Any]", new)
    if not given.keys() <= FIELDS:
        unknown = ", ".join(sorted(map(str, given.keys() - FIELDS)))
        raise InvalidEventError(f"an event has no field {unknown}; it has {', '.join(sorted(FIELDS))}")
    return given


def _type_of(value: object) -> str:
    return _type(value) if type(value) is str else _name(value, "type", MAX_TYPE)


@lru_cache(maxsize=1_000)
def _type(value: str) -> str:
    """Return an event type if it may be one; types come again and again, so the answer is remembered."""
    if "*" in value:
        raise InvalidEventError(f"type cannot contain *, which stands for any characters in patterns: {value!r:.60}")
    return _name(value, "type", MAX_TYPE)


def _uid(given: object) -> str:
    if given is None:
        return str(uuid_utils.uuid7())
    if isinstance(given, uuid.UUID):
        return str(given)
    return _name(given, "uid", MAX_TYPE)


def _text(value: object, what: str, limit: int) -> str:
    if not isinstance(value, str):
        raise InvalidEventError(f"{what} must be a string, not {type(value).__name__}")
    if len(value) > limit:
        raise InvalidEventError(f"{what} has {len(value):,} characters, the limit is {limit:,}")
    try:
        _check_text(value)
    except InvalidPayloadError as error:
        raise InvalidEventError(str(error).replace("the payload", what)) from None
    return value


def _name(value: object, what: str, limit: int) -> str:
    text = _text(value, what, limit)
    if not text or not text.isprintable() or text != text.strip():
        raise InvalidEventError(f"{what} must be non-empty printable text without spaces around it, not {text!r:.60}")
    return text


def _tags(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence | set | frozenset):
        raise InvalidEventError("tags must be a list of strings")
    if not given:
        return ()
    names = [_name(tag, "a tag", MAX_TAG) for tag in cast("Sequence[object]", given)]
    # A set's order changes from process to process: sorted, it makes the same event again.
    tags = tuple(dict.fromkeys(names if isinstance(given, Sequence) else sorted(names)))
    if len(tags) > MAX_TAGS:
        raise InvalidEventError(f"{len(tags)} tags are too many, the limit is {MAX_TAGS}")
    if comma := next((tag for tag in tags if "," in tag), None):
        raise InvalidEventError(f"a tag cannot contain a comma: {comma!r:.60}")
    return tags


def _metadata(given: object) -> str:
    if not isinstance(given, Mapping):
        raise InvalidEventError("metadata must be a mapping of strings to strings")
    pairs = cast("Mapping[object, object]", given)
    checked = {
        _name(key, "a metadata key", MAX_TYPE): _text(pairs[key], f"metadata[{key!r}]", MAX_TEXT) for key in pairs
    }
    text = orjson.dumps(checked).decode()
    if len(text) > MAX_TEXT:
        raise InvalidEventError(f"metadata has {len(text):,} characters, the limit is {MAX_TEXT:,}")
    return text


def _whole(value: object, what: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidEventError(f"{what} must be a whole number from {low:,} to {high:,}, not {value!r:.40}")
    return value


def _when(delay: object, at: object) -> tuple[timedelta | None, datetime | None]:
    if at is not None:
        if delay is not None:
            raise InvalidEventError("give delay or at, not both")
        if not isinstance(at, datetime) or at.tzinfo is None:
            raise InvalidEventError("at must be an aware datetime: which time zone is meant?")
        try:
            return None, at.astimezone(UTC)
        except OverflowError:
            raise InvalidEventError("at lies beyond the calendar in UTC") from None
    try:
        wait = delay if isinstance(delay, timedelta) else timedelta(seconds=cast("float", delay))
    except (TypeError, ValueError, OverflowError):
        raise InvalidEventError(f"delay must be seconds or a timedelta, not {delay!r:.40}") from None
    if not timedelta(0) <= wait <= timedelta(days=36_500):
        raise InvalidEventError("delay must lie between nothing and a hundred years")
    return wait, None
