"""The supervisor: keeps a number of worker processes running. It spawns, never forks, and opens no store itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

__all__ = ["HOPELESS", "Supervisor"]

HOPELESS: Final = 2
"""The exit code of a child that would fail again: it was told to run something that is not there."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 30.0
STEADY: Final = 10.0
"""A child that lived this many seconds has not failed at its start; the pause before its successor is short again."""

Tell = Callable[[str, Mapping[str, object]], None]


@dataclass
class _Place:
    """Where one child runs, and its successors."""

    process: subprocess.Popen[bytes] | None = None
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
    ) -> None:
        """Prepare to run `target` (MODULE:BUS) in `count` processes; `tell` hears what happens to them.

        With `settings` False the children do not see the POSTBUS_* variables of this process.
        """
        self._command: Sequence[str] = (sys.executable, "-m", "postbus.cli.child", target)
        inherited = {name: value for name, value in os.environ.items() if settings or not name.startswith("POSTBUS_")}
        self._environment = inherited | dict(environment or {})
        self._cwd = cwd
        self._log = log
        self._tell = tell
        self._places = [_Place() for _ in range(count)]
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
        place.process = subprocess.Popen(  # noqa: S603  our own module, in our own interpreter
            self._command,
            env=self._environment,
            cwd=self._cwd,
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends: the child then stops as well
            stderr=self._log,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then lets the children finish
        )
        place.began = now
        self._tell("worker_process_started", {"pid": place.process.pid})

    def _ended(self, place: _Place, process: subprocess.Popen[bytes], now: float) -> None:
        """Note how a child ended, and when its successor is due."""
        code, place.process = process.returncode, None
        if process.stdin is not None:
            process.stdin.close()
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
            self._tell("worker_process_ended", {"pid": process.pid, "how": _how(code), "restart_in": pause})


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
