"""Who may do what: every route by every scope, tokens that are no good, and a server that asks for none (I17)."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from fastapi.routing import APIRoute

from postbus.http.app import PARTS
from postbus.store import log_of
from postbus.tokens import SCOPES, make_token
from tests.http.serving import JSON, Served, command, place, process, serving
from tests.kinds import MOSTLY_SQLITE

ROUTES: Final = [(method, path) for part in PARTS for method, path in part.scopes]
REGISTERED: Final = [route for part in PARTS for route in part.routes if isinstance(route, APIRoute)]
SCOPE: Final = {route: scope for part in PARTS for route, scope in part.scopes.items()}


@pytest.fixture(scope="module", params=MOSTLY_SQLITE)
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server that asks for tokens."""
    with serving(request.param, tmp_path_factory.mktemp("guarded"), auth=True, local=False) as served:
        yield served


@pytest.fixture(scope="module")
def tokens(guarded: Served) -> dict[str, str]:
    """Give a token for each scope alone."""
    made = {scope: guarded.token(scope) for scope in SCOPES}
    look_again(guarded)
    return made


def look_again(served: Served) -> None:
    """Have the server see the tokens as they are, not as they were two seconds ago."""
    served.app.state.desk.tokens.refresh()


def ask(served: Served, method: str, path: str, authorization: str | None = None) -> int:
    """Ask for a route of things that are not there; return the status."""
    where = path.replace("{event_id}", "999").replace("{name}", "nobody")
    headers = JSON if authorization is None else JSON | {"authorization": authorization}
    with served.http.stream(method, where, headers=headers) as answer:
        return answer.status_code


