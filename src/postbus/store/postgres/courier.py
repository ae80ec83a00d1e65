"""For an event loop, on a connection of its own: something is asked, and its answer taken when it came."""

from collections.abc import Callable, Sequence
from typing import Final, Generic, NoReturn, TypeVar

from postbus.store.contract import WouldWait
from postbus.store.postgres.connection import Address, Database, Sent, Steps, translated

__all__ = ["PostgresCourier"]

MOST: Final = 4_096
"""How many characters a connection on which nothing is under way takes at once, whichever they are."""
A = TypeVar("A")
R = TypeVar("R")


class PostgresCourier(Generic[A, R]):
    """A `Courier` to the server; nothing of it but `prepare` waits for anybody."""

    def __init__(
        self,
        address: Address,
        queries: Sequence[str],
        begin: Callable[[Database, A], Steps[R] | None],
        learn: Callable[[Database], None] = lambda _: None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """Do what `begin` returns, if it does, by such queries.

        What that needs to know of the database is to `learn` while one may wait, and to `forget` with the connection.
        """
        self._db = Database(address, on_rollback=forget)
        self._shown = address.shown
        self._queries = queries
        self._begin = begin
        self._learn = learn
        self._forget = forget
        self._on_way: tuple[Sent, Steps[R]] | None = None
        self.ready = False

    def prepare(self) -> None:
        """Connect, have the server prepare what will be sent, and learn what has changed."""
        with translated(self._shown):
            self._db.prepare(*self._queries)
            self._learn(self._db)
        self.ready = True

    def send(self, item: A) -> bool:
        """Ask for something; return False if that is not for now, or not for this."""
        self.ready = self.ready and self._db.is_prepared(*self._queries)
        steps = self._begin(self._db, item) if self.ready and self._on_way is None else None
        if steps is None:
            return False
        try:
            asked = next(steps)
        except StopIteration:  # what is known does not tell what to ask for
            self.ready = False
            return False
        if sum(len(each) for _, values in asked for each in values if isinstance(each, str)) > MOST:
            return False
        try:
            with self._db.committing():
                self._on_way = self._db.send(*asked), steps
        except BaseException as error:  # noqa: BLE001  raised again there
            self._fail(steps, error)
        return True

    def fileno(self) -> int:
        """Return where the answer comes in."""
        return self._asked()[0].fileno()

    def answer(self, *, wait: bool = False) -> tuple[R] | None:
        """Return what came of it, as soon as that is known."""
        sent, steps = self._asked()
        try:
            with self._db.committing():
                if wait:
                    sent.wait()
                elif not sent.is_answered():
                    return None
                if sent.is_forgotten:
                    self._db.forget_prepared()
                rows = None if sent.is_undone else sent.rows()
        except BaseException as error:  # noqa: BLE001  raised again there
            self._fail(steps, error)
        self._on_way = None
        try:
            if rows is not None:
                steps.send(rows)
        except StopIteration as end:
            return (end.value,)
        except BaseException:
            self.ready = False
            raise
        self.ready = False
        raise WouldWait

    def _fail(self, steps: Steps[R], error: BaseException) -> NoReturn:
        """Have what was under way raise an error, or say what is left to do."""
        self.close()
        with translated(self._shown):
            steps.throw(error)
        raise error

    def _asked(self) -> tuple[Sent, Steps[R]]:
        assert self._on_way is not None  # noqa: S101  only what was asked is answered
        return self._on_way

    def close(self) -> None:
        """Forget what is on its way, and the connection with it."""
        self.ready = False
        self._on_way = None
        self._db.close()
        self._forget()
