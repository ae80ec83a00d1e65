"""The kinds of store. Whoever asks for `kind`, directly or through a bus, a site or a trial, runs once on each."""

from typing import Final

import pytest

__all__ = ["KINDS", "on_sqlite"]

KINDS: Final = ("postgres", "sqlite")
on_sqlite: Final = pytest.mark.parametrize("kind", ["sqlite"])
"""For what a server has no like of: files, their locks, and SQL that only SQLite knows."""
