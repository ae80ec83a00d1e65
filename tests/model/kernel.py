"""A small database in which every interleaving of several programs can be explored.

A program is a generator. Each `yield` is one step, a function of a `View`, and gets its result back. Steps are atomic;
between two of them any other program may run. A step is one SQL statement, or several where no other program could tell
the difference: a lock and what it guards, the last writes and the commit. The rules are those of PostgreSQL under READ
COMMITTED: a statement sees what was committed before it and what its own transaction wrote; row locks and advisory
locks last to the end of the transaction; sequences are not rolled back, and a crash may set them back to any value that
was not flushed.

A program's state is the results that it got so far, which makes states hashable: programs therefore return (with their
successor, see `Then`) as soon as a transaction ends, and carry on only what they still need.
"""

from collections.abc import Callable, Generator, Iterator
from itertools import product
from typing import Any, Final, NamedTuple

Key = tuple[Any, ...]
Step = Callable[["View"], Any]
Program = Callable[..., Generator[Any, Any, Any]]
SEQUENCE: Final = ("sequence",)
NUMBERS: Final = ("numbers",)
DURABLE: Final = "durable"
SHARED, EXCLUSIVE = "shared", "exclusive"


class Blocked(Exception):  # noqa: N818  the step waits
    """The step waits for locks of these processes."""

    def __init__(self, by: frozenset[int]) -> None:
        """Wait for them."""
        super().__init__()
        self.by = by


class Violation(AssertionError):  # noqa: N818  as checkers call it
    """The protocol broke one of its promises."""


class Choice(tuple[Any, ...]):
    """Several steps to yield, or several `Then` to return: each of them is explored."""

    __slots__ = ()


class Then(NamedTuple):
    """Returned by a program: what its process runs next."""

    program: Program
    args: tuple[Any, ...] = ()


class Process(NamedTuple):
    """A program on its way, with what its open transaction wrote and locked."""

    name: str
    program: Program | None
    args: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()
    own: frozenset[tuple[Key, Any]] = frozenset()
    locks: frozenset[tuple[Key, str]] = frozenset()


class State(NamedTuple):
    """What is committed, and where each process stands."""

    rows: frozenset[tuple[Key, Any]]
    processes: tuple[Process, ...]


class View:
    """What one process sees and does in one statement."""

    def __init__(self, state: State, me: int) -> None:
        """See a state as one of its processes."""
        self.rows: dict[Key, Any] = dict(state.rows)
        process = state.processes[me]
        self.own: dict[Key, Any] = dict(process.own)
        self.locks = set(process.locks)
        self._others = [each for each in enumerate(state.processes) if each[0] != me]

    def get(self, key: Key, default: Any = None) -> Any:
        """Read a row."""
        value = self.own[key] if key in self.own else self.rows.get(key)
        return default if value is None else value

    def all(self, table: str) -> list[tuple[Any, Any]]:
        """Read a table in the order of its key."""
        keys = {key for key in (*self.rows, *self.own) if key[0] == table}
        return [(key[1], value) for key in sorted(keys) if (value := self.get(key)) is not None]

    def put(self, key: Key, value: Any) -> None:
        """Write a row (None deletes it). Nobody else may have it locked or written: a real server would wait here."""
        for _, other in self._others:
            if (key, EXCLUSIVE) in other.locks or any(key == theirs for theirs, _ in other.own):
                raise Violation(f"{key} is written while {other.name} holds it")
        self.own[key] = value

    def append(self, key: Key, entry: Any) -> None:
        """Append to a log: no two writers are in each other's way."""
        self.own[key] = (*self.own.get(key, ()), entry)

    def log(self, key: Key) -> tuple[Any, ...]:
        """Read a log."""
        return (*self.rows.get(key, ()), *self.own.get(key, ()))

    def holders(self, key: Key, mode: str) -> frozenset[int]:
        """Return the processes whose locks conflict with this one."""
        return frozenset(
            place
            for place, other in self._others
            if (key, EXCLUSIVE) in other.locks or (mode == EXCLUSIVE and (key, SHARED) in other.locks)
        )

    def lock(self, key: Key, mode: str = EXCLUSIVE, *, skip: bool = False) -> bool:
        """Take a lock until the end of the transaction: waits, or returns False with `skip`, where it is taken."""
        holders = self.holders(key, mode)
        if holders and not skip:
            raise Blocked(holders)
        if not holders:
            self.locks.add((key, mode))
        return not holders

    def shared_locks(self, table: str) -> list[Key]:
        """Return the shared locks of a kind that anybody holds, as `pg_locks` shows them."""
        mine = [key for key, _ in self.locks if key[0] == table]
        return mine + [key for _, other in self._others for key, _ in other.locks if key[0] == table]

    def draw(self, counter: Key) -> int:
        """Draw the next number of a sequence: at once, for good, whatever becomes of the transaction."""
        self.rows[counter] = self.rows.get(counter, 0) + 1
        return self.rows[counter]

    def note(self, key: Key, value: Any) -> None:
        """Write down for the checks what no transaction takes back."""
        self.rows[key] = value

    def commit(self) -> None:
        """Make everything visible and durable, and unlock."""
        for key, value in self.own.items():
            if key[0] == "audit":
                self.rows[key] = (*self.rows.get(key, ()), *value)
            elif value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value
        if self.own:
            for counter in (SEQUENCE, NUMBERS):
                self.rows[DURABLE, counter] = self.rows.get(counter, 0)
        self.rollback()

    def rollback(self) -> None:
        """Forget what this transaction wrote, and unlock."""
        self.own.clear()
        self.locks.clear()


