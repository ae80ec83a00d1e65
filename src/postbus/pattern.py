"""Event type patterns: literal text, and `*` for any run of characters, dots included."""

from collections.abc import Iterable
from dataclasses import dataclass

from postbus.errors import InvalidRequest

__all__ = ["MAX_PATTERN", "Interest", "check_pattern", "matches"]

MAX_PATTERN = 255


def matches(pattern: str, text: str) -> bool:
    """Return whether `pattern` covers the whole of `text`.

    `user.*` covers `user.created` and `user.a.b`; `order.*.shipped` does not cover `order.shipped`.
    Each literal piece is sought once from where the last one ended, so no pattern, however many stars it has,
    makes this slower than one search through the text for each piece.
    """
    head, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    tail = rest.pop()
    if len(text) < len(head) + len(tail) or not text.startswith(head) or not text.endswith(tail):
        return False
    return _pieces_in_order(rest, text, len(head), len(text) - len(tail))


def _pieces_in_order(pieces: Iterable[str], text: str, start: int, end: int) -> bool:
    for piece in pieces:
        found = text.find(piece, start, end)
        if found < 0:
            return False
        start = found + len(piece)
    return True


def check_pattern(pattern: object) -> str:
    """Return `pattern` if it may be subscribed to; raise InvalidRequest if not."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest("a pattern is a non-empty string such as 'order.*'")
    if len(pattern) > MAX_PATTERN:
        raise InvalidRequest(f"a pattern has at most {MAX_PATTERN} characters")
    if not pattern.isprintable():
        raise InvalidRequest("a pattern holds printable characters only")
    return pattern


@dataclass(frozen=True, slots=True)
class Interest:
    """What somebody wants: events of a type the pattern covers, and with any of the tags (none: all)."""

    pattern: str = "*"
    tags: frozenset[str] = frozenset()

    def wants(self, event_type: str, tags: Iterable[str]) -> bool:
        """Return whether an event of this type and with these tags is wanted."""
        return matches(self.pattern, event_type) and (not self.tags or not self.tags.isdisjoint(tags))
