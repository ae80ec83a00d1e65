"""Group commit: operations that arrive together share one transaction, and so one fsync.

There is no commit thread to hand work to. Whoever arrives first leads: it runs its own operation and all that wait
beside it in one transaction, wakes their owners with the results, and hands the lead to the first one that came
meanwhile. A lone caller therefore pays for nothing but its own commit.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from itertools import islice, takewhile
from typing import Any, Final, Generic, Protocol, TypeVar

from postbus.errors import InvalidRequest, OutcomeUnknown, StoreUnavailable
from postbus.observe import probe
from postbus.store.owned import owned

R = TypeVar("R")
C = TypeVar("C", bound="Connection")
MAX_GROUP: Final = 500


class Connection(Protocol):
    """What the committer needs of a database connection; `begin` may wait for the write lock."""

    def begin(self) -> None:
        """Open a write transaction."""
        ...

    def commit(self) -> None:
        """Make it durable."""
        ...

    def rollback(self) -> None:
        """Undo it; never raises."""
        ...

    @property
    def lost(self) -> bool:
        """Whether it broke off in the midst of something that may have been done all the same."""
        ...


class _Slot:
    """One caller's operation on its way through a group; without one, the caller wants the lead to itself."""

    __slots__ = ("error", "finished", "group", "left", "operation", "result", "thread", "turn")

    def __init__(self, operation: Any) -> None:
        self.operation = operation
        self.thread = threading.get_ident()
        self.result: Any = None
        self.error: Exception | None = OutcomeUnknown("interrupted while committing: the outcome is unknown")
        self.group: list[_Slot] = [self]
        """Whose operations its owner runs when it leads."""
        self.turn: threading.Lock | None = None
        """Locked while its owner waits."""
        self.finished = self.left = False

    def wake(self) -> None:
        """Have the owner look again whether it leads or is finished; to wake it twice does no harm."""
        if self.turn is not None and self.turn.locked():
            self.turn.release()


class Committer(Generic[C]):
    """Runs operations on one connection, grouped into transactions.

    The head of the queue leads. Leaving the queue and waking the next head can be repeated, and both callers do it
    twice: an exception that comes from outside (Ctrl-C, a signal handler's) at any line leaves the lead with nobody.
    """

    def __init__(self, connection: C, together: Callable[[list[Any]], list[Any]] | None = None) -> None:
        """Take charge of a connection that nobody else uses.

        `together` makes a whole group durable and returns its results, or raises with nothing done; without it, the
        operations are called one after the other inside a transaction.
        """
        self._connection = connection
        self._together = together or self._transact
        self._guard = threading.Lock()
        self._queue: deque[_Slot] = deque()
        self._calls: dict[int, _Slot] = {}
        """The call that each thread is in the midst of."""

    def run(self, operation: Callable[[C], R]) -> R:
        """Run `operation` (or what `together` takes for one) and return its result once that is durable.

        It may run beside others, and twice: if a group fails it is undone, and each operation is run again alone,
        so that one that fails cannot fail its neighbours. It must not change anything but the database.
        """
        self._refuse_reentry()
        slot = _Slot(operation)
        try:
            try:
                if self._lead_or_wait(slot):
                    self._lead(slot)
            finally:
                self._leave(slot)
        finally:
            self._leave(slot)
        if slot.error is not None:
            raise slot.error
        return slot.result

    @owned
    def hold(self, timeout: float = -1) -> Generator[C]:
        """Hold the connection while nobody else uses it, outside any transaction; StoreUnavailable after `timeout`."""
        self._refuse_reentry()
        slot = _Slot(None)
        try:
            try:
                self._lead_or_wait(slot, timeout)
                yield self._connection
            finally:
                self._leave(slot)
        finally:
            self._leave(slot)

    @owned
    def exclusive(self) -> Generator[C]:
        """Hold the connection in a transaction of the caller's own: commit at the end, roll back if it raises."""
        with self.hold() as connection:
            try:
                connection.begin()
                yield connection
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    def _refuse_reentry(self) -> None:
        """Raise for a caller that would wait for itself."""
        call = self._calls.get(threading.get_ident())
        if call is None:
            return
        if call.operation is None:
            raise InvalidRequest("inside a transaction of your own, pass it on: publish(..., connection=tx)")
        raise StoreUnavailable("called (from a signal handler?) in the midst of a write of the same thread")

    def _lead_or_wait(self, slot: _Slot, timeout: float = -1) -> bool:
        """Return True when this caller must lead now, False when its operation has been run by another."""
        self._calls[slot.thread] = slot
        with self._guard:
            self._queue.append(slot)
            if self._queue[0] is slot:
                return True
            slot.turn = threading.Lock()
            slot.turn.acquire()
        while True:
            with self._guard:
                if slot.finished or self._queue[0] is slot:
                    return not slot.finished
            if not slot.turn.acquire(timeout=timeout):
                raise StoreUnavailable(f"other writes took longer than {timeout} s; nothing was done")

    def _leave(self, slot: _Slot) -> None:
        """End the call of a slot: hand the results to its group, and the lead, if it has that, to the next in line.

        Each step may be repeated, so that a call which an exception from outside has cut off can be made again.
        """
        if slot.left:
            return
        with self._guard:
            if self._queue and self._queue[0] is slot:
                for each in slot.group:
                    each.finished = True
                    each.wake()
                if slot.operation is None:  # heartbeats must not wait for all who want the lead to themselves
                    self._queue = deque(sorted(self._queue, key=lambda each: each is not slot and not each.operation))
            slot.finished = True
            while self._queue and self._queue[0].finished:
                self._queue.popleft()
            if self._queue:
                self._queue[0].wake()
            if self._calls.get(slot.thread) is slot:
                del self._calls[slot.thread]
            slot.left = True

    def _lead(self, slot: _Slot) -> None:
        """Run an operation and those that wait behind it, up to the first that wants the lead to itself."""
        with self._guard:
            behind = takewhile(lambda each: each.operation is not None, islice(self._queue, MAX_GROUP))
            slot.group = [each for each in behind if not each.finished]
        if not self._run(slot.group):
            for each in slot.group:
                self._run([each])

    def _run(self, group: list[_Slot]) -> bool:
        """Run operations together; return False if nothing was done, and each is to be run alone."""
        try:
            results = self._together([slot.operation for slot in group])
        except Exception as error:  # noqa: BLE001  raised in the threads that own the operations
            if len(group) > 1 and not self._connection.lost:  # what may have been committed must not be done again
                return False
            for slot in group:
                slot.error = error
        else:
            for slot, result in zip(group, results, strict=True):
                slot.result, slot.error = result, None
        return True

    def _transact(self, operations: list[Callable[[C], Any]]) -> list[Any]:
        connection = self._connection
        try:
            connection.begin()
            results = [operation(connection) for operation in operations]
            probe("committing")
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        return results
