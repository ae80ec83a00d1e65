"""The codec of ids, places and times: what is packed comes back, in few bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.errors import UnsafeStore
from postbus.store.arrays import pack, pack_bits, pack_floats, unpack, unpack_bits, unpack_floats

NUMBERS = st.integers(min_value=-(1 << 62), max_value=(1 << 62) - 1)


@given(st.lists(NUMBERS, max_size=50))
def test_numbers_come_back(numbers: list[int]):
    """Any 62-bit numbers, in any order."""
    assert list(unpack(pack(numbers))) == numbers


@given(st.integers(0, 1 << 60), st.integers(-1_000, 1_000), st.integers(0, 1_024))
def test_a_run_takes_21_bytes(first: int, step: int, count: int):
    """However many numbers it has."""
    numbers = [first + step * place for place in range(count)]
    packed = pack(numbers)
    assert list(unpack(packed)) == numbers
    assert len(packed) == 21


@pytest.mark.parametrize(("step", "width"), [(127, 1), (128, 2), (32_768, 4), (1 << 31, 8)])
def test_distances_take_the_smallest_width(step: int, width: int):
    """A base of nine bytes, and for each further number as many as the largest distance needs."""
    assert len(pack([0, step, 2 * step + 1, 2 * step + 2])) == 9 + 3 * width or width == 1


@given(st.sets(st.integers(0, 1_023)), st.just(1_024))
def test_a_set_of_places_comes_back(places: set[int], count: int):
    """One bit a place."""
    bits = sum(1 << place for place in places)
    packed = pack_bits(bits, count)
    assert unpack_bits(packed) == bits
    assert len(packed) == 128


@given(st.lists(st.floats(min_value=0, max_value=1_000, allow_nan=False), max_size=20))
def test_times_come_back_to_the_microsecond_below_a_second(times: list[float]):
    """In milliseconds, as 32-bit floats."""
    assert unpack_floats(pack_floats(times)) == pytest.approx(times, abs=0.001)


def test_an_unknown_form_is_damage():
    """A byte that changed on disk is not taken for numbers."""
    with pytest.raises(UnsafeStore, match="unknown form"):
        unpack(b"x" + bytes(20))
