"""How an ordered subscription is followed: what the options mean, and which are refused."""

from typing import Any

import pytest
from pydantic import BaseModel

from postbus.errors import Discard, InvalidRequest
from postbus.follow import CheckpointMode, InstanceMode, make_follow
from postbus.retry import RetryPolicy
from tests.unit.making import event


def plain(one: Any) -> Any:
    """Take an event."""
    return one


def bare() -> None:
    """Take nothing."""


def writing(one: Any, tx: Any) -> None:
    """Take an event and the transaction."""


def wanting_more(one: Any, tx: Any, other: Any) -> None:
    """Take what nobody gives."""


async def awaited(one: Any, tx: Any) -> None:
    """Take an event, some time."""


def test_what_is_not_said_is_as_the_requirements_have_it():
    """Three retries from 1 to 60 s, a hundred at a time, each saved, one process of many (S4.5, S4.8, S4.9)."""
    follow = make_follow("s", "order.*", plain)
    assert follow.retry == RetryPolicy(max_retries=3, base_delay=1, max_delay=60, multiplier=2)
    assert (follow.batch_size, follow.batch, follow.on_error, follow.start) == (100, None, "dead_letter", "beginning")
    assert (follow.checkpoint, follow.instance) == (CheckpointMode.synchronous(), InstanceMode.COORDINATED)
    assert (follow.name, follow.handler.interest.pattern, follow.handler.transactional) == ("s", "order.*", False)


def test_a_partial_policy_is_laid_over_the_followers_own():
    """A whole one replaces it (S1.9, S4.5)."""
    assert make_follow("s", "*", plain, retry={"max_retries": 9}).retry == RetryPolicy(9, 1, 60)
    assert make_follow("s", "*", plain, retry=RetryPolicy()).retry == RetryPolicy()


def test_as_many_are_read_as_are_handled_at_once():
    """A list is never cut short by the size of a reading (S4.9)."""
    assert make_follow("s", "*", plain, batch=500).batch_size == 500
    assert make_follow("s", "*", plain, batch=5).batch_size == 100


def test_a_handler_with_tx_is_transactional():
    """By its parameter, with nothing else to say (S4.6)."""
    assert make_follow("s", "*", writing).handler.transactional
    assert make_follow("s", "*", writing, checkpoint=CheckpointMode.synchronous()).handler.transactional


class Order(BaseModel):
    """A typed payload."""

    number: int


def test_a_handler_is_given_one_event_or_a_list_with_payloads_of_its_model():
    """And what does not fit is discarded, before the handler sees any of it (S4.5)."""
    one, other, bad = (event(payload={"number": value}) for value in (1, 2, "x"))
    assert make_follow("s", "*", plain).call([one]) is one
    assert make_follow("s", "*", plain, batch=2).call((one, other)) == [one, other]
    typed = make_follow("s", "*", plain, batch=2, model=Order)
    assert [each.payload for each in typed.call([one, other])] == [Order(number=1), Order(number=2)]
    with pytest.raises(Discard, match="does not fit Order"):
        typed.call([one, bad])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_error": "ignore"}, "on_error is 'dead_letter', 'stop' or 'park_key'"),
        ({"instance": "many"}, "COORDINATED or SINGLE"),
        ({"checkpoint": "batched"}, "CheckpointMode"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 1_000_000}, "batch_size"),
        ({"batch": 0}, "batch is"),
        ({"batch": 2.5}, "batch is"),
        ({"lease": 0.01}, "lease"),
        ({"lease": float("nan")}, "lease"),
        ({"start": "yesterday"}, "start is"),
        ({"start": -1}, "start is"),
        ({"start": True}, "start is"),
        ({"start": None}, "start is"),
        ({"retry": {"often": 3}}, "often"),
        ({"tags": "eu"}, "tags"),
        ({"pattern": ""}, "pattern"),
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"function": 7}, "function"),
        ({"function": bare}, r"\(event, ctx\)"),
        ({"function": wanting_more}, r"\(event, ctx, tx\)"),
        ({"function": awaited}, "async"),
        ({"function": writing, "checkpoint": CheckpointMode.batched(10)}, "batch="),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_named(options: dict[str, Any], reason: str):
    """With what it may be (S4.8)."""
    with pytest.raises(InvalidRequest, match=reason):
        make_follow(**{"name": "s", "pattern": "*", "function": plain, **options})


@pytest.mark.parametrize(("size", "delay"), [(0, 1), (10, 0), (10, -1), (1_000_000, 1), (10, float("nan"))])
def test_a_checkpoint_that_never_moves_is_refused(size: int, delay: float):
    """It is batched by a number of events and a time (S4.8)."""
    with pytest.raises(InvalidRequest, match="batched by"):
        CheckpointMode.batched(size, delay)
