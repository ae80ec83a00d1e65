"""A secret that is easy to find, put wherever secrets go: it comes out nowhere. Spark has a test of its own."""

import ast
import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.testing import CliRunner

from postbus import AsyncEventBus, EventBus, PostbusError, RetryPolicy, figures, observe, tracing
from postbus.cli.app import app
from postbus.cli.logs import log_to_stderr
from postbus.cli.supervise import Supervisor
from postbus.config import Settings
from postbus.dashboard import sessions
from postbus.errors import InvalidRequest, StoreUnavailable
from postbus.http import Client
from postbus.http.app import PARTS
from postbus.observe import logger, tell
from postbus.store import open_store
from postbus.tracing import Spans
from tests.cli.test_everywhere import RUNS
from tests.http.serving import PROGRAM, Served, serving
from tests.postgres.server import server
from tests.security.hearing import command_lines, full_text, hearing
from tools.cli_page import commands

CANARY: Final = "c4n4ry-s3cr3t"
SOURCE: Final = Path(__file__).parents[2] / "src" / "postbus"
LINES: Final = [each.line for each in RUNS if "pipeline" not in each.line and not each.line.startswith("bench")] + [
    "import things --type =thing --payload body --from {url}",
    "bench --seconds 0.1 --events 20 --yes --url {url}",
    "subscriptions create new --pattern a.*",
    "check lag --crit 1",
    "migrate --sql --roles",
]
ONLY_REFUSED: Final = [
    "serve --port 0",
    "worker shop",
    "erase --key ann --yes --lake lake",
    "pipeline ingest --lake lake",
    "pipeline compact --lake lake",
    "pipeline report --lake lake",
    "pipeline archive --lake lake --older-than 1d",
    "pipeline replay --dry-run",
    "pipeline run --lake lake",
]
"""What would go on for ever, or start Spark, where there is a bus."""
OWN_PLACE: Final = {"demo", "torture"}
"""What goes to no bus of anybody's."""
PAGES: Final = (
    "",
    "events",
    "dead",
    "subscriptions",
    "workers",
    "pipeline",
    "system",
    "events/1",
    "nowhere",
    "events/x",
)
TELLING: Final = {"url", "direct_url", "_url", "token", "secret", "password", "libpq"}
SHOWN_ALREADY: Final = {"cli/top.py:Frame.url", "store/postgres/address.py:Address._url"}
"""Is a URL without its secret; has a `__repr__` of its own."""


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Work in a folder of its own, and leave logging and figures as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "listener", None)
    monkeypatch.setattr(observe, "binding", False)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(scope="module")
def secret_url() -> Iterator[str]:
    """Give a bus on PostgreSQL with something in it, its address with a password that this server does not ask for."""
    with server().database() as url:
        secret = url.replace("postgres@", f"postgres:{CANARY}@")
        bus = EventBus(secret, retry=RetryPolicy(max_retries=0))
        bus.subscribe("payment.*", _fail)
        bus.publish_many([{"type": kind, "key": "ann"} for kind in ("payment.due", "order.placed")])
        bus.run_due()
        bus.shutdown()
        yield secret


def _fail(_: object) -> None:
    raise ValueError("no such card")


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(line: str, url: str, **variables: str) -> str:
    """Run a command in this process; return all that it wrote, and any error that got out of it."""
    result = CliRunner().invoke(app, shlex.split(line.format(url=url)), env={"POSTBUS_URL": url, **variables})
    error = result.exception
    assert error is None or isinstance(error, SystemExit), f"{line}: {error!r}"
    return result.output


def test_every_command_is_run():
    """Those that are not in these tests are not commands."""
    lines = [*LINES, *ONLY_REFUSED]
    missing = [
        " ".join(each.words[1:])
        for each in commands()
        if each.function is not None
        and not any(f"{line} ".startswith(f"{' '.join(each.words[1:])} ") for line in lines)
    ]
    assert set(missing) <= OWN_PLACE


@pytest.mark.parametrize("output", ["table", "json"])
def test_no_command_tells_the_password_of_a_bus_that_is_there(secret_url: str, output: str):
    """Neither in what it shows, nor in what it logs, nor as an error (I17)."""
    with hearing() as heard:
        told = {line: run(line, secret_url, POSTBUS_OUTPUT=output) for line in LINES}
    assert [line for line in told if CANARY in told[line]] == []
    assert CANARY not in heard.getvalue()
    assert "default" in told["stats"]


