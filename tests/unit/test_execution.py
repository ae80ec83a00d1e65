"""What follows from how the handlers went: outcomes as values, without threads or waiting."""

import asyncio
import concurrent.futures
import logging
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from postbus.errors import Discard, RetryLater
from postbus.execution import Execution, Ownership, Report, Run, describe
from postbus.handlers import Handlers, make_handler
from postbus.model import AttemptError, Dead, Delivery, Done, DoneWithErrors, Retry
from postbus.retry import RetryPolicy
from postbus.store import Queue, open_store
from postbus.testing import FrozenClock
from tests.unit.making import delivery

TOLD = AttemptError("ValueError", "oops")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Queue]:
    """Give a real store."""
    store = open_store(f"sqlite:///{tmp_path / 'bus.db'}", clock=FrozenClock())
    yield store
    store.close()


@pytest.fixture
def execution(store: Queue) -> Execution:
    """Give an execution with no handlers yet."""
    return Execution(store, Handlers(), RetryPolicy(), timedelta(seconds=60), random.Random(7))


def owned(run: Run, *, calling: bool) -> bool:
    """Say that the run is the thread's own."""
    return bool(run) or calling


def owning(answers: Iterator[bool]) -> Ownership:
    """Return what gives these answers, one after another."""

    def ask(run: Run, *, calling: bool) -> bool:
        del run, calling
        return next(answers)

    return ask


def run(execution: Execution, one: Delivery) -> Report:
    """Run a delivery through its handlers, all plain or not."""
    begun = execution.begin(one)
    report = asyncio.run(execution.run_async(begun)) if begun.is_async else execution.run(begun, owned)
    assert report is not None
    return report


def handle(execution: Execution, function: Callable[..., Any], **options: Any) -> None:
    """Register a handler for everything."""
    execution.handlers.add(make_handler("*", function, **options))


def raising(error: BaseException) -> Callable[..., None]:
    """Return a handler that raises."""

    def handler(_: object) -> None:
        raise error

    return handler


# ── retry or dead ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("event_retries", "handler_retry", "subscription", "allowed"),
    [
        (None, None, RetryPolicy(max_retries=2), 2),
        (None, {"max_retries": 4}, RetryPolicy(max_retries=2), 4),
        (None, RetryPolicy(max_retries=0), RetryPolicy(max_retries=2), 0),
        (1, {"max_retries": 4}, RetryPolicy(max_retries=2), 1),
        (5, RetryPolicy(max_retries=0), RetryPolicy(max_retries=2), 5),
        (0, None, RetryPolicy(max_retries=9), 0),
    ],
)
def test_the_events_number_goes_before_the_handlers_before_the_subscriptions(
    execution: Execution, event_retries: int | None, handler_retry: Any, subscription: RetryPolicy, allowed: int
):
    """Exactly as many retries as the nearest of them says (S1.9, I12)."""
    handler = make_handler("*", print, retry=handler_retry)
    decided = [
        execution.decide(delivery(attempt, retry=subscription, max_retries=event_retries), TOLD, ValueError(), handler)
        for attempt in range(1, allowed + 2)
    ]
    assert [type(each) for each in decided] == [Retry] * allowed + [Dead]


def test_a_partial_override_keeps_the_rest_of_the_policy(execution: Execution):
    """Only the base delay is the handler's own (S1.9)."""
    handler = make_handler("*", print, retry={"base_delay": 5})
    subscription = RetryPolicy(max_retries=9, base_delay=1, max_delay=12, multiplier=2)
    waits = [
        execution.decide(delivery(attempt, retry=subscription), TOLD, ValueError(), handler).after.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]
        for attempt in (1, 2, 3)
    ]
    assert waits == [5, 10, 12]


def test_the_wait_after_attempt_n_is_that_before_attempt_n_plus_one(execution: Execution):
    """One second after the first failure, then two, then four (S1.9)."""
    decided = [execution.decide(delivery(attempt), TOLD, ValueError(), None) for attempt in (1, 2, 3, 4)]
    assert decided == [Retry(timedelta(seconds=wait), TOLD) for wait in (1, 2, 4)] + [Dead(TOLD)]


