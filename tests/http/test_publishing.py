"""Publishing over HTTP: batches all or nothing or item by item, idempotency keys, uids and traces."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus
from tests.http.serving import Served, place, serving
from tests.kinds import KINDS

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give one server to all tests here; each uses keys and tags of its own."""
    with serving(request.param, tmp_path_factory.mktemp("publishing")) as served:
        yield served


def batch(served: Served, items: list[Any], key: str | None = None, **query: str) -> Any:
    """Publish a batch."""
    headers = {} if key is None else {"idempotency-key": key}
    return served.http.post("/events/batch", json=items, headers=headers, params=query)


def one(served: Served, body: dict[str, Any], **headers: str) -> Any:
    """Publish an event."""
    return served.http.post("/events", json=body, headers={name.replace("_", "-"): headers[name] for name in headers})


def test_a_batch_is_stored_in_its_order(served: Served):
    """201 with all its events; ids rise as the items stand (I2)."""
    answer = batch(served, [{"type": "b.order", "payload": number, "tags": ["x"]} for number in range(500)])
    assert answer.status_code == 201
    events = answer.json()["events"]
    assert [each["payload"] for each in events] == list(range(500))
    assert [each["id"] for each in events] == sorted({each["id"] for each in events})
    assert {each["status"] for each in events} == {"PENDING"}
    assert served.get(events[-1]["id"])["payload"] == 499


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_is_wrong_stops_the_whole_batch(served: Served, place: int):
    """422, and none of the others is stored (I2)."""
    before = served.total()
    items: list[Any] = [{"type": "good"}, {"type": "good"}]
    items.insert(place, {"type": "not*good"})
    answer = batch(served, items)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-event")
    assert served.total() == before


def test_a_batch_can_be_taken_in_parts(served: Served):
    """?partial=true is 207: those that are right are stored, and each item says what became of it."""
    large = "x" * 1_048_576
    items = [{"type": "p"}, {"surprise": 1}, {"payload": "\0"}, 7, {"payload": large}, {"type": "p", "payload": 5}]
    before = served.total()
    answer = batch(served, items, partial="true")
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert [each["status"] for each in results] == [201, 422, 422, 422, 413, 201]
    assert [sorted(each.keys() - {"status"}) for each in results] == [["event"], *[["problem"]] * 4, ["event"]]
    assert results[2]["problem"]["type"] == "/problems/invalid-payload"
    assert results[4]["problem"]["type"] == "/problems/too-large"
    assert served.get(results[5]["event"]["id"])["payload"] == 5
    assert served.total() == before + 2


def test_a_batch_in_parts_keeps_its_order_and_takes_repeats(served: Served):
    """Ids rise as the items stand; the same uid twice is one event, with another body a problem of that item alone."""
    items = [{"payload": number} for number in range(100)]
    results = batch(served, items, partial="true").json()["results"]
    ids = [each["event"]["id"] for each in results]
    assert [each["event"]["payload"] for each in results] == list(range(100))
    assert ids == sorted(set(ids))
    same = [{"uid": "part", "payload": 1}, {"payload": 2}, {"uid": "part", "payload": 1}, {"uid": "part", "payload": 9}]
    results = batch(served, same, partial="true").json()["results"]
    assert [each["status"] for each in results] == [201, 201, 201, 422]
    assert results[0]["event"]["id"] == results[2]["event"]["id"]


@pytest.mark.parametrize("quoted", ["{}", '"{}"'])
def test_a_key_makes_publishing_repeatable(served: Served, quoted: str):
    """The same key with the same body stores nothing, and answers with the first event (I3)."""
    key = quoted.format(f"order-{len(quoted)}")
    first = one(served, {"payload": {"n": 1}}, idempotency_key=key)
    before = served.total()
    again = one(served, {"payload": {"n": 1}}, idempotency_key=key)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert served.total() == before


