"""The golden set: all that is public is as it was recorded, on both stores; a difference needs a reason.

The recordings are the JSON files beside this one. `python -m tests.golden` makes them anew; `normal.py` says what they
leave out.
"""

import difflib
import json
from itertools import islice
from typing import Any, Final

import pytest

from postbus.figures import METRICS
from postbus.http.app import ROUTES
from tests.golden.code import documented_functions
from tests.golden.command_steps import COMMANDS
from tests.golden.commands import command_names, command_of
from tests.golden.http_steps import PAGES, STEPS, Step
from tests.golden.normal import BY_STORE, merged, of_store
from tests.golden.record import AREAS, file_of, read, record
from tests.golden.server import route_of

LONGEST_DIFF: Final = 200
CASES: Final = [(area, kind) for area, kinds in AREAS.items() for kind in kinds]
UNLIKE: Final = {"migrate --sql --roles"}
"""The commands that only one kind of store has."""


ONE_CORE_EACH: Final = {
    "an event's audit rows",
    "events of it that wait",
    "figures with a follower",
    "its attempt has failed",
    "rewind a queue",
}
"""Where answers differ while only SQLite passes the log: the changelog says why."""


def difference(area: str, recorded: str, found: str) -> str:
    """Return how an area differs from its recording, and what to do about it."""
    lines = difflib.unified_diff(recorded.splitlines(), found.splitlines(), "recorded", "found", lineterm="", n=6)
    shown = "\n".join(islice(lines, LONGEST_DIFF))
    return (
        f"\n{shown}\n\n{file_of(area).name} is not what this code does. If it is meant: python -m tests.golden writes "
        "the files anew; look at their diff, and give the reason in CHANGELOG.md."
    )


@pytest.mark.parametrize(("area", "kind"), CASES)
def test_what_is_public_is_as_recorded(area: str, kind: str):
    """Requests, answers, commands, metrics, log events, names and signatures have not changed unnoticed."""
    recorded, found = read(area, kind), record(area, kind)
    if recorded != found:
        pytest.fail(difference(area, recorded, found), pytrace=False)


def test_every_route_is_recorded():
    """A new route needs a step in `http_steps.py`; one that answers well must be among its steps."""
    routes = {f"{method} {route.path}" for route in ROUTES for method in route.methods or ()}
    asked = {route_of(each.method, each.path) for each in STEPS if isinstance(each, Step)}
    answered = [each for each in json.loads(read("http", "sqlite"))["exchanges"] if each["response"]["status"] < 300]
    assert routes - asked == set()
    assert routes - {each["request"]["route"] for each in answered} == set()


def test_every_metric_is_recorded_with_all_its_labels():
    """A new metric, or a label, needs something in `metrics.py` that makes it show."""
    recorded = json.loads(read("metrics", "sqlite"))
    for place in ("server", "worker"):
        wanted = {each.name.removesuffix("_total"): {*each.labels} for each in METRICS if each.where in (place, "both")}
        assert {name: {*each["labels"]} - {"le"} for name, each in recorded[place].items()} == wanted


def test_every_documented_sql_function_is_recorded():
    """The page on PostgreSQL names none that is not there."""
    assert {each.partition("(")[0] for each in json.loads(read("sql", "postgres"))} == documented_functions()


def test_every_page_of_the_dashboard_is_recorded():
    """A new page needs a request in `http_steps.py`."""
    routes = [each.partition(" ")[2] for each in json.loads(read("dashboard", "sqlite"))["routes"]]
    patterns = [[part if part[:1] != "{" else None for part in route.split("/")] for route in routes]
    paths = [each.path.partition("?")[0].split("/") for each in PAGES]
    for pattern, route in zip(patterns, routes, strict=True):
        found = [path for path in paths if len(path) >= len(pattern) and matches(pattern, path)]
        assert found, f"{route} is not recorded"


def matches(pattern: list[str | None], path: list[str]) -> bool:
    """Return whether a path begins as a route has it; None stands for any part."""
    return all(wanted in (None, part) for wanted, part in zip(pattern, path, strict=False))


def test_every_command_is_recorded():
    """A new command needs a line in `command_steps.py`."""
    assert command_names() - {command_of(each.line) for each in COMMANDS} == set()


def test_the_stores_differ_in_nothing_but_what_is_said_of_them():
    """One recording holds for both, but for the roles that only a server has."""
    for area, kinds in AREAS.items():
        told = json.loads(file_of(area).read_text(encoding="utf-8"))
        runs = told.pop("runs", [])
        told["exchanges"] = [each for each in told.get("exchanges", []) if each["name"] not in ONE_CORE_EACH]
        assert len(kinds) == 1 or BY_STORE not in json.dumps(told), area
        unlike = [of_store(each, "sqlite")["command"] for each in runs if BY_STORE in json.dumps(each)]
        assert set(unlike) <= UNLIKE


def test_a_changed_field_is_seen(monkeypatch: pytest.MonkeyPatch):
    """What differs is shown with the name of its file and the way to record it anew."""
    recorded = read("logs", "sqlite")
    told = difference("logs", recorded, recorded.replace('"lease_lost"', '"lease_gone"'))
    assert '- "lease_lost"' in told
    assert '+ "lease_gone"' in told
    assert "python -m tests.golden" in told


@pytest.mark.parametrize(
    ("postgres", "sqlite"),
    [({"a": 1}, {"a": 1}), ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}), ({"a": 1}, {"b": 1}), ([1], [1, 2]), (1.0, 1)],
)
def test_one_recording_holds_what_each_store_says(postgres: Any, sqlite: Any):
    """Two recordings that are merged come apart again as they were."""
    whole = merged(postgres, sqlite)
    assert of_store(whole, "postgres") == postgres
    assert of_store(whole, "sqlite") == sqlite
