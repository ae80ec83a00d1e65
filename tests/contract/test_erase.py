"""Erasing: what events say of somebody goes, that they happened stays."""

from datetime import timedelta
from typing import Any

import pytest

from postbus.errors import InvalidEventError, InvalidRequest, LeaseLost
from postbus.model import AttemptError, Dead, DoneWithErrors, Event, Mode, Retry, Status, Stream
from postbus.retry import RetryPolicy
from postbus.store import Log
from postbus.store.contract import Burial, DeadFilter, Failure, Settled
from tests.contract.following import ALL, lead, stand, step
from tests.contract.stores import DEAD, RETRY, Operator, ids

SECRET: dict[str, Any] = {
    "type": "person.seen",
    "payload": {"name": "Ada"},
    "title": "Ada",
    "description": "about Ada",
    "metadata": {"of": "Ada"},
    "tags": ["x", "y"],
    "key": "ada",
    "uid": "u-ada",
}
QUOTED = AttemptError("ValueError", "no such Ada", traceback="Ada was here")


def told(event: Event) -> str:
    """Return all that an event, as read, tells."""
    return repr((event.payload, event.title, event.description, event.metadata, event.errors, event.deliveries))


def test_the_content_goes_and_the_fact_stays(op: Operator):
    """Payload, title, description and metadata; not id, uid, type, tags, key and time (P.5)."""
    (event,) = op.publish_all(SECRET)
    op.settle(op.take())
    erased = op.store.erase(uid="u-ada", actor="privacy")
    assert (erased.ids, erased.changed) == ((event.id,), 1)
    left = op.get(event)
    assert (left.payload, left.title, left.description, left.metadata) == (None, None, None, {})
    kept = (event.id, "u-ada", "person.seen", ("x", "y"), "ada", event.created_at)
    assert (left.id, left.uid, left.type, left.tags, left.key, left.created_at) == kept
    assert left.status is Status.COMPLETED
    assert ids(op.list().items) == [event.id]
    assert "damaged" not in op.list().items[0].metadata
    row = op.logs(event)[-1]
    assert (row.action, row.subscription, row.worker_id, row.status) == ("ERASED", "", "privacy", None)


def test_what_errors_quoted_goes_too(op: Operator):
    """In the audit rows, wherever it stood (P.5, I13)."""
    (event,) = op.publish_all(SECRET)
    op.settle(op.take(), Retry(RETRY.after, QUOTED))
    op.clock.advance(RETRY.after)
    op.settle(op.take(), DoneWithErrors((QUOTED,)))
    assert "Ada" in told(op.get(event))
    op.store.erase(key="ada", actor="privacy")
    assert "Ada" not in told(op.get(event))
    assert "Ada" not in repr(op.store.logs(event.id))
    assert [row.error_type for row in op.logs(event)] == [None, "ValueError", None, "ValueError", None]
    assert op.status(event) is Status.COMPLETED_WITH_ERRORS


def test_by_key_all_of_its_events_are_erased_and_no_others(op: Operator):
    """However many they are, and however far apart (P.5)."""
    news = [{"type": "a", "payload": n, "key": "k" if n % 3 == 0 else "other"} for n in range(3_000)]
    events = op.publish_all(*news)
    erased = op.store.erase(key="k", actor="privacy")
    assert erased.ids == tuple(ids(events[::3]))
    assert erased.changed == 1_000
    assert [op.get(event).payload for event in events[:7]] == [None, 1, 2, None, 4, 5, None]


def test_whatever_was_still_to_be_done_is_not(op: Operator):
    """Pending, leased and dead deliveries are DISCARDED; a worker at one of them loses its lease (P.5, I8, I13)."""
    op.subscription("second")
    op.publish_all(*[{**SECRET, "uid": f"u{n}"} for n in range(4)])
    dead, leased, retried = op.claim(3)
    op.settle(dead, Dead(QUOTED))
    op.settle(retried, RETRY)
    erased = op.store.erase(key="ada", actor="privacy")
    assert op.settle(leased) is Settled.LOST
    with pytest.raises(LeaseLost):
        op.store.started(leased.lease, "w")
    op.clock.advance(3_600)
    assert op.claim(10) == op.claim(10, "second") == []
    assert op.dead().total == 0
    for event in erased.ids:
        assert op.actions(event, "default")[-1] == op.actions(event, "second")[-1] == "DISCARDED"
        assert op.actions(event)[-1] == "ERASED"
        assert op.status(event) is None
    assert op.store.stats().subscriptions[0].pending == 0


