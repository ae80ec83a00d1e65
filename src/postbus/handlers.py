"""Handlers: functions registered for a pattern, and what happens when they run."""

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast, get_args
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from postbus.breaker import Breaker
from postbus.errors import Discard, InvalidRequest
from postbus.model import Event
from postbus.pattern import Interest, check_pattern
from postbus.retry import RetryPolicy

OnError = Literal["retry", "record"]
Start = Literal["beginning", "now"] | int
"""Where a new subscription begins: before or after all that is in the log, or after an id."""
DEFAULT_TIMEOUT: Final = 30.0
MAX_NAME: Final = 100
MAX_MATCHES: Final = 10_000
PLAIN: Final = frozenset(get_args(ErrorType)) - {
    "assertion_error",
    "bytes_invalid_encoding",
    "date_from_datetime_parsing",
    "date_parsing",
    "datetime_from_date_parsing",
    "datetime_object_invalid",
    "datetime_parsing",
    "get_attribute_error",
    "iteration_error",
    "json_invalid",
    "mapping_type",
    "no_such_attribute",
    "time_delta_parsing",
    "time_parsing",
    "timezone_offset",
    "union_tag_invalid",
    "url_parsing",
    "url_syntax_violation",
    "uuid_parsing",
    "value_error",
}
"""The errors whose messages pydantic makes of the model alone; those of the others may quote the value."""


