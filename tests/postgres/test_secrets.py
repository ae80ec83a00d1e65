"""A password in the URL is seen by the server alone."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from postbus import EventBus, PostbusError
from postbus.cli.app import app
from postbus.config import Settings
from postbus.store import exists, log_of, migration_script, open_store
from tests.postgres.server import Server
from tests.security.hearing import full_text, hearing

CANARY = "c4n4ry-s3cr3t"
CANNOT_WORK = {
    "refused": f"postgresql://u:{CANARY}@127.0.0.1:1/db",
    "no host": f"postgresql://u:{CANARY}@no-such-host.invalid/db",
    "port": f"postgresql://u:{CANARY}@localhost:port/db",
    "percent": f"postgresql://u:{CANARY}%zz@localhost/db",
    "bracket": f"postgresql://u:{CANARY}@[::1/db",
    "at": f"postgresql://u:p@{CANARY}@localhost:1/db",
    "slash": f"postgresql://u:{CANARY}/x@localhost:1/db",
    "hash": f"postgresql://u:{CANARY}#x@localhost:1/db",
    "option": f"postgresql://u@localhost:1/db?password={CANARY}&nonsense=1",
    "query": f"postgresql://u@localhost:1/db?password={CANARY}",
    "schema": f"postgresql://u:{CANARY}@localhost:1/db?schema=%22",
    "scheme": f"postgre://u:{CANARY}@localhost/db",
    "driver": f"postgresql+psycopg://u:{CANARY}@localhost:1/db",
    "words": f"host=localhost port=1 password={CANARY}",
    "bare": f"u:{CANARY}@localhost",
}


@pytest.fixture
def heard() -> Iterator[io.StringIO]:
    """Give all that anybody logs, with every field of every record."""
    with hearing() as stream:
        yield stream


@pytest.fixture
def secret_url(server: Server) -> Iterator[str]:
    """Give the address of a database, with a password in it (which this server does not ask for)."""
    with server.database() as url:
        yield url.replace("postgres@", f"postgres:{CANARY}@")


@pytest.mark.parametrize("use", [open_store, EventBus, exists, migration_script])
@pytest.mark.parametrize("url", CANNOT_WORK.values(), ids=CANNOT_WORK)
def test_no_error_about_a_url_tells_its_password(url: str, use: Callable[[str], Any], heard: io.StringIO):
    """Neither the message, nor the causes, nor the log (S4.4, I17)."""
    told = ""
    try:
        told = str(use(url))
    except PostbusError as error:
        told = full_text(error, __file__)
    assert CANARY not in told + heard.getvalue()


@pytest.mark.parametrize(
    "command", ["stats", "doctor", "migrate", "events list", "dlq list", "publish a", "migrate --sql"]
)
@pytest.mark.parametrize("url", CANNOT_WORK.values(), ids=CANNOT_WORK)
def test_no_command_prints_the_password_of_a_url_that_cannot_work(
    url: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Whatever is wrong with the URL (S4.4, I17)."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.split(), env={"POSTBUS_URL": url})
    assert CANARY not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize("command", ["stats", "doctor", "events list", "dlq list", "subscriptions list", "publish a"])
def test_no_command_prints_the_password_of_a_url_that_works(
    secret_url: str, command: str, output: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Neither in tables nor in JSON (S4.4, I17)."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command.split(), "-o", output], env={"POSTBUS_URL": secret_url})
    assert result.exit_code in (0, 3), result.output
    assert CANARY not in result.output


def test_nothing_made_from_a_url_shows_its_password(secret_url: str, heard: io.StringIO):
    """Bus, store, settings, stats, findings: neither `repr` nor `str` nor the log (S4.4, I17)."""
    bus = EventBus(secret_url)
    bus.subscribe("*", lambda _: None)
    with bus:
        bus.publish("a", wait=True, timeout=10)
        shown = [
            bus,
            bus.store,
            bus.store.url,
            bus.settings,
            bus.stats(),
            log_of(bus.store).inspect(deep=True),
            bus.handlers,
        ]
        assert CANARY not in f"{shown!r} {[str(each) for each in shown]}"
    assert CANARY not in heard.getvalue()


def test_settings_show_the_url_without_its_password(secret_url: str):
    """Also where somebody prints or dumps all of them (S4.4, I17)."""
    settings = Settings.load(url=secret_url)
    assert CANARY not in f"{settings!r} {settings}"
    assert CANARY not in json.dumps(settings.model_dump(mode="json", exclude={"url"}), default=str)


def test_a_server_that_goes_away_is_told_of_without_the_password(server: Server, secret_url: str, heard: io.StringIO):
    """Errors of a bus that was open, and its workers' log while they try again (S4.4, I17)."""
    bus = EventBus(secret_url, poll_interval=0.1)
    bus.subscribe("*", lambda _: None)
    bus.start()
    server.stop("immediate")
    try:
        with pytest.raises(PostbusError) as caught:
            bus.publish("a")
        assert CANARY not in full_text(caught.value, __file__)
    finally:
        server.start()
    bus.shutdown(timeout=5)
    assert CANARY not in heard.getvalue()