def test_bare_and_quoted_are_the_same_key(served: Served):
    """`k` and `"k"` name one event."""
    first = one(served, {"payload": 1}, idempotency_key="same-key")
    assert one(served, {"payload": 1}, idempotency_key='"same-key"').json()["id"] == first.json()["id"]


def test_a_key_cannot_stand_for_two_events(served: Served):
    """The same key with another body is 422, and nothing is stored."""
    first = one(served, {"payload": 1}, idempotency_key="twice")
    before = served.total()
    for other in ({"payload": 2}, {"payload": 1, "type": "other"}, {"payload": 1, "tags": "a"}, {}):
        answer = one(served, other, idempotency_key="twice")
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-event")
    assert served.total() == before
    assert served.get(first.json()["id"])["payload"] == 1


@pytest.mark.parametrize("key", ["", '""', "x" * 201, "a\tb"])
def test_a_key_is_some_printable_text(served: Served, key: str):
    """Neither nothing nor too much: 422."""
    before = served.total()
    assert one(served, {}, idempotency_key=key).status_code == 422
    assert batch(served, [{}], key).status_code == 422
    assert served.total() == before


@pytest.mark.parametrize("quoted", ["{}", '"{}"'])
def test_a_key_makes_a_batch_repeatable(served: Served, quoted: str):
    """The same batch again stores nothing, and answers with the first events."""
    key = quoted.format(f"batch-{len(quoted)}")
    items = [{"payload": number} for number in range(5)]
    first = batch(served, items, key)
    before = served.total()
    again = batch(served, items, key)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert served.total() == before


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([0, 1, 2, 3], id="longer"),
        pytest.param([0, 1], id="shorter"),
        pytest.param([0], id="one"),
        pytest.param([0, 1, 9], id="another"),
        pytest.param([9, 9, 9, 9], id="longer and others"),
        pytest.param([2, 1, 0], id="another order"),
    ],
)
def test_a_batchs_key_cannot_stand_for_another_batch(served: Served, other: list[int]):
    """Longer, shorter or other: 422, and nothing is stored (I3)."""
    key = f"other-{other}"
    assert batch(served, [{"payload": number} for number in range(3)], key).status_code == 201
    before = served.total()
    answer = batch(served, [{"payload": number} for number in other], key)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-event")
    assert served.total() == before


