"""The public names are what `__all__` says, and no more."""

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import postbus

PROMISED = {
    "EventBus", "AsyncEventBus", "RetryPolicy", "NewEvent", "DeadLetters", "open_store", "Discard", "RetryLater",
    "PostbusError", "InvalidPayloadError", "InvalidEventError", "EventBusShutdownError", "LeaseLost", "NotFound",
    "MaxRetriesExceeded", "StoreUnavailable", "OutcomeUnknown", "SchemaMismatch", "UnsafeStore",
}  # fmt: skip


def modules() -> list[str]:
    """Return every module of the package by name."""
    return [each.name for each in pkgutil.walk_packages(postbus.__path__, "postbus.") if "__main__" not in each.name]


def imported(module: ModuleType) -> set[str]:
    """Return the names a module binds at its top by importing them from postbus."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("postbus")
        for alias in node.names
    }


def test_all_is_exactly_what_the_package_imports():
    """Every public name is exported, and nothing else is."""
    assert set(postbus.__all__) == imported(postbus)
    assert list(postbus.__all__) == sorted(postbus.__all__)


def test_the_promised_names_are_there():
    """What examples and documents use can be imported from the top."""
    assert set(postbus.__all__) >= PROMISED
    assert all(hasattr(postbus, name) for name in postbus.__all__)


def test_the_testing_names_are_there():
    """`temporary_bus`, `drain` and `FrozenClock`."""
    testing = importlib.import_module("postbus.testing")
    assert {"FrozenClock", "drain", "temporary_bus"} <= set(testing.__all__)


@pytest.mark.parametrize("name", modules())
def test_a_module_defines_what_its_all_names(name: str):
    """No `__all__` promises a name that is missing."""
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", ()):
        assert hasattr(module, exported), exported


def test_the_package_is_marked_as_typed():
    """Type checkers of users look at our annotations."""
    assert (Path(str(postbus.__file__)).parent / "py.typed").exists()
