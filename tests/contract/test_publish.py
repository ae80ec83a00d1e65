"""Publishing: ids, batches, uids, delays, fan-out, and payloads that come back as they went in."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postbus.errors import InvalidEventError, NotFound
from postbus.model import Mode, Status
from postbus.payload import draft
from postbus.store import Log
from postbus.testing import FrozenClock
from tests.contract.stores import Operator, Site, ids

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal, types included: 1 is neither True nor 1.0."""
    if type(one) is not type(other):
        return False
    match one:
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list():
            return len(one) == len(other) and all(map(same, one, other))
        case _:
            return repr(one) == repr(other)


def test_a_published_event_is_pending_with_no_attempt(op: Operator):
    """Stored as PENDING, nothing tried, due at once (S0.1, S2.1)."""
    event = op.publish("order.placed", payload={"n": 1}, tags=["eu"])
    stand = op.stand(event)
    assert (stand.status, stand.attempt, stand.retry_count) == (Status.PENDING, 0, 0)
    assert stand.next_retry_at is None
    assert stand.errors == ()
    assert event.status is Status.PENDING


def test_what_publish_returns_is_what_is_stored(op: Operator, clock: FrozenClock):
    """Every field comes back from the store as it was returned (S2.1)."""
    event = op.publish(
        "order.placed",
        payload={"deep": [1, {"x": None}]},
        tags=["eu", "big"],
        key="customer-7",
        title="An order",
        description="From a customer",
        metadata={"trace": "abc"},
        uid="order-7",
        priority=3,
        max_retries=9,
    )
    stored = op.get(event)
    for name in ("id", "uid", "type", "payload", "tags", "key", "title", "description", "metadata", "created_at",
                 "priority", "max_retries", "status", "retry_count", "next_retry_at", "updated_at"):  # fmt: skip
        assert getattr(stored, name) == getattr(event, name), name
    assert (event.uid, event.tags, event.created_at) == ("order-7", ("eu", "big"), clock.now())


def test_ids_rise_in_the_order_given(op: Operator):
    """One sequence over single publishes and batches alike (I4)."""
    first = op.publish()
    batch = op.publish_all(*({"type": f"t{n}"} for n in range(50)))
    last = op.publish()
    everything = [first.id, *ids(batch), last.id]
    assert everything == sorted(set(everything))
    assert [event.type for event in batch] == [f"t{n}" for n in range(50)]


def test_ids_go_on_rising_after_a_restart(site: Site):
    """What a closed store had given out is not given again, and what it had stored is there (I1, I4)."""
    first = site.open()
    before = first.publish([draft({"type": "a"})])[0]
    first.close()
    second = site.open()
    after = second.publish([draft({"type": "a"})])[0]
    assert after.id > before.id
    assert second.get(before.id, "default").uid == before.uid


def test_an_empty_batch_stores_nothing(op: Operator):
    """No events, no rows."""
    assert op.publish_all() == []
    assert op.list().total == 0


def test_a_batch_is_all_or_nothing(op: Operator):
    """One uid that stands for another body takes the whole batch down, its other uids too (I2)."""
    op.publish("a", uid="taken")
    with pytest.raises(InvalidEventError, match="taken"):
        op.publish_all({"type": "b", "uid": "new"}, {"type": "c"}, {"type": "other", "uid": "taken"}, {"type": "d"})
    assert op.list().total == 1
    assert op.publish("z", uid="new").type == "z"


def test_the_same_uid_again_returns_the_first_event(op: Operator, clock: FrozenClock):
    """Nothing is stored twice, and the answer tells how the first one stands by now (I3)."""
    first = op.publish("a", payload=[1], uid="u")
    op.settle(op.take())
    clock.advance(5)
    again = op.publish("a", payload=[1], uid="u")
    assert (again.id, again.created_at, again.status) == (first.id, first.created_at, Status.COMPLETED)
    assert op.list().total == 1
    assert op.claim() == []


def test_a_uid_twice_in_one_batch_is_one_event(op: Operator):
    """Both places of the answer name the same event, and there is one delivery (I3)."""
    one, other, third = op.publish_all({"type": "a", "uid": "u"}, {"type": "b"}, {"type": "a", "uid": "u"})
    assert one.id == third.id != other.id
    assert ids(op.take_all()) == [one.id, other.id]


@pytest.mark.parametrize(
    "other",
    [
        {"type": "b"},
        {"payload": {"n": 2}},
        {"payload": {"n": 1.0}},
        {"payload": {"n": True}},
        {"tags": ["x"]},
        {"key": "k"},
        {"title": "t"},
        {"description": "d"},
    ],
)
def test_the_same_uid_with_another_body_is_refused(op: Operator, other: dict[str, Any]):
    """A uid stands for one body, and the refusal stores nothing (I3)."""
    body = {"type": "a", "payload": {"n": 1}, "uid": "u"}
    first = op.publish_all(body)[0]
    with pytest.raises(InvalidEventError, match=str(first.id)):
        op.publish_all({**body, **other})
    assert op.list().total == 1


