"""The command line in a folder of its own: in this process with `cli`, as a real process with `command`."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from postbus import Discard, EventBus
from postbus.cli.app import app

PROGRAM = Path(sys.executable).with_name("postbus")
URL = "sqlite:///shop.db"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with no setting but the URL."""
    monkeypatch.setenv("POSTBUS_URL", URL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Run a command in this process; its exit code must be the one expected."""

    def run(*arguments: str, expect: int = 0, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, arguments, input=stdin)
        assert result.exit_code == expect, (result.exit_code, result.output, result.exception)
        return result

    return run


@pytest.fixture
def data(cli: Callable[..., Result]) -> Callable[..., Any]:
    """Run a command with `-o json` and return the data it prints."""
    return lambda *arguments, **options: json.loads(cli(*arguments, "-o", "json", **options).stdout)


@pytest.fixture
def command() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the real `postbus`; what still runs at the end is ended, children and all."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        } | options
        started.append(subprocess.Popen([PROGRAM, *arguments], text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.fixture
def eventually(eventually: Callable[..., Any]) -> Callable[..., Any]:
    """Look until something holds; here processes have to start, which takes its time on a busy machine."""
    return partial(eventually, within=60)


@pytest.fixture
def three_dead() -> None:
    """Leave three dead letters in the shop: two payments and an order, events 1 to 3."""
    bus = EventBus(URL)

    @bus.on("*")
    def refuse(event: object) -> None:
        raise Discard("no such card")

    for kind in ("payment.due", "payment.late", "order.placed"):
        bus.publish(kind, {"card": 4111})
    bus.run_due()
    bus.shutdown()