@pytest.mark.parametrize("uid", ["poison/\0", "poison/\ud800", "poison/" + "x" * 300])
def test_a_uid_that_looks_like_the_keys_own_is_checked_all_the_same(served: Served, uid: str):
    """Before the store is asked whether it is known: 422 on both stores, and nothing is stored (I18)."""
    before = served.total()
    headers = {"idempotency-key": "poison", "content-type": "application/json"}
    answer = served.http.post("/events/batch", content=json.dumps([{"uid": uid}]), headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-event")
    assert served.total() == before


def test_a_key_of_one_event_and_of_a_batch_do_not_meet(served: Served):
    """A batch's items are told apart from an event under the same key."""
    first = one(served, {"payload": "one"}, idempotency_key="shared")
    answer = batch(served, [{"payload": "many"}], "shared")
    assert answer.status_code == 201
    assert answer.json()["events"][0]["id"] != first.json()["id"]


def test_a_uid_is_kept_and_names_one_event(served: Served):
    """The producer's uid comes back; again with the same body is the first event, with another 422 (I3)."""
    first = served.publish(uid="u-1", payload=1)
    assert first["uid"] == "u-1"
    assert served.publish(uid="u-1", payload=1)["id"] == first["id"]
    assert one(served, {"uid": "u-1", "payload": 2}).status_code == 422
    assert batch(served, [{"uid": "u-1", "payload": 1}, {"uid": "u-2"}]).json()["events"][0]["id"] == first["id"]
    assert served.publish()["uid"] != served.publish()["uid"]


def test_the_uid_of_the_body_goes_before_the_key(served: Served):
    """What the event says of itself counts."""
    made = one(served, {"uid": "own", "payload": 1}, idempotency_key="header")
    assert made.json()["uid"] == "own"


def test_a_batch_whose_items_have_uids_of_their_own_takes_a_key(served: Served):
    """Items with a uid keep it; repeating the batch is still repeating it."""
    items = [{"uid": "mixed-1"}, {"payload": 2}]
    first = batch(served, items, "mixed")
    before = served.total()
    assert first.status_code == 201
    assert batch(served, items, "mixed").json() == first.json()
    assert served.total() == before


def test_a_trace_is_kept_with_the_event(served: Served):
    """Traceparent and tracestate stand in the metadata, as sent, for the worker to go on with."""
    made = one(served, {"metadata": {"a": "b"}, "tags": "traced"}, traceparent=TRACE, tracestate="x=1")
    wanted = {"a": "b", "traceparent": TRACE, "tracestate": "x=1"}
    assert made.json()["metadata"] == wanted
    assert served.take(tags="traced")["metadata"] == wanted
    many = served.http.post(
        "/events/batch", json=[{"payload": 1}, {"payload": 2}], headers={"traceparent": TRACE}
    ).json()["events"]
    assert [each["metadata"] for each in many] == [{"traceparent": TRACE}] * 2
    own = one(served, {"metadata": {"traceparent": "mine"}}, traceparent=TRACE)
    assert own.json()["metadata"] == {"traceparent": "mine"}


def test_a_repeat_under_another_trace_is_a_repeat(served: Served):
    """A client that tries again does so in a new span; that does not make it another event."""
    first = one(served, {"payload": 1}, idempotency_key="traced-again", traceparent=TRACE)
    again = one(served, {"payload": 1}, idempotency_key="traced-again", traceparent=TRACE.replace("b7ad", "c8be"))
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json()["id"] == first.json()["id"]


def test_every_field_comes_back(served: Served):
    """What was published is what is read (S3.1)."""
    given = {
        "type": "order.placed",
        "title": "t",
        "description": "d",
        "tags": ["b", "a"],
        "key": "k",
        "uid": "all-fields",
        "metadata": {"m": "1"},
        "priority": 5,
        "max_retries": 7,
        "payload": {"wide": 123456789012345678901234567890, "text": "é\U0001f600", "none": None, "f": 1.5},
    }
    event = served.get(served.publish(**given)["id"])
    assert {name: event[name] for name in given} == given | {"tags": "b,a"}
    assert served.publish(tags=" a , b ,,a")["tags"] == "a,b"
    assert served.publish()["type"] == "event"


def test_what_is_delayed_is_not_due(served: Served):
    """`delay` and `at` keep it from workers until then; `priority` brings it forward."""
    served.publish(tags="later", delay=3600)
    served.publish(tags="later", at="2999-01-01T00:00:00+01:00")
    assert served.claim(tags="later") is None
    served.publish(tags="later", payload="low")
    served.publish(tags="later", payload="high", priority=9)
    assert [served.take(tags="later")["payload"] for _ in range(2)] == ["high", "low"]


def test_what_was_published_is_there_after_the_server_ended(kind: str, tmp_path: Path):
    """Stored means stored (I1)."""
    with place(kind, tmp_path) as url:
        served = Served(EventBus(url))
        made = served.publish(payload={"a": [1, 2.5, "x"]})
        served.stop()
        bus = EventBus(url)
        assert bus.get(made["id"]).payload == {"a": [1, 2.5, "x"]}
        bus.shutdown()


def test_an_empty_event_is_refused(served: Served):
    """422 says what is missing, alone and in a batch; nothing is stored."""
    before = served.total()
    for path, content in (("/events", {}), ("/events/batch", [{}])):
        answer = served.http.post(path, json=content)
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-event")
        assert answer.json()["detail"].startswith("payload is missing")
    assert served.total() == before
    for given in ({"payload": None}, {"type": "a"}):
        assert served.http.post("/events", json=given).status_code == 201
