"""The retry policy: how long, how often, and what may be overridden."""

import json
import random
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.errors import InvalidRequest
from postbus.retry import RetryPolicy


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    """Draw any policy that may be made."""
    base, most = sorted(draw(st.tuples(*[st.floats(0, 1e6)] * 2)))
    return RetryPolicy(
        max_retries=draw(st.integers(0, 50)),
        base_delay=base,
        max_delay=most,
        multiplier=draw(st.floats(1, 100)),
        jitter=draw(st.floats(0, 1)),
    )


def seconds(policy: RetryPolicy, attempts: int) -> list[float]:
    """Return the waits before attempts 1 to `attempts`."""
    return [policy.delay(attempt).total_seconds() for attempt in range(1, attempts + 1)]


def test_the_defaults_are_those_of_the_requirement():
    """Three retries from one second to thirty, doubling, without jitter (S1.9)."""
    assert RetryPolicy().to_dict() == {
        "max_retries": 3,
        "base_delay": 1.0,
        "max_delay": 30.0,
        "multiplier": 2.0,
        "jitter": 0.0,
    }


def test_the_first_attempt_is_immediate_and_each_later_one_waits_longer_up_to_the_limit():
    """Attempt N waits base * multiplier ** (N - 2), cut at the limit (S1.9)."""
    assert seconds(RetryPolicy(), 8) == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_multiplier_of_one_waits_the_same_each_time():
    """A fixed delay is a policy too (S1.9)."""
    assert seconds(RetryPolicy(base_delay=300, max_delay=300, multiplier=1), 5) == [0, 300, 300, 300, 300]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_an_event_gets_one_attempt_more_than_it_has_retries(retries: int):
    """`max_retries` counts what comes after the first attempt (S1.9)."""
    assert RetryPolicy(max_retries=retries).attempts == retries + 1


@settings(deadline=None)
@given(policies(), st.integers(1, 5_000))
def test_without_chance_waits_never_shrink_and_never_pass_the_limit(policy: RetryPolicy, attempt: int):
    """For any policy, the next wait is at least this one and at most max_delay (S1.9)."""
    now, later = policy.delay(attempt), policy.delay(attempt + 1)
    assert timedelta(0) <= now <= later <= timedelta(seconds=policy.max_delay)


@pytest.mark.parametrize("multiplier", [2, 2.0, 1e300])
def test_a_very_late_attempt_waits_the_limit(multiplier: float):
    """Numbers too large for a float end at max_delay, not in an OverflowError (S1.9)."""
    assert RetryPolicy(multiplier=multiplier).delay(100_000) == timedelta(seconds=30)


@settings(deadline=None)
@given(policies(), st.integers(2, 60), st.integers())
def test_jitter_stays_within_its_share(policy: RetryPolicy, attempt: int, seed: int):
    """The wait moves by at most the given share of itself and is never negative (S1.9)."""
    plain = policy.delay(attempt).total_seconds()
    wait = policy.delay(attempt, random.Random(seed)).total_seconds()
    assert wait >= 0
    assert abs(wait - plain) <= plain * policy.jitter + 2e-6  # a timedelta rounds to the microsecond


def test_the_same_chance_gives_the_same_wait():
    """Chance is an argument, so a wait can be repeated."""
    policy = RetryPolicy(jitter=0.5)
    assert policy.delay(4, random.Random(7)) == policy.delay(4, random.Random(7))


def test_events_that_failed_together_come_back_apart():
    """With jitter, a thousand waits spread over the whole share, to both sides."""
    chance = random.Random(7)
    policy = RetryPolicy(base_delay=10, jitter=0.2)
    waits = [policy.delay(2, chance).total_seconds() for _ in range(1_000)]
    assert 8 <= min(waits) < 8.1
    assert 11.9 < max(waits) <= 12


def test_without_jitter_chance_is_not_drawn_from():
    """Handing in a Random changes nothing, not even the Random."""
    chance = random.Random(7)
    before = chance.getstate()
    assert RetryPolicy().delay(3, chance) == RetryPolicy().delay(3)
    assert chance.getstate() == before


def test_a_partial_override_keeps_the_other_fields():
    """A dict is laid over the defaults, field by field (S1.9)."""
    merged = RetryPolicy(max_retries=7, base_delay=2).merged({"max_delay": 60, "multiplier": 3})
    assert merged == RetryPolicy(max_retries=7, base_delay=2, max_delay=60, multiplier=3)


def test_a_whole_policy_replaces_and_none_changes_nothing():
    """Only a dict is merged (S1.9)."""
    ours, theirs = RetryPolicy(max_retries=7), RetryPolicy(base_delay=5)
    assert ours.merged(theirs) is theirs
    assert ours.merged(None) is ours
    assert ours.merged({}) == ours


def test_an_override_with_an_unknown_field_is_refused_by_name():
    """A misspelt field is an error, not a default (S1.9)."""
    with pytest.raises(InvalidRequest, match="max_retry"):
        RetryPolicy().merged({"max_retry": 5})


def test_an_override_is_checked_with_the_fields_it_is_laid_over():
    """A base above the limit it inherits is refused (S1.9)."""
    with pytest.raises(InvalidRequest, match="base_delay"):
        RetryPolicy().merged({"base_delay": 31})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_retries": -1},
        {"base_delay": -1},
        {"base_delay": 5, "max_delay": 4},
        {"base_delay": float("nan")},
        {"max_delay": float("nan")},
        {"multiplier": 0.5},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": float("nan")},
    ],
)
def test_a_policy_that_cannot_be_carried_out_is_refused(fields: dict[str, float]):
    """Wherever a policy comes from, it is checked when made (S1.9)."""
    with pytest.raises(InvalidRequest):
        RetryPolicy(**fields)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest):
        RetryPolicy.from_dict(fields)


@settings(deadline=None)
@given(policies())
def test_a_policy_survives_being_stored(policy: RetryPolicy):
    """Through JSON and back it is the same policy."""
    assert RetryPolicy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
