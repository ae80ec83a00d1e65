"""The pages for people and their tools: metrics, OpenAPI, its docs without a CDN, and a page a problem."""

import re
from html import escape
from typing import Annotated, Any, Final

import orjson
from fastapi import Path, Request, Response

from postbus.errors import NotFound
from postbus.http import wire
from postbus.http.routing import PROBLEM, Routes, answer, desk, reply

__all__ = ["routes"]

routes: Final = Routes()

HTML: Final = "text/html; charset=utf-8"
STYLE: Final = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.4 ui-monospace, monospace; background: #8881; border-radius: 4px; padding: .1em .3em; }
pre { padding: .8em; overflow: auto; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8884; padding-top: 1rem; font-size: 1.1rem; }
h2 small { font-weight: normal; color: #777; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } a { color: #8ab4f8; } }
"""


@routes.on(
    "GET",
    "/metrics",
    "read",
    "Figures for Prometheus",
    answers={200: answer("Figures", {"type": "string"}, "text/plain")},
)
async def get_metrics(request: Request) -> Response:
    """Return the bus and the server in figures; as OpenMetrics where that is accepted."""
    accept = request.headers.get("accept", "")
    body, kind = await desk(request).gate.read(request.app.state.metrics.written, accept)
    return Response(body, headers={"content-type": kind})


@routes.on(
    "GET", "/openapi.json", "open", "This API for tools", answers={200: answer("OpenAPI 3.1", {"type": "object"})}
)
async def get_openapi(request: Request) -> Response:
    """Return the API as OpenAPI."""
    return reply(request.app.openapi())


@routes.on(
    "GET", "/docs", "open", "This API for people", answers={200: answer("A page", {"type": "string"}, "text/html")}
)
async def get_docs(request: Request) -> Response:
    """Return the API as a page."""
    return Response(_docs(request.app.openapi()), media_type=HTML)


@routes.on(
    "GET", "/style.css", "open", "How the pages look", answers={200: answer("CSS", {"type": "string"}, "text/css")}
)
async def get_style(request: Request) -> Response:
    """Return the style sheet."""
    del request
    return Response(STYLE, media_type="text/css")


@routes.on(
    "GET",
    "/problems/{name}",
    "open",
    "What a problem means",
    answers={200: answer("A page", {"type": "string"}, "text/html"), 404: PROBLEM},
)
async def get_problem(request: Request, name: Annotated[str, Path(max_length=60)]) -> Response:
    """Return the page that a problem's `type` leads to."""
    del request
    found = wire.PROBLEMS.get(name)
    if found is None:
        raise NotFound(f"there is no problem {name!r}")
    return Response(_page(found.title, f"<h1>{escape(found.title)}</h1><p>{escape(found.help)}</p>"), media_type=HTML)


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · postbus</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/style.css"></head>'
        f"<body>{body}</body></html>"
    )


def _docs(openapi: dict[str, Any]) -> str:
    told = [(path, method, each) for path, methods in openapi["paths"].items() for method, each in methods.items()]
    contents = "".join(
        f'<tr><td><a href="#{escape(each["operationId"])}"><code>{method.upper()} {escape(path)}</code></a></td>'
        f"<td>{escape(each['summary'])}</td><td>{_needs(each)}</td></tr>"
        for path, method, each in told
    )
    parts = [
        f"<h1>postbus <small>{escape(openapi['info']['version'])}</small></h1>",
        '<p>The HTTP API. For tools: <a href="openapi.json">openapi.json</a>.</p>',
        f"<table>{contents}</table>",
    ]
    parts += [_operation(path, method, each, openapi["components"]["schemas"]) for path, method, each in told]
    return _page("API", "".join(parts))


def _needs(told: dict[str, Any]) -> str:
    scope = told["x-scope"]
    return "open to all" if scope == "open" else f"scope {scope}"


def _operation(path: str, method: str, told: dict[str, Any], schemas: dict[str, Any]) -> str:
    text = [
        f'<h2 id="{escape(told["operationId"])}"><code>{method.upper()} {escape(path)}</code> ',
        f"{escape(told['summary'])} <small>{_needs(told)}</small></h2>",
        *(f"<p>{_prose(each)}</p>" for each in told.get("description", "").split("\n\n")),
    ]
    if parameters := told.get("parameters"):
        text += ["<table>", *map(_parameter, parameters), "</table>"]
    for kind, content in told.get("requestBody", {}).get("content", {}).items():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        if examples := schemas.get(name, {}).get("examples"):
            shown = orjson.dumps(examples[0], option=orjson.OPT_INDENT_2).decode()
            text.append(f"<p>For example, as <code>{escape(kind)}</code>:</p><pre>{escape(shown)}</pre>")
    answers = {code: each["description"] for code, each in sorted(told["responses"].items())}
    good = "; ".join(f"<code>{code}</code> {_prose(each)}" for code, each in answers.items() if each != "A problem")
    bad = ", ".join(f"<code>{code}</code>" for code, each in answers.items() if each == "A problem")
    text.append(f"<p>Answers: {good}{f'. Problems: {bad}' if bad else ''}</p>")
    return "".join(text)


def _parameter(told: dict[str, Any]) -> str:
    where = f"{told['in']}, required" if told.get("required") else told["in"]
    schema = told.get("schema", {})
    usually = f" Usually <code>{escape(str(schema['default']))}</code>." if schema.get("default") is not None else ""
    says = f"{_prose(told.get('description', ''))}{usually}"
    return f"<tr><td><code>{escape(told['name'])}</code></td><td>{escape(where)}</td><td>{says}</td></tr>"


def _prose(text: str) -> str:
    """Return text for a page, with what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
