"""The bus in a dict: what a store must do, said in the fewest words, to hold a real one against."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from postbus.model import Dead, Done, DoneWithErrors, Lease, Outcome, Retry, Status
from postbus.pattern import matches
from postbus.store.contract import Settled

Key = tuple[int, str]


@dataclass
class Queue:
    """A subscription: what it wants, and its own terms."""

    pattern: str
    lease: timedelta
    max_retries: int


QUEUES: Final = {
    "default": Queue("*", timedelta(seconds=60), 2),
    "narrow": Queue("a.*", timedelta(seconds=30), 1),
}


@dataclass
class Item:
    """A delivery. `held` is the epoch that may end it; None when nobody's may."""

    priority: int
    due: datetime
    allowed: int
    status: Status = Status.PENDING
    attempt: int = 0
    retry_count: int = 0
    held: int | None = None
    suspect: bool = False
    new: bool = False
    """It is handed out from the log: neither delayed, nor of a priority, nor ever taken or reset."""
    rows: int = 0
    granted: int = 0
    """Attempts beyond those allowed by policy: after a reset, or because its worker asked for a retry."""
    ends: dict[int, type[Outcome]] = field(default_factory=dict)
    lapsed: set[int] = field(default_factory=set)
    """Epochs that were buried by expiry, not by their worker."""


@dataclass
class Model:
    """All deliveries, and the time."""

    now: datetime
    leaves_rows: bool
    """A claim makes rows of what it passes and does not take: on PostgreSQL, up to 64 events."""
    items: dict[Key, Item] = field(default_factory=dict)
    highest: int = 0

    def publish(self, event_id: int, kind: str, priority: int, delay: float, max_retries: int | None) -> None:
        """Make a delivery for each queue that wants the event."""
        for name, queue in QUEUES.items():
            if matches(queue.pattern, kind):
                retries = queue.max_retries if max_retries is None else max_retries
                due, new = self.now + timedelta(seconds=delay), not priority and not delay
                self.items[event_id, name] = Item(priority, due, retries + 1, new=new)

    def lapsed(self) -> list[Key]:
        """Return the leases that have run out and that nobody has ended yet."""
        return [key for key, item in self.items.items() if item.status is Status.PROCESSING and item.due <= self.now]

    def expire(self, key: Key) -> None:
        """End a lease: pending again as a suspect, or dead after the last attempt."""
        item = self.items[key]
        item.rows += 1
        item.due = self.now
        if item.attempt >= item.allowed:
            item.status = Status.FAILED
            if item.held is not None:
                item.lapsed.add(item.held)
            item.held = None
        else:
            item.status, item.suspect = Status.PENDING, True
            item.retry_count += 1

    def claimable(self, name: str, *, alone: bool, limit: int) -> list[Key]:
        """Return what a claim must give, in order: one suspect to who holds nothing, else the others."""
        due = [
            key
            for key, item in self.items.items()
            if key[1] == name and item.status is Status.PENDING and item.due <= self.now
        ]
        due.sort(key=lambda key: (-self.items[key].priority, self.items[key].new, self.items[key].due, key[0]))
        suspects = [key for key in due if self.items[key].suspect]
        if suspects and alone:
            return suspects[:1]
        return [key for key in due if not self.items[key].suspect][:limit]

    def look(self, name: str, keys: Sequence[Key], limit: int, *, alone: bool) -> None:
        """Note what a claim that gives these deliveries does to the log: it passes it unless rows are enough."""
        mine = [item for key, item in self.items.items() if key[1] == name]
        if alone and any(item.suspect and item.status is Status.PENDING and item.due <= self.now for item in mine):
            return
        rows = [key for key in keys if not self.items[key].new and self.items[key].priority >= 0]
        if self.leaves_rows and len(rows) < limit:
            for item in mine:
                item.new = False

    def take(self, lease: Lease) -> None:
        """Lease a delivery under an epoch higher than any before."""
        assert lease.epoch > self.highest
        self.highest = lease.epoch
        item = self.items[lease.event_id, lease.subscription]
        item.status, item.held, item.new = Status.PROCESSING, lease.epoch, False
        item.attempt += 1
        item.rows += 1
        item.due = self.now + QUEUES[lease.subscription].lease

    def holds(self, lease: Lease) -> bool:
        """Return whether the lease may still end its delivery."""
        item = self.items[lease.event_id, lease.subscription]
        return item.held == lease.epoch and item.status in (Status.PENDING, Status.PROCESSING)

    def is_leased(self, lease: Lease) -> bool:
        """Return whether the lease still stands: nobody has ended it."""
        return self.holds(lease) and self.items[lease.event_id, lease.subscription].status is Status.PROCESSING

    def settle(self, lease: Lease, outcome: Outcome) -> set[Settled]:
        """End a delivery; return the answers that are right."""
        item = self.items[lease.event_id, lease.subscription]
        if not self.holds(lease):
            if isinstance(outcome, Dead) and lease.epoch in item.lapsed:
                return {Settled.REPEATED, Settled.LOST}  # its end is the same, though another recorded it
            return {Settled.REPEATED if item.ends.get(lease.epoch) is type(outcome) else Settled.LOST}
        if item.status is Status.PENDING and isinstance(outcome, Retry):
            return {Settled.LOST}  # it is due again already
        failed = item.status is Status.PROCESSING
        item.ends[lease.epoch] = type(outcome)
        item.rows += 1
        item.held = None
        match outcome:
            case Done():
                item.status = Status.COMPLETED
            case DoneWithErrors():
                item.status = Status.COMPLETED_WITH_ERRORS
            case Retry(after, _):
                item.status, item.suspect, item.due = Status.PENDING, False, self.now + after
                item.retry_count += failed
                item.granted += 1
            case Dead():
                item.status = Status.FAILED
        return {Settled.APPLIED}

    def release(self, lease: Lease) -> int:
        """Hand a delivery back; return whether it was held."""
        if not self.is_leased(lease):
            return 0
        item = self.items[lease.event_id, lease.subscription]
        item.status, item.held, item.due = Status.PENDING, None, self.now
        item.attempt -= 1
        item.rows += 1
        return 1

    def reset(self, key: Key) -> None:
        """Make an unfinished delivery due now, under nobody's lease."""
        item = self.items[key]
        item.granted += item.status is Status.PROCESSING
        item.status, item.held, item.due, item.new = Status.PENDING, None, self.now, False
        item.rows += 1

    def revive(self, key: Key) -> None:
        """Give a dead letter all its attempts anew."""
        item = self.items[key]
        item.status, item.held, item.due, item.suspect = Status.PENDING, None, self.now, False
        item.attempt = item.retry_count = item.granted = 0
        item.rows += 1
