"""Records a server: every request of the script with its answer, OpenAPI, the dashboard's pages, and its metrics."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
from starlette.applications import Starlette
from starlette.routing import Mount

from postbus import EventBus
from postbus.http.app import PARTS, ROUTES
from postbus.store import log_of
from postbus.tokens import SCOPES, make_token
from tests.contract.stores import Site
from tests.golden.http_steps import PAGES, STEPS, Advance, Do, Page, Step
from tests.golden.metrics import record_metrics
from tests.golden.normal import Normaliser, of_path, shortened
from tests.golden.shop import follow_sales
from tests.http.serving import Served

__all__ = ["record_server", "route_of"]

JSON: Final = {"content-type": "application/json"}
VOLATILE: Final = frozenset({"date", "content-length", "transfer-encoding", "connection", "etag", "last-modified"})
"""Headers that say nothing about the bus."""
COMMON: Final = frozenset({"x-content-type-options", "referrer-policy", "content-security-policy"})
"""Headers that all answers carry: told once, and where an answer has another value."""


def record_server(site: Site) -> dict[str, Any]:
    """Return what a server on an empty store is and answers, area by area."""
    bus = EventBus(site.url, worker_id="server", clock=site.clock, poll_interval=3_600)  # its upkeep does nothing here
    served = Served(bus, auth=True, local=True)
    try:
        run = Run(site, served)
        scopes, exchanges = run.scopes(), run.exchanges()
        openapi = served.http.get("/openapi.json").json()
        return {
            "http": {"common headers": run.common, "exchanges": exchanges, "scopes": scopes},
            "openapi": summary(openapi),
            "dashboard": {"pages": run.pages(), "routes": dashboard_routes(served)},
            "metrics": record_metrics(site, run.ask("GET", "/metrics").text),
        }
    finally:
        served.stop()


def route_of(method: str, path: str) -> str | None:
    """Return the route that a request belongs to, as `GET /events/{event_id}`; None if there is none."""
    where = path.partition("?")[0]
    found = (each.path for each in ROUTES if method in (each.methods or ()) and each.path_regex.match(where))
    return next((f"{method} {each}" for each in found), None)


@dataclass
class Run:
    """One run of the script against a server."""

    site: Site
    served: Served
    common: dict[str, str] = field(default_factory=dict[str, str])
    kept: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        """Make a token for each scope, and one for all of them; a token's value is kept under its name."""
        for name, scopes in {**{each: [each] for each in SCOPES}, "all": [*SCOPES]}.items():
            self.kept[name] = make_token(log_of(self.served.bus.store), name, scopes)[1]
        self.normal = Normaliser({self.site.url: "<url>", self.served.url: "<server url>"})
        headers = self.ask("GET", "/livez").headers
        self.common = {name: headers[name] for name in sorted(COMMON)}

    def ask(self, method: str, path: str, content: bytes | None = None, **headers: str) -> httpx2.Response:
        """Send a request, with the token for everything unless the headers say otherwise."""
        sent = {"authorization": f"Bearer {self.kept['all']}"} | headers
        return self.served.http.request(method, path, content=content, headers=sent)

    # ── the script ───────────────────────────────────────────────────────────────────────────────────────────────────

    def exchanges(self) -> list[dict[str, Any]]:
        """Return every request of the script with its answer."""
        told: list[dict[str, Any]] = []
        for step in STEPS:
            match step:
                case Advance(seconds):
                    self.site.clock.advance(seconds)
                case Do("follow"):
                    follow_sales(self.site)
                case Do():
                    self.served.drain()
                case Step():
                    told.append(self._exchange(step))
        return told

    def _exchange(self, step: Step) -> dict[str, Any]:
        content = step.body if isinstance(step.body, bytes | None) else json.dumps(self._filled(step.body)).encode()
        headers = (JSON if content is not None else {}) | {
            name: self._filled(each) for name, each in step.headers.items()
        }
        answer = self.ask(step.method, self._filled(step.path), content, **headers)
        for name, place in step.keep.items():
            self.kept[name] = _at(answer.json(), place)
        body = step.body.decode(errors="backslashreplace") if isinstance(step.body, bytes) else step.body
        request = {"method": step.method, "path": shortened(step.path), "route": route_of(step.method, step.path)}
        request |= {"body": _brief(body)} if body is not None else {}
        request |= {"headers": dict(step.headers)} if step.headers else {}
        return {"name": step.name, "request": request, "response": self.normal(self._answered(step.path, answer))}

    def _filled(self, value: Any) -> Any:
        """Return a value with what earlier answers have given."""
        match value:
            case str() if (found := re.search(r"\$(\w+)", value)) is not None:
                kept = self.kept[found[1]]
                return kept if value == found[0] else value.replace(found[0], str(kept))
            case Mapping():
                return {name: self._filled(each) for name, each in value.items()}
            case list():
                return [self._filled(each) for each in value]
            case _:
                return value

    def _answered(self, path: str, answer: httpx2.Response) -> dict[str, Any]:
        headers = {name: each for name, each in answer.headers.items() if name not in VOLATILE}
        headers = {name: each for name, each in headers.items() if self.common.get(name) != each}
        headers |= dict.fromkeys(COMMON - set(answer.headers))
        told: dict[str, Any] = {"status": answer.status_code, "headers": headers}
        return told | ({"body": of_path(path, _body(answer))} if answer.content else {})

    # ── scopes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def scopes(self) -> dict[str, Any]:
        """Return for every route the scope it needs, and how it answers without a token and to each scope alone."""
        needed = {route: scope for part in PARTS for route, scope in part.scopes.items()}
        return {
            f"{method} {path}": {"scope": scope, **self._tried(method, path)}
            for (method, path), scope in needed.items()
        }

    def _tried(self, method: str, path: str) -> dict[str, int]:
        """Ask for what is not there, so that nothing changes."""
        where = path.replace("{event_id}", "999").replace("{name}", "nobody")
        keys = {"none": "", **{each: f"Bearer {self.kept[each]}" for each in SCOPES}}
        told: dict[str, int] = {}
        for name, key in keys.items():
            query = {"wait": "0"} if path in ("/stream", "/wake") else {}
            headers = JSON | {"authorization": key}
            with self.served.http.stream(method, where, headers=headers, params=query) as answer:
                told[name] = answer.status_code
        return told

    # ── the dashboard ────────────────────────────────────────────────────────────────────────────────────────────────

    def pages(self) -> list[dict[str, Any]]:
        """Return of every page of the script its status, where it leads, and its headings."""
        with httpx2.Client(base_url=self.served.url, timeout=60, trust_env=False, verify=False) as browser:
            return [self._page(browser, each) for each in PAGES]

    def _page(self, browser: httpx2.Client, page: Page) -> dict[str, Any]:
        method = "GET" if page.form is None else "POST"
        form = None if page.form is None else self._filled(page.form)
        headers = ({} if form is None else {"origin": self.served.url}) | dict(page.headers)
        with browser.stream(method, f"/dashboard{page.path}", data=form, headers=headers) as answer:
            endless = answer.headers.get("content-type", "").startswith("text/event-stream")
            text = "" if endless else answer.read().decode()
        told = {"request": f"{method} {page.path}", "status": answer.status_code}
        kind = answer.headers.get("content-type", "")
        told |= {"type": kind} if kind and not kind.startswith("text/html") else {}
        told |= {"location": answer.headers["location"]} if "location" in answer.headers else {}
        return self.normal(told | _headings(text))


