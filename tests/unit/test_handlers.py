"""Handlers: what is registered, what matches, and how a function is called."""

import functools
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from postbus.errors import Discard, InvalidRequest
from postbus.handlers import Handlers, make_handler
from postbus.model import Event
from tests.unit.making import event


def plain(one: Event) -> None:
    """Take an event."""


def with_context(one: Event, ctx: Any) -> None:
    """Take an event and its context."""


def optional_context(one: Event, ctx: Any = None) -> None:
    """Take an event, and a context if there is one."""


async def awaited(one: Event) -> None:
    """Take an event, some time."""


class Callable:
    """An object that can be called."""

    def __call__(self, one: Event) -> None:
        """Take an event."""


class AsyncCallable:
    """An object that can be called and awaited."""

    async def __call__(self, one: Event, ctx: Any) -> None:
        """Take an event and its context."""


@pytest.mark.parametrize(
    ("function", "is_async", "context"),
    [
        (plain, False, False),
        (with_context, False, True),
        (awaited, True, False),
        (lambda _: None, False, False),
        (optional_context, False, True),
        (lambda _, __=3: None, False, False),
        (lambda *_: None, False, False),
        (lambda _, **__: None, False, False),
        (lambda _, *, __=1: None, False, False),
        (functools.partial(with_context, ctx=None), False, False),
        (functools.partial(awaited), True, False),
        (Callable(), False, False),
        (AsyncCallable(), True, True),
        (print, False, False),
    ],
)
def test_a_function_is_called_the_way_it_is_written(function: Any, *, is_async: bool, context: bool):
    """Plain or async, with or without a context, function or object (S1.3)."""
    handler = make_handler("*", function)
    assert handler.is_async is is_async
    if function is not print and not isinstance(function, functools.partial):
        assert handler.wants_context is context


@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "ignore"},
        {"timeout": 0},
        {"timeout": -1},
        {"tags": "eu"},
        {"retry": {"retries": 3}},
        {"retry": {"max_retries": -1}},
        {"subscription": ""},
        {"subscription": "a/b"},
        {"subscription": "x" * 101},
        {"subscription": "a\nb"},
        {"subscription": None},
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_when_registering(options: dict[str, Any]):
    """Not at the first event, when nobody looks (S1.3)."""
    with pytest.raises(InvalidRequest):
        make_handler("*", plain, **options)


@pytest.mark.parametrize("pattern", ["", "x" * 256, None, 7, "a\0", "a\n"])
def test_a_wrong_pattern_is_refused(pattern: Any):
    """A pattern is a short printable text (S1.4)."""
    with pytest.raises(InvalidRequest, match="pattern"):
        make_handler(pattern, plain)


def test_what_cannot_be_called_is_no_handler():
    """A coroutine object, a string or None is refused (S1.3)."""
    for odd in (None, "plain", 7):
        with pytest.raises(InvalidRequest, match="callable"):
            make_handler("*", odd)  # pyright: ignore[reportArgumentType]


def test_the_defaults_are_those_of_the_requirement():
    """Thirty seconds, the default subscription, retry, no breaker (S1.8)."""
    handler = make_handler("*", plain)
    assert (handler.timeout, handler.subscription, handler.on_error, handler.breaker) == (30, "default", "retry", None)
    assert make_handler("*", plain, timeout=None).timeout is None


def test_every_registration_has_an_id_of_its_own():
    """The same function twice is two handlers (S1.3)."""
    assert make_handler("*", plain).id != make_handler("*", plain).id


def test_a_handler_is_named_after_its_function():
    """The same in every process, through wrappers too (S1.6)."""

    @functools.wraps(plain)
    def wrapped(*args: Any) -> Any:
        return plain(*args)

    name = f"{__name__}.plain"
    assert make_handler("*", plain).name == name
    assert make_handler("*", wrapped).name == name
    assert make_handler("*", plain).breaker_name == make_handler("*", plain).breaker_name


def test_handlers_of_an_event_come_in_order_of_registration():
    """Those whose pattern, tags and subscription fit, and no others (S1.7)."""
    handlers = Handlers()
    options: list[dict[str, Any]] = [
        {"pattern": "order.*"},
        {"pattern": "user.*"},
        {"pattern": "*", "tags": ("eu",)},
        {"pattern": "*", "tags": ("us",)},
        {"pattern": "*", "subscription": "other"},
        {"pattern": "order.placed"},
    ]
    made = [make_handler(each.pop("pattern"), plain, **each) for each in options]
    for handler in made:
        handlers.add(handler)
    assert handlers.matching("default", event("order.placed", tags=("eu", "big"))) == (made[0], made[2], made[5])
    assert handlers.matching("other", event("order.placed")) == (made[4],)
    assert handlers.subscriptions() == ("default", "other")
    assert len(handlers.interests("default")) == 5


def test_a_removed_handler_matches_no_more():
    """Even where its match was remembered (S1.3)."""
    handlers = Handlers()
    one, two = make_handler("*", plain), make_handler("*", awaited)
    handlers.add(one)
    handlers.add(two)
    assert handlers.matching("default", event("a")) == (one, two)
    assert handlers.remove(one.id)
    assert handlers.matching("default", event("a")) == (two,)
    assert not handlers.remove(one.id)
    assert handlers.all() == (two,)


def test_a_handler_added_later_is_found_at_once():
    """What was remembered before it came does not hide it (S1.3)."""
    handlers = Handlers()
    assert handlers.matching("default", event("a")) == ()
    one = make_handler("a", plain)
    handlers.add(one)
    assert handlers.matching("default", event("a")) == (one,)


def test_a_match_under_way_does_not_bring_a_removed_handler_back():
    """A look that began before the removal must not be remembered after it (S1.3)."""
    handlers = Handlers()
    entered, go_on = threading.Event(), threading.Event()

    class Slow(str):
        """An event type that takes its time to be compared."""

        __slots__ = ()

        def startswith(self, *args: Any) -> bool:
            """Wait for the removal."""
            entered.set()
            go_on.wait(5)
            return super().startswith(*args)

    one = make_handler("a*", plain)
    handlers.add(one)
    look = threading.Thread(target=lambda: handlers.matching("default", event(Slow("abc"))))
    look.start()
    entered.wait(5)
    handlers.remove(one.id)
    go_on.set()
    look.join(5)
    assert handlers.matching("default", event("abc")) == ()


# ── typed payloads ───────────────────────────────────────────────────────────────────────────────────────────────────


class Order(BaseModel):
    """An order as a pydantic model."""

    order_id: int
    note: str = "none"


@dataclass
class Parcel:
    """An order as a dataclass."""

    order_id: int


def test_a_payload_is_made_into_its_model():
    """Pydantic models, dataclasses and plain types; the event itself stays as it was."""
    given = event("a", payload={"order_id": 7})
    assert make_handler("*", plain, model=Order).prepared(given).payload == Order(order_id=7)
    assert make_handler("*", plain, model=Parcel).prepared(given).payload == Parcel(7)
    assert make_handler("*", plain, model=dict[str, int]).prepared(given).payload == {"order_id": 7}
    assert make_handler("*", plain).prepared(given) is given
    assert given.payload == {"order_id": 7}


@pytest.mark.parametrize("payload", [None, {}, {"order_id": "seven"}, [7]])
def test_a_payload_that_does_not_fit_is_discarded(payload: Any):
    """No retry would help (S1.1)."""
    for model in (Order, Parcel):
        with pytest.raises(Discard, match=model.__name__):
            make_handler("*", plain, model=model).prepared(event("a", payload=payload))