def test_no_command_tells_the_password_of_a_bus_that_is_away():
    """Nobody listens there: what is said of it is where, and not how one would get in (I17)."""
    url = f"postgresql://u:{CANARY}@127.0.0.1:1/db?password={CANARY}"
    with hearing() as heard:
        told = {line: run(line, url, POSTBUS_DIRECT_URL=url) for line in [*LINES, *ONLY_REFUSED]}
    assert [line for line in told if CANARY in told[line]] == []
    assert CANARY not in heard.getvalue()
    assert "postgresql://u@127.0.0.1:1/db" in told["stats"]


def test_no_command_tells_a_token(tmp_path: Path):
    """To a server that lets it in, or does not; or where no header could carry it (I17)."""
    with serving("sqlite", tmp_path, auth=True, local=False) as served, hearing() as heard:
        token = served.token()
        served.app.state.desk.tokens.refresh()
        told = {line: run(line, served.url, POSTBUS_TOKEN=token) for line in LINES}
        told |= {f"{line} unknown": run(line, served.url, POSTBUS_TOKEN=f"{token}x") for line in LINES[::5]}
        told |= {f"{line} wrong": run(line, served.url, POSTBUS_TOKEN=f"{token}\n") for line in LINES[::5]}
    assert "default" in told["stats"]
    assert [line for line in told if key_of(token) in told[line]] == []
    assert key_of(token) not in heard.getvalue()


def key_of(token: str) -> str:
    """Return what of a token is secret."""
    return token.split("_", 2)[2]


# ── values and errors ────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_that_holds_a_secret_shows_it(secret_url: str, tmp_path: Path):
    """Buses, clients, stores, settings, supervisors: neither `repr` nor `str` (I17)."""
    with serving("sqlite", tmp_path, auth=True, local=False) as served:
        client = Client(served.url, token=f"postbus_x_{CANARY}")
        given = Settings.load(url=secret_url, direct_url=secret_url, token=CANARY)
        bus = EventBus(secret_url)
        made: list[Any] = [bus, bus.store, client, client.store, client.settings, given, AsyncEventBus(secret_url)]
        made += [Supervisor("a:b", 1, print, environment={"POSTBUS_URL": secret_url}), served.app, vars(client.store)]
        made += [served.app.state.desk, served.app.routes, bus.handlers, bus.subscriptions, bus.dlq]
        assert CANARY not in f"{made!r} {[str(each) for each in made]}"
        for each in (bus, client, made[6].wrapped):
            each.shutdown()


def test_no_dataclass_shows_a_secret_unasked():
    """A field that may hold one is left out of `repr`: in the whole source, also where no test looks (I17)."""
    shown = {
        f"{path.relative_to(SOURCE)}:{kind.name}.{field.target.id}"
        for path in SOURCE.rglob("*.py")
        if "torture" not in path.parts  # its databases are its own, and ask for nothing
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(kind, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in kind.decorator_list)
        for field in kind.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id in TELLING
        if "repr=False" not in ast.unparse(field)
    }
    assert shown == SHOWN_ALREADY


@pytest.mark.parametrize("wrong", ["\n", "\r", "\0", "é", " \n"])
def test_a_token_that_no_header_can_carry_is_not_repeated(tmp_path: Path, wrong: str):
    """A token read together with the end of its line: HTTP clients would quote the whole header (I17)."""
    with serving("sqlite", tmp_path, auth=True, local=False) as served, hearing() as heard:
        with pytest.raises(InvalidRequest, match="end of its line") as refused:
            Client(served.url, token=f"{CANARY}{wrong}").publish("a")
        assert CANARY not in full_text(refused.value, __file__) + heard.getvalue()


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{CANARY}%99@127.0.0.1:1/db",
        f"postgresql://u:4711#{CANARY}@127.0.0.1:1/db",
        f"postgresql://u:4711\0{CANARY}@127.0.0.1:1/db",
    ],
    ids=["not UTF-8", "after a hash", "after a NUL"],
)
def test_a_password_that_misleads_is_not_repeated(url: str):
    """Not whole, nor the half that might be taken for a port, nor by an error that quotes what it cannot read (I17)."""
    for use in (open_store, EventBus):
        with pytest.raises(InvalidRequest, match="%23") as refused:
            use(url)
        told = full_text(refused.value, __file__)
        assert CANARY not in told
        assert "4711" not in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f'url = "postgresql://u:{CANARY}@h/db', "not TOML"),
        (f'url = "postgresql://u:{CANARY}@h/d\xe9"', "not TOML"),
        (f'token = ["{CANARY}"]\nurl = {{a = "{CANARY}"}}\nlease = "{CANARY}"\n{CANARY} = 1', "wrong settings"),
    ],
    ids=["cut off", "not UTF-8", "of another kind"],
)
def test_settings_that_are_wrong_are_not_repeated(text: str, told: str):
    """What is wrong is named by its key or its place (I17)."""
    Path("postbus.toml").write_bytes(text.replace(f"\n{CANARY} = 1", "\nunknown = 1").encode("latin-1"))
    with pytest.raises(InvalidRequest, match=told) as refused:
        Settings.load()
    assert CANARY not in full_text(refused.value, __file__)


