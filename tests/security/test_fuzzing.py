"""What comes from outside, made up by Hypothesis; `make fuzz` has atheris look further, by what the code does with it.

Each module of `tests/fuzz` has one `check`, which both use, and the inputs that once failed among its seeds.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.http.schemas import components
from tests.fuzz import address, cloudevents, pattern, payload, wire
from tests.fuzz.wire import ACCEPTED, CLOUD, MEDIA, QUERIES, ROUTES, Request, Wire, well
from tests.http.serving import place
from tests.kinds import KINDS

TARGETS: Final = (address, cloudevents, pattern, payload)
ODD: Final = (
    "",
    " ",
    "\0",
    "\ud800",
    "\udfff\ud83d",
    "a\r\nb: c",
    "é€😀",
    "*",
    "k/0",
    "/s",
    "a/b",
    "x" * 300,
    "1",
    "null",
)
TEXT: Final = st.sampled_from([*ODD, "1.0", "default", "2030-01-01T00:00:00Z", "aGVsbG8=", "text/plain"]) | st.text(
    max_size=9
)
NUMBER: Final = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**30, -0.0, 1e308, 0.5]) | st.integers(-9, 9)
JSON: Final = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
NAMES: Final = sorted({name for each in components().values() for name in each.get("properties", {})})
CE_NAMES: Final = ("specversion", "id", "source", "type", "data", "data_base64", "datacontenttype", "subject", "time")


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """Make JSON text, and then perhaps no longer JSON: a piece doubled, left out, or replaced by what is special."""
    spaced = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    text = json.dumps(draw(JSON), ensure_ascii=draw(st.booleans()), separators=spaced).encode(errors="surrogatepass")
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(len(text), begin + 8)))
        pieces = [
            text[begin:end] * 2,
            b"",
            b"NaN",
            b"1e999",
            b"-0",
            b"\\ud800",
            b"\\u0000",
            b"\xff",
            b"\xed\xa0\x80",
            b"[",
        ]
        text = text[:begin] + draw(st.sampled_from(pieces)) + text[end:]
    return text


@pytest.mark.parametrize(
    ("target", "seed"),
    [pytest.param(each, seed, id=f"{each.__name__}-{n}") for each in TARGETS for n, seed in enumerate(each.SEEDS)],
)
def test_what_once_failed_does_not_again(target: Any, seed: bytes):
    """The seeds of the fuzzers, which hold what they have found (I17)."""
    target.check(seed)


@given(spoilt())
def test_json_text_is_kept_exactly_or_refused(text: bytes):
    """Read as another reader reads it, given back to the last bit, the same by every way in (S1.16, I18)."""
    payload.check(text)


@given(st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", "."]), max_size=20), st.data())
def test_a_pattern_covers_what_it_should_and_looks_at_nothing_twice(pieces: list[str], data: st.DataObject):
    """By an oracle that tries all places at once; the work is counted in characters passed over (S1.4)."""
    text = "".join(pieces)
    begin, end = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
    for covered in (text, text[:begin] + text[end:], text[begin:] + text[:end]):
        pattern.check(f"{'*'.join(pieces)}\n{covered}".encode())


@settings(max_examples=50)
@given(st.text("05#?/@:%[],&=;+ é\n\0", max_size=12))
def test_no_password_misleads_a_url(password: str):
    """It is read as libpq reads it or refused, and never shown, in part or whole (I17)."""
    address.check(password.encode("latin-1"))


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(CE_NAMES) | st.sampled_from(["x", "tags", "partitionkey", "X", "é"]), JSON))
def test_a_cloudevent_comes_back_as_it_came_or_is_refused(attributes: dict[str, Any]):
    """In structured mode as it was, through headers as text; no error but a refusal."""
    for given_too in ({}, {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}):
        cloudevents.check(json.dumps(attributes | given_too).encode())


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(CE_NAMES).map(lambda name: f"ce-{name}") | st.just("ce-not-text") | TEXT, TEXT))
def test_no_metadata_makes_an_event_unreadable(metadata: dict[str, str]):
    """Anybody who publishes chooses it: the event is a CloudEvent to its readers all the same."""
    for given_too in ({}, {"ce-source": "/s", "ce-id": "1", "ce-data-base64": "true", "ce-not-text": "x,id,time"}):
        cloudevents.check(json.dumps(metadata | given_too).encode())


# ── the whole API ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=KINDS)
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """Give one app to all examples: it outlives them."""
    with place(request.param, tmp_path_factory.mktemp("wire")) as url:
        made = Wire(url)
        yield made
        made.close()


def plain(text: str) -> str:
    """Return what of a text a server hands on in a header."""
    return "".join(each for each in text if each.isprintable() and ord(each) < 256).strip()


BODY: Final = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)
REQUEST: Final = st.builds(
    lambda route, query, kind, accept, cloud, keys, body: Request(
        route[0],
        route[1].replace("{event_id}", "1").replace("{name}", "default").replace("{subscription}", "default"),
        query.encode("ascii", "ignore"),
        (("content-type", kind), ("accept", accept), *(CLOUD if cloud else ()), *keys),
        body,
    ),
    st.sampled_from(ROUTES),
    st.sampled_from(QUERIES) | st.builds("{}={}".format, st.sampled_from(NAMES), TEXT.map(plain)),
    st.sampled_from(MEDIA),
    st.sampled_from(ACCEPTED),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["idempotency-key", "ce-x", "traceparent", "last-event-id"]), TEXT.map(plain)),
        max_size=2,
    ),
    (BODY | st.lists(BODY, max_size=3)).map(lambda value: json.dumps(value).encode()) | spoilt(),
)


@settings(max_examples=100)
@given(request=REQUEST)
def test_no_request_is_the_servers_fault(app: Wire, request: Request):
    """Any route, any fields, any kind, any headers: an answer below 500, and of what is wrong a problem (I17)."""
    well(app, request)


def test_every_route_answers_well_to_every_kind_of_body(app: Wire):
    """The fuzzer's seeds for the whole API: each route with each body, most of them another's (I17)."""
    for seed in wire.SEEDS:
        well(app, Request.of(seed))
