"""OpenAPI holds: a fuzzer finds no 5xx, no answer outside its schema, no wrong request taken; docs need no CDN."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest

from tests.http.serving import Served, serving
from tests.kinds import MOSTLY_SQLITE

PROGRAM: Final = Path(sys.executable).with_name("schemathesis")
SETTINGS: Final = """\
# What JSON Schema cannot say is refused with 422 all the same: text that does not print, NUL, base_delay > max_delay.
[checks.positive_data_acceptance]
enabled = false

# Too large and too slow are refusals too.
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 408, 409, 410, 413, 415, 422]

# A stream has no end of its own.
[[operations]]
include-path = "/stream"
parameters = { "query.wait" = 0 }

# With partial=true what is wrong is told item by item, with 207.
[[operations]]
include-path = "/events/batch"
checks.negative_data_rejection.expected-statuses = [207, 400, 401, 403, 404, 405, 406, 408, 409, 410, 413, 415, 422]
"""
PHASES: Final = "examples,coverage,fuzzing,stateful"


@pytest.fixture(scope="module", params=MOSTLY_SQLITE)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server that asks for tokens, and lets nobody wait long."""
    with serving(request.param, tmp_path_factory.mktemp("openapi"), auth=True, local=False) as served:
        hurry(served)
        yield served


def hurry(served: Served) -> None:
    """Cut all waiting to a moment: a fuzzer asks for a minute of it, and learns nothing there."""
    gate = served.app.state.desk.gate
    claim, rung = gate.claim, gate.rung

    async def claim_soon(wanted: Any, wait: float, gone: Any) -> Any:
        return await claim(wanted, min(wait, 0.05), gone)

    async def rung_soon(since: int, timeout: float) -> None:  # noqa: ASYNC109  as the gate has it
        await rung(since, min(timeout, 0.05))

    gate.claim, gate.rung = claim_soon, rung_soon


def fuzz(served: Served, folder: Path, *options: str) -> None:
    """Run schemathesis over the whole API, with all its scopes; it must find nothing."""
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    token = served.token()
    served.app.state.desk.tokens.refresh()
    command = [
        *(PROGRAM, "--config-file", settings, "run", f"{served.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {token}", "--phases", PHASES, "--warnings", "off"),
        *("--continue-on-failure", "--request-timeout", "60", *options),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert "Stateful" in done.stdout
    assert served.http.get("/livez").status_code == 200


def test_a_fuzzer_finds_nothing(served: Served, tmp_path: Path):
    """A short run of every phase, stateful too: no 5xx, no answer outside its schema, nothing wrong taken."""
    fuzz(served, tmp_path, "--max-examples", "3", "--max-time", "15", "--seed", "1")


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_fuzzer_finds_nothing_in_ten_minutes(served: Served, tmp_path: Path):
    """The long run, another one each time; what it finds, it prints with its seed."""
    fuzz(served, tmp_path, "--max-examples", "1000", "--max-time", "600")


def operations(served: Served) -> dict[str, dict[str, Any]]:
    """Return what OpenAPI tells of each operation."""
    paths = served.http.get("/openapi.json").json()["paths"]
    return {f"{method.upper()} {path}": told for path in paths for method, told in paths[path].items()}


def test_every_operation_says_what_it_is(served: Served):
    """Each has a name of its own, a summary, a description, a scope and its answers."""
    found = operations(served)
    assert len({told["operationId"] for told in found.values()}) == len(found)
    for told in found.values():
        assert re.fullmatch(r"[a-z][a-z_]+", told["operationId"])
        assert told["summary"]
        assert told["description"]
        assert told["x-scope"] in ("open", "publish", "work", "read", "admin")
        good = [each for code, each in told["responses"].items() if code.startswith("2")]
        assert good
        assert all(each["description"] for each in told["responses"].values())
    bodies = [told["requestBody"]["content"] for told in found.values() if "requestBody" in told]
    assert all("application/json" in each for each in bodies)


def test_every_reference_leads_somewhere(served: Served):
    """No schema is named that is not there."""
    text = served.http.get("/openapi.json").text
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert named <= served.http.get("/openapi.json").json()["components"]["schemas"].keys()


class Page(HTMLParser):
    """What a page loads, and what in it a Content-Security-Policy of 'self' would block."""

    def __init__(self, text: str) -> None:
        """Read a page."""
        super().__init__()
        self.assets: list[str] = []
        self.links: list[str] = []
        self.blocked: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag asks for."""
        given = {name: value or "" for name, value in attrs}
        if tag == "style" or (tag == "script" and "src" not in given) or "style" in given:
            self.blocked.append(tag)
        self.blocked += [name for name in given if name.startswith("on")]
        self.blocked += [value for value in given.values() if value.lower().startswith(("javascript:", "data:"))]
        self.links += [given["href"]] if tag == "a" and "href" in given else []
        self.assets += [given[name] for name in ("src", "srcset", "href", "data") if name in given and tag != "a"]
        self.ids += [given["id"]] if "id" in given else []


@pytest.mark.parametrize("path", ["/docs", "/problems/lease-lost"])
def test_a_page_needs_nothing_from_elsewhere(served: Served, path: str):
    """Its assets come from here, and nothing in it needs an exception from the policy it carries."""
    answer = served.http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = [part.strip() for part in answer.headers["content-security-policy"].split(";")]
    assert {"default-src 'self'", "frame-ancestors 'none'"} <= set(policy)
    assert "unsafe" not in answer.headers["content-security-policy"]
    page = Page(answer.text)
    assert page.blocked == []
    assert page.assets
    for asset in page.assets:
        assert asset.startswith("/")
        assert not asset.startswith("//")
        assert served.http.get(asset).status_code == 200
    assert "http://" not in answer.text
    assert "https://" not in answer.text


def test_the_docs_show_every_operation(served: Served):
    """Each under its name, with its scope; links from the page lead somewhere."""
    page = Page(served.http.get("/docs").text)
    assert page.ids == [told["operationId"] for told in operations(served).values()]
    inside = [link.removeprefix("#") for link in page.links if link.startswith("#")]
    assert set(inside) <= set(page.ids)
    outside = [link for link in page.links if not link.startswith("#")]
    assert all(served.http.get(link).status_code == 200 for link in outside)


def test_every_answer_carries_what_browsers_need(served: Served):
    """Nosniff and a policy on all of them, errors too; no word of what serves it."""
    for path in ("/livez", "/docs", "/nothing", "/events/x", "/stats"):
        headers = served.http.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "content-security-policy" in headers
        assert "server" not in headers


def test_a_wrong_method_is_told_what_is_right(served: Served):
    """405 with every method the path takes, not only those of the first route found."""
    for path, allowed in (("/events", "GET, POST"), ("/events/batch", "POST"), ("/subscriptions/x", "DELETE, GET")):
        answer = served.http.request("PUT", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["type"] == "/problems/method-not-allowed"