def test_a_variable_that_is_wrong_is_named_and_not_repeated(monkeypatch: pytest.MonkeyPatch):
    """One that is read as JSON, too: a wrong setting is no crash (I17)."""
    monkeypatch.setenv("POSTBUS_RETRY", CANARY)
    with pytest.raises(InvalidRequest, match="retry") as refused:
        Settings.load()
    assert CANARY not in full_text(refused.value, __file__)


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("terminal", [False, True], ids=["as JSON", "at a terminal"])
def test_no_log_shows_the_variables_of_a_frame(monkeypatch: pytest.MonkeyPatch, *, terminal: bool):
    """An error's traceback tells where, and not with which values: those are URLs, tokens and payloads (I17)."""
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", written)
    log_to_stderr()

    def connect(password: str) -> None:
        raise StoreUnavailable(f"it is away, and {len(password)} is not told")

    try:
        connect(CANARY)
    except PostbusError as error:
        tell(logging.ERROR, "http_failed", error=error)
    assert "it is away" in written.getvalue()
    assert "in connect" in written.getvalue()
    assert CANARY not in written.getvalue()


# ── a server ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Give the spans that are recorded."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_spans", Spans(provider))
    return exporter


def spans_of(recorded: InMemorySpanExporter) -> str:
    """Return all that the spans tell."""
    return "".join(each.to_json() for each in recorded.get_finished_spans())


def told(answer: httpx2.Response, *, but: str = "") -> str:
    """Return all of an answer, less one header."""
    return f"{answer.status_code} {answer.text} {[each for each in answer.headers.items() if each[0] != but]}"


def asked(served: Served, **headers: str) -> list[str]:
    """Ask every route, rightly or not; return all that was answered."""
    found: list[str] = []
    for method, path in [each for part in PARTS for each in part.scopes]:
        address = re.sub(r"\{\w+\}", "1", path)
        found.append(
            told(served.http.request(method, address, params={"wait": 0}, json={"payload": 1}, headers=headers))
        )
    return found


def test_no_answer_page_or_span_tells_a_token_or_a_session(tmp_path: Path, recorded: InMemorySpanExporter):
    """Whoever asks: with a good token, a wrong one or a cookie; and the seal's key comes out nowhere (I17)."""
    # What the client's libraries log is told to who signs in, and to nobody else.
    with serving("sqlite", tmp_path, auth=True, local=False) as served, hearing(but="httpcore2") as heard:
        token = served.token()
        served.app.state.desk.tokens.refresh()
        kept = asked(served, authorization=f"Bearer {token}")
        kept += asked(served, authorization=f"Bearer {token}x") + asked(served, authorization=f"Basic {token}")
        kept += asked(served, **{"x-token": token})
        wrong = served.http.post("/dashboard/sign-in", data={"token": f"{token}x"}, headers={"origin": served.url})
        given = served.http.post("/dashboard/sign-in", data={"token": token}, headers={"origin": served.url})
        cookie = given.cookies[sessions.COOKIE]
        kept += [told(wrong), told(given, but="set-cookie")]
        kept += [told(served.http.get(f"/dashboard/{page}")) for page in PAGES]
        forged = {"cookie": f"{sessions.COOKIE}={cookie}x"}
        kept += [told(served.http.get(f"/dashboard/{page}", headers=forged)) for page in PAGES]
        key = room_of(served).sessions._key
        secrets = [key_of(token), cookie.rpartition(".")[2], key.hex(), repr(key)[2:-1]]
        kept += [heard.getvalue(), spans_of(recorded), repr(room_of(served))]
    assert [secret for secret in secrets if any(secret in each for each in kept)] == []
    assert {each[:3] for each in kept} >= {"200", "201", "303", "401", "404", "422"}
    assert "publish" in spans_of(recorded)


