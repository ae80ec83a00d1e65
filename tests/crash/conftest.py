"""What crash tests share: a trial on a file of its own, whose children end with the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.processes import Trial


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    """Give a trial, and end its children."""
    trial = Trial(tmp_path)
    yield trial
    trial.close()