@dataclass(frozen=True)
class Handler:
    """A function, what it handles, and on which terms."""

    id: str
    function: Callable[..., Any]
    interest: Interest
    subscription: str
    retry: RetryPolicy | Mapping[str, float] | None
    timeout: float | None
    on_error: OnError
    breaker: Breaker | None
    model: Any = None
    transactional: bool = False
    start: Start = "beginning"
    """Where its subscription begins, if this handler is the first to name it."""

    @cached_property
    def name(self) -> str:
        """The function's own name, the same in every process."""
        named = inspect.unwrap(self.function)
        return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', repr(named))}"

    @cached_property
    def breaker_name(self) -> str:
        """What its breaker is called in the store: shared by every process that registers the same function."""
        return f"{self.subscription}/{self.interest.pattern}/{self.name}"

    @cached_property
    def is_async(self) -> bool:
        """Whether calling it gives something to await."""
        call = getattr(self.function, "__call__", None)  # noqa: B004  the method itself is wanted
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    @cached_property
    def wants_context(self) -> bool:
        """Whether it takes `ctx` beside the event."""
        parameters = _parameters(self.function)
        if self.transactional:
            return "ctx" in parameters
        places = [
            each for each in parameters.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
        needed = [each for each in places if each.default is each.empty or each.name == "ctx"]
        return len(needed) > 1

    @cached_property
    def _adapter(self) -> TypeAdapter[Any] | None:
        return None if self.model is None else TypeAdapter(self.model)

    def prepared(self, event: Event) -> Event:
        """Return the event with its payload validated into the handler's model; raise Discard if it does not fit."""
        adapter = self._adapter
        if adapter is None:
            return event
        try:
            return replace(event, payload=adapter.validate_python(event.payload))
        except ValidationError as error:
            words = frozenset(_words(adapter.core_schema)) | {"key"}  # what pydantic names a wrong key itself
            model, wrong = getattr(self.model, "__name__", self.model), "; ".join(_misfits(error, words))
            raise Discard(f"the payload does not fit {model}: {wrong}") from None


def _misfits(error: ValidationError, words: frozenset[str]) -> Iterator[str]:
    """Yield what is wrong and where, by the model's words alone: this goes to logs, where payloads have no business.

    A part of a location that is not in the model, such as the key of an extra field, is shown as an ellipsis.
    """
    for each in error.errors(include_input=False):
        parts = [part if isinstance(part, int) or _consists_of(part, words) else None for part in each["loc"]]
        place = "".join(
            "[…]" if part is None else f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts
        )
        yield f"{place.removeprefix('.') or 'payload'}: {_reason(each)}"


def _reason(error: ErrorDetails) -> str:
    """Return what was expected: pydantic's message, or, where that may quote the value, what it says of the model."""
    kind, context = error["type"], error.get("ctx", {})
    if "url" not in error:  # a validator's own: message and context are what it made of the value
        return kind
    if kind in PLAIN:
        return error["msg"]
    if kind == "union_tag_invalid":
        return f"{kind}, expected {context['discriminator']} to be one of {context['expected_tags']}"
    raised = getattr(context.get("error"), "__traceback__", None)
    return kind if raised is None else f"{kind} in {raised.tb_frame.f_code.co_qualname}"


def _consists_of(part: str, words: frozenset[str]) -> bool:
    """Return whether a part of a location, such as `way` or `list[int]`, is made of a model's words."""
    found = re.findall(r"[^\[\](), ]+", part)
    return bool(found) and words.issuperset(found)


def _words(schema: object) -> Iterator[str]:
    """Yield the texts and names in a model's schema: its fields, aliases, tags, types and validators."""
    match schema:
        case str():
            yield schema
        case Mapping():
            table = cast("Mapping[str, object]", schema)
            skipped = {"metadata", "default", "serialization"} if isinstance(table.get("type"), str) else ()
            for name, value in table.items():  # of a kind of value; or of fields, which may have any names
                yield name
                if name not in skipped:
                    yield from _words(value)
        case list() | tuple() | set() | frozenset():
            for value in cast("Iterable[object]", schema):
                yield from _words(value)
        case _:
            yield getattr(schema, "__name__", "")


def make_handler(
    pattern: str,
    function: Callable[..., Any],
    *,
    subscription: str = "default",
    tags: Sequence[str] = (),
    retry: RetryPolicy | Mapping[str, float] | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    on_error: OnError = "retry",
    breaker: Breaker | None = None,
    model: Any = None,
    transactional: bool = False,
    start: Start = "beginning",
) -> Handler:
    """Return a handler; raise InvalidRequest, naming the option that is wrong."""
    _check_callable(function)
    if transactional or "tx" in _parameters(function):
        _check_transactional(function, transactional=transactional, timeout=timeout, on_error=on_error)
    else:
        _check_signature(function)
    if on_error not in get_args(OnError):
        raise InvalidRequest(f"on_error is 'retry' or 'record', not {on_error!r}")
    if timeout is not None and timeout <= 0:
        raise InvalidRequest("timeout must be more than 0 seconds, or None for no limit")
    if isinstance(tags, str):
        raise InvalidRequest("tags must be a list of strings")
    RetryPolicy().merged(retry)
    made = Handler(
        id=uuid4().hex,
        function=function,
        interest=Interest(check_pattern(pattern), frozenset(tags)),
        subscription=check_subscription(subscription),
        retry=retry,
        timeout=timeout,
        on_error=on_error,
        breaker=breaker,
        model=model,
        transactional=transactional,
        start=check_start(start),
    )
    if transactional and made.is_async:
        raise InvalidRequest("an async function cannot be transactional: others would wait for its lock at every await")
    return made


def make_follower(
    pattern: str, function: Callable[..., Any], *, subscription: str, tags: Sequence[str] = (), model: Any = None
) -> Handler:
    """Return the handler of a follower, transactional if it has a parameter tx; raise InvalidRequest."""
    _check_callable(function)
    if isinstance(tags, str):
        raise InvalidRequest("tags must be a list of strings")
    transactional = "tx" in _parameters(function)
    (_check_tx_signature if transactional else _check_signature)(function)
    needed = [name for name, each in _parameters(function).items() if each.default is each.empty]
    if other := set(needed[1:]) - {"ctx", "tx"}:
        # Elsewhere a second parameter may have any name; here a misspelt tx would cost what tx is for.
        names = ", ".join(sorted(other))
        raise InvalidRequest(f"a follower's function takes (event), and ctx and tx by these names, not {names}")
    interest = Interest(check_pattern(pattern), frozenset(tags))
    made = Handler(
        id=uuid4().hex,
        function=function,
        interest=interest,
        subscription=check_subscription(subscription),
        retry=None,
        timeout=None,
        on_error="retry",
        breaker=None,
        model=model,
        transactional=transactional,
    )
    if transactional and made.is_async:
        raise InvalidRequest("an async function cannot be transactional: others would wait for its lock at every await")
    return made


def _check_callable(function: object) -> None:
    """Raise InvalidRequest for what cannot be called, and for a generator: calling it runs nothing of its body."""
    if not callable(function):
        raise InvalidRequest("a handler must be a function or another callable")
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004  the method itself is wanted
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise InvalidRequest("a handler must not yield: it is called once for each event, and then it is done")


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _check_transactional(
    function: Callable[..., Any], *, transactional: bool, timeout: float | None, on_error: OnError
) -> None:
    """Raise InvalidRequest unless a handler that has `tx`, or is said to be transactional, can be so."""
    if "tx" not in _parameters(function):
        raise InvalidRequest("a transactional handler writes through its parameter tx: give it one, (event, tx)")
    if not transactional:
        raise InvalidRequest("a handler with a parameter tx is transactional: say so with transactional=True")
    if on_error == "record":
        raise InvalidRequest(
            "a transactional handler that fails is undone and retried: on_error='record' contradicts it"
        )
    if timeout is None:
        raise InvalidRequest("a transactional handler must have a timeout: while it runs, others wait for its lock")
    _check_tx_signature(function)


def _check_tx_signature(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    for names in ({"tx": None}, {"tx": None, "ctx": None}):
        try:
            signature.bind(None, **names)
        except TypeError:
            continue
        return
    raise InvalidRequest(f"a transactional handler takes (event, tx) or (event, ctx, tx), not {signature}")


def _check_signature(function: Callable[..., Any]) -> None:
    """Raise InvalidRequest for a function that can be called with neither (event) nor (event, ctx)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    for arguments in ((None,), (None, None)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return
    raise InvalidRequest(f"a handler takes (event) or (event, ctx), not {signature}")


def check_subscription(name: object) -> str:
    """Return a subscription's name if it may be one; raise InvalidRequest if not."""
    if not isinstance(name, str) or not name or not name.isprintable() or "/" in name or len(name) > MAX_NAME:
        raise InvalidRequest(f"a subscription's name is 1 to {MAX_NAME} printable characters without a slash")
    return name


def check_start(start: Any) -> Start:
    """Return where a subscription is to begin if it can begin there; raise InvalidRequest if not."""
    if start in ("beginning", "now") or (type(start) is int and start >= 0):
        return start
    raise InvalidRequest(f"start is 'beginning', 'now' or an id, not {start!r:.80}")


class Match(NamedTuple):
    """The handlers an event goes through, the transactional ones last, and whether any of them must be awaited."""

    handlers: tuple[Handler, ...]
    is_async: bool
    outside: int
    """How many are not transactional: the others run after them, all in one transaction."""


class Handlers:
    """The handlers of one process, in order of registration."""

    def __init__(self) -> None:
        """Begin with none."""
        self._handlers: dict[str, Handler] = {}
        self._matches: dict[tuple[str, str, tuple[str, ...]], Match] = {}
        self._lock = threading.Lock()

    def add(self, handler: Handler) -> None:
        """Take a handler in."""
        with self._lock:
            self._handlers = {**self._handlers, handler.id: handler}
            self._matches = {}

    def remove(self, identity: str) -> bool:
        """Drop a handler; return whether it was there."""
        with self._lock:
            known = identity in self._handlers
            self._handlers = {key: value for key, value in self._handlers.items() if key != identity}
            self._matches = {}
            return known

    def all(self) -> tuple[Handler, ...]:
        """Return every handler."""
        return tuple(self._handlers.values())

    def subscriptions(self) -> tuple[str, ...]:
        """Return the subscriptions handled here, each once."""
        return tuple(dict.fromkeys(handler.subscription for handler in self._handlers.values()))

    def interests(self, subscription: str) -> tuple[Interest, ...]:
        """Return what this process handles of a subscription, each once."""
        return tuple(dict.fromkeys(each.interest for each in self.all() if each.subscription == subscription))

    def matching(self, subscription: str, event: Event) -> tuple[Handler, ...]:
        """Return the handlers an event goes through: in order of registration, the transactional ones last."""
        return self.match(subscription, event).handlers

    def match(self, subscription: str, event: Event) -> Match:
        """Return the handlers an event goes through, and whether any of them must be awaited."""
        key = (subscription, event.type, event.tags)
        matches = self._matches
        found = matches.get(key)
        if found is None:
            handlers = tuple(
                each
                for each in self.all()
                if each.subscription == subscription and each.interest.wants(event.type, event.tags)
            )
            inside = tuple(each for each in handlers if each.transactional)
            outside = tuple(each for each in handlers if not each.transactional)
            found = Match(outside + inside, any(each.is_async for each in outside), len(outside))
            if len(matches) < MAX_MATCHES:
                # Into the table as it was: if a handler has come or gone meanwhile, there is a new one.
                matches[key] = found
        return found
