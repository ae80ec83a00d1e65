"""The one validator: what may be published, and that it comes back as it went in."""

import json
import math
import string
from collections import OrderedDict, UserDict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.errors import InvalidEventError, InvalidPayloadError
from postbus.model import NewEvent
from postbus.payload import MAX_DEPTH, MAX_PAYLOAD, decode, draft, encode, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
WIDE = st.integers() | st.integers(-(10**60), 10**60) | st.sampled_from([2**63, -(2**63) - 1, 2**64, 10**4200])
JSON = st.recursive(
    st.none() | st.booleans() | WIDE | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=30,
)


class Colour(StrEnum):
    """A str that is not quite a str."""

    RED = "red"


class Size(IntEnum):
    """An int that is not quite an int."""

    BIG = 3


class Plain(Enum):
    """Not JSON at all."""

    ONE = 1


class Point(NamedTuple):
    """A tuple with names."""

    x: int


def nested(depth: int, *, objects: bool = False) -> Any:
    """Return containers inside containers, `depth` of them."""
    value: Any = {} if objects else []
    for _ in range(depth - 1):
        value = {"k": value} if objects else [value]
    return value


def cyclic() -> list[Any]:
    """Return a list that holds itself."""
    value: list[Any] = []
    value.append(value)
    return value


REFUSED: dict[str, Any] = {
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "NUL": "a\0b",
    "NUL in a key": {"a\0b": 1},
    "lone high surrogate": "\ud800",
    "lone low surrogate": "x\udfffy",
    "surrogate in a key": {"\ud800": 1},
    "split surrogate pair": "\ud83e\udd80",
    "int key": {1: "a"},
    "bool key": {True: "a"},
    "None key": {None: "a"},
    "float key": {1.5: "a"},
    "tuple key": {(1, 2): "a"},
    "enum key": {Colour.RED: 1},
    "depth 65": nested(65),
    "depth 65 of objects": nested(65, objects=True),
    "depth 1,000": nested(1_000),
    "depth 100,000": nested(100_000),
    "a cycle": cyclic(),
    "2 MB": "x" * 2_000_000,
    "2 MB in many parts": ["x" * 1_000] * 2_000,
    "2 MB of bytes in fewer characters": "ü" * 600_000,
    "set": {1, 2},
    "frozenset": frozenset("a"),
    "datetime": datetime(2026, 1, 1, tzinfo=UTC),
    "date": date(2026, 1, 1),
    "timedelta": timedelta(1),
    "tuple": (1, 2),
    "empty tuple": (),
    "named tuple": Point(1),
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "Decimal": Decimal("1.5"),
    "Fraction": Fraction(1, 3),
    "complex": 1j,
    "UUID": UUID(int=1),
    "path": Path("a"),
    "str enum": Colour.RED,
    "int enum": Size.BIG,
    "enum": Plain.ONE,
    "OrderedDict": OrderedDict(a=1),
    "UserDict": UserDict(a=1),
    "range": range(3),
    "generator": (n for n in ()),
    "function": len,
    "object": object(),
    "dataclass": NewEvent(type="a"),
    "5,000-digit integer": 10**5_000,
    "-5,000-digit integer": -(10**5_000),
}


@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_what_would_not_come_back_the_same_is_refused(payload: Any):
    """At the top, in a list, in an object: always InvalidPayloadError with a reason (S1.16)."""
    for placed in (payload, [payload], {"key": [1, {"inner": payload}]}):
        with pytest.raises(InvalidPayloadError, match=r"\w+ \w+"):
            encode(placed)
        with pytest.raises(InvalidPayloadError):
            draft({"type": "a", "payload": placed})


def test_a_structure_that_unfolds_without_end_is_refused_at_once():
    """Sixty lists that each hold the next one twice would be 2**60 lists: refused without counting them (S1.16)."""
    payload: Any = []
    for _ in range(60):
        payload = [payload, payload]
    with pytest.raises(InvalidPayloadError):
        encode(payload)


@given(JSON)
def test_any_json_comes_back_exactly(payload: Any):
    """Value, type and order, for integers of any width and every float (S1.5)."""
    back = decode(encode(payload))
    assert back == payload
    assert json.dumps(back) == json.dumps(payload)


@given(JSON)
def test_what_is_stored_is_json_for_everybody(payload: Any):
    """Any reader of the text gets the value, not only ours (S1.5)."""
    assert json.loads(encode(payload)) == payload


