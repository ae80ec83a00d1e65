"""What a recording leaves out: values that are no contract, because they are generated, timed or another machine's.

Every rule stands in this module. Moments need no rule of their own: the clocks stand still, so a moment is written as
its distance from the start, `<t+300s>`, and a retry that comes a second late is a difference.
"""

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, timedelta
from typing import Any, Final

__all__ = ["BY_STORE", "Normaliser", "merged", "of_path", "of_store", "shortened", "written"]

START: Final = datetime(2030, 1, 1, tzinfo=UTC)
"""Where a FrozenClock stands at first."""
NEAR: Final = timedelta(days=100)
"""How long after the start a moment may lie that the bus has made; others stand in a request."""
LONGEST: Final = 400
BY_STORE: Final = "<by store>"

BY_KEY: Final[Mapping[str, str]] = {
    "epoch": "<epoch>",  # grows with every claim; how fast is the store's own affair
    "log_id": "<log>",  # drawn when the store is made
    "next": "<cursor>",  # opaque: to be handed back
    "owner": "<owner>",  # names a process, or `http`
    "rings": "<number>",  # how often a server was woken
    "store_bytes": "<bytes>",
    "token": "<token>",
    "traceback": "<traceback>",
    "seconds": "<seconds>",  # how long a measure took, and what follows from it
    "per_second": "<number>",
    "p50_ms": "<number>",
    "p99_ms": "<number>",
}
"""Replaced wherever the key stands, unless the value is null."""

OPAQUE: Final[Mapping[frozenset[str], Mapping[str, str]]] = {
    frozenset({"action", "id"}): {"id": "entry", "epoch": "epoch"},  # an audit entry; who held nothing has no epoch
    frozenset({"deliveries", "more"}): {"more": "hint", "next_due": "hint"},  # a claim: as far as it is cheap to know
    frozenset({"fault", "holds", "what"}): {"holds": "text", "what": "text"},  # one of torture's faults
}
"""In objects that have these keys, what is replaced, null or not, and what it is."""

FINDING: Final = frozenset({"check", "ok", "message", "remedy"})
UNORDERED: Final[Mapping[frozenset[str], tuple[str, ...]]] = {
    frozenset({"lease_expired", "subscription"}): ("subscription",),  # the deliveries of an event
    FINDING: ("check", "message"),  # what doctor found
    frozenset({"pattern", "seen_at"}): ("subscription", "name", "pattern"),  # handlers
}
"""Lists of objects with these keys have no promised order, and get one by these."""

IN_TEXT: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<uid>"),
    (re.compile(r"\bpostbus_[0-9a-f]{12}_[\w-]{43}"), "<token>"),
    (re.compile(r"^[0-9a-f]{12}$"), "<token id>"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "<digest>"),
    (re.compile(r"cursor=[^&>]+"), "cursor=<cursor>"),
    (re.compile(r"(SQLite|PostgreSQL) [\d.]+( \([^)]*\))?"), r"\1 <version>"),
    (re.compile(r"\d+\.\d GB free"), "<size> free"),
    (re.compile(r"^postbus \d[\w.]*$"), "postbus <version>"),
    (re.compile(r"\.postbus-bench-\w+"), "<folder>"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "<server>"),
    (re.compile(r"^( +(?:summary|description): ).*"), r"\1<text>"),  # of an alert
)
"""Replaced within any text."""

FOLLOWER: Final = "shop:1"
"""The one worker that measures how long its handler runs; of the others it stands in the script."""
MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")