def test_jitter_spreads_the_waits_within_its_share(execution: Execution):
    """A fifth more or less, by the chance that was handed in (S1.9)."""
    policy = RetryPolicy(base_delay=10, max_delay=100, jitter=0.2)
    waits = {
        execution.decide(delivery(1, retry=policy), TOLD, ValueError(), None).after.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(200)
    }
    assert len(waits) > 100
    assert 8 <= min(waits) < 9
    assert 11 < max(waits) <= 12


def test_discard_is_the_end_at_once(execution: Execution):
    """On the first attempt, whatever the policy allows."""
    assert execution.decide(delivery(1), TOLD, Discard("no"), None) == Dead(TOLD)


def test_retry_later_chooses_the_delay_and_counts_as_an_attempt(execution: Execution):
    """Its own delay while attempts are left, dead when they are not (I12)."""
    later = RetryLater(77)
    assert execution.decide(delivery(3), TOLD, later, None) == Retry(timedelta(seconds=77), TOLD)
    assert execution.decide(delivery(4), TOLD, later, None) == Dead(TOLD)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_handlers_run_in_order_and_all_of_them(execution: Execution):
    """Sequentially, and then it is done (S1.7)."""
    order: list[int] = []
    for number in range(3):
        handle(execution, lambda _, number=number: order.append(number))
    assert run(execution, delivery()).outcome == Done()
    assert order == [0, 1, 2]


def test_the_first_failure_stops_the_run(execution: Execution):
    """What comes after it waits for the retry, which starts at the first again (S1.7)."""
    ran: list[str] = []
    handle(execution, lambda _: ran.append("first"))
    handle(execution, raising(ValueError("oops")))
    handle(execution, lambda _: ran.append("third"))
    outcome = run(execution, delivery()).outcome
    assert isinstance(outcome, Retry)
    assert (outcome.error.type, outcome.error.message, outcome.error.attempt) == ("ValueError", "oops", 1)
    assert ran == ["first"]


def test_record_handlers_never_stop_the_run(execution: Execution):
    """Each one's error is collected, and the event is completed with them (S2.4)."""
    ran: list[str] = []
    handle(execution, raising(ValueError("one")), on_error="record")
    handle(execution, lambda _: ran.append("second"))
    handle(execution, raising(KeyError("three")), on_error="record")
    outcome = run(execution, delivery()).outcome
    assert isinstance(outcome, DoneWithErrors)
    assert [(each.type, each.message) for each in outcome.errors] == [("ValueError", "one"), ("KeyError", "'three'")]
    assert ran == ["second"]


def test_a_retry_handler_that_fails_goes_before_what_was_recorded(execution: Execution):
    """The event is retried, not completed with errors (S1.7, S2.4)."""
    handle(execution, raising(ValueError("recorded")), on_error="record")
    handle(execution, raising(ValueError("failed")))
    outcome = run(execution, delivery()).outcome
    assert isinstance(outcome, Retry)
    assert outcome.error.message == "failed"


@pytest.mark.parametrize("cancelled", [asyncio.CancelledError(), concurrent.futures.CancelledError()])
def test_cancellation_is_no_failure(execution: Execution, cancelled: BaseException):
    """No outcome: the lease is given back, no attempt is burnt (S0.7)."""
    handle(execution, raising(cancelled))
    assert run(execution, delivery()).outcome is None


def test_no_handler_is_no_success(execution: Execution):
    """Nothing is completed because nobody cared: it is handed back (S1.1)."""
    assert run(execution, delivery()).outcome is None


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_even_an_exit_is_only_a_failed_attempt(execution: Execution, error: BaseException):
    """A handler that calls sys.exit fails its event and nothing else (S1.1)."""
    handle(execution, raising(error))
    assert isinstance(run(execution, delivery()).outcome, Retry)


def test_an_error_that_cannot_be_shown_is_an_error_all_the_same(execution: Execution):
    """Its type is told, and the run ends properly (S1.10)."""

    class Broken(Exception):  # noqa: N818  it is
        def __str__(self) -> str:
            raise ValueError("not even this")

    handle(execution, raising(Broken()))
    outcome = run(execution, delivery()).outcome
    assert isinstance(outcome, Retry)
    assert outcome.error.type == "Broken"


