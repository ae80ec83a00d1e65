"""Group commit: operations that arrive together share one transaction, and so one fsync.

There is no commit thread to hand work to. Whoever arrives first leads: it runs its own operation and all that wait
beside it in one transaction, wakes their owners with the results, and hands the lead to the first one that came
meanwhile. A lone caller therefore pays for nothing but its own commit.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from postbus.errors import InvalidRequest, StoreUnavailable
from postbus.observe import probe
from postbus.store.contract import WouldWait

__all__ = ["Committer", "Connection"]

R = TypeVar("R")
C = TypeVar("C", bound="Connection")
MAX_GROUP = 500


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

    __slots__ = ("alone", "error", "finished", "operation", "result", "turn")

    def __init__(self, operation: Any) -> None:
        self.operation = operation
        self.result: Any = None
        self.error: Exception | None = StoreUnavailable("interrupted while committing: the outcome is unknown")
        self.finished = False
        self.alone = False
        """Whether its owner is in a hurry, and so the wrong one to run what others wait for."""
        self.turn: threading.Lock | None = None


class Committer(Generic[C]):
    """Runs operations on one connection, grouped into transactions."""

    def __init__(self, connection: C, together: Callable[[list[Any]], list[Any]] | None = None) -> None:
        """Take charge of a connection that nobody else uses.

        `together` makes a whole group durable and returns its results, or raises with nothing done; without it, the
        operations are called one after the other inside a transaction.
        """
        self._connection = connection
        self._together = together or self._transact
        self._guard = threading.Lock()
        self._waiting: deque[_Slot] = deque()
        self._led = False
        self._holder: int | None = None
        self._leader: int | None = None
        self._hurried: int | None = None

    def run(self, operation: Callable[[C], R]) -> R:
        """Run `operation` (or what `together` takes for one) and return its result once that is durable.

        It may run beside others, and twice: if a group fails it is undone, and each operation is run again alone,
        so that one that fails cannot fail its neighbours. It must not change anything but the database.
        """
        self._refuse_holder()
        slot = _Slot(operation)
        if self._lead_or_wait(slot):
            self._lead(slot)
        if slot.error is not None:
            raise slot.error
        return slot.result

    @contextmanager
    def exclusive(self) -> Generator[C]:
        """Hold the connection in a transaction of the caller's own: commit at the end, roll back if it raises."""
        self._refuse_holder()
        self._lead_or_wait(_Slot(None))
        self._holder = threading.get_ident()
        try:
            self._connection.begin()
            yield self._connection
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise
        finally:
            self._holder = None
            self._let_operations_in()
            self._hand_over()

    @contextmanager
    def hurried(self) -> Generator[None]:
        """Have this thread raise WouldWait where another leads."""
        self._hurried = threading.get_ident()
        try:
            yield
        finally:
            self._hurried = None

    @contextmanager
    def hold(self) -> Generator[C]:
        """Hold the connection while nobody else uses it, outside any transaction."""
        self._refuse_holder()
        self._lead_or_wait(_Slot(None))
        try:
            yield self._connection
        finally:
            self._hand_over()

    def _refuse_holder(self) -> None:
        """Raise for a caller that would wait for itself."""
        if self._holder == threading.get_ident():
            raise InvalidRequest("inside a transaction of your own, pass it on: publish(..., connection=tx)")
        if self._leader == threading.get_ident():
            raise StoreUnavailable("called (from a signal handler?) in the midst of a write of the same thread")

    def _lead_or_wait(self, slot: _Slot) -> bool:
        """Return True when this caller must lead now, False when its operation has been run by another."""
        with self._guard:
            hurried = self._hurried == threading.get_ident()
            if not self._led:
                self._led = True
                if hurried:
                    slot.alone = True
                    self._hurried = None  # what follows a first write of the block must not be left undone
                return True
            if hurried:
                raise WouldWait
            slot.turn = threading.Lock()
            slot.turn.acquire()
            self._waiting.append(slot)
        self._await_turn(slot, slot.turn)
        return not slot.finished

    def _await_turn(self, slot: _Slot, turn: threading.Lock) -> None:
        try:
            turn.acquire()
        except BaseException:
            # Ctrl-C: leave the queue; if a leader has taken the slot already, or made it the heir, see that through.
            with self._guard:
                queued = slot in self._waiting
                if queued:
                    self._waiting.remove(slot)
            if not queued:
                turn.acquire()
                if not slot.finished:
                    self._hand_over()
            raise

    def _lead(self, slot: _Slot) -> None:
        group = [slot]
        self._leader = threading.get_ident()
        try:
            if not slot.alone:
                self._gather(group)
            self._run_group(group)
        finally:
            self._leader = None
            self._hand_over()
            for other in group[1:]:
                other.finished = True
                if other.turn is not None:
                    other.turn.release()

    def _gather(self, group: list[_Slot]) -> None:
        with self._guard:
            while self._waiting and self._waiting[0].operation is not None and len(group) < MAX_GROUP:
                group.append(self._waiting.popleft())

    def _let_operations_in(self) -> None:
        """Put operations before those who want the lead to themselves: heartbeats must not wait for all of these."""
        with self._guard:
            self._waiting = deque(sorted(self._waiting, key=lambda slot: slot.operation is None))

    def _hand_over(self) -> None:
        with self._guard:
            if self._waiting:
                heir = self._waiting.popleft()
                if heir.turn is not None:
                    heir.turn.release()
            else:
                self._led = False

    def _run_group(self, group: list[_Slot]) -> None:
        if len(group) > 1:
            try:
                results = self._together([slot.operation for slot in group])
            except Exception as error:  # noqa: BLE001  each operation is run again alone, and reports its own error
                if self._connection.lost:
                    # It may have been committed: done again, it would be there twice.
                    for slot in group:
                        slot.error = error
                    return
            else:
                for slot, result in zip(group, results, strict=True):
                    slot.result, slot.error = result, None
                return
        for slot in group:
            self._run_alone(slot)

    def _run_alone(self, slot: _Slot) -> None:
        try:
            (slot.result,) = self._together([slot.operation])
            slot.error = None
        except Exception as error:  # noqa: BLE001  raised in the thread that owns the operation
            slot.error = error

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
