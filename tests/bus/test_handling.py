"""What a worker does with an event: handlers in order, errors recorded, typed payloads, and the context."""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal
from uuid import UUID

import pydantic
import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetPydanticSchema, ValidationError
from pydantic_core import PydanticCustomError
from pydantic_core._pydantic_core import list_all_errors
from pydantic_core.core_schema import datetime_schema

from postbus import Context, Discard, Event, EventBus, LeaseLost, RetryPolicy, Status
from postbus.handlers import PLAIN
from postbus.testing import FrozenClock, drain
from tests.bus.telling import failures

# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_plain_and_async_handlers_both_run(bus: EventBus):
    """Each event goes to the handlers that match it (S0.7, S1.3)."""
    ran: list[str] = []

    @bus.on("plain")
    def plain(event: Event) -> None:
        ran.append(event.type)

    @bus.on("async")
    async def awaited(event: Event) -> None:
        await asyncio.sleep(0)
        ran.append(event.type)

    with bus:
        bus.publish("plain")
        bus.publish("async")
        bus.wait_idle(timeout=10)
    assert sorted(ran) == ["async", "plain"]


def test_handlers_of_one_event_run_one_after_another(bus: EventBus):
    """Never two at once, in order of registration, plain or async (S1.7)."""
    running, most, order = 0, 0, []
    lock = threading.Lock()

    def enter(name: str) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            order.append(name)

    def leave() -> None:
        nonlocal running
        with lock:
            running -= 1

    @bus.on("*")
    def first(_: Event) -> None:
        enter("first")
        leave()

    @bus.on("*")
    async def second(_: Event) -> None:
        enter("second")
        await asyncio.sleep(0.01)
        leave()

    @bus.on("*")
    def third(_: Event) -> None:
        enter("third")
        leave()

    with bus:
        bus.publish("a", wait=True, timeout=10)
    assert (order, most) == (["first", "second", "third"], 1)


def test_different_events_run_at_the_same_time(make_bus: Callable[..., EventBus]):
    """As many as the concurrency allows meet at a barrier (S0.7)."""
    for handler_kind in ("plain", "async"):
        bus = make_bus(concurrency=4)
        met = threading.Barrier(4)
        arrived = 0
        together = asyncio.Event()

        def plain(_: Event, met: threading.Barrier = met) -> None:
            met.wait(10)

        async def awaited(_: Event, together: asyncio.Event = together) -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 4:
                together.set()
            await asyncio.wait_for(together.wait(), 10)

        bus.subscribe("*", plain if handler_kind == "plain" else awaited, retry={"max_retries": 0})
        events = bus.publish_many([{"type": "a"}] * 4)
        with bus:
            bus.wait_idle(timeout=10)
            assert {bus.get(event.id).status for event in events} == {Status.COMPLETED}


def test_no_more_run_at_once_than_the_concurrency_allows(make_bus: Callable[..., EventBus]):
    """Two of twenty at a time (S0.7)."""
    bus = make_bus(concurrency=2)
    running, most = 0, 0
    lock = threading.Lock()

    @bus.on("*")
    def handle(_: Event) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    bus.publish_many([{"type": "a"}] * 20)
    with bus:
        bus.wait_idle(timeout=10)
    assert most == 2


def test_every_event_ends_completed_or_dead_with_its_diagnosis(bus: EventBus):
    """A mix of handlers that work, fail, recover and discard: nothing is left, nothing is lost (S1.1, I9)."""
    seen: dict[int, int] = {}

    @bus.on("*", retry=RetryPolicy(max_retries=2, base_delay=0.001, max_delay=0.001))
    def handle(event: Event, ctx: Context) -> None:
        seen[event.id] = ctx.attempt
        match event.payload % 4:
            case 1:
                raise ValueError("always")
            case 2 if ctx.attempt < 3:
                raise ValueError("at first")
            case 3:
                raise Discard("never")

    events = bus.publish_many({"type": f"t{n % 5}", "payload": n} for n in range(100))
    with bus:
        bus.wait_idle(timeout=30)
        expected = [(Status.COMPLETED, 1), (Status.FAILED, 3), (Status.COMPLETED, 3), (Status.FAILED, 1)]
        for event in events:
            stand = bus.get(event.id).deliveries[0]
            assert (stand.status, stand.attempt) == expected[event.payload % 4]
            assert len(stand.errors) == [0, 3, 2, 1][event.payload % 4]
        assert bus.dlq.list().total == 50


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("bare")], ids=repr)
def test_a_handler_that_exits_fails_its_event_and_nothing_else(make_bus: Callable[..., EventBus], error: BaseException):
    """One thread, three events: the second calls sys.exit, the third is handled all the same (S1.1, I10)."""
    bus = make_bus(concurrency=1, retry=RetryPolicy(max_retries=0))

    @bus.on("*")
    def handle(event: Event) -> None:
        if event.payload == 1:
            raise error

    events = bus.publish_many({"type": "a", "payload": n} for n in range(3))
    with bus:
        bus.wait_idle(timeout=10)
        assert [bus.get(event.id).status for event in events] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]


