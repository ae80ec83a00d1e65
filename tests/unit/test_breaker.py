"""The circuit breaker's state table."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.breaker import Admission, Breaker, BreakerState
from postbus.errors import InvalidRequest

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BREAKER = Breaker(failures=3, reset_after=30)
CLOSED = BreakerState()
OPEN = BreakerState(failures=3, opened_at=NOON)
HALF_OPEN = BreakerState(failures=3, opened_at=NOON, probe_until=NOON + timedelta(seconds=90))


def at(seconds: float) -> datetime:
    """Return the moment `seconds` after the breaker opened."""
    return NOON + timedelta(seconds=seconds)


@pytest.mark.parametrize(("state", "name"), [(CLOSED, "closed"), (OPEN, "open"), (HALF_OPEN, "half-open")])
def test_a_state_has_one_name(state: BreakerState, name: str):
    """Closed, open and half-open can be told apart (S1.20)."""
    assert state.name == name


@pytest.mark.parametrize(
    ("state", "seconds", "admission"),
    [
        (CLOSED, 0, Admission.ALL),
        (BreakerState(failures=2), 0, Admission.ALL),
        (OPEN, 0, Admission.NONE),
        (OPEN, 29.999999, Admission.NONE),
        (OPEN, 30, Admission.PROBE),
        (OPEN, 3_600, Admission.PROBE),
        (HALF_OPEN, 30, Admission.NONE),
        (HALF_OPEN, 89.999999, Admission.NONE),
        (HALF_OPEN, 90, Admission.PROBE),
    ],
)
def test_what_is_let_through_follows_from_state_and_time(state: BreakerState, seconds: float, admission: Admission):
    """Closed lets all through, open none until its reset, half-open none until its probe is given up (S1.20)."""
    assert BREAKER.admit(state, at(seconds)) is admission


def test_it_opens_at_the_last_failure_in_a_row_and_not_before():
    """Three failures allowed: the third opens it (S1.20)."""
    state = CLOSED
    names: list[str] = []
    for second in range(3):
        state = BREAKER.failed(state, at(second))
        names.append(state.name)
    assert names == ["closed", "closed", "open"]
    assert state == BreakerState(failures=3, opened_at=at(2))


def test_a_success_in_between_starts_the_count_anew():
    """Only failures in a row count (S1.20)."""
    state = BREAKER.failed(BREAKER.failed(CLOSED, at(0)), at(1))
    assert BREAKER.succeeded() == CLOSED
    assert BREAKER.failed(BREAKER.succeeded(), at(2)).failures < state.failures
    assert BREAKER.failed(BREAKER.succeeded(), at(2)).name == "closed"


def test_half_open_lets_exactly_one_probe_through():
    """Of a hundred that ask after the reset, the first gets the probe and the others nothing (S1.20)."""
    state, admitted = OPEN, [Admission.NONE] * 0
    for _ in range(100):
        admission = BREAKER.admit(state, at(31))
        if admission is Admission.PROBE:
            state = BREAKER.probing(state, until=at(91))
        admitted.append(admission)
    assert admitted == [Admission.PROBE] + [Admission.NONE] * 99
    assert state.name == "half-open"


def test_a_probe_that_succeeds_closes_the_breaker():
    """After it everything is let through and nothing is held against the handler (S1.20)."""
    state = BREAKER.succeeded()
    assert state == CLOSED
    assert BREAKER.admit(state, at(31)) is Admission.ALL


def test_a_probe_that_fails_opens_the_breaker_from_that_moment():
    """The next probe waits a whole reset from the failure, not from the first opening (S1.20)."""
    state = BREAKER.failed(HALF_OPEN, at(35))
    assert state == BreakerState(failures=4, opened_at=at(35))
    assert BREAKER.admit(state, at(64)) is Admission.NONE
    assert BREAKER.admit(state, at(65)) is Admission.PROBE


def test_a_probe_whose_worker_died_is_replaced_by_one_other():
    """When the probe's time has passed another goes out, again alone (S1.20)."""
    assert BREAKER.admit(HALF_OPEN, at(90)) is Admission.PROBE
    again = BREAKER.probing(HALF_OPEN, until=at(150))
    assert BREAKER.admit(again, at(90)) is Admission.NONE
    assert BREAKER.admit(again, at(150)) is Admission.PROBE


def test_work_claimed_before_the_opening_does_not_put_the_probe_off():
    """Late failures while open are counted, but the time of opening stays (S1.20)."""
    state = BREAKER.failed(BREAKER.failed(OPEN, at(10)), at(20))
    assert state == BreakerState(failures=5, opened_at=NOON)
    assert BREAKER.admit(state, at(30)) is Admission.PROBE


@settings(deadline=None)
@given(st.lists(st.sampled_from(["succeed", "fail", "probe"]), max_size=30), st.integers(1, 5))
def test_open_means_failures_and_a_probe_means_open(steps: list[str], failures: int):
    """Whatever happens in whatever order, no state is closed with a probe out or open without its failures (S1.20)."""
    breaker, state = Breaker(failures=failures, reset_after=10), CLOSED
    for second, step in enumerate(steps):
        match step:
            case "succeed":
                state = breaker.succeeded()
            case "fail":
                state = breaker.failed(state, at(second * 7))
            case "probe" if breaker.admit(state, at(second * 7)) is Admission.PROBE:
                state = breaker.probing(state, at(second * 7 + 20))
            case _:
                pass
        assert (state.opened_at is not None) == (state.failures >= failures)
        assert state.probe_until is None or state.opened_at is not None


def test_a_state_is_a_value():
    """Frozen: what a worker was told cannot change under it."""
    with pytest.raises(AttributeError):
        OPEN.failures = 0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("failures", "reset_after"), [(0, 30), (-1, 30), (5, 0), (5, -1)])
def test_a_breaker_that_could_never_open_or_never_close_is_refused(failures: int, reset_after: float):
    """It needs at least one failure and some time (S1.20)."""
    with pytest.raises(InvalidRequest, match="breaker"):
        Breaker(failures=failures, reset_after=reset_after)
