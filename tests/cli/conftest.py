"""The command line in a folder of its own: in this process with `cli`, as a real process with `command`."""

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
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
ON_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
PATIENCE = 60.0
MOST_TOLD = 2_000
"""How much of what a terminal has shown is told of a failure: `top` shows a screen ten times a second."""


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


class Terminal:
    """A process with a pseudo-terminal of its own, as a person would have it before them."""

    def __init__(self, *arguments: str | Path, lines: int = 40, columns: int = 120, **options: Any) -> None:
        """Start a program, its terminal so large."""
        self._master, slave = os.openpty()
        self.resize(lines, columns)
        child = [sys.executable, "-c", ON_TERMINAL, *arguments]
        given = options.get("env", os.environ).items()
        # Whoever runs the tests may have fixed a size, xdist among them: a window has the size of its window.
        sizeless = {name: value for name, value in given if name not in ("COLUMNS", "LINES")}
        options["env"] = sizeless | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(child, stdin=slave, stdout=slave, stderr=slave, **options)
        self._slave = slave  # kept open: so that how the program has left it can be looked at
        self.shown = ""

    def resize(self, lines: int, columns: int) -> None:
        """Give the window another size, as dragging its corner does."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def until(self, text: str) -> str:
        """Read until a text is shown; return all that was shown since the last time, that text included."""
        self.find(re.escape(text))
        before, found, self.shown = self.shown.partition(text)
        return before + found

    def find(self, pattern: str) -> str:
        """Read until a pattern is shown; return what it stands for."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.shown)) is None:
            self._read(0.1)
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.shown[-MOST_TOLD:]!r}"
        return found[0]

    def _read(self, seconds: float) -> bool:
        ready = bool(select.select([self._master], [], [], seconds)[0])
        self.shown += os.read(self._master, 65_536).decode(errors="replace") if ready else ""
        return ready

    def end(self) -> tuple[int, str]:
        """Wait until the program ends by itself; return its exit code and what was still shown."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self._read(0.02)
            assert time.monotonic() < deadline, f"it does not end, and has shown {self.shown[-MOST_TOLD:]!r}"
        while self._read(0):
            pass
        return self.process.returncode, self.shown

    @property
    def is_as_found(self) -> bool:
        """Whether lines are edited and echoed, as they were before."""
        flags = termios.tcgetattr(self._slave)[3]
        return bool(flags & termios.ICANON and flags & termios.ECHO)

    def close(self) -> None:
        """End the program if it still runs, and give the terminal back."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Start the real `postbus` at a terminal."""
    started: list[Terminal] = []

    def start(*arguments: str, **options: Any) -> Terminal:
        started.append(Terminal(PROGRAM, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


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