def test_an_async_handler_that_exits_fails_its_event_and_nothing_else(make_bus: Callable[..., EventBus]):
    """The event loop lives on (S1.1, I10)."""
    bus = make_bus(concurrency=1, retry=RetryPolicy(max_retries=0))

    @bus.on("*")
    async def handle(event: Event) -> None:
        if event.payload == 1:
            sys.exit(3)

    events = bus.publish_many({"type": "a", "payload": n} for n in range(3))
    with bus:
        bus.wait_idle(timeout=10)
        assert [bus.get(event.id).status for event in events] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]


def test_a_cancelled_handler_burns_no_attempt(bus: EventBus):
    """Its lease is given back, and the next run is attempt one again (S0.7, I11)."""
    attempts: list[int] = []

    @bus.on("*")
    async def handle(event: Event, ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) == 1:
            raise asyncio.CancelledError

    event = bus.publish("a")
    with bus:
        bus.wait_idle(timeout=10)
        told = bus.get(event.id, include_logs=True)
    assert attempts == [1, 1]
    assert [row.action for row in told.logs] == ["PICKED", "RELEASED", "PICKED", "COMPLETED"]
    assert told.retry_count == 0


# ── record ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_record_runs_all_handlers_and_keeps_each_ones_error(still: EventBus, caplog: pytest.LogCaptureFixture):
    """No retry: COMPLETED_WITH_ERRORS with both errors, and one entry for each (S2.3, S2.4, S1.11)."""
    ran: list[str] = []

    def failing(name: str) -> Callable[[Event], None]:
        def handle(_: Event) -> None:
            ran.append(name)
            raise ValueError(name)

        return handle

    still.subscribe("*", failing("one"), on_error="record")
    still.subscribe("*", lambda _: ran.append("two"), on_error="record")
    still.subscribe("*", failing("three"), on_error="record")
    event = still.publish("a")
    with caplog.at_level(logging.WARNING, "postbus"):
        assert drain(still) == 1
        assert drain(still) == 0
    told = still.get(event.id)
    assert ran == ["one", "two", "three"]
    assert told.status is Status.COMPLETED_WITH_ERRORS
    assert [error.message for error in told.errors] == ["one", "three"]
    assert [entry["then"] for entry in failures(caplog)] == ["recorded", "recorded"]