def test_every_route_has_a_scope(guarded: Served):
    """What the app serves is what has a scope: nothing can be reached beside it."""
    served = {(method, route.path) for route in REGISTERED for method in route.methods or ()}
    assert served == set(ROUTES)
    assert len(REGISTERED) == sum(len(part.routes) for part in PARTS)
    *parts, to_it, dashboard = guarded.app.routes
    named = getattr(to_it, "path", None), getattr(dashboard, "name", None)
    assert (len(parts), *named) == (len(PARTS), "/dashboard", "dashboard")  # guarded by sessions
    told = guarded.http.get("/openapi.json").json()["paths"]
    scopes = {(method.upper(), path): each["x-scope"] for path in told for method, each in told[path].items()}
    assert scopes == SCOPE
    assert set(SCOPE.values()) == {"open", *SCOPES}
    assert {route for route, scope in SCOPE.items() if scope == "open"} == {
        ("GET", "/livez"),
        ("GET", "/readyz"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/style.css"),
        ("GET", "/problems/{name}"),
    }


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_route_is_open_to_its_scope_and_no_other(guarded: Served, tokens: dict[str, str], method: str, path: str):
    """No token is 401, every other scope 403, the right one neither."""
    wanted = SCOPE[method, path]
    if wanted == "open":
        assert ask(guarded, method, path) not in (401, 403)
        return
    assert ask(guarded, method, path) == 401
    answers = {scope: ask(guarded, method, path, f"Bearer {tokens[scope]}") for scope in SCOPES}
    assert {scope for scope, status in answers.items() if status == 403} == set(SCOPES) - {wanted}
    assert answers[wanted] not in (401, 403)
    assert answers[wanted] < 500


def test_no_parameter_chooses_the_scope(guarded: Served, tokens: dict[str, str]):
    """Which scope a route needs is not for the query to say."""
    assert ask(guarded, "GET", "/stats?scope=open") == 401
    assert ask(guarded, "GET", "/stats?scope=work", f"Bearer {tokens['work']}") == 403


def test_a_refusal_comes_before_the_body_is_looked_at(guarded: Served, tokens: dict[str, str]):
    """Who may not publish learns nothing of what is wrong with the event, nor is it read."""
    poison = b'{"payload": NaN'
    headers = JSON | {"authorization": f"Bearer {tokens['read']}"}
    assert guarded.http.post("/events", content=poison, headers=headers).status_code == 403
    assert guarded.http.post("/events", content=poison, headers=JSON).status_code == 401


@pytest.mark.parametrize(
    "garbled",
    [
        "{}x",
        "x{}",
        "{}=",
        "postbus_{}",
        "_",
        "postbus",
        "postbus__",
        "postbus_\N{LATIN SMALL LETTER E WITH ACUTE}_x",
        "'; DROP TABLE tokens --",
        "x" * 10_000,
    ],
)
def test_a_garbled_token_is_none(guarded: Served, tokens: dict[str, str], garbled: str):
    """Whatever is not the token itself is 401, with the header that says what is wanted."""
    wrong = garbled.format(tokens["read"])
    answer = guarded.http.get("/stats", headers={b"authorization": f"Bearer {wrong}".encode()})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == "application/problem+json"
    assert tokens["read"] not in answer.text


def test_the_kind_of_credentials_matters(guarded: Served, tokens: dict[str, str]):
    """A token is sent as Bearer, in a header; in a URL it would stand in logs, so there it is not looked at."""
    for header in (f"Basic {tokens['read']}", tokens["read"]):
        assert guarded.http.get("/stats", headers={"authorization": header}).status_code == 401
    assert guarded.http.get("/stats", params={"token": tokens["read"]}).status_code == 401
    assert guarded.http.get("/stats", headers={"authorization": f"bearer  {tokens['read']}"}).status_code == 200


def test_an_expired_token_is_refused(guarded: Served, eventually: Callable[..., Any]):
    """It works until its time has come; then it is 401."""
    _, secret = make_token(log_of(guarded.bus.store), "short", ["read"], timedelta(seconds=1.5))
    look_again(guarded)
    assert ask(guarded, "GET", "/stats", f"Bearer {secret}") == 200
    assert eventually(lambda: ask(guarded, "GET", "/stats", f"Bearer {secret}") == 401)


def test_a_revoked_token_is_refused_by_a_running_server(guarded: Served, eventually: Callable[..., Any]):
    """Within seconds, without a restart."""
    token, secret = make_token(log_of(guarded.bus.store), "gone", ["read"])
    look_again(guarded)
    assert ask(guarded, "GET", "/stats", f"Bearer {secret}") == 200
    log_of(guarded.bus.store).revoke_token(token.id)
    assert eventually(lambda: ask(guarded, "GET", "/stats", f"Bearer {secret}") == 401)


def test_what_readyz_tells_of_each_check_needs_read(guarded: Served, tokens: dict[str, str]):
    """Open is only whether it is ready."""
    assert guarded.http.get("/readyz").json() == {"status": "ok"}
    assert guarded.http.get("/readyz?verbose").status_code == 401
    assert ask(guarded, "GET", "/readyz?verbose", f"Bearer {tokens['work']}") == 403
    assert ask(guarded, "GET", "/readyz?verbose", f"Bearer {tokens['read']}") == 200


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server on loopback that asks for no tokens."""
    with serving("sqlite", tmp_path_factory.mktemp("trusting")) as served:
        yield served


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1:80", "localhost."]
)
def test_without_tokens_only_this_host_is_answered(trusting: Served, host: str):
    """A name that somebody else points at 127.0.0.1 does not bring a web page in (DNS rebinding)."""
    answer = trusting.http.get("/stats", headers={"host": host})
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/forbidden")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}", "[::1]"])
def test_without_tokens_this_host_is_answered_by_all_its_names(trusting: Served, host: str):
    """Loopback has more than one name."""
    assert trusting.http.get("/stats", headers={"host": host.format(port=trusting.port)}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example"]
)
def test_another_sites_page_is_refused(trusting: Served, origin: str):
    """A browser tells where the page came from; only our own may ask."""
    before = trusting.total()
    answer = trusting.http.post("/events", json={"payload": 1}, headers={"origin": origin})
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/forbidden")
    assert trusting.total() == before
    assert "access-control-allow-origin" not in answer.headers
    own = {"origin": f"http://127.0.0.1:{trusting.port}"}
    assert trusting.http.post("/events", json={"payload": 1}, headers=own).status_code == 201


def test_a_simple_form_post_of_another_page_stores_nothing(trusting: Served):
    """Text sent without asking first, as browsers may, is not taken for JSON."""
    before = trusting.total()
    answer = trusting.http.post("/events", content=b'{"payload": 1}', headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert trusting.total() == before


def test_an_open_address_needs_a_token_and_secrets_stay_secret(kind: str, tmp_path: Path):
    """`--host 0.0.0.0` without a token does not start; with one, no output ever shows it (I17)."""
    with place(kind, tmp_path) as url:
        environment = {"POSTBUS_URL": url, "NO_COLOR": "1"}
        assert command("migrate", env=environment).returncode == 0
        refused = command("serve", "--host", "0.0.0.0", "--port", "0", env=environment)  # noqa: S104
        assert refused.returncode == 2
        assert "token create" in refused.stderr
        made = command("token", "create", "web", "--scope", "read", env=environment)
        assert made.returncode == 0
        secret = made.stdout.strip()
        listed = [command("token", "list", *more, env=environment).stdout for more in ((), ("-o", "json"))]
        assert len(json.loads(listed[1])) == 1
        seen = "".join(listed)
        with process(url, "--host", "0.0.0.0") as server:  # noqa: S104
            seen += wander(server.url, secret)
            assert server.end()[0] == 0
            seen += "".join(server.said)
    key = secret.rpartition("_")[2] if secret.count("_") == 2 else secret.split("_", 2)[2]
    assert len(key) >= 43
    assert "unauthorized" in seen
    assert key not in seen


def wander(url: str, secret: str) -> str:
    """Ask with and without a token, rightly and wrongly; return all that was answered."""
    headers = {"authorization": f"Bearer {secret}"}
    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:
        answers = [
            http.get("/stats"),
            http.get("/stats", headers=headers),
            http.get("/metrics", headers=headers),
            http.get("/events/77", headers=headers),
            http.post("/events", json={"payload": 1}, headers=headers),
            http.get("/stats", headers={"authorization": f"Bearer {secret}x"}),
            http.get("/nothing", headers=headers),
            http.get("/events?limit=x", headers=headers),
        ]
    assert [each.status_code for each in answers] == [401, 200, 200, 404, 403, 401, 404, 422]
    return "".join(each.text + str(each.headers) for each in answers)