class Normaliser:
    """Replaces what is no contract; `known` are texts of this run, such as its folder, and what stands for them."""

    def __init__(self, known: Mapping[str, str]) -> None:
        """Know what this run alone has."""
        self._known = known

    def __call__(self, value: Any) -> Any:
        """Return a JSON value without what is no contract."""
        match value:
            case dict():
                return self._object(value)
            case list() | tuple():
                return self._list(value)
            case str():
                return self._text(value)
            case _:
                return value

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        told = {
            name: BY_KEY[name] if name in BY_KEY and each is not None else self(each) for name, each in value.items()
        }
        for shape, opaque in OPAQUE.items():
            if shape <= value.keys():
                told |= {name: f"<{opaque[name]}>" for name in opaque if name in value}
        if value.get("name") == "default" and "created_at" in value:
            told["created_at"] = "<made>"  # with the schema, by the machine's clock
        if value.get("worker_id") == FOLLOWER and value.get("execution_time_ms") is not None:
            told["execution_time_ms"] = "<measured>"
        if isinstance(lease := value.get("lease"), list):  # event, subscription and epoch, as remote stores have it
            told["lease"] = [*lease[:2], "<epoch>"]
        if value.get("stream") == "audit":
            told |= {name: "<entry>" for name in ("position", "lag") if name in value}
        if isinstance(errors := value.get("errors"), list) and any("field" in each for each in errors):
            # Which fields are wrong is ours; the words and the order are pydantic's.
            told["errors"] = sorted(
                (dict(each) | {"message": "<message>"} for each in errors), key=lambda e: e["field"]
            )
            told["detail"] = "<detail>"
        return told

    def _list(self, value: Sequence[Any]) -> list[Any]:
        """Return a list, in an order of ours where none is promised."""
        told = [self(each) for each in value if not _is_fine(each)]
        by = next((by for shape, by in UNORDERED.items() if all(_has(each, shape) for each in told)), None)
        return told if by is None else sorted(told, key=lambda each: [str(each[name]) for name in by])

    def _text(self, text: str) -> str:
        for known, name in self._known.items():
            text = text.replace(known, name)
        for pattern, name in IN_TEXT:
            text = pattern.sub(name, text)
        return _moment(text) if MOMENT.fullmatch(text) else shortened(text)


def of_path(path: str, body: Any) -> Any:
    """Return what a path answers, without what is no contract there alone."""
    match path, body:
        case "/store/span?stream=audit", {"head": _, "pruned": _}:
            return body | {"head": "<entry>", "pruned": "<entry>"}
        case "/store/owners", list():
            return ["<owner>"] * len(body)
        case _:
            return body


def _moment(text: str) -> str:
    since = datetime.fromisoformat(text) - START
    seconds = f"{since.total_seconds():+.6f}".rstrip("0").rstrip(".")
    return f"<t{seconds}s>" if timedelta(0) <= since < NEAR else text


def _has(value: Any, shape: AbstractSet[str]) -> bool:
    return isinstance(value, dict) and shape <= value.keys()


def _is_fine(value: Any) -> bool:
    """Return whether this is a finding of doctor's that says nothing: what it looks at is the store's own affair."""
    return _has(value, FINDING) and (value["ok"] or value["check"] == "disk")


def shortened(text: str) -> str:
    """Return a text, or of a long one how long it is."""
    return text if len(text) <= LONGEST else f"<{len(text):,} characters>"


# ── one recording of two stores ──────────────────────────────────────────────────────────────────────────────────────


def merged(postgres: Any, sqlite: Any) -> Any:
    """Return one recording of both; where they differ, each has its own part under `<by store>`."""
    match postgres, sqlite:
        case dict(), dict() if postgres.keys() == sqlite.keys():
            return {name: merged(each, sqlite[name]) for name, each in postgres.items()}
        case list(), list() if len(postgres) == len(sqlite):
            return [merged(*pair) for pair in zip(postgres, sqlite, strict=True)]
        case _:
            same = written(postgres) == written(sqlite)
            return postgres if same else {BY_STORE: {"postgres": postgres, "sqlite": sqlite}}


def of_store(recording: Any, kind: str) -> Any:
    """Return what a recording says of one kind of store."""
    match recording:
        case {"<by store>": parts}:
            return parts[kind]
        case dict():
            return {name: of_store(each, kind) for name, each in recording.items()}
        case list():
            return [of_store(each, kind) for each in recording]
        case _:
            return recording


# ── as text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(value: Any, indent: int = 0, width: int = 118) -> str:
    """Return JSON that is easy to read and to compare: keys sorted, what fits into a line on one line."""
    flat = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if len(flat) + indent <= width or not isinstance(value, dict | list):
        return flat
    inner = " " * (indent + 1)
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + written(each, indent + 1, width) for each in value) + f"\n{' ' * indent}]"
    names = {name: json.dumps(name, ensure_ascii=False) for name in sorted(value)}
    parts = (f"{inner}{text}: {written(value[name], indent + 1, width)}" for name, text in names.items())
    return "{\n" + ",\n".join(parts) + f"\n{' ' * indent}}}"
