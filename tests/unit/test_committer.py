"""Group commit: who shares a transaction, and who is not harmed by whom."""

import gc
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest

from postbus.errors import InvalidRequest, OutcomeUnknown
from postbus.store import committer as committer_module
from postbus.store import owned as owned_module
from postbus.store.committer import Committer
from tests.conftest import Crew
from tests.interrupts import Interrupted, interrupted_at


class Ledger:
    """A connection that writes down what happens to it."""

    def __init__(self) -> None:
        """Begin with nothing written."""
        self.open: list[Any] | None = None
        self.committed: list[list[Any]] = []
        self.rolled_back = 0
        self.fail_commits = 0
        self.left_open = 0
        self.lost = False
        """Whether it broke before the answer to a commit came."""

    def begin(self) -> None:
        """Open a transaction, undoing one that a call left open which was interrupted twice, as connections do."""
        self.left_open += self.open is not None
        self.open = []

    def commit(self) -> None:
        """Keep what was written."""
        if self.fail_commits:
            self.fail_commits -= 1
            raise OSError("the disk said no")
        assert self.open is not None
        self.committed.append(self.open)
        self.open = None
        if self.lost:
            raise ConnectionError("no answer came")

    def rollback(self) -> None:
        """Forget what was written."""
        self.rolled_back += 1
        self.open = None

    def write(self, value: Any) -> Any:
        """Write something down and return it."""
        assert self.open is not None
        self.open.append(value)
        return value


@pytest.fixture
def ledger() -> Ledger:
    """Give an empty ledger."""
    return Ledger()


@pytest.fixture
def committer(ledger: Ledger) -> Committer[Ledger]:
    """Give a committer over it."""
    return Committer(ledger)


def queue_up(
    committer: Committer[Ledger], crew: Crew, operations: list[Callable[[Ledger], Any]], eventually: Any
) -> None:
    """Have all operations wait behind a transaction, so that they make one group."""
    with committer.exclusive():
        for count, operation in enumerate(operations, 1):
            crew.start(lambda operation=operation: committer.run(operation))
            eventually(lambda count=count: len(committer._queue) == count + 1)


def test_a_lone_operation_is_its_own_transaction(committer: Committer[Ledger], ledger: Ledger):
    """Its result comes back after the commit."""
    assert committer.run(lambda connection: connection.write(1)) == 1
    assert ledger.committed == [[1]]


def test_operations_that_wait_together_share_a_transaction(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew, eventually: Any
):
    """Twenty operations, one commit, each its own result (S1.18)."""
    queue_up(committer, crew, [lambda c, n=n: c.write(n) for n in range(20)], eventually)
    assert sorted(crew.join()) == list(range(20))
    assert ledger.committed == [[], list(range(20))]


def test_a_group_has_an_end(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew, eventually: Any, monkeypatch: pytest.MonkeyPatch
):
    """Nobody waits for more than so many others."""
    monkeypatch.setattr(committer_module, "MAX_GROUP", 10)
    queue_up(committer, crew, [lambda c, n=n: c.write(n) for n in range(25)], eventually)
    crew.join()
    assert [len(group) for group in ledger.committed] == [0, 10, 10, 5]


def test_a_failing_operation_does_not_fail_its_neighbours(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew, eventually: Any
):
    """The group is undone and each is run again alone: one error, nine commits (I2)."""

    def fail(connection: Ledger) -> None:
        connection.write("half")
        raise ValueError("mine alone")

    operations: list[Callable[[Ledger], Any]] = [lambda c, n=n: c.write(n) for n in range(9)]
    queue_up(committer, crew, [*operations[:4], fail, *operations[4:]], eventually)
    with pytest.raises(ValueError, match="mine alone"):
        crew.join()
    assert sorted(crew.results) == list(range(9))
    assert ledger.committed == [[], *([n] for n in range(9))]
    assert ledger.open is None


def test_a_commit_that_fails_is_tried_again_one_by_one(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew, eventually: Any
):
    """What could not be committed together may be alone; nobody is told of success before (I1)."""
    runs: list[int] = []

    def fail_once(connection: Ledger) -> str:
        runs.append(1)
        connection.fail_commits = int(len(runs) == 1)
        return connection.write("first")

    queue_up(committer, crew, [fail_once, lambda c: c.write("second")], eventually)
    assert sorted(crew.join()) == ["first", "second"]
    assert ledger.committed == [[], ["first"], ["second"]]
    assert ledger.rolled_back == 1


def test_an_error_at_commit_is_the_callers_error(committer: Committer[Ledger], ledger: Ledger):
    """No acknowledgement without a commit, and the next one works (I1, I16)."""
    ledger.fail_commits = 1
    with pytest.raises(OSError, match="the disk said no"):
        committer.run(lambda connection: connection.write(1))
    assert ledger.committed == []
    assert committer.run(lambda connection: connection.write(2)) == 2


