"""Starts children cheaply: `python -m tests.crash.nursery` has imported everything, and forks one for each line.

A worker that lives for a few seconds would otherwise spend most of them importing. It has one thread and has opened
nothing when it forks, so that a child is as good as one started from nothing.
"""

import os
import signal
import sys

from postbus.torture.crew import fork_for_each
from tests.crash.child import play


def _grow_up(config: dict[str, object]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    try:
        play(config)
    except BaseException as error:  # noqa: BLE001  whatever it was, this process ends here
        sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    fork_for_each(_grow_up)
