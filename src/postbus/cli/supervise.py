"""The supervisor: keeps a number of worker processes running. It spawns, never forks, and opens no store itself."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from postbus.errors import StoreUnavailable
from postbus.figures import PROCESSES, RESTARTS, WANTED, Figures, Region, Samples, decoded, lasting, merged

__all__ = ["FIGURES", "HOPELESS", "Supervisor"]

HOPELESS: Final = 2
"""The exit code of a child that would fail again: it was told to run something that is not there."""
FIGURES: Final = "POSTBUS_WORKER_FIGURES"
"""The variable that tells a child in which open file to count."""
PATIENCE: Final = 2.0
"""How long a child may take to tell of the store."""
LARGEST: Final = 65_536
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 30.0
STEADY: Final = 10.0
"""A child that lived this many seconds has not failed at its start; the pause before its successor is short again."""

Tell = Callable[[str, Mapping[str, object]], None]


@dataclass
class _Place:
    """Where one child runs, and its successors."""

    process: subprocess.Popen[bytes] | None = None
    line: socket.socket | None = None
    """The child's stdin. It closes when this process ends, however it ends: the child then stops as well."""
    region: Region | None = None
    began: float = 0.0
    failures: int = 0
    due: float = 0.0


class Supervisor:
    """Runs `count` children of one command and replaces those that end, until it is told to stop."""

    def __init__(
        self,
        target: str,
        count: int,
        tell: Tell,
        *,
        environment: Mapping[str, str] | None = None,
        settings: bool = True,
        cwd: str | None = None,
        log: IO[bytes] | None = None,
        figures: bool = False,
    ) -> None:
        """Prepare to run `target` (MODULE:BUS) in `count` processes; `tell` hears what happens to them.

        With `settings` False the children do not see the POSTBUS_* variables of this process; with `figures` they
        count what they do.
        """
        self._command: Sequence[str] = (sys.executable, "-m", "postbus.cli.child", target)
        inherited = {name: value for name, value in os.environ.items() if settings or not name.startswith("POSTBUS_")}
        self._environment = inherited | dict(environment or {})
        self._cwd = cwd
        self._log = log
        self._tell = tell
        self._places = [_Place() for _ in range(count)]
        self._counting = figures
        self._lock = threading.Lock()
        self._past: Samples = {}
        """What children counted that have ended."""
        self._own = Figures()
        self._asked = 0
        self._stopping = False
        self.exit_code = 0
        self.killed = 0

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [process.pid for process in self._running()]

    def turn(self) -> bool:
        """Take note of children that ended and start those that are due; return whether any is left or to come."""
        now = time.monotonic()
        for place in self._places:
            if place.process is not None and place.process.poll() is not None:
                self._ended(place, place.process, now)
            if place.process is None and not self._stopping and now >= place.due:
                self._start(place, now)
        return not self._stopping or any(self._running())

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Start no more children and send those that run a signal: SIGTERM lets them finish what they began."""
        self._stopping = True
        for process in self._running():
            process.send_signal(number)

    def _running(self) -> Iterator[subprocess.Popen[bytes]]:
        return (place.process for place in self._places if place.process is not None)

    def _start(self, place: _Place, now: float) -> None:
        place.line, stdin = socket.socketpair()
        with contextlib.ExitStack() as handed:
            handed.enter_context(stdin)
            environment, files = self._environment, list[int]()
            if self._counting:
                place.region, file = Region.make()
                files.append(handed.enter_context(file).fileno())
                environment = {**environment, FIGURES: str(files[0])}
            place.process = subprocess.Popen(  # noqa: S603  our own module, in our own interpreter
                self._command,
                env=environment,
                cwd=self._cwd,
                stdin=stdin.fileno(),
                stderr=self._log,
                pass_fds=files,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then lets the children finish
            )
        place.began = now
        self._tell("worker_process_started", {"pid": place.process.pid})

    def _ended(self, place: _Place, process: subprocess.Popen[bytes], now: float) -> None:
        """Note how a child ended, and when its successor is due."""
        code, place.process = process.returncode, None
        if place.line is not None:
            place.line.close()
        with self._lock:
            if place.region is not None:
                self._past, place.region = merged([self._past, lasting(place.region.samples())]), None
        self.killed += code == -signal.SIGKILL
        if self._stopping:
            self.exit_code = self.exit_code or (0 if code in (0, -signal.SIGTERM) else 1)
        elif code == HOPELESS:
            self.exit_code = HOPELESS
            self.stop()
        else:
            place.failures = 0 if now - place.began > STEADY else place.failures + 1
            pause = min(FIRST_PAUSE * 2 ** max(place.failures - 1, 0), LONGEST_PAUSE)
            place.due = now + pause
            self._own.count(RESTARTS)
            self._tell("worker_process_ended", {"pid": process.pid, "how": _how(code), "restart_in": pause})

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────

    def samples(self) -> Samples:
        """Return what all children have counted, those that have ended included; safe in any thread."""
        self._own.set(PROCESSES, (), sum(each.process is not None for each in self._places))
        self._own.set(WANTED, (), len(self._places))
        with self._lock:
            present = [each.region.samples() for each in self._places if each.region is not None]
            return {**merged([self._past, *present]), **self._own.samples()}

    def ask_store(self) -> Samples:
        """Return what one of the children is told by the store; raise StoreUnavailable if it is told nothing.

        A child that does not answer may only be busy or starting: the next question goes to the next one.
        """
        lines = [each.line for each in self._places if each.process is not None and each.line is not None]
        try:
            return decoded(_answer(lines[self._asked % len(lines)]))
        except (OSError, ValueError, ZeroDivisionError) as error:
            self._asked += 1
            raise StoreUnavailable(f"no worker process could tell of the store ({error})") from error


def _answer(line: socket.socket) -> bytes:
    """Ask a child, and return what it says; raise OSError if it says nothing."""
    line.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while line.recv(LARGEST):
            pass  # an answer that came too late
    line.settimeout(PATIENCE)
    line.sendall(b"?")
    told = b""
    while not told.endswith(b"\n"):
        if not (more := line.recv(LARGEST)):
            raise BrokenPipeError("it has ended")
        told += more
    return told


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