def test_an_errors_text_is_fit_to_be_stored(execution: Execution):
    """No NUL, no lone surrogates, no megabytes (S1.10)."""
    handle(execution, raising(ValueError("a\0b\ud800" + "x" * 100_000)))
    outcome = run(execution, delivery()).outcome
    assert isinstance(outcome, Retry)
    for text in (outcome.error.message, outcome.error.traceback or ""):
        assert "\0" not in text
        assert text.encode()
        assert len(text) <= 10_000


def test_an_error_says_where_it_came_from(execution: Execution):
    """Handler, worker, time and the tail of the traceback (S1.10)."""
    handle(execution, raising(ValueError("oops")))
    outcome = run(execution, delivery(2)).outcome
    assert isinstance(outcome, Retry)
    error = outcome.error
    assert (error.attempt, error.worker_id, error.at) == (2, "host:1", None), "the store tells when"
    assert error.handler is not None
    assert "raising" in error.handler
    assert "ValueError: oops" in (error.traceback or "")


def test_a_plain_function_that_returns_a_coroutine_has_not_handled_anything(execution: Execution):
    """An async function behind a plain wrapper is a failure that says so, not a silent success (S1.1)."""

    async def real(_: object) -> None:
        """Do the work."""

    handle(execution, lambda one: real(one))  # noqa: PLW0108  the wrapper is the point
    outcome = run(execution, delivery()).outcome
    assert isinstance(outcome, Retry)
    assert "await" in outcome.error.message


def test_async_and_plain_handlers_mix_in_order(execution: Execution):
    """One after another, whatever their colour (S1.7)."""
    order: list[str] = []

    async def awaited(_: object) -> None:
        await asyncio.sleep(0)
        order.append("async")

    handle(execution, lambda _: order.append("plain"))
    handle(execution, awaited)
    handle(execution, lambda _: order.append("plain again"))
    assert run(execution, delivery()).outcome == Done()
    assert order == ["plain", "async", "plain again"]


@pytest.mark.parametrize("on_error", ["retry", "record"])
def test_each_failure_is_one_log_entry(execution: Execution, caplog: pytest.LogCaptureFixture, on_error: Any):
    """A constant name and fields that say which, where and what then (S1.11)."""
    handle(execution, raising(ValueError("oops")), on_error=on_error)
    with caplog.at_level(logging.WARNING, "postbus"):
        run(execution, delivery(4))
    (entry,) = [record for record in caplog.records if record.msg == "attempt_failed"]
    fields = vars(entry)
    assert (fields["event_id"], fields["subscription"], fields["attempt"]) == (1, "default", 4)
    assert (fields["error_type"], fields["error_message"]) == ("ValueError", "oops")
    assert fields["then"] == {"retry": "dead", "record": "recorded"}[on_error]


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("x [type=int, input_value='s]', input_type=str]\nmore", "x [type=int]\nmore"),
        ("x [type=int, input_value='s, input_type=str] s', input_type=str]", "x [type=int]"),
        ("x [type=int, input_value=<Table\n s\n s>, input_type=Table[int]]\nmore", "x [type=int]\nmore"),
        ("x [type=int, input_value={'card': s", "x [type=int]"),
        ("a 1 [type=int, input_value=s, input_type=str]\nb 2 [type=str, input_value=s, input_type=int]",
         "a 1 [type=int]\nb 2 [type=str]"),
    ],
)  # fmt: skip
def test_what_pydantic_quotes_is_left_out(message: str, kept: str):
    """On one line, over several, cut off, or pretending to have ended: the rest of the text stays (I17)."""
    assert describe(ValueError(message), delivery()).message == kept
    assert describe(message, delivery()).message == kept


def test_who_no_longer_owns_a_run_tells_nothing(execution: Execution, caplog: pytest.LogCaptureFixture):
    """A thread that was left behind neither reports, nor logs, nor goes on to the next handler (S1.8, I11)."""
    ran: list[str] = []
    mine = iter([True, False])
    handle(execution, raising(ValueError("late")))
    handle(execution, lambda _: ran.append("second"))
    with caplog.at_level(logging.WARNING, "postbus"):
        assert execution.run(execution.begin(delivery()), owning(mine)) is None
    assert ran == []
    assert caplog.records == []
