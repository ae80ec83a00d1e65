"""Document S3, literally: its requests, its answers field by field, its side effects, and its example with curl."""

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.stores import Site
from tests.http.serving import Served, place, process, standing_still

PUBLISHED: Final = {
    "title": "Send Email Notification",
    "description": "Send welcome email to new user",
    "tags": "email,priority-high,notification",
    "payload": {
        "user_id": 12345,
        "email": "user@example.com",
        "template": "welcome",
        "variables": {"name": "Alice", "signup_date": "2025-12-24"},
    },
}
WORKER: Final = "worker-02:8742"
SUBSCRIBING: Final = {"tags": "email,notification", "worker_id": WORKER}
COMPLETING: Final = {"worker_id": WORKER, "execution_time_ms": 1250, "status_code": 200}
FAILING: Final = {
    "worker_id": WORKER,
    "execution_time_ms": 5000,
    "status_code": 500,
    "error_message": "Connection timeout: mail server unreachable. Will retry.",
}
FIVE_MINUTES: Final = timedelta(minutes=5)


class Walk:
    """Process A and process B, on a clock that moves only when told to."""

    def __init__(self, served: Served, site: Site) -> None:
        """Walk through a server."""
        self.served, self.http, self.clock = served, served.http, site.clock

    def now(self) -> str:
        """Return the moment as it stands on the wire."""
        return self.clock.now().isoformat().replace("+00:00", "Z")

    def publish(self) -> int:
        """Create the document's job."""
        return self.served.publish(**PUBLISHED)["id"]

    def subscribe(self, **query: str) -> Any:
        """Poll as the document does."""
        return self.http.get("/events/subscribe", params=SUBSCRIBING | query)

    def fail(self, event_id: int, **told: Any) -> Any:
        """Report the document's failure."""
        return self.http.post(f"/events/{event_id}/fail", json=FAILING | told)

    def rows(self, event_id: int) -> list[dict[str, Any]]:
        """Return the event's log."""
        return self.served.get(event_id, include_logs="true")["logs"]


@pytest.fixture
def walk(kind: str, tmp_path: Path) -> Iterator[Walk]:
    """Give a server with an empty store."""
    with standing_still(kind, tmp_path) as (served, site):
        yield Walk(served, site)


