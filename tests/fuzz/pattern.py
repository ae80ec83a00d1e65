"""Patterns: what `*` covers, by a rule that tries every place at once; and how much of the text is looked at."""

import sys
from typing import Final

from postbus.pattern import MAX_PATTERN, matches

__all__ = ["SEEDS", "check"]

SEEDS: Final = (
    b"order.*\norder.placed",
    b"*a*b*\naabb",
    b"*ab*ba*\naba",
    b"ab*ba\naba",
    b"a**\na",
    b"*\n",
    b"\n",
    b"*.*.*\na.b",
)
LONGEST: Final = 400


class Counted(str):
    """Text that counts how many of its characters searches have passed over."""

    __slots__ = ("looked",)
    looked: int

    def find(self, sub: str, start: int | None = None, end: int | None = None, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Search, and count from where to where."""
        first, last = start or 0, len(self) if end is None else end
        found = str.find(self, sub, first, last)
        self.looked += (last if found < 0 else found + len(sub)) - first
        return found


def check(data: bytes) -> None:
    """Match one text; the answer must be right, and no character looked at for two pieces."""
    pattern, _, text = data.decode("latin-1").partition("\n")
    pattern, counted = pattern[:MAX_PATTERN], Counted(text[:LONGEST])
    counted.looked = 0
    assert matches(pattern, counted) == covers(pattern, counted)
    assert counted.looked <= len(counted), f"{counted.looked} characters looked at, of {len(counted)}"


def covers(pattern: str, text: str) -> bool:
    """Say what `matches` should: go through the pattern once, with all the places that can be reached so far."""
    reached = {0}
    for sign in pattern:
        if sign == "*":
            reached = set(range(min(reached, default=sys.maxsize), len(text) + 1))
        else:
            reached = {place + 1 for place in reached if text[place : place + 1] == sign}
    return len(text) in reached
