"""The error tree and the one table of codes."""

import pickle
import re
from datetime import timedelta

import pytest

from postbus import errors
from postbus.errors import CODES, Discard, PostbusError, RetryLater, exit_code, http_status


def classes_of_the_module() -> list[type[BaseException]]:
    """Return every exception class `postbus.errors` defines."""
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    ]


def tree() -> list[type[PostbusError]]:
    """Return every error of the tree, its root included."""
    return [kind for kind in classes_of_the_module() if issubclass(kind, PostbusError)]


def drawn() -> list[tuple[int, str]]:
    """Return (depth, name) for each line of the drawing in the module's docstring."""
    lines = re.findall(r"^((?: {4}|│   )*)(├── |└── )?([A-Z]\w+)(?: {2,}.*)?$", errors.__doc__ or "", re.MULTILINE)
    return [(len(indent) // 4 + bool(branch), name) for indent, branch, name in lines]


def test_all_lists_every_public_name():
    """Nothing public is missing from `__all__`, and nothing private stands in it."""
    functions = {"CODES", "exit_code", "http_status"}
    assert set(errors.__all__) == {kind.__name__ for kind in classes_of_the_module()} | functions
    assert len(errors.__all__) == len(set(errors.__all__))


def test_the_drawing_shows_the_tree_as_it_is():
    """The docstring draws every error of the tree under the parent it has."""
    parents: list[str] = []
    seen: dict[str, str | None] = {}
    base = min(depth for depth, _ in drawn())
    for depth, name in drawn():
        parents[depth - base :] = [name]
        seen[name] = parents[-2] if len(parents) > 1 else None
    bases = {kind.__name__: kind.__mro__[1].__name__ for kind in tree() if kind is not PostbusError}
    assert seen == {"PostbusError": None, **bases}


@pytest.mark.parametrize("kind", tree())
def test_every_error_is_caught_as_a_postbus_error_and_has_its_codes(kind: type[PostbusError]):
    """Each error stands in the table itself, so that no code is inherited by accident."""
    assert kind in CODES
    status, code = CODES[kind]
    assert 400 <= status < 600
    assert code in {1, 2}
    assert (http_status(kind("x")), exit_code(kind("x"))) == (status, code)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.InvalidPayloadError, 422, 2),
        (errors.InvalidEventError, 422, 2),
        (errors.NotFound, 404, 1),
        (errors.LeaseLost, 409, 1),
        (errors.MaxRetriesExceeded, 400, 1),
        (errors.StoreUnavailable, 503, 1),
        (errors.OutcomeUnknown, 503, 1),
    ],
)
def test_the_codes_are_those_of_the_public_contract(kind: type[PostbusError], status: int, code: int):
    """A lost lease is 409, the last failure 400, a full store 503, wrong input 422 and a usage error."""
    assert (http_status(kind("x")), exit_code(kind("x"))) == (status, code)


def test_an_error_derived_by_somebody_else_has_the_codes_of_its_parent():
    """A subclass that the table does not know is answered as its nearest ancestor that it knows."""

    class LeaseStolen(errors.LeaseLost):
        pass

    assert (http_status(LeaseStolen("x")), exit_code(LeaseStolen("x"))) == (409, 1)


@pytest.mark.parametrize(("kind", "builtin"), [(errors.InvalidRequest, ValueError), (errors.NotFound, LookupError)])
def test_callers_may_catch_the_builtin_they_expect(kind: type[PostbusError], builtin: type[Exception]):
    """Wrong arguments are also ValueErrors, and missing things LookupErrors."""
    with pytest.raises(builtin, match="why"):
        raise kind("why")


@pytest.mark.parametrize("choice", [Discard, RetryLater])
def test_what_a_handler_chooses_is_no_error_of_the_bus(choice: type[Exception]):
    """`except PostbusError` around a handler's code swallows neither Discard nor RetryLater."""
    assert not issubclass(choice, PostbusError)
    assert issubclass(choice, Exception)


@pytest.mark.parametrize("delay", [90, 90.0, timedelta(minutes=1, seconds=30)])
def test_retry_later_takes_seconds_or_a_timedelta(delay: float | timedelta):
    """Either way the delay is kept as a timedelta, and the reason is the message."""
    choice = RetryLater(delay, "not yet")
    assert choice.delay == timedelta(seconds=90)
    assert str(choice) == "not yet"


def test_retry_later_gives_a_reason_of_its_own():
    """Without a reason the recorded error still says what happened."""
    assert str(RetryLater(1)) == "the handler asked for a later retry"


@pytest.mark.parametrize("kind", [*tree(), Discard])
def test_errors_survive_the_way_between_processes(kind: type[Exception]):
    """Pickled and read again, an error keeps its type and message."""
    copy = pickle.loads(pickle.dumps(kind("why")))  # noqa: S301  our own bytes
    assert type(copy) is kind
    assert str(copy) == "why"
