"""Upkeep: ends leases nobody holds any more, tidies up. Idempotent turns, so every process may take them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from postbus.model import HandlerRecord
from postbus.observe import tell
from postbus.retry import RetryPolicy
from postbus.store import Log, Queue, is_log

__all__ = ["Upkeep", "recover"]

TIDY_EVERY: Final = 60.0
SEEN_EVERY: Final = 60.0
LONGEST_PAUSE: Final = 30.0
SHARE: Final = 0.05
"""How much of the time upkeep may take: while vacuum is held up, its looks grow long, and are taken less often."""


def recover(store: Log, policy: RetryPolicy, mine: str) -> int:
    """Free the leases of processes that are known to be dead; return how many."""
    dead = [owner for owner in store.owners() if owner != mine and store.is_dead(owner)]
    if not dead:
        return 0
    freed = 0
    while count := store.expire(dead, policy):
        freed += count
    tell(logging.WARNING, "recovered_from_crash", processes=len(dead), deliveries=freed)
    return freed


@dataclass
class Upkeep:
    """One process's share of the upkeep."""

    store: Queue
    policy: RetryPolicy
    owner: str
    every: float
    handlers: Callable[[], list[HandlerRecord]]
    _tidied: float = field(default_factory=time.monotonic)
    _seen: float = field(default_factory=time.monotonic)

    def turn(self) -> float:
        """Look once after everything; return the seconds until the next look."""
        began = time.monotonic()
        if is_log(self.store):
            recover(self.store, self.policy, self.owner)
            self.store.expire(None, self.policy)
        now = time.monotonic()
        if now - self._seen >= SEEN_EVERY:
            self._seen = now
            self.store.register_handlers(self.handlers())
        if now - self._tidied >= TIDY_EVERY and is_log(self.store):
            self._tidied = now
            self.store.tidy()
        return max(self.every, min((now - began) / SHARE, LONGEST_PAUSE))
