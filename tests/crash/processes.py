"""Starting, stopping, killing and waiting for children; waiting is for a condition, never for a time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, LiteralString, TypeVar, cast

import apsw

from postbus import EventBus, NewEvent
from postbus.torture import checker
from postbus.torture.history import OK, History, read
from postbus.torture.stage import is_locked
from tests.postgres.server import query

__all__ = ["Child", "Nursery", "Trial", "until"]

ROOT: Final = Path(__file__).resolve().parents[2]
BUSY: Final = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
      AND (state <> 'idle' OR backend_xid IS NOT NULL)
"""
T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = 30) -> T:
    """Return the first true answer of `condition`; fail if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.005)
    return answer


def is_writing(url: str) -> bool:
    """Return whether somebody has a transaction open that others may have to wait for."""
    if not url.startswith("sqlite:"):
        # Whoever is at work, or has begun and waits to go on; one connection of ours is asking.
        return query(url, BUSY) != [(0,)]
    return is_locked(Path(url.removeprefix("sqlite:///")))


class Child:
    """A process playing a role of `tests.crash.child`."""

    def __init__(self, folder: Path, **config: Any) -> None:
        """Start it."""
        self.config = config
        self._stderr = folder / f"stderr-{time.monotonic_ns()}"
        with self._stderr.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.child", json.dumps(config)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def hear(self) -> dict[str, Any]:
        """Return the next thing it tells; fail if it ends without a word."""
        line = self._process.stdout.readline() if self._process.stdout else b""
        if not line:
            raise AssertionError(f"{self.config['role']} ended with {self.wait()}: {self.errors()}")
        return json.loads(line)

    def say(self, word: str = "go") -> None:
        """Let it go on."""
        if self._process.stdin:
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> int:
        """End it and return its exit code."""
        self._process.send_signal(number)
        return self.wait()

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    def wait(self, seconds: float = 100) -> int:
        """Return its exit code, once it has ended."""
        return self._process.wait(seconds)

    def stop(self) -> None:
        """Suspend it at a moment when it is not writing: a writer stopped midway would stop everybody."""
        until(self._stopped_outside_a_write, "a moment without a write in progress")

    def _stopped_outside_a_write(self) -> bool:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        if is_writing(self.config["url"]):
            self.go_on()
            return False
        return True

    def go_on(self) -> None:
        """Resume it."""
        self._process.send_signal(signal.SIGCONT)

    def errors(self) -> str:
        """Return what it wrote to its standard error."""
        return self._stderr.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """End it if it runs, and give its pipes back."""
        if not self.ended():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Nursery:
    """Workers without end, for a trial that kills them: each is forked from a process that has imported everything."""

    def __init__(self, trial: "Trial") -> None:
        """Start it."""
        self.crew: deque[int] = deque()
        self._trial = trial
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.nursery"],
            cwd=trial.folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def begin(self, trial: "Trial | None" = None, **config: Any) -> int:
        """Have a worker more, of its own trial if none is given; return its process id."""
        config = (trial or self._trial).config("work", **config)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(config).encode() + b"\n")
        self._process.stdin.flush()
        self.crew.append(int(self._process.stdout.readline()))
        return self.crew[-1]

    def kill(self) -> None:
        """Kill the one that has been at work for the longest."""
        os.kill(self.crew.popleft(), signal.SIGKILL)

    def close(self) -> None:
        """Begin no more, and ask those that are left to end; whoever does not is killed."""
        if self._process.poll() is None:
            self._process.communicate()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.crew:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            with suppress(AssertionError):
                until(lambda: not any(map(_runs, self.crew)), "they end")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Trial:
    """One bus, the children that use it, and what they wrote down."""

    folder: Path
    url: str
    subscriptions: Sequence[str] = ("default",)
    children: list[Child] = field(default_factory=list[Child])

    @property
    def executions_file(self) -> Path:
        """Where handlers write down that they ran."""
        return self.folder / "executions"

    @property
    def log_file(self) -> Path:
        """Where children write their log entries."""
        return self.folder / "log"

    def start(self, role: str, name: str = "p", **config: Any) -> Child:
        """Start a child on this trial's bus; publishers of one name share a journal, so that they can go on."""
        child = Child(self.folder, **self.config(role, name, **config))
        self.children.append(child)
        return child

    def config(self, role: str, name: str = "p", **config: Any) -> dict[str, Any]:
        """Return what a child of this trial needs to know."""
        return {
            "role": role,
            "name": name,
            "url": self.url,
            "journal": str(self.folder / f"journal-{name}"),
            "executions": str(self.executions_file),
            "log": str(self.log_file),
            "subscriptions": list(self.subscriptions),
            **config,
        }

    def publish(self, wishes: Iterable[str], name: str = "p", **fields: Any) -> list[int]:
        """Publish, from the test itself, events that ask their handlers for something; write them down."""
        events = [
            NewEvent(type="trial.event", payload={"do": wish}, uid=f"{name}-{number}", **fields)
            for number, wish in enumerate(wishes)
        ]
        bus = EventBus(self.url)
        stored = bus.publish_many(events)
        bus.shutdown()
        told = {"uids": [event.uid for event in stored], "ids": [event.id for event in stored]}
        History(self.folder / f"journal-{name}", "test").note("publish", OK, **told)
        return told["ids"]

    def run(self, role: str, **config: Any) -> None:
        """Run a child to its end, which must be a good one."""
        child = self.start(role, **config)
        assert child.wait() == 0, child.errors()

    def journal(self) -> checker.Journal:
        """Return what all publishers wrote down."""
        return checker.journal(read(sorted(self.folder.glob("journal-*"))))

    def executions(self) -> list[checker.Execution]:
        """Return what all handlers wrote down."""
        return checker.executions(read([self.executions_file]))

    def logged(self, name: str) -> list[dict[str, Any]]:
        """Return the log entries of one name."""
        return [entry.told for entry in read([self.log_file]) if entry.op == "log" and entry.told["name"] == name]

    def database(self) -> checker.Database:
        """Return what is stored."""
        return checker.read_database(self.url)

    def verdicts(self, **options: Any) -> list[checker.Verdict]:
        """Return every promise that this trial's history breaks."""
        options = {"subscriptions": self.subscriptions, **options}
        return checker.check(self.journal(), self.executions(), self.database(), **options)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return rows of our tables, read past the product."""
        if not self.url.startswith("sqlite:"):
            return query(self.url, cast("LiteralString", sql))
        connection = apsw.Connection(self.url.removeprefix("sqlite:///"), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(10_000)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    @property
    def now(self) -> str:
        """SQL for the moment, by the clock that this bus goes by."""
        return "unixepoch('subsec') * 1000000" if self.url.startswith("sqlite:") else "postbus.now()"

    def close(self) -> None:
        """End what is left of the children."""
        for child in self.children:
            child.close()
