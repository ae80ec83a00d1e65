"""The rows of the model, and the rules that a scenario sets.

- ("event", id): Event · ("published", id): the same, never pruned: what the checks go by
- ("cursor",): Cursor · ("gaps", first id): ids · ("skip", id): 1 · ("patterns",): kinds · ("pruned",): up to where
- ("block", number): Block · ("row", id): Row · ("kind", kind): 1
- ("audit", id): entries (action, number) · ("position", follower): Seen
- notes for the checks and the clock: ("ran", id): how often it was handed out · ("told", number, id): the outcome that
  was recorded for a lease · ("overdue", number): the lease's time is over
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tests.model.kernel import EXCLUSIVE, SHARED, Step, View, Violation

CURSOR: Final = ("cursor",)
SUBSCRIPTION: Final = ("subscription",)
PATTERNS: Final = ("patterns",)
PRUNED: Final = ("pruned",)
KINDS: Final = ("kinds",)
ENDS: Final = frozenset({"DONE", "DEAD", "CANCELLED", "ERASED", "DISCARDED"})
CAUSES: Final = frozenset({"EXPIRED", "RETRIED", "RELEASED", "RESET", "REPLAYED", "REDELIVERED"})
NONE: Final[frozenset[int]] = frozenset()
Steps = Generator[Any, Any, Any]
Epochs = tuple[tuple[int, int], ...]
"""Epochs with the event that each of them leases."""


@dataclass(frozen=True)
class Rules:
    """Terms of the subscription, what takes part, and the bugs to plant."""

    wanted: str = "ab"
    """What its patterns match in the end; the checks go by it."""
    attempts: int = 2
    passed: int = 2
    """How many events a pass looks at."""
    ranges: int = 9
    """How many ranges of missing ids a cursor remembers; more are spilled to `gaps`."""
    span: int = 9
    """How far apart the ids of a block may be."""
    kinds: bool = False
    """Workers find rows by the table of kinds."""
    seldom: bool = False
    """A pass may leave out closing, as one within 100 ms of the last does."""
    slow_pins: bool = False
    """A pin's floor is read, and the pin taken, in steps of their own."""
    outside: bool = False
    """A follower's checkpoint is kept outside of the database, as Spark's offsets are."""
    bug: str = ""


class Event(NamedTuple):
    """An event in the log."""

    kind: str
    special: bool = False
    erased: bool = False


class Cursor(NamedTuple):
    """How far a subscription has handed out the log."""

    position: int = 0
    missing: frozenset[int] = NONE
    looked: int = 0


class Block(NamedTuple):
    """A lease over some events, with the places that are done."""

    ids: tuple[int, ...]
    done: frozenset[int] = NONE
    token: int = 0

    @property
    def left(self) -> frozenset[int]:
        """The events whose bit is not set."""
        return frozenset(each for place, each in enumerate(self.ids) if place not in self.done)


class Row(NamedTuple):
    """A delivery about which something individual is known: pending, held or dead."""

    state: str = "pending"
    attempt: int = 0
    alone: bool = False
    """Its last attempt ended by expiry."""
    epoch: int | None = None
    """Only expiry leaves it: its attempt may still be finished while nobody claims the row."""


def epochs_of(number: int, ids: Iterable[int]) -> Epochs:
    """Return the epochs of a block's events."""
    return tuple((number << 10 | place, each) for place, each in enumerate(ids))


def add_row(view: View, event_id: int, row: Row) -> None:
    """Insert a row; there must be none."""
    if view.get(("row", event_id)):
        raise Violation(f"event {event_id} has a row already")
    view.put(("row", event_id), row)


def set_bits(view: View, number: int, ids: Iterable[int]) -> None:
    """Set the bits of some events; a block without other bits goes."""
    block: Block = view.get(("block", number))
    block = block._replace(done=block.done | {block.ids.index(each) for each in ids})
    view.put(("block", number), block if block.left else None)


def parts(*results: Any) -> Any:
    """Take the parts of one step, in their order; return the result of the first."""
    return results[0]


def committed(
    rules: Rules, write: Step, then: Callable[[View, Any], None] | None = None, *, names_kinds: bool = True
) -> Steps:
    """Write and commit, then do what follows a commit.

    The kinds of new pending rows are written last and in one order, by every verb that makes rows.
    """

    def commit(view: View, result: Any) -> Any:
        view.commit()
        if then is not None:
            then(view, result)
        return result

    if not rules.kinds or not names_kinds:
        return (yield lambda view: commit(view, write(view)))
    result, kinds = yield lambda view: (write(view), _new_kinds(view, rules))
    for kind in kinds:
        yield lambda view, kind=kind: _add_kind(view, kind)
    return (yield lambda view: commit(view, result))


def _new_kinds(view: View, rules: Rules) -> tuple[str, ...]:
    rows = [key[1] for key, row in sorted(view.own.items(), key=str) if key[0] == "row" and row is not None]
    kinds = dict.fromkeys(view.get(("event", each)).kind for each in rows)
    if rules.bug == "known kinds are not written":
        kinds = dict.fromkeys(kind for kind in kinds if not view.get(("kind", kind)))
    return tuple(kinds if rules.bug == "kinds in no order" else sorted(kinds))


def _add_kind(view: View, kind: str) -> None:
    """INSERT … ON CONFLICT DO NOTHING: waits for who has the kind in hand, and locks nothing where it is there."""
    view.lock(KINDS, SHARED)
    view.lock(("kind", kind))
    if view.get(("kind", kind)):
        view.locks.discard((("kind", kind), EXCLUSIVE))
    else:
        view.put(("kind", kind), 1)
