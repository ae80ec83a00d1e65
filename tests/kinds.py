"""The kinds of store. Whoever asks for `kind`, directly or through a bus, a site or a trial, runs once on each."""

from typing import Final

import pytest

__all__ = ["KINDS", "MOSTLY_SQLITE", "mostly_on_sqlite", "on_sqlite"]

KINDS: Final = ("postgres", "sqlite")
on_sqlite: Final = pytest.mark.parametrize("kind", ["sqlite"])
"""For what a server has no like of: files, their locks, and SQL that only SQLite knows."""
MOSTLY_SQLITE: Final = ("sqlite", pytest.param("postgres", marks=pytest.mark.slow))
"""For what another layer does before or after the store, or what takes long: `make prove` runs it on both."""
mostly_on_sqlite: Final = pytest.mark.parametrize("kind", MOSTLY_SQLITE)