def test_an_exclusive_transaction_commits_at_its_end(committer: Committer[Ledger], ledger: Ledger):
    """And rolls back when its block raises (I2)."""
    with committer.exclusive() as connection:
        connection.write("kept")

    def raise_inside() -> None:
        with committer.exclusive() as connection:
            connection.write("lost")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        raise_inside()
    assert ledger.committed == [["kept"]]
    assert committer.run(lambda connection: connection.write("after")) == "after"


def test_nobody_shares_an_exclusive_transaction(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew, eventually: Any
):
    """What waits when one such ends goes first, so that no heartbeat waits for all of them; then the next, alone."""
    entered = threading.Event()

    def exclusively() -> None:
        with committer.exclusive() as connection:
            connection.write("alone")
            entered.set()

    with committer.exclusive():
        for count, start in enumerate((1, 2), 1):
            crew.start(lambda start=start: committer.run(lambda c: c.write(start)))
            eventually(lambda count=count: len(committer._queue) == count + 1)
        crew.start(exclusively)
        eventually(lambda: len(committer._queue) == 4)
        crew.start(lambda: committer.run(lambda c: c.write(3)))
        eventually(lambda: len(committer._queue) == 5)
    crew.join()
    assert entered.is_set()
    assert ledger.committed == [[], [1, 2, 3], ["alone"]]


def test_who_holds_a_transaction_cannot_wait_for_himself(committer: Committer[Ledger], crew: Crew):
    """Neither an operation nor a second transaction hangs: both are refused with the remedy."""

    def nest(use: Callable[[], Any]) -> None:
        with committer.exclusive():
            use()

    crew.start(lambda: nest(lambda: committer.run(lambda c: c.write(1))))
    with pytest.raises(InvalidRequest, match="connection=tx"):
        crew.join()
    other = Crew()
    other.start(lambda: nest(lambda: committer.exclusive().__enter__()))
    with pytest.raises(InvalidRequest):
        other.join()
    assert committer.run(lambda connection: connection.write(2)) == 2


