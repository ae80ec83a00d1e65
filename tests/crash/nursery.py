"""Starts children cheaply: `python -m tests.crash.nursery` has imported everything, and forks one for each line.

A worker that lives for a few seconds would otherwise spend most of them importing. It has one thread and has opened
nothing when it forks, so that a child is as good as one started from nothing.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator

from tests.crash.child import play

__all__ = ["main"]


def main() -> None:
    """Fork a child for every configuration that comes in, and tell its pid; end when nothing more can come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need not be buried one by one
    for line in _lines():
        pid = os.fork()
        if not pid:
            _grow_up(json.loads(line))
        os.write(1, f"{pid}\n".encode())


def _lines() -> Iterator[bytes]:
    """Read without a buffer, which a child would inherit."""
    line = b""
    while byte := os.read(0, 1):
        if byte == b"\n":
            yield line
            line = b""
        else:
            line += byte


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
    main()