def test_of_events_leased_together_only_the_erased_one_is_lost(op: Operator):
    """Its neighbours are settled as ever (P.5, I8)."""
    op.publish_all({"type": "a"}, SECRET, {"type": "a"})
    first, ada, last = op.claim(3, shared=True)
    op.store.erase(uid="u-ada", actor="privacy")
    assert [op.settle(each) for each in (first, ada, last)] == [Settled.APPLIED, Settled.LOST, Settled.APPLIED]
    assert op.actions(ada.id, "default") == ["PICKED", "DISCARDED"]


def test_what_nobody_waits_for_is_not_discarded(op: Operator):
    """Done already, not wanted, or passed by a subscription that was made later (I9, I13)."""
    op.subscription("other", ["b"])
    (event,) = op.publish_all(SECRET)
    op.subscription("later")
    op.settle(op.take())
    op.store.erase(uid="u-ada", actor="privacy")
    assert [row.subscription for row in op.logs(event) if row.action == "DISCARDED"] == []


def test_done_again_it_changes_nothing_and_names_the_same(op: Operator):
    """So that what was to follow, in the lake, can be done again (P.5)."""
    (event,) = op.publish_all(SECRET)
    first = op.store.erase(uid="u-ada", actor="privacy")
    rows = op.store.logs(event.id)
    for again in (op.store.erase(uid="u-ada", actor="p"), op.store.erase(key="ada", actor="p")):
        assert (again.ids, again.changed) == (first.ids, 0)
    assert op.store.logs(event.id) == rows


def test_what_would_be_blanked_can_be_counted_before(op: Operator):
    """Events and audit rows that say something, by uid, key or id; counting blanks nothing (P.5)."""
    (event, *_) = op.publish_all(SECRET, {"type": "a", "key": "ada"}, {**SECRET, "uid": "u-bob", "key": "bob"})
    op.settle(op.take(), DoneWithErrors((QUOTED,)))
    found = op.store.erasable(key="ada")
    assert (found.ids, found.events, found.audit) == ((event.id, event.id + 1), 1, 1)
    assert op.store.erasable(uid="u-ada").events == op.store.erasable(ids=[event.id]).events == 1
    assert op.store.erasable(key="nobody").ids == ()
    assert op.get(event).title == "Ada"
    op.store.erase(key="ada", actor="privacy")
    assert (op.store.erasable(key="ada").events, op.store.erasable(key="ada").audit) == (0, 0)
    with pytest.raises(InvalidRequest):
        op.store.erasable()


def test_an_event_that_says_nothing_is_recorded_as_erased(op: Operator):
    """Somebody asked for it, and can show that it was done (I13)."""
    event = op.publish("a", uid="u")
    op.settle(op.take())
    assert [op.store.erase(uid="u", actor="privacy").changed for _ in range(2)] == [1, 0]
    assert op.actions(event) == ["PICKED", "COMPLETED", "ERASED"]


@pytest.mark.parametrize("many", [0, 150])
def test_a_repeated_publish_brings_nothing_back(op: Operator, many: int):
    """The uid still stands for the event, and for the body it had (I3, P.5)."""
    (event,) = op.publish_all(SECRET)
    op.settle(op.take())
    op.store.erase(uid="u-ada", actor="privacy")
    again = op.publish_all(*[{"type": "b"}] * many, SECRET)[-1]
    assert (again.id, again.payload, again.title) == (event.id, None, None)
    assert op.get(event).payload is None
    with pytest.raises(InvalidEventError, match="another body"):
        op.publish_all({**SECRET, "payload": None, "title": None, "description": None})
    assert ids(op.take_all()) == [each.id for each in op.list(limit=200).items if each.id != event.id][::-1]


