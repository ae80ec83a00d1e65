"""JSON text from outside: read as another reader reads it, kept, and given back exactly; or refused, by one error."""

import json
from typing import Any, Final

import orjson

from postbus.errors import InvalidPayloadError
from postbus.payload import MAX_PAYLOAD, decode, drafts_of_text, encode, parse

__all__ = ["SEEDS", "check"]

SEEDS: Final = (
    b'{"a": [1, -0.0, 1e-320, true, null], "\xc3\xa9": "\\u00e9\\ud83d\\ude00"}',
    b'{"a": 1, "a": 2}',
    b'["\\ud800", "\\u0000", NaN, 1e400]',
    b"[18446744073709551616, -9223372036854775809, 1E2, -0]",
    b"[" * 70 + b"]" * 70,
    b'"\xed\xa0\x80"',
    b'\xff\xfe"\x00a\x00"\x00',
    b'\xef\xbb\xbf"a"',
    b'" \\u2028\\/\\b"',
    b'{"a":"\\u0000"}',
)
REASONS: Final = ("same key twice", "too large for a float", "Exceeds the limit", "levels deep", "larger than")
"""Why text may be refused that another reader takes."""


class Refused:
    """Stands for what is not taken."""


def check(data: bytes) -> None:
    """Read one text in every way there is; they must agree."""
    value, reason = read(data)
    _agrees_with_another_reader(data, value, reason)
    text = Refused if value is Refused else kept(value)
    if not isinstance(text, str):
        assert staged(data) is Refused
        return
    assert not _repeats(data), "a key that stands twice has lost a value"
    assert len(text.encode()) <= MAX_PAYLOAD
    assert same(decode(text), value)
    assert encode(decode(text)) == text
    assert same(staged(data), value)


def read(data: bytes) -> tuple[Any, str]:
    """Return the value of a text, or why it is refused."""
    try:
        return parse(data), ""
    except InvalidPayloadError as error:
        return Refused, str(error)


def kept(value: Any) -> Any:
    """Return the text that is stored."""
    try:
        return encode(value)
    except InvalidPayloadError:
        return Refused


def staged(data: bytes) -> Any:
    """Return the value as the way for text has it, which looks at most texts in C only."""
    try:
        (made,) = drafts_of_text([{"type": "a", "payload": data.decode()}])
    except (InvalidPayloadError, UnicodeDecodeError):
        return Refused
    assert same(decode(made.payload), made.value)
    return made.value


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same to the last bit: 1, 1.0, True, -0.0 and the order of keys included."""
    return repr(one) == repr(other)


def _agrees_with_another_reader(data: bytes, value: Any, reason: str) -> None:
    """Compare with orjson, which shares no code with the reader of the standard library."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        assert value is Refused or kept(value) is Refused or _has_wide(value), "only we take it"
        return
    if value is Refused:
        assert any(each in reason for each in REASONS), f"only we refuse it: {reason}"
    elif not _has_wide(value):
        assert same(found, value), "we read something else"


def _repeats(data: bytes) -> bool:
    """Return whether an object in a text has a key twice, which both readers would take without a word."""
    found: list[bool] = []
    json.loads(data, object_pairs_hook=lambda pairs: found.append(len(dict(pairs)) < len(pairs)))
    return any(found)


def _has_wide(value: Any) -> bool:
    """Return whether an integer is beyond 64 bits, which orjson reads as a float, or not at all."""
    if isinstance(value, dict):
        return any(map(_has_wide, value.values()))
    if isinstance(value, list):
        return any(map(_has_wide, value))
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64
