"""Starting, stopping, killing and waiting for children; waiting is for a condition, never for a time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import apsw

from postbus import EventBus, NewEvent
from tests.crash import checker

__all__ = ["Child", "Trial", "until"]

ROOT: Final = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = 30) -> T:
    """Return the first true answer of `condition`; fail if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(0.005)
    return answer


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
                env={**os.environ, "PYTHONPATH": str(ROOT)},
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

    def stop(self, db: Path) -> None:
        """Suspend it at a moment when it is not writing: a writer stopped midway would stop everybody."""
        until(lambda: self._stopped_outside_a_write(db), "a moment without a write in progress")

    def _stopped_outside_a_write(self, db: Path) -> bool:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        probe = apsw.Connection(str(db))
        try:
            probe.execute("BEGIN IMMEDIATE; ROLLBACK")
        except apsw.BusyError:
            self.go_on()
            return False
        finally:
            probe.close()
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


@dataclass
class Trial:
    """One file, the children that use it, and what they wrote down."""

    folder: Path
    subscriptions: Sequence[str] = ("default",)
    children: list[Child] = field(default_factory=list[Child])

    @property
    def db(self) -> Path:
        """The file under test."""
        return self.folder / "bus.db"

    @property
    def executions_file(self) -> Path:
        """Where handlers write down that they ran."""
        return self.folder / "executions"

    @property
    def log_file(self) -> Path:
        """Where children write their log entries."""
        return self.folder / "log"

    def start(self, role: str, name: str = "p", **config: Any) -> Child:
        """Start a child on this trial's file; publishers of one name share a journal, so that they can go on."""
        config = {
            "role": role,
            "name": name,
            "db": str(self.db),
            "journal": str(self.folder / f"journal-{name}"),
            "executions": str(self.executions_file),
            "log": str(self.log_file),
            "subscriptions": list(self.subscriptions),
            **config,
        }
        child = Child(self.folder, **config)
        self.children.append(child)
        return child

    def publish(self, wishes: Iterable[str]) -> None:
        """Publish, from the test itself, events that ask their handlers for something; write them down."""
        events = [
            NewEvent(type="trial.event", payload={"do": wish}, uid=f"p-{number}") for number, wish in enumerate(wishes)
        ]
        bus = EventBus(f"sqlite:///{self.db}")
        stored = bus.publish_many(events)
        bus.shutdown()
        lines = {"try": [event.uid for event in events]}, {"ack": [(event.id, event.uid) for event in stored]}
        (self.folder / "journal-p").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, role: str, **config: Any) -> None:
        """Run a child to its end, which must be a good one."""
        child = self.start(role, **config)
        assert child.wait() == 0, child.errors()

    def journal(self) -> checker.Journal:
        """Return what all publishers wrote down."""
        return checker.read_journal(*sorted(self.folder.glob("journal-*")))

    def executions(self) -> list[checker.Execution]:
        """Return what all handlers wrote down."""
        return checker.read_executions(self.executions_file)

    def logged(self, name: str) -> list[dict[str, Any]]:
        """Return the log entries of one name."""
        return [entry for entry in checker._lines([self.log_file]) if entry["log"] == name]

    def database(self) -> checker.Database:
        """Return what the file holds."""
        return checker.read_database(self.db)

    def verdicts(self, **options: Any) -> list[checker.Verdict]:
        """Return every promise that this trial's history breaks."""
        options = {"subscriptions": self.subscriptions, **options}
        return checker.check(self.journal(), self.executions(), self.database(), **options)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return rows of the file, read past the product."""
        connection = apsw.Connection(str(self.db), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(10_000)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def close(self) -> None:
        """End what is left of the children."""
        for child in self.children:
            child.close()