def room_of(served: Served) -> Any:
    """Return what the dashboard's pages work with."""
    dashboard: Any = served.app.routes[-1]
    page = next(each for each in dashboard.app.routes if getattr(each, "path", "") == "/events")
    return next(cell.cell_contents for cell in page.endpoint.__closure__ if type(cell.cell_contents).__name__ == "Room")


def test_a_server_whose_database_is_gone_does_not_tell_how_to_get_in(recorded: InMemorySpanExporter):
    """Answers, pages, figures, spans and the log while it is away (I17)."""
    url = server().create()
    with hearing() as heard:
        served = Served(EventBus(url.replace("postgres@", f"postgres:{CANARY}@")))
        server().drop(url)
        kept = asked(served) + [told(served.http.get(f"/dashboard/{page}")) for page in PAGES]
        kept += [told(served.http.get("/readyz?verbose=1")), told(served.http.get("/metrics"))]
        served.stop()
        kept += [heard.getvalue(), spans_of(recorded)]
    assert any(each.startswith("503") for each in kept)
    assert "does not exist" in heard.getvalue()
    assert [each for each in kept if CANARY in each] == []


# ── payloads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_masked_is_on_no_page_and_in_no_log_figure_or_span(
    kind: str, tmp_path: Path, recorded: InMemorySpanExporter
):
    """Payload, title, description, metadata of events that wait, have failed and are done: pages show their shape."""
    hidden = {"payload": {"card": CANARY, "all": [CANARY]}, "title": CANARY, "description": CANARY}
    hidden |= {"metadata": {"note": CANARY}}
    with serving(kind, tmp_path, mask=True) as served, hearing() as heard:
        served.bus.subscribe("payment.*", _fail, retry=RetryPolicy(max_retries=0))
        for kind_of_event in ("payment.due", "order.placed"):
            served.http.post("/events", json={"type": kind_of_event, **hidden})
        served.bus.wait_idle(timeout=10)
        pages = [*PAGES, "events/2", "dead/confirm?act=retry", "events?type=payment.*", "events?status=FAILED"]
        kept = [told(served.http.get(f"/dashboard/{page}")) for page in pages]
        with served.http.stream("GET", "/dashboard/live") as live:
            kept.append(next(live.iter_text()))
        kept += [told(served.http.get("/metrics")), told(served.http.get("/stats")), heard.getvalue()]
        kept += [spans_of(recorded)]
        assert '"card": "•••"' in unescape(served.http.get("/dashboard/events/1").text)
    assert "no such card" in "".join(kept)
    assert [each[:200] for each in kept if CANARY in each] == []


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────

SHOP: Final = """
from postbus import EventBus

bus = EventBus()

@bus.on("note")
def note(event):
    raise ValueError("not noted")
"""


def watched(arguments: list[str], variables: dict[str, str], ready: Callable[[str], bool]) -> tuple[str, list[str]]:
    """Run `postbus` until it has said something; return all that it said, and how its processes were called."""
    environment = {**os.environ, **variables, "NO_COLOR": "1"}
    process = subprocess.Popen(
        [PROGRAM, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said, lines = "", [str]
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said += line
            if ready(said):
                break
        lines = command_lines(os.getpid())
    finally:
        process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=60)[0]
    return said, lines


def test_no_worker_process_is_called_by_a_secret(secret_url: str, tmp_path: Path):
    """`ps` shows arguments to everybody: the URL goes by the environment, even where it came as a flag (I17)."""
    (tmp_path / "shop.py").write_text(SHOP)
    bus = EventBus(secret_url)
    bus.publish("note", max_retries=0)
    bus.shutdown()
    said, lines = watched(["worker", "shop:bus", "--url", secret_url], {}, lambda said: "not noted" in said)
    assert any("postbus.cli.child" in each for each in lines)
    assert CANARY not in said
    assert [each for each in lines if CANARY in each and "postbus worker" not in each] == []


def test_the_demo_neither_uses_nor_tells_what_is_set():
    """Its workers have a bus of their own, and do not see the settings of whoever runs it (I17)."""
    variables = {"POSTBUS_URL": f"postgresql://u:{CANARY}@127.0.0.1:1/db", "POSTBUS_TOKEN": CANARY}
    said, lines = watched(["demo", "--events", "20", "--no-report"], variables, lambda said: "completed" in said)
    assert any("postbus.cli.child" in each for each in lines)
    assert CANARY not in said + "".join(lines)