_ENDED: Final = object()
_next_steps: dict[Any, Any] = {}


def _next_step(process: Process) -> Any:
    """Return what a process does next: a step, a Choice, a Then, or _ENDED."""
    key = (process.program, process.args, process.results)
    found = _next_steps.get(key)
    if found is None:
        if process.program is None:
            return _ENDED
        running = process.program(*process.args)
        try:
            found = next(running)
            for result in process.results:
                found = running.send(result)
        except StopIteration as end:
            found = end.value or _ENDED
        _next_steps[key] = found
    return found


def _continued(process: Process) -> list[Process]:
    """Let a process that is through with its program go on to the next ones, or end."""
    found = _next_step(process)
    if found is _ENDED:
        return [process._replace(program=None, args=(), results=())]
    if isinstance(found, Then):
        found = Choice((found,))
    if isinstance(found, Choice) and isinstance(found[0], Then):
        return [
            after for then in found for after in _continued(process._replace(program=then[0], args=then[1], results=()))
        ]
    return [process]


def start(rows: dict[Key, Any], programs: dict[str, Then]) -> State:
    """Return the state in which all programs are about to begin."""
    processes = (_continued(Process(name, each.program, each.args))[0] for name, each in programs.items())
    return State(frozenset(rows.items()), tuple(processes))


def step(state: State, me: int) -> Iterator[State]:
    """Give the states that a process's next step leads to; raises Blocked where it waits."""
    process = state.processes[me]
    found = _next_step(process)
    if found is _ENDED:
        return
    for place, do in enumerate(found if isinstance(found, Choice) else (found,)):
        view = View(state, me)
        result = do(view)
        results = (*process.results, place if isinstance(found, Choice) else result)
        own, locks = frozenset(view.own.items()), frozenset(view.locks)
        rows = frozenset(view.rows.items())
        for after in _continued(process._replace(results=results, own=own, locks=locks)):
            yield State(rows, (*state.processes[:me], after, *state.processes[me + 1 :]))


def crash(state: State, survive: Callable[[Process], Process]) -> Iterator[State]:
    """Give the states after a crash of the server: transactions are gone, sequences are anywhere they may be."""
    rows = dict(state.rows)
    processes = tuple(
        _continued(survive(each._replace(own=frozenset(), locks=frozenset())))[0] if each.program is not None else each
        for each in state.processes
    )
    ranges = [range(rows.get((DURABLE, counter), 0), rows.get(counter, 0) + 1) for counter in (SEQUENCE, NUMBERS)]
    for sequence, number in product(*ranges):
        yield State(frozenset({**rows, SEQUENCE: sequence, NUMBERS: number}.items()), processes)