@pytest.mark.parametrize(
    "payload",
    [None, True, False, 0, -0.0, 5e-324, 1.7976931348623157e308, "", [], {}, "\U0010ffff", "\x1f\x7f\u2028", "🦀"],
    ids=repr,
)
def test_the_edges_of_json_are_kept(payload: Any):
    """Sign of zero, smallest and largest floats, empty things, the ends of Unicode."""
    assert repr(decode(encode(payload))) == repr(payload)


def test_the_deepest_allowed_payload_passes():
    """Sixty-four levels are fine, sixty-five are not."""
    for objects in (False, True):
        payload = nested(MAX_DEPTH, objects=objects)
        assert decode(encode(payload)) == payload


def test_the_largest_allowed_payload_passes():
    """One mebibyte of JSON text is fine, one byte more is not, and the message says what to do (S1.16)."""
    assert len(encode("x" * (MAX_PAYLOAD - 2))) == MAX_PAYLOAD
    with pytest.raises(InvalidPayloadError, match=r"store it elsewhere"):
        encode("x" * (MAX_PAYLOAD - 1))


def test_the_widest_readable_integer_passes():
    """Four thousand digits are kept to the last one."""
    payload = {"n": int("7" * 4_000)}
    assert decode(encode(payload)) == payload


def test_encoding_does_not_change_the_callers_object():
    """What was handed in is as it was."""
    payload = {"b": [1, {"c": None}], "a": 2**70}
    before = json.dumps(payload)
    encode(payload)
    assert json.dumps(payload) == before


# ── text from outside ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "{",
        "[1,]",
        "{'a': 1}",
        "NaN",
        "Infinity",
        "-Infinity",
        '{"a": NaN}',
        "1e400",
        "-1e400",
        '[{"n": 1e999}]',
        '{"a": 1, "a": 2}',
        '{"a": 1, "b": {"c": 1, "c": 1}}',
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "9" * 5_000,
        '"' + "x" * MAX_PAYLOAD + '"',
        b"\xff\xfe\xff",
        b'"\xc3"',
        "1 2",
        "undefined",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_text_that_python_would_change_or_cannot_read_is_refused(text: str | bytes):
    """Duplicate keys, constants, overflow, depth, size, bad bytes: InvalidPayloadError, nothing else (S1.16)."""
    with pytest.raises(InvalidPayloadError):
        encode(parse(text))


@given(JSON)
def test_text_that_is_json_is_read_as_json(payload: Any):
    """As str or as UTF-8 bytes."""
    text = json.dumps(payload, ensure_ascii=False)
    assert parse(text) == payload
    assert parse(text.encode()) == payload


def test_escapes_that_hide_refused_characters_are_found():
    """A NUL or half a surrogate pair written as an escape is refused by the check that follows (S1.16)."""
    for text in (r'"\u0000"', r'"\ud800"', r'{"\u0000": 1}'):
        with pytest.raises(InvalidPayloadError):
            encode(parse(text))


# ── the other fields ─────────────────────────────────────────────────────────────────────────────────────────────────