def test_one_batch_cannot_hold_two_bodies_for_one_uid(op: Operator):
    """The clash inside a batch is found too, and nothing of it is stored (I2, I3)."""
    with pytest.raises(InvalidEventError):
        op.publish_all({"type": "a", "uid": "u"}, {"type": "b", "uid": "u"})
    assert op.list().total == 0


def test_generated_uids_differ(op: Operator):
    """Who supplies no uid gets one of its own (I3)."""
    assert len({event.uid for event in op.publish_all(*[{"type": "a"}] * 100)}) == 100


def test_a_delayed_event_waits_for_its_time(op: Operator, clock: FrozenClock):
    """Not claimable a microsecond before, claimable at the moment itself (S0.3)."""
    event = op.publish(delay=30)
    assert event.next_retry_at == clock.now() + timedelta(seconds=30)
    clock.advance(timedelta(seconds=30) - timedelta(microseconds=1))
    assert op.claim() == []
    assert op.stand(event).next_retry_at is not None
    clock.advance(timedelta(microseconds=1))
    assert ids(op.claim()) == [event.id]


def test_at_names_the_moment(op: Operator, clock: FrozenClock):
    """A moment in the future is waited for; one in the past is now."""
    later = op.publish(at=clock.now() + timedelta(hours=1))
    past = op.publish(at=clock.now() - timedelta(days=400))
    assert ids(op.take_all()) == [past.id]
    clock.advance(3600)
    assert later.id in ids(op.take_all())


def test_an_event_goes_to_every_queue_subscription_that_wants_it(op: Operator):
    """One delivery for each whose pattern and tags fit, inside the publish."""
    op.subscription("all")
    op.subscription("orders", ["order.*", "invoice.paid"])
    op.subscription("eu", ["*"], tags=["eu", "uk"])
    op.subscription("ordered", ["*"], mode=Mode.ORDERED)
    wanted = {
        op.publish("order.placed").id: {"default", "all", "orders"},
        op.publish("invoice.paid", tags=["uk"]).id: {"default", "all", "orders", "eu"},
        op.publish("user.made", tags=["us"]).id: {"default", "all"},
    }
    for event_id, names in wanted.items():
        assert {each.subscription for each in op.get(event_id).deliveries} == names


def test_each_subscription_goes_its_own_way(op: Operator):
    """What one finishes, another still has before it, with its own attempts."""
    op.subscription("audit")
    event = op.publish()
    op.settle(op.take())
    assert op.status(event) is Status.COMPLETED
    assert op.status(event, "audit") is Status.PENDING
    assert op.take("audit").attempt == 1


def test_an_event_nobody_wants_is_stored_all_the_same(op: Operator):
    """It is in the log, without a status."""
    op.store.delete_subscription("default", "me")
    event = op.publish()
    assert op.get(event).status is None
    assert op.get(event).deliveries == ()


def test_a_draft_may_be_the_largest_allowed(op: Operator):
    """A payload just within the limit is stored and returned."""
    payload = "x" * (1_048_576 - 2)
    assert op.get(op.publish(payload=payload)).payload == payload


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(payload=JSON)
def test_any_json_comes_back_exactly_as_published(store: Log, payload: Any):
    """Equal in value, type and order, from publish, get and claim alike (S1.5, S2.1)."""
    op = Operator(store, FrozenClock())
    event = op.publish("round.trip", payload=payload)
    assert same(event.payload, payload)
    assert same(op.get(event).payload, payload)
    (delivery,) = op.claim()
    assert delivery.id == event.id
    assert same(delivery.event.payload, payload)
    op.settle(delivery)


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**4000, -0.0, 5e-324, 1e22])
def test_numbers_at_the_edges_come_back_exactly(op: Operator, number: float):
    """Wide integers stay integers, and floats keep their last bit and their sign."""
    stored = op.get(op.publish(payload={"n": [number]})).payload["n"][0]
    assert same(stored, number)


def test_text_of_every_kind_comes_back_exactly(op: Operator):
    """Separators, quotes, control characters and all planes of Unicode are kept in every field that allows them."""
    text = "a,b\x1fc\u2028'\"\\%_\t\r\n\x7f ünïcödé 漢字 🦀 \ue000"
    event = op.publish("t", payload={text: text}, title=text, description=text, metadata={"k": text})
    stored = op.get(event)
    assert stored.payload == {text: text}
    assert (stored.title, stored.description, stored.metadata) == (text, text, {"k": text})


def test_tags_keep_their_order_and_lose_their_doubles(op: Operator):
    """Read back as given, each once."""
    assert op.get(op.publish(tags=["z", "a", "z", "m"])).tags == ("z", "a", "m")


def test_an_unknown_event_is_not_found(op: Operator):
    """Asking for what was never published raises."""
    with pytest.raises(NotFound, match="404"):
        op.get(404)
