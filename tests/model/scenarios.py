"""What is explored: who runs beside whom, and what must hold in every state (C1 to C4, I1, I5, I7 to I12)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from tests.model.kernel import (
    NUMBERS,
    Explored,
    Key,
    Process,
    State,
    Then,
    View,
    Violation,
    crash,
    explore,
    kill,
    run_alone,
    start,
)
from tests.model.leases import change_one, expire, heartbeat, release_token, settle, tidy
from tests.model.logs import (
    Head,
    delete,
    follower,
    prune,
    publisher,
    rewind,
    subscribe_from_beginning,
    subscribe_now,
    tend_gaps,
    widen,
)
from tests.model.programs import GIVEN_UP, Worker, expirer, gap_keeper, given_up, settling, worker
from tests.model.tables import CURSOR, ENDS, PATTERNS, Block, Cursor, Event, Row, Rules

CRASHED: Final = ("crashed",)
KILLED: Final = ("killed",)
PLAIN: Final = Rules()
AFTER: Final = {
    "DONE": {"REPLAYED"},
    "CANCELLED": {"REPLAYED"},
    "DISCARDED": {"REPLAYED"},
    "ERASED": set[str](),
    "DEAD": {"REPLAYED", "REDELIVERED", "DISCARDED", "ERASED"},
}
"""What may be recorded after an end."""


@dataclass(frozen=True)
class Scenario:
    """Programs that run beside each other, from a log with some events."""

    programs: tuple[tuple[str, Callable[..., Any], tuple[Any, ...]], ...]
    """Name, program, and its arguments behind the rules."""
    rules: Rules = PLAIN
    log: tuple[str, ...] = ()
    """The events that are there at the beginning, each committed by itself."""
    rows: tuple[tuple[Key, Any], ...] = ((CURSOR, Cursor()),)
    crashes: int = 0
    """How often the server crashes."""
    kills: int = 0
    """How many processes are killed, or cut off."""

    def explored(self, bug: str = "", most: int | None = None) -> Explored:
        """Explore it with a bug planted, or with none; raises Violation."""
        rules = replace(self.rules, bug=bug)
        rows: dict[Key, Any] = dict(self.rows)
        for event in self.log:
            rows = run_alone(rows, Then(publisher, (self.rules, (event,), COMMIT)))
        programs = {name: Then(program, (rules, *arguments)) for name, program, arguments in self.programs}
        drained = set[int]()

        def at_end(state: State) -> None:
            identity = hash(state.rows)
            if identity not in drained:
                drained.add(identity)
                finish(dict(state.rows), rules)

        return explore(
            start(rows, programs), lambda rows: require_places(rows, rules), at_end, others=self._faults, most=most
        )

    def _faults(self, state: State) -> Iterator[tuple[str, State]]:
        rows = dict(state.rows)
        if (crashed := rows.get(CRASHED, 0)) < self.crashes:
            for after in crash(state, _survive):
                yield "crash", _noted(after, CRASHED, crashed + 1)
        if (killed := rows.get(KILLED, 0)) < self.kills:
            for me, process in enumerate(state.processes):
                if process.program is not None and process.program is not publisher:
                    after = _noted(kill(state, me), KILLED, killed + 1)
                    for number in _leased_by(state, process):
                        after = _noted(after, ("overdue", number), 1)
                    yield f"kill {process.name}", after


def _noted(state: State, key: Key, value: Any) -> State:
    return state._replace(rows=frozenset({**dict(state.rows), key: value}.items()))


def _leased_by(state: State, process: Process) -> list[int]:
    """Return the blocks whose leases nobody extends once this process is gone."""
    if process.program is not settling:
        return []
    number = process.args[3][0][0] >> 10
    return [number] if any(key == ("block", number) for key, _ in state.rows) else []


def _survive(process: Process) -> Process:
    """Return what a process does after a crash: a publisher gives up what it began, others begin it anew."""
    if process.program is publisher and process.results:
        return process._replace(program=None, args=(), results=())
    args = process.args
    if process.program is follower and args[0].bug != "a head remembered across a crash":
        args = (*args[:3], Head())
    return process._replace(args=args, results=())


def require_places(rows: dict[Key, Any], rules: Rules) -> None:
    """Raise Violation unless each event that is wanted is in exactly one place (C1), and followers missed none (I5)."""
    cursor: Cursor | None = rows.get(CURSOR)
    leased = [each for key, block in rows.items() if key[0] == "block" for each in block.left]
    spilled = [each for key, ids in rows.items() if key[0] == "gaps" for each in ids]
    for key, value in sorted(rows.items(), key=_checked):
        table = key[0]
        if table == "published" and cursor is not None:
            bits, gaps = leased.count(key[1]), spilled.count(key[1])
            _require_one_place(rows, rules, key[1], value, cursor, bits, gaps)
        elif table in ("row", "block", "skip", "gaps") and cursor is None:
            raise Violation(f"{key} is left behind by a subscription that was deleted")
        elif table == "skip" and cursor is not None and key[1] <= cursor.position:
            raise Violation(f"a skip of event {key[1]} stays below the cursor")
        elif table == "block" and not value.left:
            raise Violation(f"block {key[1]} stays, though all its bits are set")
        elif table == "position":
            _require_all_seen(rows, key[1], value)
        elif table == "audit":
            _require_one_end(key[1], [action for action, _ in value])


def _checked(item: tuple[Key, Any]) -> tuple[bool, str]:
    """Order rows so that one state always breaks the same promise first: events before what is kept of them."""
    return item[0][0] != "published", str(item[0])


def _require_all_seen(rows: dict[Key, Any], name: str, seen: Any) -> None:
    if missed := [
        key[1] for key in rows if key[0] == "published" and key[1] <= seen.position and key[1] not in seen.ids
    ]:
        raise Violation(f"follower {name} passed {missed}")


def _require_one_end(event_id: int, actions: list[str]) -> None:
    """Raise Violation if anything follows an end that does not begin the event anew (I9)."""
    for before, after in pairwise(actions):
        if before in AFTER and after not in AFTER[before]:
            raise Violation(f"event {event_id} has an entry after its end: {before}, {after}")


def _require_one_place(
    rows: dict[Key, Any], rules: Rules, event_id: int, published: Event, cursor: Cursor, bits: int, spilled: int
) -> None:
    event: Event | None = rows.get(("event", event_id))
    row: Row | None = rows.get(("row", event_id))
    entries = rows.get(("audit", event_id), ())
    last = entries[-1][0] if entries else None
    own_row = row is not None and row.state != "held"
    if row is not None and row.state == "held" and not bits:
        raise Violation(f"event {event_id} is held by no block")
    if row is not None and row.attempt > rules.attempts:
        raise Violation(f"event {event_id} has {row.attempt} attempts")
    if published.kind not in rules.wanted or (event is not None and event.erased):
        if own_row or bits:
            raise Violation(f"event {event_id} is not wanted, or erased, and is in a row or a block")
        return
    if event is None:
        if own_row or bits or last not in ENDS:
            raise Violation(f"event {event_id} is pruned, and not finished")
        return
    above = event_id > cursor.position and ("skip", event_id) not in rows
    places = above + (event_id in cursor.missing) + spilled + own_row + bits
    dead = row is not None and row.state == "dead"
    if places + (last in ENDS and not dead) != 1:
        raise Violation(f"event {event_id} is in {places} places, and its last entry is {last}")


def finish(rows: dict[Key, Any], rules: Rules) -> None:
    """Let maintenance and workers finish what is left; raise Violation if that is not everything (I9, I10)."""
    if CURSOR not in rows:
        return
    if PATTERNS in rows:
        rules = replace(rules, wanted=rows[PATTERNS])
    before = None
    while rows != before:
        before = rows
        for program in (expire, tend_gaps):
            rows = run_alone(rows, Then(program, (rules,)))
        rows = run_alone(rows, Then(worker, (rules, Worker("last", limit=9), 1)))
    require_places(rows, rules)
    for key, published in rows.items():
        event = rows.get(("event", key[1]), published) if key[0] == "published" else None
        if event is not None and event.kind in rules.wanted and not event.erased:
            entries = rows.get(("audit", key[1]), ())
            if not entries or entries[-1][0] not in ENDS:
                raise Violation(f"event {key[1]} is never finished: {entries}")
    cursor: Cursor = rows[CURSOR]
    if cursor.missing or any(key[0] in ("gaps", "block") for key in rows):
        raise Violation("missing, gaps or blocks stay although nothing goes on")


A, B = Worker("A"), Worker("B")
ONE_A, ONE_B = Worker("A", limit=1), Worker("B", limit=1)
COMMIT: Final = (View.commit,)
ROLLBACK: Final = (View.rollback,)


def _scenario(*programs: tuple[str, Callable[..., Any], tuple[Any, ...]], **terms: Any) -> Scenario:
    return Scenario(programs, **terms)


def _retried(*ids: int) -> tuple[tuple[Key, Any], ...]:
    """Return rows of events that were tried once."""
    each = ((("row", i), Row("pending", 1)) for i in ids)
    runs = ((("ran", i), 1) for i in ids)
    return (
        (CURSOR, Cursor(max(ids))),
        *each,
        *runs,
        *((("audit", i), (("PICKED", 0), ("RETRIED", 0))) for i in ids),
    )


def _leased(*blocks: tuple[int, ...]) -> tuple[tuple[Key, Any], ...]:
    """Return rows of events that are leased."""
    rows: list[tuple[Key, Any]] = [(NUMBERS, len(blocks)), (CURSOR, Cursor(max(max(ids) for ids in blocks)))]
    for number, ids in enumerate(blocks, start=1):
        rows.append((("block", number), Block(ids)))
        rows += [(("overdue", number), 1)]
        rows += [(("ran", each), 1) for each in ids]
        rows += [(("audit", each), (("PICKED", number << 10 | place),)) for place, each in enumerate(ids)]
    return tuple(rows)


def _expired(*ids: int) -> tuple[tuple[Key, Any], ...]:
    """Return rows of events whose leases, in blocks of one, have expired; events come in the order of their blocks."""
    rows: list[tuple[Key, Any]] = [(NUMBERS, len(ids)), (CURSOR, Cursor(max(ids)))]
    for number, each in enumerate(ids, start=1):
        epoch = number << 10
        rows += [
            (("row", each), Row("pending", 1, alone=True, epoch=epoch)),
            (("ran", each), 1),
            (("audit", each), (("PICKED", epoch), ("EXPIRED", epoch))),
        ]
    return tuple(rows)


FIRST, SECOND = 1 << 10, 2 << 10
"""Epochs of the first places of two blocks."""
SCENARIOS: Final[dict[str, Scenario]] = {
    # ── the log ──
    "late commits": _scenario(
        ("P", publisher, (("a", "a"),)),
        ("Q", publisher, (("a",),)),
        ("A", worker, (A, 2)),
        ("B", worker, (ONE_B, 1)),
    ),
    "savepoints": _scenario(
        ("P", publisher, (("(", "a", ")", "a"), COMMIT)),
        ("Q", publisher, (("a", "(", "a", ")"), COMMIT)),
        ("A", worker, (A, 3)),
    ),
    "slow pins": _scenario(
        ("P", publisher, (("a",),)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 3)),
        rules=Rules(slow_pins=True, seldom=True),
    ),
    "crashes": _scenario(
        ("P", publisher, (("a",),)),
        ("Q", publisher, (("a",),)),
        ("R", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 2)),
        crashes=2,
    ),
    "two types with late ids": _scenario(
        ("P", publisher, (("b", "a"), COMMIT)),
        ("Q", publisher, (("a",),)),
        ("A", worker, (Worker("A", "a"), 2)),
        ("B", worker, (Worker("B", "b"), 2)),
    ),
    "late and unwanted": _scenario(
        ("P", publisher, (("z", "a"), COMMIT)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (ONE_A, 3)),
        rules=Rules(passed=1),
    ),
    "patterns": _scenario(
        ("P", publisher, (("a",), COMMIT)),
        ("W", widen, ("ab", ("b",))),
        ("A", worker, (A, 2)),
        rows=((CURSOR, Cursor()), (PATTERNS, "a")),
    ),
    "gaps spilled": _scenario(
        ("P", publisher, (("a", "a"),)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 2)),
        ("M", gap_keeper, (1,)),
        ("N", gap_keeper, (1,)),
        rules=Rules(ranges=0),
    ),
    "gaps, cancelled and pruned": _scenario(
        ("P", publisher, (("a",), COMMIT)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 1)),
        ("M", gap_keeper, (1,)),
        ("X", change_one, (1, "CANCELLED")),
        ("T", prune, (2,)),
        rules=Rules(ranges=0),
    ),
    "gaps, rewound": _scenario(
        ("P", publisher, (("a",), COMMIT)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 2)),
        ("M", gap_keeper, (1,)),
        ("W", rewind, (0,)),
        rules=Rules(ranges=0),
    ),
    "specials": _scenario(
        ("P", publisher, (("a*",), COMMIT)),
        ("A", worker, (ONE_A, 2)),
        ("B", worker, (ONE_B, 2)),
        log=("a", "a"),
        rules=Rules(passed=1),
    ),
    "specials cancelled": _scenario(
        ("A", worker, (ONE_A, 2)),
        ("X", change_one, (3, "CANCELLED")),
        ("W", rewind, (1,)),
        log=("a", "a", "a*"),
        rules=Rules(passed=1),
    ),
    "cancel above the cursor": _scenario(
        ("A", worker, (A, 2)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (2, "CANCELLED")),
        log=("a", "a"),
    ),
    "cancel of late ones": _scenario(
        ("P", publisher, (("a",), COMMIT)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 2)),
        ("X", change_one, (1, "CANCELLED")),
    ),
    # ── leases ──
    "span of a block": _scenario(
        ("P", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 2)),
        ("B", worker, (B, 2)),
        log=("a", "a"),
        rules=Rules(span=1),
    ),
    "kinds": _scenario(
        ("A", worker, (Worker("A", "a", outcomes=("RETRIED",)), 1)),
        ("B", worker, (Worker("B", "b", outcomes=("RETRIED",)), 1)),
        ("T", tidy, ()),
        log=("b", "a"),
        rules=Rules(kinds=True),
    ),
    "kinds crosswise": _scenario(
        ("A", settle, (((FIRST, 1), (FIRST | 1, 2)), "RETRIED")),
        ("B", settle, (((SECOND, 3), (SECOND | 1, 4)), "RETRIED")),
        ("T", tidy, ()),
        log=("a", "b", "b", "a"),
        rows=_leased((1, 2), (3, 4)),
        rules=Rules(kinds=True),
    ),
    "kinds of expired ones": _scenario(
        ("A", worker, (Worker("A", "a", outcomes=("dies", "RELEASED")), 1)),
        ("E", expirer, (1,)),
        ("X", change_one, (2, "RESET")),
        ("T", tidy, ()),
        log=("a", "a"),
        rules=Rules(kinds=True),
    ),
    "busy cursor": _scenario(
        ("A", worker, (A, 2)),
        ("B", worker, (replace(ONE_B, outcomes=("RELEASED", "DONE")), 1)),
        ("X", change_one, (1, "CANCELLED")),
        log=("a", "a"),
        rules=Rules(passed=1),
    ),
    "rows that stay locked": _scenario(
        ("A", worker, (ONE_A, 1)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (1, "CANCELLED")),
        log=("a", "a"),
        rows=_retried(1),
    ),
    "cancel with expiry": _scenario(
        ("A", worker, (replace(A, outcomes=("DONE", "dies")), 2)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (1, "CANCELLED")),
        ("E", expirer, (1,)),
        log=("a", "a"),
    ),
    "erase": _scenario(
        ("A", worker, (A, 1)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (2, "ERASED")),
        ("W", rewind, (0,)),
        log=("a", "a"),
    ),
    "dead letters": _scenario(
        ("A", worker, (replace(ONE_A, outcomes=("DEAD", "DONE")), 2)),
        ("X", change_one, (1, "REDELIVERED")),
        ("Y", change_one, (1, "DISCARDED")),
        ("Z", change_one, (1, "ERASED")),
        log=("a",),
    ),
    "reset and repeats": _scenario(
        ("A", worker, (replace(A, in_parts=True, outcomes=("DONE", "RETRIED")), 1)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (1, "RESET")),
        log=("a", "a"),
    ),
    "reset of a last attempt": _scenario(
        ("A", worker, (replace(ONE_A, outcomes=("DONE", "RETRIED")), 1)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (1, "RESET")),
        log=("a",),
        rules=Rules(attempts=1),
    ),
    "late outcomes": _scenario(
        ("A", worker, (replace(A, outcomes=("hangs", "hangs and retries", "RETRIED")), 1)),
        ("B", worker, (replace(ONE_B, outcomes=("DONE", "RELEASED")), 2)),
        ("E", expirer, (1,)),
        log=("a", "a"),
    ),
    "heartbeats": _scenario(
        ("A", worker, (replace(A, outcomes=("beats",)), 2)),
        ("B", worker, (ONE_B, 1)),
        ("E", expirer, (2,)),
        log=("a", "a"),
    ),
    "groups": _scenario(
        ("A", settle, (((SECOND, 3), (FIRST, 1)), "DONE")),
        ("B", settle, (((FIRST | 1, 2), (SECOND | 1, 4)), "RETRIED")),
        ("H", heartbeat, ((2, 1),)),
        ("E", expirer, (2,)),
        log=("a", "a", "a", "a"),
        rows=_leased((1, 2), (3, 4)),
    ),
    "a group of expired ones": _scenario(
        ("A", settle, (((FIRST, 2), (SECOND, 1)), "DONE")),
        ("B", worker, (ONE_B, 1)),
        ("W", rewind, (0,)),
        log=("a", "a"),
        rows=_expired(2, 1),
    ),
    "who runs alone": _scenario(
        ("A", worker, (replace(A, outcomes=("RELEASED", "DONE", "dies")), 2)),
        ("B", worker, (replace(ONE_B, outcomes=("DONE", "dies")), 1)),
        ("E", expirer, (1,)),
        log=("a", "a"),
        rows=_expired(1),
        rules=Rules(attempts=3),
    ),
    "retries and their fence": _scenario(
        ("A", worker, (replace(A, in_parts=True, outcomes=("RETRIED", "DONE")), 2)),
        ("B", worker, (replace(ONE_B, outcomes=("DONE", "DEAD", "RELEASED")), 1)),
        log=("a", "a"),
    ),
    "retry, then done": _scenario(
        ("R", worker, (replace(ONE_A, outcomes=("changes its mind",)), 1)),
        log=("a",),
    ),
    "retry told twice": _scenario(
        ("A", worker, (replace(A, outcomes=("tells twice",)), 2)),
        ("B", worker, (replace(ONE_B, outcomes=("DONE", "tells twice")), 1)),
        log=("a", "a"),
    ),
    "lost answers and crashes": _scenario(
        ("P", publisher, (("a",),)),
        ("A", worker, (replace(A, lost=True), 2)),
        ("B", worker, (replace(ONE_B, lost=True), 1)),
        log=("a",),
        crashes=2,
    ),
    "a claim given up while it runs": _scenario(
        ("A", given_up, (A,)),
        ("R", release_token, (GIVEN_UP,)),
        ("B", worker, (ONE_B, 2)),
        ("E", expirer, (1,)),
        log=("a", "a"),
    ),
    "rows, expiry and cancel": _scenario(
        ("A", worker, (replace(A, outcomes=("DONE", "RETRIED", "dies")), 2)),
        ("B", worker, (replace(ONE_B, outcomes=("DONE", "hangs")), 2)),
        ("X", change_one, (1, "CANCELLED")),
        ("E", expirer, (2,)),
        log=("a", "a"),
        rows=_retried(1),
        rules=Rules(attempts=3),
    ),
    "killed at every step": _scenario(
        ("A", worker, (replace(A, in_parts=True, outcomes=("DONE", "RETRIED")), 1)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (1, "RESET")),
        ("E", expirer, (1,)),
        log=("a", "a"),
        kills=2,
    ),
    "no retries": _scenario(
        ("A", worker, (replace(A, outcomes=("DONE", "dies", "RETRIED")), 2)),
        ("B", worker, (ONE_B, 2)),
        ("E", expirer, (1,)),
        log=("a", "a"),
        rules=Rules(attempts=1),
    ),
    # ── rewind, delete, prune ──
    "rewind": _scenario(
        ("A", worker, (A, 2)),
        ("B", worker, (ONE_B, 1)),
        ("W", rewind, (0,)),
        log=("a", "a"),
    ),
    "rewind beside rows": _scenario(
        ("A", worker, (replace(ONE_A, outcomes=("RELEASED", "DONE")), 2)),
        ("B", worker, (ONE_B, 2)),
        ("W", rewind, (0,)),
        log=("a",),
    ),
    "rewind beside retries": _scenario(
        ("A", worker, (replace(A, outcomes=("RETRIED", "DONE")), 2)),
        ("E", expirer, (1,)),
        ("W", rewind, (0,)),
        log=("a", "a"),
        rows=_retried(1, 2),
        rules=Rules(attempts=3),
    ),
    "rewind forward": _scenario(
        ("A", worker, (ONE_A, 1)),
        ("W", rewind, (2,)),
        log=("a", "a", "a"),
        rules=Rules(passed=1),
    ),
    "rewind and late ones": _scenario(
        ("P", publisher, (("a",),)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 2)),
        ("W", rewind, (1,)),
        log=("a",),
    ),
    "delete": _scenario(
        ("P", publisher, (("a",), COMMIT)),
        ("A", worker, (replace(ONE_A, outcomes=("RELEASED", "DONE", "hangs")), 2)),
        ("B", worker, (ONE_B, 1)),
        ("E", expirer, (1,)),
        ("D", delete, ()),
        log=("a",),
    ),
    "prune": _scenario(
        ("A", worker, (replace(A, outcomes=("DONE", "hangs")), 2)),
        ("E", expirer, (1,)),
        ("T", prune, (2,)),
        log=("a", "a"),
    ),
    "prune and late ones": _scenario(
        ("P", publisher, (("a",), COMMIT)),
        ("Q", publisher, (("a",), COMMIT)),
        ("A", worker, (A, 2)),
        ("T", prune, (2,)),
    ),
    "prune and specials": _scenario(
        ("A", worker, (ONE_A, 3)),
        ("B", worker, (ONE_B, 1)),
        ("X", change_one, (2, "CANCELLED")),
        ("T", prune, (3,)),
        log=("a", "a", "a*"),
        rules=Rules(passed=1),
    ),
    "late, rewound and pruned": _scenario(
        ("P", publisher, (("a",),)),
        ("Q", publisher, (("a",),)),
        ("A", worker, (A, 2)),
        ("W", rewind, (1,)),
        ("T", prune, (2,)),
        log=("a",),
        crashes=1,
    ),
    "prune beside rewind": _scenario(
        ("A", worker, (A, 2)),
        ("T", prune, (1,)),
        ("W", rewind, (0,)),
        log=("a", "a"),
    ),
    # ── subscribing and following ──
    "subscribe": _scenario(
        ("P", publisher, (("a", "a"),)),
        ("Q", publisher, (("a",),)),
        ("R", publisher, (("a",),)),
        ("S", subscribe_now, ()),
        rows=(),
    ),
    "subscribe beside prune": _scenario(
        ("P", publisher, (("a",),)),
        ("S", subscribe_from_beginning, ()),
        ("T", prune, (1,)),
        log=("a", "a"),
        rows=(),
    ),
    "follower": _scenario(
        ("P", publisher, (("(", "a", ")", "a"), COMMIT)),
        ("Q", publisher, (("a",),)),
        ("F", follower, ("F", 2)),
        rows=(),
        rules=Rules(slow_pins=True),
    ),
    "follower over crashes": _scenario(
        ("P", publisher, (("a",), ROLLBACK)),
        ("Q", publisher, (("a",), COMMIT)),
        ("R", publisher, (("a",), COMMIT)),
        ("F", follower, ("F", 3)),
        rows=(),
        crashes=2,
        rules=Rules(outside=True),
    ),
    "everything": _scenario(
        ("P", publisher, (("a", "b*"),)),
        ("A", worker, (replace(A, lost=True, outcomes=("DONE", "RETRIED", "dies", "hangs")), 2)),
        ("B", worker, (Worker("B", "b", limit=1), 1)),
        ("E", expirer, (1,)),
        ("X", change_one, (2, "RESET")),
        ("W", rewind, (0,)),
        ("T", prune, (2,)),
        log=("a",),
        crashes=1,
    ),
}
