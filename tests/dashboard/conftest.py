"""Servers for the tests of the dashboard's pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.serving import Served, serving


@pytest.fixture
def served(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server without tokens."""
    with serving(kind, tmp_path) as served:
        yield served


@pytest.fixture
def guarded(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server that asks for tokens."""
    with serving(kind, tmp_path, auth=True, local=False) as served:
        yield served