def kill(state: State, me: int) -> State:
    """Return the state after one process was killed, in a transaction or between two."""
    killed = Process(state.processes[me].name, None)
    return state._replace(processes=(*state.processes[:me], killed, *state.processes[me + 1 :]))


class Explored(NamedTuple):
    """How far an exploration came."""

    states: int
    ends: int
    complete: bool


def explore(
    first: State,
    check: Callable[[dict[Key, Any]], None],
    at_end: Callable[[State], None],
    *,
    others: Callable[[State], Iterator[tuple[str, State]]] = lambda _: iter(()),
    most: int | None = None,
) -> Explored:
    """Visit every state that can be reached; raise Violation with the way there at the first that breaks a promise.

    `check` sees the committed rows of every state, `at_end` each state in which no process can go on, `others` gives
    what may happen besides (crashes). `most` bounds the number of states.
    """
    seen = {hash(first)}
    checked = {hash(first.rows)}
    ends = 0

    def ended(state: State) -> None:
        nonlocal ends
        ends += 1
        at_end(state)

    path: list[tuple[str, State, Iterator[tuple[str, State]]]] = [("begin", first, _successors(first, others, ended))]
    try:
        while path:
            found = next(path[-1][2], None)
            if found is None:
                path.pop()
                continue
            name, state = found
            if (identity := hash(state)) in seen:
                continue
            seen.add(identity)
            path.append((name, state, _successors(state, others, ended)))
            if (rows := hash(state.rows)) not in checked:
                checked.add(rows)
                check(dict(state.rows))
            if most is not None and len(seen) >= most:
                return Explored(len(seen), ends, complete=False)
    except Violation as violation:
        raise Violation(f"{violation}\n{_told([each[:2] for each in path])}\n({len(seen)} states)") from None
    return Explored(len(seen), ends, complete=True)


def _told(way: list[tuple[str, State]]) -> str:
    """Return who took each step of a way, and which rows it changed."""
    lines: list[str] = []
    before = frozenset[tuple[Key, Any]]()
    for name, state in way:
        changed = sorted(map(str, state.rows - before)) + [f"no {key}" for key, _ in before - state.rows]
        gone = [each for each in changed if not each.startswith("no ") or each[3:] not in map(str, dict(state.rows))]
        lines.append(f"{name}: {', '.join(gone)}")
        before = state.rows
    return "\n".join(lines)


def _successors(
    state: State, others: Callable[[State], Iterator[tuple[str, State]]], at_end: Callable[[State], None]
) -> Iterator[tuple[str, State]]:
    waiting: dict[int, frozenset[int]] = {}
    moved = False
    for me, process in enumerate(state.processes):
        if process.program is None:
            continue
        try:
            for after in step(state, me):
                moved = True
                yield process.name, after
        except Blocked as blocked:
            waiting[me] = blocked.by
        except Violation as violation:
            raise Violation(f"{process.name}: {violation}") from None
    _refuse_deadlock(state, waiting)
    if not moved:
        at_end(state)
    yield from others(state)


def _refuse_deadlock(state: State, waiting: dict[int, frozenset[int]]) -> None:
    """Raise Violation where processes wait for each other."""
    stuck = dict(waiting)
    while free := [me for me, by in stuck.items() if not by & stuck.keys()]:
        for me in free:
            del stuck[me]
    if stuck:
        raise Violation(f"deadlock of {', '.join(state.processes[me].name for me in stuck)}")


def run_alone(rows: dict[Key, Any], then: Then) -> dict[Key, Any]:
    """Run one program to its end with nobody beside it; return what is committed then."""
    state = start(rows, {"alone": then})
    while state.processes[0].program is not None:
        state = next(step(state, 0))
    return dict(state.rows)