def test_what_was_pruned_can_be_named_by_its_id(op: Operator):
    """Its audit rows may be there longer, and quote it (P.5)."""
    (event,) = op.publish_all(SECRET)
    op.settle(op.take(), DoneWithErrors((QUOTED,)))
    op.store.prune(Stream.EVENTS, after=0, through=event.id)
    assert op.store.erase(uid="u-ada", actor="privacy").ids == ()
    assert op.store.erase(ids=[event.id], actor="privacy").changed == 1
    assert "Ada" not in repr(op.store.logs(event.id))
    assert op.actions(event)[-1] == "ERASED"


def test_of_what_was_pruned_it_is_recorded_once(op: Operator):
    """Also where nothing of it is left to blank (I13)."""
    event = op.publish("a")
    op.settle(op.take())
    op.store.prune(Stream.EVENTS, after=0, through=event.id)
    assert [op.store.erase(ids=[event.id], actor="privacy").changed for _ in range(2)] == [1, 0]
    assert op.actions(event) == ["PICKED", "COMPLETED", "ERASED"]


def test_nothing_or_too_much_is_refused(store: Log):
    """A call without an argument must not erase everything, nor seem to have erased something (P.5)."""
    with pytest.raises(InvalidRequest):
        store.erase(actor="privacy")
    with pytest.raises(InvalidRequest):
        store.erase(uid="a", key="b", actor="privacy")
    assert store.erase(uid="nobody", actor="privacy").ids == ()


def test_an_erased_event_can_be_pruned_and_dead_letters_are_not_revived(op: Operator):
    """Nothing holds it any more (P.5)."""
    op.publish_all(SECRET)
    op.settle(op.take(), DEAD)
    op.store.erase(uid="u-ada", actor="privacy")
    assert op.store.retry_dead(DeadFilter(), "ops") == 0
    head = op.store.span(Stream.EVENTS).head
    assert op.store.prune(Stream.EVENTS, after=0, through=head).removed == 1


def test_what_a_follower_said_when_it_stopped_goes_too(op: Operator):
    """It may quote the event before which it stopped; that it stopped there is still told."""
    (event,) = op.publish_all(SECRET)
    settings: dict[str, Any] = {"mode": Mode.ORDERED, "lease": None, "retry": None, "start": "beginning"}
    op.store.create_subscription("s", ["*"], [], **settings)
    lead = op.store.lead("s", "me", "w:1", timedelta(seconds=60))
    assert lead is not None
    op.store.resign(lead, "no such Ada", event.id)
    op.store.erase(uid="u-ada", actor="privacy")
    (found,) = op.store.checkpoints()
    assert (found.stopped, found.stopped_before) == ("erased", event.id)


@pytest.mark.parametrize("way", ["buried", "stopped", "diverted"])
def test_what_was_read_before_and_fails_afterwards_is_not_quoted(op: Operator, way: str):
    """No delivery tells a follower or a Spark stream that its event was erased while its handler was at it (P.5)."""
    store = op.store
    store.create_subscription("s", ["*"], [], mode=Mode.ORDERED, lease=None, retry=None, start="now")
    op.publish_all(SECRET)
    reader = lead(store)
    (event,) = store.read_on(0, 10, ALL).events
    store.erase(ids=[event.id], actor="privacy")
    match way:
        case "buried":
            store.move(step(reader, event, buried=[Burial(event, [QUOTED, QUOTED], 1.0)]))
        case "stopped":
            store.resign(reader, "stopped before event 1: no such Ada", event.id)
            assert stand(store).stopped == "erased"
        case _:
            assert store.divert("s", [Failure(event.id, Dead(QUOTED))], RetryPolicy(), "spark") == 1
    assert "Ada" not in repr((stand(store), store.logs(event.id), op.dead().items))
    if way != "stopped":
        (dead,) = op.dead().items
        assert {(each.type, each.message, each.traceback) for each in dead.errors} == {("ValueError", "erased", None)}
