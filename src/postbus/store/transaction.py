"""A transaction of the caller's on the bus's own database."""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from postbus.errors import InvalidRequest
from postbus.model import Event
from postbus.payload import Draft
from postbus.store.contract import Settled, Settlement, Step
from postbus.store.session import Row

CONTROL: Final = frozenset({"BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "ABORT", "START"})
CUT_EVERY: Final = 0.01


class _Connection(Protocol):
    """What a transaction needs of the connection it is on."""

    @property
    def in_transaction(self) -> bool:
        """Whether the transaction still stands."""
        ...

    def run_own(self, sql: str, parameters: Any = ()) -> list[Row]:
        """Run a statement of the caller's own, in the driver's own style, and return its rows."""
        ...

    def interrupt(self) -> None:
        """Cut off the statement that another thread is running, if any."""
        ...


class CallersTransaction:
    """A `Transaction` until its block ends."""

    def __init__(
        self,
        db: _Connection,
        append: Callable[[Sequence[Draft]], list[Event]],
        settle: Callable[[Settlement], Settled],
        move: Callable[[Step], None],
    ) -> None:
        """Serve one caller inside one open transaction."""
        self.touched = False
        """Whether it has to do with events or deliveries, so that others are to be told, and memories may be wrong."""
        self._db = db
        self._append = append
        self._settle = settle
        self._move = move
        self._closed = False
        self._busy = threading.RLock()

    def close(self) -> None:
        """Serve no more; what another thread is running is cut off."""
        self._closed = True
        while not self._busy.acquire(timeout=CUT_EVERY):
            self._db.interrupt()
        self._busy.release()

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Run one statement of the caller's own and return its rows; the transaction itself is not its business."""
        if sql.lstrip().partition(" ")[0].rstrip(";").upper() in CONTROL:
            raise InvalidRequest("the block commits or rolls back: leave BEGIN, COMMIT, ROLLBACK and SAVEPOINT out")
        with self._open():
            return self._db.run_own(sql, parameters)

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        """Store events that exist only if this transaction commits."""
        self.touched = True
        with self._open():
            return self._append(drafts)

    def settle(self, settlement: Settlement) -> Settled:
        """Record how a delivery ended, if this transaction commits."""
        self.touched = True
        with self._open():
            return self._settle(settlement)

    def move(self, step: Step) -> None:
        """Move a follower's checkpoint, if this transaction commits."""
        self.touched = self.touched or step.leaves
        with self._open():
            self._move(step)

    @contextmanager
    def _open(self) -> Generator[None]:
        """Use the connection while it is this transaction's."""
        with self._busy:
            self.check()
            yield
            self.check()

    def check(self) -> None:
        """Raise InvalidRequest unless the transaction still stands."""
        if self._closed:
            raise InvalidRequest("this transaction has ended")
        if not self._db.in_transaction:
            raise InvalidRequest("the transaction was rolled back by one of its statements; nothing was stored")
