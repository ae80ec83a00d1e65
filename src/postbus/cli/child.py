"""One worker process: `python -m postbus.cli.child MODULE:BUS`, started by the supervisor."""

import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Final

from postbus.aio import AsyncEventBus
from postbus.bus import EventBus
from postbus.cli.logs import log_to_stderr
from postbus.cli.supervise import FIGURES, HOPELESS
from postbus.errors import InvalidRequest, PostbusError, UnsafeStore
from postbus.figures import Counted, Figures, Region, encoded, listen, of_stats
from postbus.observe import logger, tell
from postbus.store import is_log

__all__ = ["OVERRIDES", "main"]

OVERRIDES: Final = "POSTBUS_WORKER_FLAGS"
"""The variable in which the supervisor hands down the flags of `postbus worker`, as JSON."""
LINGER: Final = 5.0
"""How long a handler that hangs may keep a finished process from ending."""


def main(target: str) -> int:
    """Run a bus until SIGTERM, or until its supervisor is gone; return the exit code."""
    log_to_stderr()
    if (file := os.environ.pop(FIGURES, None)) is not None:
        _count_in(int(file))
    bus: EventBus | None = None
    try:
        bus = load(target, json.loads(os.environ.get(OVERRIDES, "{}")))
        _follow_parent(bus)
        bus.run()
        logger.info("worker_stopped", extra={"worker_id": bus.worker_id, "worn_out": bus.worn_out})
    except PostbusError as error:
        # What was wrong from the start stays so until somebody changes it.
        refused = isinstance(error, InvalidRequest) or (bus is None and isinstance(error, UnsafeStore))
        logger.error("worker_refused" if refused else "worker_failed", extra={"target": target, "error": str(error)})
        return HOPELESS if refused else 1
    end = threading.Timer(LINGER, os._exit, [0])
    end.daemon = True
    end.start()
    return 0


def load(target: str, flags: dict[str, object]) -> EventBus:
    """Import MODULE and return its BUS (called, if it is a function); raise InvalidRequest if there is none.

    An AsyncEventBus is run by the bus it wraps, whose coroutine handlers share an event loop of their own.
    """
    where, _, name = target.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    found = _attribute(where, name)
    bus = found if isinstance(found, EventBus | AsyncEventBus) or not callable(found) else found()
    if isinstance(bus, AsyncEventBus):
        bus = bus.wrapped
    if not isinstance(bus, EventBus):
        raise InvalidRequest(f"{target} is a {type(bus).__name__}, not an EventBus")
    if bus.is_shut_down:
        raise InvalidRequest(f'importing {where} ran and shut down the bus: put that under if __name__ == "__main__":')
    _apply(bus, target, flags)
    return bus


def _attribute(module: str, name: str) -> object:
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except PostbusError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            traceback.print_exc()
        raise InvalidRequest(f"{error} (looked in {Path.cwd()} and in the installed packages)") from None
    except AttributeError as error:
        raise InvalidRequest(str(error)) from None
    except Exception as error:
        traceback.print_exc()
        raise InvalidRequest(f"importing {module} failed: {type(error).__name__}: {error}") from error
    return found


def _apply(bus: EventBus, target: str, flags: dict[str, object]) -> None:
    """Let the flags win over what the module says; a URL cannot, since the store is open."""
    url = flags.pop("url", bus.settings.url)
    if url != bus.settings.url:
        raise InvalidRequest(f"{target} names its own URL in the code, so --url has no effect: leave one of them out")
    bus.settings = bus.settings.model_copy(update=flags)
    if not (bus.handlers or bus.followers):
        raise InvalidRequest(
            f"{target} has no handlers: decorate a function with @bus.on or @bus.follow before the worker starts"
        )
    told: dict[str, object] = {"url": bus.store.url, "worker_id": bus.worker_id, "handlers": len(bus.handlers)}
    told |= {"followers": len(bus.followers)} if bus.followers else {}
    logger.info("worker_ready", extra={**told, "concurrency": bus.settings.concurrency})


def _count_in(file: int) -> None:
    """Count in memory that the supervisor sees too: what is counted there outlives this process."""
    listen(Figures(Region(file).cell))
    os.close(file)


def _follow_parent(bus: EventBus) -> None:
    """Answer what the supervisor asks; stop when its end of stdin closes, which even SIGKILL brings about.

    A thread of its own asks the store: if that hangs, the supervisor's end must be noticed all the same.
    """
    asked = threading.Semaphore(0)
    # A breaker is the least that a worker may ask for. Of a bus behind a server that is all: the server tells the rest.
    counted = Counted(lambda: of_stats(bus.stats()) if is_log(bus.store) else {}, lambda: bus.store.breaker(""))

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                asked.release()
        os.kill(os.getpid(), signal.SIGTERM)

    def answer() -> None:
        while asked.acquire():
            with contextlib.suppress(OSError):
                os.write(0, _told_by_store(counted))

    for work in (wait, answer):
        threading.Thread(target=work, name="postbus-parent", daemon=True).start()


def _told_by_store(counted: Counted) -> bytes:
    """Return the store's figures, as far as they are known."""
    try:
        return encoded(counted.samples())
    except Exception as error:  # noqa: BLE001  told; whoever asked learns that there is nothing to tell
        tell(logging.WARNING, "metrics_store_failed", reason=str(error))
        return b"null\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