WRONG: dict[str, dict[str, Any]] = {
    "empty type": {"type": ""},
    "300-character type": {"type": "x" * 300},
    "type of spaces": {"type": "  "},
    "type with a space before": {"type": " a"},
    "type with a newline": {"type": "a\nb"},
    "type with a NUL": {"type": "a\0"},
    "type with a surrogate": {"type": "\ud800"},
    "type that is a number": {"type": 7},
    "type that is None": {"type": None},
    "type that is bytes": {"type": b"a"},
    "tag with a comma": {"tags": ["a,b"]},
    "empty tag": {"tags": [""]},
    "tag of spaces": {"tags": [" "]},
    "tag with a tab": {"tags": ["a\tb"]},
    "tag with a separator": {"tags": ["a\x1fb"]},
    "tag with a NUL": {"tags": ["\0"]},
    "long tag": {"tags": ["x" * 129]},
    "33 tags": {"tags": [f"t{n}" for n in range(33)]},
    "tag that is a number": {"tags": [1]},
    "tags as one string": {"tags": "a,b"},
    "tags as bytes": {"tags": b"ab"},
    "tags as a number": {"tags": 3},
    "empty key": {"key": ""},
    "long key": {"key": "x" * 256},
    "key that is a number": {"key": 7},
    "title that is a number": {"title": 7},
    "title with a NUL": {"title": "a\0b"},
    "long title": {"title": "x" * 65_537},
    "description with a surrogate": {"description": "\ud800"},
    "description that is a list": {"description": ["a"]},
    "empty uid": {"uid": ""},
    "uid that is a number": {"uid": 7},
    "long uid": {"uid": "x" * 256},
    "metadata with a number": {"metadata": {"a": 1}},
    "metadata with None": {"metadata": {"a": None}},
    "metadata with a number for a key": {"metadata": {1: "a"}},
    "metadata with a NUL": {"metadata": {"a": "\0"}},
    "metadata as pairs": {"metadata": [("a", "b")]},
    "metadata as text": {"metadata": "a=b"},
    "priority 11": {"priority": 11},
    "priority -11": {"priority": -11},
    "priority 1.0": {"priority": 1.0},
    "priority True": {"priority": True},
    "priority as text": {"priority": "1"},
    "max_retries -1": {"max_retries": -1},
    "max_retries 1.5": {"max_retries": 1.5},
    "max_retries True": {"max_retries": True},
    "negative delay": {"delay": -1},
    "delay NaN": {"delay": math.nan},
    "delay infinity": {"delay": math.inf},
    "delay of 200 years": {"delay": timedelta(days=73_000)},
    "delay as text": {"delay": "5"},
    "delay as a list": {"delay": [5]},
    "naive at": {"at": datetime(2026, 1, 1)},  # noqa: DTZ001  the point of the test
    "at as text": {"at": "tomorrow"},
    "at as a number": {"at": 1_700_000_000},
    "at as a date": {"at": date(2026, 1, 1)},
    "at beyond the calendar": {"at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))},
    "delay and at": {"delay": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)},
    "an unknown field": {"colour": "red"},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_field_is_refused_by_name(wrong: dict[str, Any]):
    """InvalidEventError, never an error of Python's own (S1.16)."""
    with pytest.raises(InvalidEventError, match=r"\w+"):
        draft({"type": "a", **wrong})


def test_an_event_needs_a_type():
    """Nothing, or something that is no event at all, is refused."""
    with pytest.raises(InvalidEventError, match="type"):
        draft({})
    for odd in (None, 7, "order.placed", ["a"], [("type", "a")]):
        with pytest.raises(InvalidEventError):
            draft(odd)  # pyright: ignore[reportArgumentType]


def test_a_draft_says_what_is_to_be_stored():
    """Every field at its limits is taken over as given."""
    given_at = datetime(2026, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))
    made = draft(
        NewEvent(
            type="x" * 255,
            payload={"n": 1},
            tags=["b", "a", "b"],
            key="k" * 255,
            title="",
            description="line one\nline two",
            metadata={"trace": "a,b"},
            uid="u" * 255,
            at=given_at,
            priority=-10,
            max_retries=0,
        )
    )
    assert (made.type, made.tags, made.key, made.title) == ("x" * 255, ("b", "a"), "k" * 255, "")
    assert (made.at, made.delay, made.priority, made.max_retries) == (given_at, None, -10, 0)
    assert (made.supplied, made.uid, json.loads(made.metadata)) == (True, "u" * 255, {"trace": "a,b"})
    assert made.at is not None
    assert made.at.tzinfo is UTC


def test_a_mapping_and_a_new_event_make_the_same_draft():
    """Either form of an event is validated alike."""
    fields: dict[str, Any] = {"type": "a", "payload": [1], "tags": ["x"], "uid": "u", "delay": 5}
    assert draft(fields) == draft(NewEvent(**fields))


def test_a_generated_uid_is_a_uuid_of_version_seven():
    """They sort by their time, and no two are the same (I3)."""
    uids = [draft({"type": "a"}).uid for _ in range(100)]
    assert {UUID(uid).version for uid in uids} == {7}
    assert len(set(uids)) == 100
    assert not draft({"type": "a"}).supplied


def test_a_uuid_may_be_given_as_such():
    """Its canonical text is what is stored (I3)."""
    given_uid = uuid4()
    made = draft({"type": "a", "uid": given_uid})
    assert (made.uid, made.supplied) == (str(given_uid), True)


@pytest.mark.parametrize(("delay", "seconds"), [(0, 0), (1.5, 1.5), (timedelta(minutes=2), 120)])
def test_a_delay_is_seconds_or_a_timedelta(delay: float | timedelta, seconds: float):
    """Either way the same wait."""
    assert draft({"type": "a", "delay": delay}).delay == timedelta(seconds=seconds)


@given(st.text(string.printable + "äß漢\0\ud800,", max_size=300))
def test_a_type_is_taken_as_it_is_or_refused(text: str):
    """No text is changed on its way in (S1.16)."""
    try:
        made = draft({"type": text, "tags": [text]})
    except InvalidEventError:
        return
    assert made.type == text
    assert made.tags == (text,)
    assert 0 < len(text) <= 128
    assert "," not in text
