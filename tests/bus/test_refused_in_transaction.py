"""A transaction of the caller's own after a refusal, a mistake of his, or a server that does not answer."""

import threading
import time
from typing import Any

import psycopg
import pytest

from postbus import EventBus, InvalidEventError
from tests.conftest import Crew
from tests.contract.following import on_postgres
from tests.kinds import on_sqlite


@on_sqlite
def test_of_a_refused_batch_nothing_stays_behind(bus: EventBus):
    """Who goes on and commits has stored none of it: a uid of it stands for nothing, and is free (I1, I3)."""
    bus.publish("first", 1, uid="U2")
    with bus.transaction() as tx:
        with pytest.raises(InvalidEventError):
            bus.publish_many(
                [{"type": "order", "uid": "U1"}, {"type": "order", "payload": "another", "uid": "U2"}], connection=tx
            )
        other = bus.publish("other", connection=tx)
    event = bus.publish("order", uid="U1")
    assert event.type == "order"
    assert event.id != other.id
    assert sorted(each.type for each in bus.list().items) == ["first", "order", "other"]


def test_a_mistake_of_the_callers_own_is_told_as_it_is(bus: EventBus):
    """Text that is no UTF-8, from wherever, says nothing of the store."""
    with pytest.raises(UnicodeDecodeError), bus.transaction():
        b"\xff".decode()


@on_postgres
def test_a_transaction_ends_although_its_statement_cannot_be_cancelled(
    bus: EventBus, crew: Crew, monkeypatch: pytest.MonkeyPatch
):
    """Where the server does not answer, the connection is cut: nobody waits for it for ever (I10)."""
    running, ended = threading.Event(), list[Any]()

    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.errors.CancellationTimeout("no answer")

    monkeypatch.setattr(psycopg.Connection, "cancel_safe", refuse)

    def sleep(tx: Any) -> None:
        running.set()
        try:
            tx.execute("SELECT pg_sleep(60)")
        except psycopg.Error as error:
            ended.append(error)

    def run_out_of_time() -> None:
        with bus.transaction() as tx:
            crew.start(lambda: sleep(tx))
            assert running.wait(10)
            threading.Event().wait(0.3)
            raise RuntimeError("out of time")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="out of time"):
        run_out_of_time()
    crew.join(30)
    assert ended
    assert time.monotonic() - began < 30