def test_an_interrupt_while_waiting_leaves_the_others_working(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew, eventually: Any
):
    """Ctrl-C in a thread that waits for its turn must not leave the turn with nobody (I10)."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise Interrupted

    release = threading.Event()

    def hold() -> None:
        with committer.exclusive():
            release.wait(10)

    crew.start(hold)
    eventually(lambda: bool(committer._queue))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            committer.run(lambda connection: connection.write("interrupted"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    crew.start(lambda: committer.run(lambda connection: connection.write("other")))
    release.set()
    crew.join(5)
    assert ["other"] in ledger.committed


def test_a_group_that_may_have_been_committed_is_not_run_again(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew, eventually: Any
):
    """The connection broke before the answer: everybody in the group is told so, and nothing is done twice (I3)."""
    told: list[str] = []

    def write(connection: Ledger) -> None:
        connection.write("once")
        connection.lost = True

    def publish() -> None:
        with pytest.raises(ConnectionError) as caught:
            committer.run(write)
        told.append(str(caught.value))

    with committer.exclusive():
        for count in range(1, 4):
            crew.start(publish)
            eventually(lambda count=count: len(committer._queue) == count + 1)
    crew.join()
    assert told == ["no answer came"] * 3
    assert [group for group in ledger.committed if group] == [["once"] * 3]


def test_hundreds_of_operations_from_many_threads_are_each_done_once(
    committer: Committer[Ledger], ledger: Ledger, crew: Crew
):
    """Nothing lost, nothing doubled, whoever leads (I2)."""

    def work(number: int) -> None:
        for turn in range(50):
            assert committer.run(lambda c, turn=turn: c.write((number, turn))) == (number, turn)

    for number in range(8):
        crew.start(lambda number=number: work(number))
    crew.join(30)
    written = [value for group in ledger.committed for value in group]
    assert sorted(written) == [(number, turn) for number in range(8) for turn in range(50)]
    assert ledger.left_open == 0


def test_an_interrupted_leader_acknowledges_nothing_for_its_neighbours(crew: Crew):
    """Ctrl-C while a group is run again one by one: whoever was not reached is told so, never given success (I1)."""
    committer: Committer[Ledger] = Committer(Ledger())
    started, go_on = threading.Event(), threading.Event()
    told: list[object] = []

    def first(_: Ledger) -> None:
        started.set()
        go_on.wait(10)

    def neighbour() -> None:
        try:
            told.append(committer.run(lambda ledger: (ledger.open or []).append("x")))
        except OutcomeUnknown as error:
            told.append(str(error))

    runs = iter([ValueError("the group fails"), KeyboardInterrupt()])

    def interrupted(_: Ledger) -> None:
        raise next(runs)

    def leader() -> None:
        with pytest.raises(KeyboardInterrupt):
            committer.run(interrupted)

    crew.start(lambda: committer.run(first))
    started.wait(10)
    crew.start(leader)
    wait_until(lambda: len(committer._queue) == 2)
    for _ in range(3):
        crew.start(neighbour)
    wait_until(lambda: len(committer._queue) == 5)
    go_on.set()
    crew.join()
    assert len(told) == 3
    assert all("outcome is unknown" in str(each) for each in told)


def run(committer: Committer[Ledger]) -> None:
    """Run an operation."""
    committer.run(lambda connection: connection.write("mine"))


def run_failing(committer: Committer[Ledger]) -> None:
    """Run an operation that fails."""
    committer.run(lambda connection: 1 / connection.write(0))


def hold(committer: Committer[Ledger]) -> None:
    """Hold the connection."""
    with committer.hold():
        pass


def transaction(committer: Committer[Ledger]) -> None:
    """Hold it in a transaction."""
    with committer.exclusive() as connection:
        connection.write("mine")


def transaction_failing(committer: Committer[Ledger]) -> None:
    """Hold it in a transaction that fails."""
    with committer.exclusive() as connection:
        connection.write(1 // 0)


@pytest.mark.parametrize(
    ("call", "error"),
    [(each, KeyboardInterrupt) for each in (run, run_failing, hold, transaction, transaction_failing)]
    + [(run_failing, Interrupted)],
)
@pytest.mark.parametrize("neighbours", [0, 2])
def test_an_interrupt_at_any_line_leaves_the_lead_to_the_next(
    call: Callable[[Committer[Ledger]], None], neighbours: int, error: type[BaseException], eventually: Any
):
    """Ctrl-C at whichever line of whatever leads, kept as a console does: all others end, and later writes (I10)."""
    assert next(line for line in count(1) if not survives(call, neighbours, line, error, eventually)) > 5


def survives(
    call: Callable[[Committer[Ledger]], None], neighbours: int, line: int, error: type[BaseException], eventually: Any
) -> bool:
    """Check that a committer goes on after an interrupt at a line; return whether the call got so far."""
    ledger, crew = Ledger(), Crew()
    committer: Committer[Ledger] = Committer(ledger)
    ready = threading.Event()
    kept: list[BaseException | None] = []

    def lead() -> bool:
        ready.wait()
        was, raised = interrupted_at(line, error, lambda: call(committer), committer_module, owned_module)
        kept.append(raised)
        with suppress(OutcomeUnknown):
            committer.run(lambda connection: connection.write("mine again"))
        return was

    def neighbour() -> None:
        with suppress(OutcomeUnknown, Interrupted):
            committer.run(lambda connection: connection.write("other"))

    with committer.exclusive():
        crew.start(lead)
        ready.set()
        eventually(lambda: len(committer._queue) > 1 or not crew.is_busy())
        crew.start(neighbour, neighbours)
    crew.join(5)
    was = True in crew.results
    crew.start(lambda: committer.run(lambda connection: connection.write("later")))
    crew.join(5)
    assert not committer._queue
    assert not committer._calls
    assert ledger.open is None
    return was


@contextmanager
def wrapped(committer: Committer[Ledger]) -> Generator[Ledger]:
    """Give a transaction, as a fixture does or a unit of work of the user's own."""
    with committer.exclusive() as connection:
        yield connection


def by_a_suspended_function(committer: Committer[Ledger]) -> tuple[Ledger, Callable[[], object]]:
    """Open a transaction in a function that is then on nobody's stack."""
    block = wrapped(committer)
    return block.__enter__(), lambda: block.__exit__(None, None, None)


def by_an_exit_stack(committer: Committer[Ledger]) -> tuple[Ledger, Callable[[], object]]:
    """Open it in an ExitStack."""
    stack = ExitStack()
    return stack.enter_context(committer.exclusive()), stack.close


def by_hand(committer: Committer[Ledger]) -> tuple[Ledger, Callable[[], object]]:
    """Open it without a `with` statement, as handlers' transactions are, after a look whether it has an end."""
    block = committer.exclusive()
    assert hasattr(block, "__exit__")
    return block.__enter__(), lambda: block.__exit__(None, None, None)


@pytest.mark.parametrize("opened", [by_a_suspended_function, by_an_exit_stack, by_hand])
def test_a_transaction_lasts_while_anything_can_end_it(
    opened: Callable[[Committer[Ledger]], tuple[Ledger, Callable[[], object]]],
    committer: Committer[Ledger],
    ledger: Ledger,
    crew: Crew,
):
    """Nobody takes the lead from a block that is entered and on no stack; another thread may commit it (I2)."""
    connection, end = opened(committer)
    gc.collect()
    connection.write("kept")
    assert (ledger.open, ledger.rolled_back) == (["kept"], 0)
    crew.start(end)
    crew.join()
    assert ledger.committed == [["kept"]]


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for threads to have queued up."""
    deadline = threading.Event()
    for _ in range(2_000):
        if holds():
            return
        deadline.wait(0.005)
    pytest.fail("the threads never queued up")
