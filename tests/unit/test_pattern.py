"""Patterns: what `*` covers, and what matching costs."""

import itertools
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus.errors import InvalidRequest
from postbus.pattern import MAX_PATTERN, Interest, check_pattern, matches


def covers(pattern: str, text: str) -> bool:
    """Say by brute force what `matches` should: a star may stand for every possible run."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(covers(pattern[1:], text[taken:]) for taken in range(len(text) + 1))
    return text[:1] == pattern[0] and covers(pattern[1:], text[1:])


def bytecodes(call: Callable[[], object], budget: int) -> int:
    """Return how many bytecodes `call` runs; fail as soon as they pass the budget, however long it would take."""
    count = 0

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += what == "opcode"
        if count > budget:
            pytest.fail(f"more than {budget} bytecodes")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def cpu_seconds(pattern: str, text: str) -> float:
    """Return the least CPU time of several calls: what is left when nothing disturbs."""

    def once() -> float:
        began = time.thread_time()
        matches(pattern, text)
        return time.thread_time() - began

    return min(once() for _ in range(7))


HARD = [
    pytest.param("*a" * 49 + "*b*", "a", id="the last piece is nowhere"),
    pytest.param("*" + "ab*" * 50, "a", id="the first piece is nowhere"),
    pytest.param("*a" * 50, "a", id="covered in countless ways"),
    pytest.param("*a" * 49 + "*c", "ab", id="the end differs"),
    pytest.param("*ab" * 49 + "*ac*", "ab", id="pieces that all but fit"),
]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("order.placed", "order.placed"),
        ("user.*", "user.created"),
        ("user.*", "user.a.b"),
        ("user.*", "user."),
        ("*", "anything.at.all"),
        ("*", ""),
        ("*.created", "user.created"),
        ("*.created", "a.b.created"),
        ("order.*.shipped", "order.7.shipped"),
        ("order.*.shipped", "order.eu.7.shipped"),
        ("order.*.shipped", "order..shipped"),
        ("a*b*c", "abc"),
        ("a**c", "abc"),
        ("*b*b*", "abab"),
        ("*ü*", "grün"),
    ],
)
def test_a_star_covers_any_run_of_characters(pattern: str, text: str):
    """Dots and the empty run included; everything else stands for itself (S1.4)."""
    assert matches(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("order.placed", "order.placed.late"),
        ("order.placed", "an.order.placed"),
        ("Order.placed", "order.placed"),
        ("user.*", "user"),
        ("user.*", "users.created"),
        ("*.created", "created"),
        ("order.*.shipped", "order.shipped"),
        ("ab*ba", "aba"),
        ("a*b*a", "aba.b"),
        ("*ab*ab*", "xabx"),
        ("", "a"),
    ],
)
def test_what_a_pattern_does_not_cover_whole_it_does_not_cover(pattern: str, text: str):
    """A part of the text, another case or an overlap of two pieces is no match (S1.4)."""
    assert not matches(pattern, text)


@pytest.mark.parametrize("special", [".", "?", "[a]", "+", "\\", "^a$", "(a|b)", "{2}", "%", "_"])
def test_nothing_but_the_star_is_special(special: str):
    """What regular expressions, globs and LIKE make special is plain text here (S1.4)."""
    assert matches(special, special)
    assert matches(f"{special}*", f"{special}a")
    assert not matches(special, "a")
    assert not matches(special, "aa")


@settings(deadline=None, max_examples=500)
@given(st.text("ab.*", max_size=7), st.text("ab.*", max_size=9))
def test_matching_agrees_with_trying_every_possibility(pattern: str, text: str):
    """On a small alphabet, where most things nearly match, brute force says the same (S1.4)."""
    assert matches(pattern, text) == covers(pattern, text)


def test_matching_is_right_for_every_short_pattern_and_text():
    """All 1,093 patterns of up to six signs over all 63 texts of up to five letters, by brute force (S1.4)."""
    texts = ["".join(signs) for size in range(6) for signs in itertools.product("ab", repeat=size)]
    patterns = ["".join(signs) for size in range(7) for signs in itertools.product("ab*", repeat=size)]
    pairs = itertools.product(patterns, texts)
    assert [pair for pair in pairs if matches(*pair) != covers(*pair)] == []


@settings(deadline=None)
@given(st.lists(st.text(max_size=5), min_size=1, max_size=5), st.data())
def test_whatever_is_put_in_for_the_stars_is_covered(pieces: list[str], data: st.DataObject):
    """A text made from a pattern by filling its stars matches it (S1.4)."""
    literals = [piece.replace("*", "") for piece in pieces]
    text = literals[0] + "".join(data.draw(st.text(max_size=5)) + literal for literal in literals[1:])
    assert matches("*".join(literals), text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("pattern", "unit"), HARD)
def test_fifty_stars_over_10_kb_take_a_bounded_number_of_steps(pattern: str, unit: str):
    """The steps taken are at most a few for each character, counted and not timed (S1.4)."""
    text = unit * (10_000 // len(unit))
    bytecodes(lambda: matches(pattern, text), budget=200 * (len(text) + len(pattern)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("pattern", "unit"), HARD)
def test_eight_times_the_text_costs_about_eight_times_the_work(pattern: str, unit: str):
    """Quadratic matching would cost 64 times as much, and backtracking would not end before the timeout (S1.4)."""
    small, large = unit * (250_000 // len(unit)), unit * (2_000_000 // len(unit))
    floor = 20e-6  # below this the clock measures itself
    assert cpu_seconds(pattern, large) <= 32 * max(cpu_seconds(pattern, small), floor)


@pytest.mark.parametrize("pattern", ["*", "order.placed", "a b", "ü*", "x" * MAX_PATTERN])
def test_a_pattern_that_may_be_subscribed_to_is_returned_as_it_is(pattern: str):
    """Any printable text up to the limit is a pattern (S1.4)."""
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize(
    "pattern", ["", None, 7, b"order.*", ["order.*"], "x" * (MAX_PATTERN + 1), "a\nb", "a\0", "\ud800"]
)
def test_a_pattern_nobody_could_mean_is_refused(pattern: object):
    """Empty, too long, unprintable or no string at all: InvalidRequest says which (S1.4)."""
    with pytest.raises(InvalidRequest, match="a pattern"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    ("interest", "wanted"),
    [
        (Interest(), True),
        (Interest("order.*"), True),
        (Interest("user.*"), False),
        (Interest("order.*", frozenset({"eu"})), True),
        (Interest("order.*", frozenset({"us", "eu"})), True),
        (Interest("order.*", frozenset({"us"})), False),
        (Interest("user.*", frozenset({"eu"})), False),
    ],
)
def test_an_interest_is_a_pattern_and_any_of_its_tags(interest: Interest, wanted: bool):  # noqa: FBT001  parametrised
    """Without tags every event of the type is wanted, with tags those that share at least one."""
    assert interest.wants("order.placed", ["eu", "vip"]) is wanted


def test_an_interest_in_tags_does_not_want_an_event_without_any():
    """No tag is no common tag."""
    assert not Interest("*", frozenset({"eu"})).wants("order.placed", [])
