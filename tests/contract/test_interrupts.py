"""Ctrl-C in a console or a notebook, and alarms: an exception from outside at any line of a write, or of a claim."""

import gc
import sys
from collections.abc import Callable
from itertools import count
from typing import Final

import pytest

from postbus.payload import draft
from postbus.store import Log, committer, owned
from tests.conftest import Crew
from tests.contract.stores import DONE, Operator
from tests.interrupts import Interrupted, interrupted_at

TOUCHED: Final = (
    "postbus.store.postgres.append",
    "postbus.store.postgres.claim",
    "postbus.store.postgres.connection",
    "postbus.store.postgres.store",
    "postbus.store.sqlite.connection",
    "postbus.store.sqlite.store",
)


def publish(op: Operator) -> None:
    """Publish one event."""
    op.publish()


def publish_two(op: Operator) -> None:
    """Publish a batch."""
    op.publish_all({"type": "a"}, {"type": "a"})


def publish_in_transaction(op: Operator) -> None:
    """Publish in a transaction of the caller's own."""
    with op.store.transaction() as tx:
        tx.publish([draft({"type": "a"})])


def publish_in_failing_transaction(op: Operator) -> None:
    """Have it undone by an error."""
    with op.store.transaction() as tx:
        tx.publish([draft({"type": "a"})])
        raise ArithmeticError


def work(op: Operator) -> None:
    """Claim an event and complete it."""
    for each in op.claim(limit=1):
        op.settle(each, DONE)


VERBS: Final = (publish, publish_two, publish_in_transaction, publish_in_failing_transaction, work)


@pytest.mark.filterwarnings("ignore:.*was deleted while still open", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("verb", "error"),
    [(each, KeyboardInterrupt) for each in VERBS] + [(publish, Interrupted)],
)
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1_200)])])
def test_a_store_goes_on_after_an_interrupt_at_any_line(
    store: Log, op: Operator, verb: Callable[[Operator], None], error: type[BaseException], step: int
):
    """Later writes of all threads are done while the exception is kept, batches are whole, nothing waits (I2, I10)."""
    modules = [committer, owned, *(sys.modules[name] for name in TOUCHED if name in sys.modules)]
    kept: list[BaseException | None] = []
    published = 0
    for line in count(1, step):
        if verb is work:
            op.publish()
            published += 1
        was, raised = interrupted_at(line, error, lambda: verb(op), *modules)
        kept.append(raised)
        crew = Crew()
        crew.start(op.publish)
        crew.join(10)
        published += 1
        if not was:
            break
    kept, raised = [], None
    gc.collect()  # the connections that they kept, here where a warning of them is expected
    total = op.list(limit=1).total
    assert line > 20
    assert published <= total
    assert verb is not publish_two or (total - published) % 2 == 0