def test_a_record_handler_does_not_save_the_event_from_a_retry_handler(still: EventBus, clock: FrozenClock):
    """One that is to be retried is, and the recorded error is met again on the next attempt (S1.7, S2.4)."""

    @still.on("*", on_error="record")
    def recorded(_: Event) -> None:
        raise ValueError("recorded")

    @still.on("*")
    def retried(_: Event, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ValueError("retried")

    event = still.publish("a")
    drain(still)
    assert still.get(event.id).status is Status.PENDING
    clock.advance(1)
    drain(still)
    assert still.get(event.id).status is Status.COMPLETED_WITH_ERRORS


# ── typed payloads and the context ───────────────────────────────────────────────────────────────────────────────────


class Order(BaseModel):
    """An order."""

    order_id: int
    items: list[str] = []


@dataclass
class Parcel:
    """A parcel."""

    order_id: int


@pytest.mark.parametrize("model", [Order, Parcel])
def test_a_handler_gets_its_payload_as_a_model(still: EventBus, model: Any):
    """Pydantic model or dataclass; the stored payload stays JSON."""
    got: list[Any] = []
    still.subscribe("*", lambda event: got.append(event.payload), model=model)
    event = still.publish("a", {"order_id": 7})
    drain(still)
    assert got == [model(order_id=7)]
    assert still.get(event.id).payload == {"order_id": 7}


@pytest.mark.parametrize("model", [Order, Parcel])
def test_a_payload_that_does_not_fit_is_a_dead_letter_at_once(still: EventBus, model: Any):
    """No retry would help; the reason names the model and the field (S1.1, S1.10)."""
    ran: list[Any] = []
    still.subscribe("*", ran.append, model=model)
    still.publish("a", {"order_id": "seven"})
    drain(still)
    (letter,) = still.dlq.list()
    assert ran == []
    assert letter.attempts == 1
    assert model.__name__ in letter.errors[0].message
    assert "order_id" in letter.errors[0].message


def checked(text: str) -> str:
    """Refuse every text, and repeat it, as validators do."""
    raise ValueError(f"over\n\ntwo lines: {text}")


def measured(text: str) -> str:
    """Refuse every text, under pydantic's own name for something else."""
    raise PydanticCustomError("missing", "no such thing\nas {text}", {"text": text})


class Cash(BaseModel):
    """One way to pay."""

    kind: Literal["cash"]


class Card(BaseModel):
    """Another."""

    kind: Literal["card"]


Zoned = Annotated[datetime, GetPydanticSchema(lambda *_: datetime_schema(tz_constraint=3600))]
Way = Annotated[Cash | Card, Field(discriminator="kind")]


class Checkout(BaseModel):
    """Whatever pydantic can quote of a value: in a message, or in a location."""

    model_config = ConfigDict(extra="forbid")
    items: list[str]
    way: Way
    ways: dict[str, Way]
    uid: UUID
    host: IPv4Address
    text: Annotated[str, AfterValidator(checked)]
    size: Annotated[str, AfterValidator(measured)]
    at: Zoned
    amount: int | list[int]


@pydantic.dataclasses.dataclass(config=ConfigDict(extra="forbid"))
class Basket:
    """The same as a dataclass."""

    items: list[str]
    way: Way
    ways: dict[str, Way]
    uid: UUID
    host: IPv4Address
    text: Annotated[str, AfterValidator(checked)]
    size: Annotated[str, AfterValidator(measured)]
    at: Zoned
    amount: int | list[int]


class Receipt(BaseModel):
    """Some of that, where no key of the payload is part of a location."""

    way: Way
    items: list[str]
    uid: UUID
    text: Annotated[str, AfterValidator(checked)]
    size: Annotated[str, AfterValidator(measured)]


CHECKOUT: dict[str, Any] = {
    "items": [{"card": "card4111"}],
    "way": {"kind": "card4111"},
    "ways": {"card4111": {"kind": "card4111\n\ncard4111"}},
    "uid": "þcard4111",
    "host": "card4111",
    "text": "card4111",
    "size": "card4111",
    "at": "2026-01-01T00:00:00+04:11",
    "amount": "card4111a",
    "card4111": "card4111",
}
SECRETS = ("card4111", "þ", "got 15060")
"""What must not be repeated; the last is what pydantic says of an offset of 4:11."""


@pytest.mark.parametrize("way", ["on", "follow"])
@pytest.mark.parametrize("model", [Checkout, Basket])
def test_a_payload_that_does_not_fit_is_described_without_any_of_it(
    bus: EventBus, caplog: pytest.LogCaptureFixture, eventually: Callable[..., Any], way: str, model: Any
):
    """Fields, kinds of error and what was expected come of the model; no key, tag or value of the payload (I17)."""
    ran: list[Event] = []
    if way == "on":
        bus.subscribe("*", ran.append, subscription="s", model=model)
    else:
        bus.follow("s", model=model)(ran.append)
    with bus:
        bus.publish("a", CHECKOUT)
        (letter,) = eventually(lambda: bus.dlq.list(subscription="s"))
    (error,) = letter.errors
    told = f"{error.message} {error.traceback}"
    assert ran == []
    for expected in (
        "items[0]: Input should be a valid string;",
        "way: union_tag_invalid, expected 'kind' to be one of 'cash', 'card';",
        "ways[…]: union_tag_invalid, expected",
        "uid: uuid_parsing;",
        "host: ip_v4_address;",
        "text: value_error in checked;",
        "size: missing;",
        "amount.list[int]: Input should be a valid list;",
        "[…]: ",
    ):
        assert expected in error.message
    everything = told + caplog.text + str([vars(each) for each in caplog.records])
    assert [secret for secret in SECRETS if secret in everything] == []


def test_each_kind_of_error_that_quotes_the_value_is_known():
    """A new one of a later pydantic shows here: its message has a part that no model has given (I17)."""
    kinds = {each["type"]: each for each in list_all_errors()}
    foreign = {"error", "encoding_error", "tag", "tz_actual", "attribute"}
    known = {
        "actual_length class class_name decimal_places discriminator encoding expected expected_schemes expected_tags",
        "expected_version field_type ge gt le lt max_digits max_length method_name min_length multiple_of pattern",
        "tz_expected whole_digits",
    }
    given = {name for each in kinds.values() for name in each.get("example_context") or ()}
    assert given <= foreign | set(" ".join(known).split())
    quoting = {name for name, each in kinds.items() if foreign & set(each.get("example_context") or ())}
    assert quoting == kinds.keys() - PLAIN


@pytest.mark.parametrize("way", ["model", "in the handler", "chained", "in a group", "quoted", "as a key", "cut off"])
def test_an_error_of_validation_repeats_nothing_of_the_payload(
    still: EventBus, caplog: pytest.LogCaptureFixture, way: str
):
    """Place and reason are kept, the value is not: neither in the dead letter nor in the log (I17)."""

    def handle(event: Event) -> None:
        try:
            Receipt.model_validate(event.payload)
        except ValidationError as error:
            match way:
                case "chained":
                    raise LookupError("no such order") from error
                case "in a group":
                    raise ExceptionGroup("two", [KeyError("one"), ExceptionGroup("inner", [error])]) from error
                case "quoted":
                    raise ValueError(f"wrong: {error}") from None
                case "as a key":
                    raise KeyError(str(error)) from None
                case "cut off":
                    raise ValueError(str(error).partition(" does not match")[0]) from None
                case _:
                    raise

    still.subscribe("*", handle, model=Receipt if way == "model" else None, retry=RetryPolicy(max_retries=0))
    still.publish("a", {each: CHECKOUT[each] for each in ("items", "way", "uid", "text", "size")})
    drain(still)
    (letter,) = still.dlq.list()
    (error,) = letter.errors
    told = f"{error.message} {error.traceback}"
    if way not in {"as a key", "cut off"}:
        assert "Input should be a valid string" in told
        assert "items[0]: " in told if way == "model" else "items.0" in told
        assert "union_tag_invalid" in told
    everything = told + caplog.text + str([vars(each) for each in caplog.records])
    assert [secret for secret in SECRETS if secret in everything] == []


def test_the_context_tells_of_the_run(still: EventBus, clock: FrozenClock, caplog: pytest.LogCaptureFixture):
    """Attempt, epoch and worker; a logger that knows the event (S0.7)."""
    seen: list[tuple[int, int, str]] = []

    @still.on("*")
    def handle(_: Event, ctx: Context) -> None:
        seen.append((ctx.attempt, ctx.epoch, ctx.worker_id))
        ctx.log.warning("half way")
        if ctx.attempt == 1:
            raise ValueError("once")

    event = still.publish("a")
    with caplog.at_level(logging.WARNING, "postbus"):
        drain(still)
        clock.advance(1)
        drain(still)
    assert [(attempt, worker) for attempt, _, worker in seen] == [(1, still.worker_id), (2, still.worker_id)]
    assert seen[1][1] > seen[0][1]
    entry = next(record for record in caplog.records if record.getMessage() == "half way")
    assert (vars(entry)["event_id"], vars(entry)["attempt"]) == (event.id, 1)
    assert entry.name.startswith("postbus")


def test_a_handler_can_extend_its_own_lease(still: EventBus, clock: FrozenClock):
    """It runs from then on; after another took over it is LeaseLost (S2.5, I8)."""
    lost: list[LeaseLost] = []

    @still.on("*")
    def handle(event: Event, ctx: Context) -> None:
        clock.advance(50)
        ctx.extend()
        until = still.get(event.id).deliveries[0].lease_until
        assert until == clock.now() + timedelta(seconds=60)
        if ctx.attempt == 1:
            still.reset(event.id, "taken away")
            with pytest.raises(LeaseLost) as caught:
                ctx.extend()
            lost.append(caught.value)

    event = still.publish("a")
    drain(still)
    assert len(lost) == 1
    assert still.get(event.id).status is Status.COMPLETED


def test_a_settlement_that_comes_too_late_is_logged_and_changes_nothing(
    still: EventBus, caplog: pytest.LogCaptureFixture
):
    """The handler finished after its delivery was reset: `lease_lost`, and the second run counts (I8, I11)."""

    @still.on("*")
    def handle(event: Event, ctx: Context) -> None:
        if ctx.attempt == 1:
            still.reset(event.id, "taken away")

    event = still.publish("a")
    with caplog.at_level(logging.WARNING, "postbus"):
        assert drain(still) == 2
    assert [record.msg for record in caplog.records].count("lease_lost") == 1
    actions = [row.action for row in still.get(event.id, include_logs=True).logs]
    assert actions == ["PICKED", "RESET", "PICKED", "COMPLETED"]
