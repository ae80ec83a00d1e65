"""What every test stands on: a clean environment, Hypothesis profiles, and a way to wait without sleeping."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.kinds import KINDS
from tests.postgres.server import stop_server
from tests.quick_spark import start_quickly

LONGEST = 10.0
LONG = ("spark/test_torture", "/spark/", "pipeline")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in the background (`make test &`), and children would inherit it, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
start_quickly()
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_unconfigure() -> None:
    """Stop the PostgreSQL server of this process, if a test has asked for one."""
    stop_server()


class Scheduling(LoadScopeScheduling):
    """Deals tests out file by file, but all of Spark's to one process: several Sparks at once are slower than one.

    Not those of torture, whose drivers are processes of their own; its other faults are dealt out singly, for there are
    many, and each takes minutes under `make prove`.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.endswith("torture/test_faults.py"):
            return nodeid
        return "spark" if ("/spark/" in file and "torture" not in file) or "pipeline" in nodeid else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that nobody waits for it at the end."""
    items.sort(key=lambda item: next((at for at, part in enumerate(LONG) if part in item.nodeid), len(LONG)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Have the tests dealt out by it, in the order in which they were put."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("POSTBUS_"):
            monkeypatch.delenv(name)


def _eventually(holds: Callable[[], Any], within: float = LONGEST) -> Any:
    deadline = time.monotonic() + within
    pause = threading.Event()
    while not (result := holds()):
        if time.monotonic() > deadline:
            pytest.fail(f"this did not come true within {within} s")
        pause.wait(0.005)
    return result


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Say which kind of store the test is on."""
    return request.param


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Return a function that looks until something holds, returns it, and fails the test after a deadline."""
    return _eventually


class Crew:
    """Threads of one test: what they raise is raised in the test, and one that hangs fails it."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._threads: list[threading.Thread] = []
        self.results: list[Any] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[[], Any], count: int = 1) -> None:
        """Have `count` threads do this work."""
        for _ in range(count):
            thread = threading.Thread(target=self._do, args=(work,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            self.results.append(work())
        except BaseException as error:  # noqa: BLE001  raised again in the test's own thread
            self.errors.append(error)

    def is_busy(self) -> bool:
        """Return whether one of them still works."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, within: float = LONGEST) -> list[Any]:
        """Wait until all are done; return what they returned, raise what one of them raised."""
        deadline = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.is_busy():
            pytest.fail(f"a thread still hangs after {within} s")
        if self.errors:
            raise self.errors[0]
        return self.results


@pytest.fixture
def crew() -> Crew:
    """Give threads that cannot hang the test run."""
    return Crew()