def dashboard_routes(served: Served) -> list[str]:
    """Return the dashboard's routes, with their methods."""
    (dashboard,) = (each.app for each in served.app.routes if isinstance(each, Mount) and each.path == "/dashboard")
    assert isinstance(dashboard, Starlette)
    told = [(getattr(each, "path"), getattr(each, "methods", None)) for each in dashboard.routes]  # noqa: B009  of any route
    return [f"{','.join(sorted(methods)) if methods else 'MOUNT'} {path}" for path, methods in told]


def _headings(text: str) -> dict[str, str]:
    found = re.search(r"<h1[^>]*>(.*?)</h1>", text, re.DOTALL)
    return {} if found is None else {"h1": " ".join(re.sub(r"<[^>]+>", " ", found[1]).split())}


def _body(answer: httpx2.Response) -> Any:
    """Return a body as JSON, as the frames of a stream, or as text; of what is recorded elsewhere, only what it is."""
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind.endswith("json"):
        body = answer.json()
        return "<OpenAPI>" if "openapi" in body else body
    if kind == "text/html":
        return _headings(answer.text)
    if kind == "text/event-stream":
        return [_frame(each) for each in answer.text.strip().split("\n\n")]
    return f"<{kind}>" if len(answer.text) > 200 else answer.text  # a style sheet, figures


def _frame(text: str) -> dict[str, Any]:
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return fields | ({"data": json.loads(fields["data"])} if "data" in fields else {})


def _brief(body: Any) -> Any:
    return Normaliser({})(body) if len(json.dumps(body)) > 10_000 else body  # what is too large


def _at(value: Any, place: str) -> Any:
    for part in place.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


# ── summaries ────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(openapi: dict[str, Any]) -> dict[str, Any]:
    """Return what OpenAPI tells of paths, parameters, bodies, answers and the names of fields."""
    paths = {
        f"{method.upper()} {path}": {
            "scope": told["x-scope"],
            "parameters": [
                _named(each["name"], each.get("required"), each["in"]) for each in told.get("parameters", [])
            ],
            "body": _content(told.get("requestBody", {})),
            "responses": {code: _content(each) for code, each in told["responses"].items()},
        }
        for path, methods in openapi["paths"].items()
        for method, told in methods.items()
    }
    return {"paths": paths, "schemas": {name: _fields(each) for name, each in openapi["components"]["schemas"].items()}}


def _named(name: str, required: object, where: str = "") -> str:
    return f"{where} {name}".strip() + ("" if required else "?")


def _content(told: dict[str, Any]) -> list[str]:
    return [f"{kind} {_shape(each.get('schema', {}))}".strip() for kind, each in told.get("content", {}).items()]


def _shape(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "items" in schema:
        return f"[{_shape(schema['items'])}]"
    if "properties" in schema:
        return f"{{{', '.join(_named(name, name in schema.get('required', ())) for name in schema['properties'])}}}"
    return str(schema.get("type", ""))


def _fields(schema: dict[str, Any]) -> Any:
    """Return the names of a schema's fields, `?` after those that may be missing; of another kind, what it is."""
    if "properties" in schema:
        return sorted(_named(name, name in schema.get("required", ())) for name in schema["properties"])
    if "anyOf" in schema:
        return {"any of": [_fields(each) for each in schema["anyOf"]]}
    return {"enum": schema["enum"]} if "enum" in schema else _shape(schema)
