"""What streams hold for their clients: bounded over all of them, whoever reads and whoever does not."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from postbus.store.contract import PAGE_BYTES

__all__ = ["HANG_UP", "Buffers"]

MOST_HELD: Final = 16 * PAGE_BYTES
"""How many bytes all streams together hold for their clients."""
STALLED: Final = 1.0
"""A client that has taken nothing for so many seconds is hung up on where the others need its room."""
HANG_UP: Final = "postbus.hang_up"
"""Under this name the server gives each request what cuts off its connection."""


class Page:
    """What one stream holds for its client."""

    def __init__(self, size: int, hang_up: Callable[[], None] | None) -> None:
        """Begin with nothing taken."""
        self.size = size
        self.hang_up = hang_up
        self.taken_at = time.monotonic()


class Buffers:
    """What all streams of a server hold for their clients."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._pages: list[Page] = []

    @contextmanager
    def held(self, size: int, hang_up: Callable[[], None] | None) -> Generator[Page]:
        """Hold a page until the end of the block; where all are too much, hang up on clients that take nothing."""
        page = Page(size, hang_up)
        self._pages.append(page)
        try:
            self._make_room_for(page)
            yield page
        finally:
            if page in self._pages:
                self._pages.remove(page)

    @property
    def size(self) -> int:
        """How many bytes that is."""
        return sum(each.size for each in self._pages)

    def _make_room_for(self, page: Page) -> None:
        over = self.size - MOST_HELD
        for each in sorted(set(self._pages) - {page}, key=lambda each: each.taken_at):
            if over <= 0 or time.monotonic() - each.taken_at < STALLED:
                return
            if each.hang_up is not None:
                each.hang_up()
                self._pages.remove(each)
                over -= each.size
