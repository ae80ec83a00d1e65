"""What tells one process that another has written to the file."""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from postbus.payload import draft
from postbus.store.sqlite import watch as watch_module
from postbus.store.sqlite.store import SqliteStore
from postbus.testing import FrozenClock
from tests.conftest import Crew

FOREVER = 3_600.0
told = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells, elsewhere the file is looked at")


def opened(path: Path) -> SqliteStore:
    """Open the file once more, as another process would."""
    return SqliteStore(path, FrozenClock())


def ends() -> int:
    """Return how many pipes and the like are open; SQLite keeps its own files for a while."""
    found = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("pipe" in each.name or "inotify" in each.name for each in found)


@told
def test_a_commit_is_told_and_need_not_be_looked_for(tmp_path, crew: Crew, monkeypatch):
    """Whoever waits is woken by the write itself; while nothing happens, nothing is looked at (S4.10)."""
    monkeypatch.setattr(watch_module, "LOOK_ANYWAY", FOREVER)
    one, two = opened(tmp_path / "bus.db"), opened(tmp_path / "bus.db")
    watch: Any = one.watch()
    while watch.wait(0):
        pass
    for _ in range(50):
        crew.start(lambda: watch.wait(FOREVER))
        two.publish([draft({"type": "a"})])
        assert crew.join(30)[-1] is True
        while watch.wait(0):
            pass
    assert watch.wait(5 * watch_module.SETTLED) is False  # the last write may have been told after it was seen
    looks, look = [], watch._changed
    monkeypatch.setattr(watch, "_changed", lambda: bool(looks.append(1)) or look())
    monkeypatch.setattr(watch, "_written_at", -FOREVER)
    assert watch.wait(0.2) is False
    assert len(looks) <= 2
    one.close()
    two.close()


@told
def test_a_write_that_counts_late_is_looked_for_all_the_while(tmp_path, monkeypatch):
    """On a disk that takes long, what was written is seen by a fifth of that time later at the most, not by half."""
    store = opened(tmp_path / "bus.db")
    watch: Any = store.watch()
    pauses: list[float] = []
    monkeypatch.setattr(watch, "_began", None)
    monkeypatch.setattr(watch, "_written_at", 0.0)
    monkeypatch.setattr(watch, "_look", SimpleNamespace(poll=lambda ms: pauses.append(ms / 1000) or []))
    for since in (0.03, 0.1, 0.2):
        monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda now=since: now))
        watch._doze(FOREVER)
    assert pauses == pytest.approx([0.006, 0.02, 0.04])
    monkeypatch.undo()
    store.close()


def test_where_nothing_is_told_the_file_is_looked_at(tmp_path, crew: Crew, monkeypatch):
    """Without a way to be told, as on other systems or with too many watches, a change is seen all the same."""
    monkeypatch.setattr(watch_module, "_told_of_writes", lambda _: None)
    one, two = opened(tmp_path / "bus.db"), opened(tmp_path / "bus.db")
    watch = one.watch()
    while watch.wait(0):
        pass
    crew.start(lambda: watch.wait(FOREVER))
    two.publish([draft({"type": "a"})])
    assert crew.join(30)[-1] is True
    one.close()
    two.close()


@told
def test_more_watches_than_the_system_allows_are_no_error(tmp_path):
    """The limit is all programs' together: who comes over it, or finds no file, goes without being told."""
    before = ends()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert watch_module._told_of_writes(tmp_path) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert watch_module._told_of_writes(tmp_path / "nowhere") is None
    assert ends() == before


@told
def test_a_closed_watch_gives_its_files_back(tmp_path, crew: Crew):
    """Also when somebody is waiting at it, who must not wait at a file that is another's by then."""
    store = opened(tmp_path / "bus.db")
    before = ends()
    for waits in (False, True):
        for _ in range(10):
            watch = store.watch()
            if waits:
                crew.start(lambda watch=watch: watch.wait(FOREVER))
            watch.close()
            watch.wake()
            watch.close()
        crew.join(30)
    assert ends() == before
    assert watch.wait(0) is False
    store.close()
