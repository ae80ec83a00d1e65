"""Routes: the same id everywhere, and exactly the routes that are wanted."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.pattern import Interest
from postbus.store.postgres.rows.routes import Route, RouteBook, route_id

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize(
    ("parts", "solo", "identity"),
    [
        (("default", 0, "order.placed", ""), False, 2_519_325_403_665_116_143),
        (("default", 0, "order.placed", ""), True, 8_113_900_616_976_607_524),
        (("default", 10, "order.placed", "eu,uk"), False, 1_453_181_880_758_349_918),
        (("billing", -10, "überweisung", "größe"), False, -8_552_000_378_034_801_563),
    ],
)
def test_an_id_is_the_first_eight_bytes_of_the_md5_of_the_parts(
    parts: tuple[str, int, str, str], *, solo: bool, identity: int
):
    """Written down once more, so that other languages and stores can be held to it."""
    text = "\x1f".join([parts[0], str(parts[1]), parts[2], parts[3], "1" if solo else "0"])
    expected = int.from_bytes(hashlib.md5(text.encode()).digest()[:8], "big", signed=True)  # noqa: S324
    assert route_id(*parts, solo=solo) == expected == identity


@given(TEXT, st.integers(-10, 10), TEXT, TEXT, st.booleans())
def test_an_id_fits_into_a_signed_64_bit_column(name: str, priority: int, kind: str, tags: str, solo: bool):  # noqa: FBT001
    """Whatever the parts."""
    assert -(2**63) <= route_id(name, priority, kind, tags, solo=solo) < 2**63


def route(number: int, kind: str = "a", tags: str = "", **parts: object) -> Route:
    """Return a route with a number for an id."""
    given = {"subscription": "default", "priority": 0, "solo": False, **parts}
    return Route(id=number, type=kind, tags=tags, **given)  # pyright: ignore[reportArgumentType]


def test_a_selection_holds_the_routes_that_are_wanted():
    """By subscription, pattern, tags and blocks, grouped by priority, suspects apart."""
    book = RouteBook()
    for each in (
        route(1, "order.placed"),
        route(2, "order.placed", "eu,uk", priority=5),
        route(3, "user.made"),
        route(4, "order.shipped"),
        route(5, "order.placed", solo=True),
        route(6, "order.placed", subscription="other"),
    ):
        book.add(each)
    chosen = book.select("default", (Interest("order.*"),), (Interest("order.shipped"),))
    assert {priority: list(routes) for priority, routes in chosen.normal.items()} == {0: [1], 5: [2]}
    assert {priority: list(routes) for priority, routes in chosen.solo.items()} == {0: [5]}
    tagged = book.select("default", (Interest("*", frozenset(["uk", "us"])),))
    assert list(tagged.normal) == [5]


def test_a_selection_takes_in_routes_that_appear_later():
    """Each once, without looking at the old ones again."""
    book = RouteBook()
    book.add(route(1))
    first = book.select("default", (Interest("*"),))
    book.add(route(2))
    book.add(route(2))
    again = book.select("default", (Interest("*"),))
    assert again is first
    assert list(again.normal[0]) == [1, 2]
