"""Routes: what a delivery is filed under, so that a claim is a few exact index probes.

A route is (subscription, priority, type, tag set), and whether the delivery is to be run alone. Its id is a 64-bit
hash of these, so that any process, in any language, files alike without asking.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from postbus.pattern import Interest

__all__ = ["Route", "RouteBook", "Selection", "route_id"]

SEPARATOR = "\x1f"


class Route(NamedTuple):
    """What a route's id stands for. `tags` are sorted and joined by commas."""

    id: int
    subscription: str
    priority: int
    type: str
    tags: str
    solo: bool


def route_id(subscription: str, priority: int, event_type: str, tags: str, *, solo: bool) -> int:
    """Return the signed 64-bit id: the first eight bytes of the MD5 of the parts joined by U+001F."""
    text = SEPARATOR.join((subscription, str(priority), event_type, tags, "1" if solo else "0"))
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@dataclass(slots=True)
class Selection:
    """The routes that some interests resolve to, grouped by priority, and how far the rotation over them has come."""

    subscription: str
    interests: tuple[Interest, ...]
    blocked: tuple[Interest, ...]
    seen: int = 0
    normal: dict[int, dict[int, None]] = field(default_factory=dict[int, dict[int, None]])
    solo: dict[int, dict[int, None]] = field(default_factory=dict[int, dict[int, None]])
    turns: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, route: Route) -> None:
        """Take a route in if it is wanted."""
        tags = route.tags.split(",") if route.tags else ()
        if route.subscription == self.subscription and self._wanted(route.type, tags):
            groups = self.solo if route.solo else self.normal
            groups.setdefault(route.priority, {})[route.id] = None

    def _wanted(self, event_type: str, tags: Iterable[str]) -> bool:
        return any(interest.wants(event_type, tags) for interest in self.interests) and not any(
            interest.wants(event_type, tags) for interest in self.blocked
        )


class RouteBook:
    """The routes known to this process, in the order they appeared, and the selections made from them."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self.by_id: dict[int, Route] = {}
        self._order: list[Route] = []
        self._selections: dict[tuple[str, tuple[Interest, ...], tuple[Interest, ...]], Selection] = {}

    def add(self, route: Route) -> None:
        """Learn of a route; one known already changes nothing."""
        if route.id not in self.by_id:
            self.by_id[route.id] = route
            self._order.append(route)

    def select(
        self, subscription: str, interests: tuple[Interest, ...], blocked: tuple[Interest, ...] = ()
    ) -> Selection:
        """Return the routes these interests resolve to; only routes new since the last call are looked at."""
        key = (subscription, interests, blocked)
        selection = self._selections.get(key)
        if selection is None:
            if len(self._selections) >= MAX_SELECTIONS:
                self._selections.clear()
            selection = self._selections[key] = Selection(subscription, interests, blocked)
        for route in self._order[selection.seen :]:
            selection.add(route)
        selection.seen = len(self._order)
        return selection


MAX_SELECTIONS = 1_000
