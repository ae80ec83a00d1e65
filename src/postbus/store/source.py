"""An existing table whose rows become events: read once, in order, and never written."""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

from postbus.errors import InvalidRequest

_PART: Final = re.compile(r'"((?:[^"]|"")+)"|([^".\s][^".]*)')


class Columns(NamedTuple):
    """The names of a table's columns; None where the table has none for it."""

    id: str
    created_at: str
    payload: str
    type: str | None = None
    key: str | None = None
    tags: str | None = None


class SourceRow(NamedTuple):
    """A row as it stands there: all of it text as far as the database can tell it so, nothing checked."""

    id: Any
    created_at: Any
    payload: Any
    type: Any
    key: Any
    tags: Any


class Source(Protocol):
    """A table, read as of one moment."""

    def count(self) -> int:
        """Return how many rows there are."""
        ...

    def rows(self) -> Iterator[SourceRow]:
        """Go through the rows by time, then id; what has no time comes last."""
        ...


def split_name(name: str) -> tuple[str, ...]:
    """Return the parts of a table's name: `orders`, `shop.orders`, or `"with.dot"` in double quotes.

    They are the names exactly, to be quoted by whoever puts them into a statement. Raises InvalidRequest.
    """
    parts: list[str] = []
    end = -1
    while end < len(name):
        found = _PART.match(name, end + 1)
        if found is None or (found.end() < len(name) and name[found.end()] != "."):
            raise InvalidRequest(f'a table is named such as orders, shop.orders or "with.dot", not {name!r:.80}')
        parts.append(found[1].replace('""', '"') if found[1] else found[2])
        end = found.end()
    return tuple(parts)
