"""The gate: what comes alone is done without going to a thread, and nobody else is kept waiting for it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from postbus.http.gate import Haste
from tests.conftest import Crew
from tests.http.serving import Served, serving


@pytest.fixture
def served(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server with an empty store."""
    with serving(kind, tmp_path) as served:
        yield served


def watched(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of threads come that publish."""
    threads: list[str] = []
    publish = served.bus.store.publish

    def noting(drafts: object) -> object:
        threads.append(threading.current_thread().name)
        return publish(drafts)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(served.bus.store, "publish", noting)
    return threads


def test_what_comes_alone_to_a_file_needs_no_thread(served: Served, kind: str, monkeypatch: pytest.MonkeyPatch):
    """A server is always asked in a thread, for it may take its time; so is what is not small."""
    threads = watched(served, monkeypatch)
    served.publish()
    served.publish(payload="x" * 100_000)
    assert [name == "postbus-publish" for name in threads] == [kind == "postgres", True]


def test_a_lock_held_elsewhere_keeps_nobody_else_waiting(tmp_path: Path, crew: Crew):
    """While another process writes to the file, a publish waits for it, and others are answered at once."""
    with serving("sqlite", tmp_path) as served:
        elsewhere = apsw.Connection(served.bus.store.url.removeprefix("sqlite:///"))
        elsewhere.execute("BEGIN IMMEDIATE")
        crew.start(served.publish)
        began = time.monotonic()
        for _ in range(20):
            assert served.http.get("/livez").status_code == 200
        assert time.monotonic() - began < 10, "they waited for the lock"
        assert served.total() == 0
        elsewhere.execute("ROLLBACK")
        elsewhere.close()
        (event,) = crew.join(30)
        assert served.total() == 1
        assert event["status"] == "PENDING"


def test_a_slow_disk_is_left_to_the_threads(served: Served, kind: str):
    """Once something took long, the loop does nothing itself for a while: it has others to answer."""
    haste = Haste(served.bus.store)
    if kind == "postgres":
        assert haste.at_once(lambda: 1) is None
        return
    assert haste.at_once(lambda: 1) == (1,)
    slow = threading.Event()
    assert haste.at_once(lambda: slow.wait(0.2)) == (False,)
    assert haste.at_once(lambda: 1) is None
