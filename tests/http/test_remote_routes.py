"""The routes that a remote store asks: what they take, what they refuse, and when they answer."""

import time
from pathlib import Path
from typing import Any

import pytest

from postbus import EventBus, RetryPolicy, Status
from postbus.upkeep import Upkeep
from tests.conftest import Crew
from tests.http.serving import Served, place

LEASE = {"event_id": 1, "epoch": 1, "subscription": "default"}
ERROR = {"type": "ValueError", "message": "oops"}


def test_a_claim_waits_until_something_is_published(server: Served, crew: Crew):
    """It is answered with the event as soon as there is one, and with nothing once its time is over."""
    asked = {"worker_id": "w:1", "wait": 30, "interests": [{"pattern": "order.*", "tags": ["eu", "uk"]}]}
    crew.start(lambda: server.http.post("/events/claim", json=asked).json())
    server.publish(type="order.placed", tags="us")
    event = server.publish(type="order.placed", tags="uk")
    (told,) = crew.join(20)
    (delivery,) = told["deliveries"]
    assert delivery["event"]["id"] == delivery["lease"][0] == event["id"]
    assert (delivery["worker_id"], delivery["retry"]["max_retries"]) == ("w:1", 3)
    empty = server.http.post("/events/claim", json={**asked, "wait": 0.05}).json()
    assert empty["deliveries"] == []


def test_whoever_waits_is_woken_by_a_change(server: Served, crew: Crew):
    """At once if something has changed meanwhile, or the server counts anew; else when something does."""
    rings = server.http.get("/wake").json()["rings"]
    assert server.http.get("/wake", params={"since": rings + 1_000, "wait": 30}).json()["rings"] >= rings
    crew.start(lambda: server.http.get("/wake", params={"since": rings, "wait": 30}).json()["rings"])
    server.publish(type="a")
    (told,) = crew.join(20)
    assert told > rings


def test_where_nobody_waits_nobody_is_woken(server: Served):
    """A publish costs no thread's waking; whoever waits next is told of it all the same, at once or a moment later."""
    rings = server.http.get("/wake").json()["rings"]
    time.sleep(1.5)  # longer than it takes to look again
    server.publish(type="a")
    assert server.http.get("/wake").json()["rings"] == rings
    assert server.http.get("/wake", params={"since": rings, "wait": 30}).json()["rings"] > rings


def test_settlements_are_answered_one_by_one(server: Served):
    """Applied, repeated and lost ones in one request, in their order (I8)."""
    for _ in range(3):
        server.publish(type="a")
    claimed = server.http.post("/events/claim", json={"worker_id": "w:1", "limit": 3}).json()["deliveries"]
    told = [
        {"event_id": each["lease"][0], "epoch": each["lease"][2], "worker_id": "w:1", **ended}
        for each, ended in zip(
            claimed,
            [
                {"outcome": "done"},
                {"outcome": "retry", "after": 60, "errors": [ERROR]},
                {"outcome": "dead", "errors": [ERROR]},
            ],
            strict=True,
        )
    ]
    stale = {**told[0], "epoch": 0}
    answer = server.http.post("/events/settle", json={"settlements": [*told, told[0], stale]})
    assert answer.json() == ["applied", "applied", "applied", "repeated", "lost"]
    assert [server.get(each["event_id"])["status"] for each in told] == ["COMPLETED", "PENDING", "FAILED"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/events/claim", {}),
        ("/events/claim", {"worker_id": "w", "limit": 101}),
        ("/events/claim", {"worker_id": "w", "owner": "me"}),
        ("/events/claim", {"worker_id": "w", "interests": [{"pattern": "\n"}]}),
        ("/events/claim", {"worker_id": "w", "retry": {"base_delay": 9, "max_delay": 1}}),
        ("/events/claim", {"worker_id": "w\0"}),
        ("/events/settle", {"settlements": [{**LEASE, "worker_id": "w", "outcome": "gone"}]}),
        ("/events/settle", {"settlements": [{**LEASE, "worker_id": "w", "outcome": "done", "errors": [ERROR]}]}),
        ("/events/settle", {"settlements": [{**LEASE, "worker_id": "w", "outcome": "dead"}]}),
        ("/events/settle", {"settlements": [{**LEASE, "worker_id": "w", "outcome": "retry", "errors": [ERROR]}]}),
        ("/events/settle", {"settlements": [{**LEASE, "worker_id": "w", "outcome": "done", "after": 1}]}),
        ("/events/extend", {"leases": [{**LEASE, "epoch": 2**63}], "lease": 1}),
        ("/events/release", {"leases": [LEASE] * 1_001, "worker_id": "w"}),
        ("/store/publish", {"events": [{"type": "a"}, {"type": "*"}]}),
        ("/store/publish", {"events": [], "more": 1}),
        ("/store/publish", []),
        ("/store/dead/purge", {"actor": "me", "before": 0}),
        ("/store/dead/purge", {"actor": "me", "before": "2030-01-01T00:00:00"}),
        ("/store/dead/purge", {"actor": "me", "before": "0001-01-01T00:00:00+23:00"}),
        ("/store/dead", {"after": "x"}),
        ("/store/events", {"subscription": "default", "status": "GONE"}),
        ("/store/events", {"subscription": "default", "after": "9" * 30}),
        ("/store/subscriptions/rewind", {"name": "default", "to": "tomorrow", "actor": "me"}),
        ("/store/breaker/change", {"name": "b", "found": {}, "wanted": {"failures": -1}}),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(server: Served, path: str, body: Any):
    """A problem that says what to change; no event is stored, claimed, settled or purged by it."""
    server.publish(type="a")
    server.take()
    server.act("fail", 1, retry=False)
    answer = server.http.post(path, json=body)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]
    assert server.total() == 1
    assert [each["event"]["id"] for each in server.http.get("/dlq").json()["letters"]] == [1]


def test_the_end_of_a_server_frees_no_lease_of_a_remote_worker(kind: str, tmp_path: Path):
    """Its worker lives on elsewhere: the next process on this host must not take it for dead (I7)."""
    with place(kind, tmp_path) as url:
        served = Served(EventBus(url))
        served.publish(type="a")
        (claimed,) = served.http.post("/events/claim", json={"worker_id": "far:1"}).json()["deliveries"]
        served.stop()
        heir = EventBus(url)
        Upkeep(heir.store, RetryPolicy(), "heir", 1, list).turn()
        stand = heir.get(1).deliveries[0]
        assert (stand.status, stand.worker_id, heir.poll()) == (Status.PROCESSING, "far:1", None)
        assert heir.store.owners() == {"http"}
        heir.shutdown()
        again = Served(EventBus(url))
        event_id, name, epoch = claimed["lease"]
        told = {"event_id": event_id, "subscription": name, "epoch": epoch, "worker_id": "far:1", "outcome": "done"}
        assert again.http.post("/events/settle", json={"settlements": [told]}).json() == ["applied"]
        again.stop()
