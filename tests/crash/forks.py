"""A program that forks with a bus at module level: `FORKS='{…}' python -m tests.crash.forks`, or under gunicorn.

Whatever is acknowledged is written down in `journal`. The parent opens the bus before or after the fork, and then
closes it, drops it, ends, or goes on; the child opens a bus of its own, publishes on its parent's, or works on it.
"""

import atexit
import gc
import json
import multiprocessing
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from postbus import Event, EventBus, PostbusError
from postbus.torture.history import History

CONFIG: Final[dict[str, str]] = json.loads(os.environ["FORKS"])
FOLDER: Final = Path(CONFIG["folder"])
LONGEST: Final = 30.0

bus = EventBus(CONFIG["url"], poll_interval=0.05)


@bus.on("parent.*")
def handle(event: Event) -> None:
    """Write down what was handled."""
    note("handled", event=event.id)


def note(what: str, **told: Any) -> None:
    """Write a line that outlives this process."""
    History(str(FOLDER / "journal"), str(os.getpid())).note(what, "ok", **told)


def say(word: str) -> None:
    """Let the others go on."""
    (FOLDER / word).touch()


def await_word(word: str) -> None:
    """Wait for one of the others."""
    deadline = time.monotonic() + LONGEST
    while not (FOLDER / word).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(word)
        time.sleep(0.005)


def publish(on: EventBus, who: str, count: int) -> None:
    """Publish, and write down what was acknowledged."""
    for number in range(count):
        note("published", by=who, event=on.publish(f"{who}.said", number).id)


def child() -> None:
    """Use the bus while the parent does what it does."""
    try:
        mine = EventBus(CONFIG["url"]) if CONFIG["child"] == "opens" else bus
        publish(mine, "child", 5)
        if CONFIG["child"] == "works":
            mine.start()
        say("ready")
        await_word("go")
        publish(mine, "child", 20)
        if CONFIG["child"] == "works":
            mine.wait_idle(LONGEST)
        mine.shutdown()
    except PostbusError as error:
        note("refused", error=type(error).__name__, message=str(error))
        say("ready")
    say("done")


def forked(target: Callable[[], None]) -> None:
    """Run it in a child of this process."""
    if not os.fork():
        try:
            target()
        finally:
            os._exit(0)


def started_by(method: str) -> Callable[[Callable[[], None]], None]:
    """Return what starts a child process by a method."""
    if method == "fork":
        return forked
    atexit.unregister(multiprocessing.util._exit_function)  # pyright: ignore[reportAttributeAccessIssue]  # or this process would wait for its children before it ends
    context = multiprocessing.get_context(method)
    return lambda target: context.Process(target=target).start()  # pyright: ignore[reportAttributeAccessIssue]


def act() -> None:
    """Do with the bus what the parent is to do, once the child uses it."""
    global bus  # noqa: PLW0603
    await_word("ready")
    if CONFIG["opened"] == "after":
        publish(bus, "parent", 3)
    match CONFIG["parent"]:
        case "closes":
            bus.shutdown()
        case "collects":
            del bus
            gc.collect()
        case "continues":
            publish(bus, "parent", 5)
        case _:
            return
    say("go")


def main() -> None:
    """Fork and act."""
    if CONFIG["opened"] == "before":
        publish(bus, "parent", 3)
    started_by(CONFIG["method"])(child)
    act()
    if CONFIG["parent"] == "continues":
        await_word("done")
        publish(bus, "parent", 5)


# ── under gunicorn, with preload ─────────────────────────────────────────────────────────────────────────────────────


def application(_: Any, start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Be the child, for one request."""
    child()
    start_response("204 No Content", [])
    return []


def when_ready(_: Any) -> None:
    """Act in the arbiter, which is about to fork its workers: gunicorn calls this hook of a file of settings."""
    threading.Thread(target=act, daemon=True).start()


if __name__ == "__main__":
    main()
elif CONFIG["method"] == "gunicorn" and CONFIG["opened"] == "before":
    publish(bus, "parent", 3)
