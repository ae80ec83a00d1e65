"""Moments as microseconds, and the system's clock."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.clock import Clock, SystemClock, from_micros, to_micros

ANY_MOMENT = st.datetimes(timezones=st.just(UTC))


def test_the_system_clock_tells_the_present_in_utc():
    """Its time is aware, in UTC, and lies between two looks at the machine's clock."""
    clock: Clock = SystemClock()
    before, now, after = datetime.now(UTC), clock.now(), datetime.now(UTC)
    assert now.tzinfo is UTC
    assert before <= now <= after


@settings(deadline=None)
@given(ANY_MOMENT)
def test_a_moment_survives_the_round_trip_through_microseconds(moment: datetime):
    """No microsecond is lost between a moment and its number, at any time datetime knows."""
    assert from_micros(to_micros(moment)) == moment
    assert from_micros(to_micros(moment)).tzinfo is UTC


@settings(deadline=None)
@given(ANY_MOMENT, ANY_MOMENT)
def test_numbers_are_ordered_as_moments_are(one: datetime, other: datetime):
    """So that a store may compare and index the numbers instead."""
    assert (to_micros(one) < to_micros(other)) == (one < other)


@pytest.mark.parametrize(
    ("moment", "micros"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), 0),
        (datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC), 1_000_001),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), -1),
        (datetime(2262, 4, 11, tzinfo=UTC), 9_223_286_400_000_000),
        (datetime(2026, 1, 1, 14, tzinfo=timezone(timedelta(hours=14))), 1_767_225_600_000_000),
    ],
)
def test_the_numbers_are_whole_microseconds_since_1970(moment: datetime, micros: int):
    """Before 1970 they are negative, and the zone a moment is written in makes no difference."""
    assert to_micros(moment) == micros
    assert from_micros(micros) == moment


def test_a_moment_without_a_zone_is_refused():
    """A naive datetime would be taken for some time zone by guess, so it raises."""
    with pytest.raises(TypeError):
        to_micros(datetime(2026, 1, 1))  # noqa: DTZ001  the point of the test
