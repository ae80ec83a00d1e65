"""What crash tests share: a trial on a bus of its own, whose children end with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import Trial
from tests.postgres.server import server


@pytest.fixture
def trial(kind: str, tmp_path: Path) -> Iterator[Trial]:
    """Give a trial on each kind of store, and end its children."""
    if kind == "sqlite":
        yield from _trial(tmp_path, f"sqlite:///{tmp_path / 'bus.db'}")
    else:
        with server().database() as url:
            yield from _trial(tmp_path, url)


@pytest.fixture
def file_trial(tmp_path: Path) -> Iterator[Trial]:
    """Give a trial on a SQLite file: for what a server has no like of (damaged files, full disks, sidecar files)."""
    yield from _trial(tmp_path, f"sqlite:///{tmp_path / 'bus.db'}")


def _trial(folder: Path, url: str) -> Iterator[Trial]:
    trial = Trial(folder, url)
    yield trial
    trial.close()