def has(body: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether all these fields are there, with just these values; additions are allowed."""
    wrong = {name: body.get(name, "missing") for name in wanted if body.get(name, ...) != wanted[name]}
    assert not wrong
    assert all(type(body[name]) is type(wanted[name]) for name in wanted)
    return True


def test_creating_a_job_answers_with_all_that_it_is(walk: Walk):
    """POST /events is 201 with the eleven fields of the document (S3.1)."""
    answer = walk.http.post("/events", json=PUBLISHED)
    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert type(body["id"]) is int
    assert has(
        body,
        PUBLISHED
        | {
            "status": "PENDING",
            "retry_count": 0,
            "max_retries": 3,
            "next_retry_at": None,
            "created_at": walk.now(),
            "updated_at": walk.now(),
        },
    )
    assert answer.headers["location"] == f"/events/{body['id']}"


def test_subscribing_hands_out_one_event_at_a_time(walk: Walk):
    """The event comes once, PROCESSING, to whoever names any of its tags; then 204 without a body (S3.2)."""
    event_id, created = walk.publish(), walk.now()
    assert walk.subscribe(tags="payment").status_code == 204
    walk.clock.advance(45)
    answer = walk.subscribe()
    assert answer.status_code == 200
    fields = {"id": event_id, "status": "PROCESSING", "retry_count": 0, "max_retries": 3, "created_at": created}
    fields |= {name: PUBLISHED[name] for name in ("title", "tags", "payload")}
    assert has(answer.json(), fields)
    assert walk.served.get(event_id)["status"] == "PROCESSING"
    assert walk.served.get(event_id)["deliveries"][0]["worker_id"] == WORKER
    again = walk.subscribe(worker_id="worker-05:1")
    assert (again.status_code, again.content) == (204, b"")


@pytest.mark.parametrize("query", [{"tags": "email"}, {"worker_id": "worker-02:8742"}, {"tags": "", "worker_id": "w"}])
def test_subscribing_needs_tags_and_a_worker(walk: Walk, query: dict[str, str]):
    """Both parameters are required (S3.2); types= may stand for tags=."""
    answer = walk.http.get("/events/subscribe", params=query)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


def test_completing_records_it_and_finishes_the_event(walk: Walk):
    """The answer is the log entry; the event is COMPLETED, updated now (S3.3)."""
    event_id = walk.publish()
    walk.clock.advance(45)
    walk.subscribe()
    picked = walk.now()
    walk.clock.advance(30)
    answer = walk.http.post(f"/events/{event_id}/complete", json=COMPLETING)
    assert answer.status_code == 200
    entry = COMPLETING | {"event_id": event_id, "action": "COMPLETED", "created_at": walk.now()}
    assert has(answer.json(), entry)
    event = walk.served.get(event_id, include_logs="true")
    assert has(event, PUBLISHED | {"status": "COMPLETED", "retry_count": 0, "max_retries": 3, "next_retry_at": None})
    assert event["updated_at"] == walk.now()
    first, second = event["logs"]
    assert has(first, {"worker_id": WORKER, "action": "PICKED", "created_at": picked})
    assert has(second, COMPLETING | {"action": "COMPLETED", "created_at": walk.now()})
    assert type(first["id"]) is int
    assert first["id"] < second["id"]
    assert first.keys().isdisjoint({"status_code", "execution_time_ms", "error_message"})
    assert "logs" not in walk.served.get(event_id)


def test_failing_schedules_the_next_attempt_in_five_minutes(walk: Walk):
    """200 with the entry and when it comes again; till then it is PENDING and nobody gets it (S3.4)."""
    event_id = walk.publish()
    walk.subscribe()
    walk.clock.advance(5)
    answer = walk.fail(event_id)
    later = (walk.clock.now() + FIVE_MINUTES).isoformat().replace("+00:00", "Z")
    assert answer.status_code == 200
    entry = FAILING | {"event_id": event_id, "action": "FAILED", "created_at": walk.now()}
    assert has(answer.json(), entry | {"retry_scheduled": True, "next_retry_at": later})
    event = walk.served.get(event_id)
    assert has(event, {"status": "PENDING", "retry_count": 1, "next_retry_at": later, "updated_at": walk.now()})
    assert has(walk.rows(event_id)[-1], FAILING | {"action": "FAILED", "created_at": walk.now()})
    walk.clock.advance(299)
    assert walk.subscribe().status_code == 204
    walk.clock.advance(1)
    assert has(walk.subscribe().json(), {"id": event_id, "retry_count": 1, "status": "PROCESSING"})


def test_the_fourth_failure_is_the_last(walk: Walk):
    """200, 200, 200, 400 with 3 of 3 and a problem's fields; its repeat is 200 and writes nothing (S3.4, S3.9)."""
    event_id = walk.publish()
    answers = []
    for _ in range(4):
        assert walk.subscribe().status_code == 200
        answers.append(walk.fail(event_id))
        walk.clock.advance(300)
    assert [each.status_code for each in answers] == [200, 200, 200, 400]
    last = answers[-1]
    assert has(last.json(), {"error": "Max retries exceeded", "retry_count": 3, "max_retries": 3})
    assert has(last.json(), {"type": "/problems/max-retries-exceeded", "title": "Max retries exceeded", "status": 400})
    assert type(last.json()["detail"]) is str
    assert last.headers["content-type"] == "application/problem+json"
    assert walk.http.get(last.json()["type"]).status_code == 200
    event = walk.served.get(event_id)
    assert has(event, {"status": "FAILED", "retry_count": 3, "max_retries": 3, "next_retry_at": None})
    before = walk.rows(event_id)
    again = walk.fail(event_id)
    assert again.status_code == 200
    assert has(again.json(), FAILING | {"event_id": event_id, "action": "FAILED", "retry_scheduled": False})
    assert again.json()["next_retry_at"] is None
    assert again.json()["created_at"] == before[-1]["created_at"]
    assert walk.rows(event_id) == before
    assert [row["action"] for row in before] == ["PICKED", "FAILED"] * 4
    walk.clock.advance(3600)
    assert walk.subscribe().status_code == 204


@pytest.mark.parametrize("verb", ["complete", "fail"])
def test_a_report_can_be_sent_again(walk: Walk, verb: str):
    """A repeat is 200 with the same body, and the log has no new row (S3.9)."""
    event_id = walk.publish()
    walk.subscribe()
    body = COMPLETING if verb == "complete" else FAILING
    first = walk.http.post(f"/events/{event_id}/{verb}", json=body)
    rows, event = walk.rows(event_id), walk.served.get(event_id)
    walk.clock.advance(7)
    second = walk.http.post(f"/events/{event_id}/{verb}", json=body)
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.json() == first.json()
    assert walk.rows(event_id) == rows
    assert walk.served.get(event_id) == event


def test_listing_filters_and_pages(walk: Walk):
    """GET /events has events, total, limit, offset; twenty unless said otherwise; by status and by any tag (S3.6)."""
    first = walk.publish()
    walk.subscribe()
    walk.http.post(f"/events/{first}/complete", json=COMPLETING)
    second = walk.served.publish(title="Process Payment", tags="payment,priority-high")["id"]
    walk.subscribe(tags="payment")
    next_retry_at = walk.fail(second).json()["next_retry_at"]
    body = walk.http.get("/events", params={"limit": 10}).json()
    assert {name: body[name] for name in ("total", "limit", "offset")} == {"total": 2, "limit": 10, "offset": 0}
    by_id = {each["id"]: each for each in body["events"]}
    shared = {"created_at": walk.now(), "updated_at": walk.now()}
    done = {"title": PUBLISHED["title"], "status": "COMPLETED", "tags": PUBLISHED["tags"], "retry_count": 0}
    assert has(by_id[first], {"id": first} | done | shared)
    waiting = {"title": "Process Payment", "status": "PENDING", "tags": "payment,priority-high", "retry_count": 1}
    assert has(by_id[second], {"id": second} | waiting | shared | {"next_retry_at": next_retry_at})

    def found(**query: Any) -> list[int]:
        return [each["id"] for each in walk.http.get("/events", params=query).json()["events"]]

    assert found(status="PENDING", limit=10) == [second]
    assert found(status="COMPLETED") == [first]
    assert found(status="FAILED") == found(status="PROCESSING") == []
    assert found(tags="payment") == [second]
    assert set(found(tags="email,payment")) == {first, second}
    assert found(tags="nothing") == []
    assert len({*found(limit=1), *found(limit=1, offset=1)}) == 2
    default = walk.http.get("/events").json()
    assert (default["limit"], default["offset"]) == (20, 0)


def test_an_orphan_is_put_back_by_hand(walk: Walk):
    """POST /events/{id}/reset?reason= makes it due, writes RESET, and fences the worker that had it (S3.10)."""
    event_id = walk.publish()
    walk.subscribe()
    walk.clock.advance(31)
    answer = walk.http.post(f"/events/{event_id}/reset", params={"reason": "worker_timeout"})
    assert answer.status_code == 200
    assert has(answer.json(), {"id": event_id, "status": "PENDING", "retry_count": 0})
    assert [row["action"] for row in walk.rows(event_id)] == ["PICKED", "RESET"]
    assert walk.rows(event_id)[-1]["error_message"] == "worker_timeout"
    assert walk.http.post(f"/events/{event_id}/complete", json=COMPLETING).status_code == 409
    assert walk.subscribe(worker_id="worker-05:1").json()["id"] == event_id


def test_a_payload_has_a_megabyte_at_most(walk: Walk):
    """One byte more is 413 with advice, and nothing is stored; just that many are taken (S3.11)."""
    fits = "x" * (1_048_576 - 2)
    assert walk.http.post("/events", json={"payload": fits}).status_code == 201
    before = walk.served.total()
    answer = walk.http.post("/events", json={"payload": fits + "x"})
    assert answer.status_code == 413
    assert answer.json()["type"] == "/problems/too-large"
    assert "reference" in answer.json()["detail"]
    large = walk.http.post("/events", json={"payload": fits * 2})
    assert (large.status_code, large.json()["type"]) == (413, "/problems/too-large")
    assert walk.served.total() == before


def test_the_log_tells_the_lifecycle_with_one_retry(walk: Walk):
    """PICKED, STARTED, FAILED, PICKED, COMPLETED, just as the document lists them (S3.7)."""
    event_id, told = walk.publish(), []
    first, second = "worker-01:7234", WORKER

    def expect(worker: str, action: str, **more: Any) -> None:
        told.append({"event_id": event_id, "worker_id": worker, "action": action, "created_at": walk.now()} | more)

    walk.clock.advance(45)
    walk.subscribe(worker_id=first)
    expect(first, "PICKED")
    walk.clock.advance(1)
    assert walk.http.post(f"/events/{event_id}/start", json={"worker_id": first}).status_code == 200
    expect(first, "STARTED")
    walk.clock.advance(8)
    failure = {"status_code": 503, "error_message": "Service unavailable, will retry", "execution_time_ms": 8000}
    assert walk.fail(event_id, worker_id=first, **failure).status_code == 200
    expect(first, "FAILED", **failure)
    walk.clock.advance(316)
    walk.subscribe(worker_id=second)
    expect(second, "PICKED")
    walk.clock.advance(15)
    assert walk.http.post(f"/events/{event_id}/complete", json=COMPLETING).status_code == 200
    expect(second, "COMPLETED", status_code=200, execution_time_ms=1250)
    rows = walk.rows(event_id)
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    assert len(rows) == len(told)
    assert all(has(row, wanted) for row, wanted in zip(rows, told, strict=True))
    assert all(datetime.fromisoformat(row["created_at"]).tzinfo is not None for row in rows)


def curl(*arguments: str) -> tuple[int, str]:
    """Run curl; return the status and the body."""
    done = subprocess.run(
        ["/usr/bin/curl", "-sS", "-w", "\n%{http_code}", *arguments], capture_output=True, text=True, check=True
    )
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def test_process_a_publishes_and_process_b_consumes_with_curl(kind: str, tmp_path: Path):
    """The document's last example, by processes that share nothing but the server (S3)."""
    event = {
        "title": "Batch Report Generation",
        "tags": "reporting,batch",
        "payload": {"report_type": "sales", "month": "2025-12"},
    }
    sending = ("-H", "content-type: application/json", "-d")
    with place(kind, tmp_path) as url, process(url) as server:
        status, body = curl(f"{server.url}/events", *sending, json.dumps(event))
        assert status == 201
        event_id = json.loads(body)["id"]
        status, body = curl(f"{server.url}/events/subscribe?tags=reporting&worker_id=worker-03:9100")
        assert status == 200
        assert has(json.loads(body), {"id": event_id, "status": "PROCESSING", "payload": event["payload"]})
        nothing = f"{server.url}/events/subscribe?tags=payment&worker_id=worker-04:9101"
        assert curl(nothing) == (204, "")
        done = {"worker_id": "worker-03:9100", "execution_time_ms": 15000, "status_code": 200}
        status, body = curl(f"{server.url}/events/{event_id}/complete", *sending, json.dumps(done))
        assert status == 200
        assert has(json.loads(body), {"event_id": event_id, "action": "COMPLETED"} | done)
        assert json.loads(curl(f"{server.url}/events/{event_id}")[1])["status"] == "COMPLETED"
        curl(f"{server.url}/events", *sending, json.dumps({"tags": "payment"}))
        assert curl(nothing)[0] == 200
        assert server.end()[0] == 0
