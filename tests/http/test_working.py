"""Working over HTTP: long polls, batches, leases and their epochs, and a server that is told to end."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from postbus import EventBus
from tests.conftest import Crew
from tests.contract.stores import Site
from tests.http.serving import Served, place, process, serving, standing_still

LONG = 30


@pytest.fixture
def served(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server with an empty store."""
    with serving(kind, tmp_path) as served:
        yield served


@pytest.fixture
def still(kind: str, tmp_path: Path) -> Iterator[tuple[Served, Site]]:
    """Give a server on which time stands still, and its clock."""
    with standing_still(kind, tmp_path) as still:
        yield still


def actions(served: Served, event_id: int) -> list[str]:
    """Return what the log says happened to an event."""
    return [row["action"] for row in served.get(event_id, include_logs="true")["logs"]]


def waiting(served: Served) -> int:
    """Return how many polls wait at the server."""
    rooms = served.app.state.desk.gate._rooms
    return sum(not each.future.done() for room in list(rooms.values()) for each in list(room))


# ── long polls ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_long_poll_is_answered_when_an_event_comes(served: Served, crew: Crew, eventually: Callable[..., Any]):
    """Well before its wait is over (S3.2)."""
    crew.start(lambda: served.claim(tags="email", wait=LONG))
    eventually(lambda: waiting(served) == 1)
    began = time.monotonic()
    event_id = served.publish(tags="email")["id"]
    (found,) = crew.join(LONG)
    assert found["id"] == event_id
    assert time.monotonic() - began < LONG / 3


def test_an_event_published_by_another_process_wakes_it_too(served: Served, crew: Crew, eventually: Callable[..., Any]):
    """Not only what comes through this server."""
    crew.start(lambda: served.claim(wait=LONG))
    eventually(lambda: waiting(served) == 1)
    bus = EventBus(served.bus.store.url)
    began = time.monotonic()
    bus.publish("elsewhere")
    (found,) = crew.join(LONG)
    assert found["type"] == "elsewhere"
    assert time.monotonic() - began < LONG / 3
    bus.shutdown()


def test_a_long_poll_is_answered_when_a_retry_falls_due(served: Served, crew: Crew):
    """An event that comes back while somebody waits is his."""
    event_id = served.publish()["id"]
    served.take()
    assert served.act("fail", event_id, delay=0.5).status_code == 200
    began = time.monotonic()
    crew.start(lambda: served.claim(wait=LONG))
    (found,) = crew.join(LONG)
    assert (found["id"], found["retry_count"]) == (event_id, 1)
    assert time.monotonic() - began < LONG / 3


def test_a_long_poll_ends_with_its_wait(served: Served):
    """204, not before and not without end."""
    began = time.monotonic()
    assert served.claim(wait=0.4) is None
    assert time.monotonic() - began >= 0.4


def test_many_who_wait_get_one_each(served: Served, crew: Crew, eventually: Callable[..., Any]):
    """Twelve wait, twelve events come, nobody gets two and none is left (I7)."""
    crew.start(lambda: served.claim(wait=LONG), 12)
    eventually(lambda: waiting(served) == 12)
    ids = [served.publish(payload=number)["id"] for number in range(12)]
    assert sorted(found["id"] for found in crew.join(60)) == ids


def test_whoever_waits_for_other_tags_is_left_waiting(served: Served, crew: Crew, eventually: Callable[..., Any]):
    """What comes goes to those who want it."""
    crew.start(lambda: served.claim(tags="payment", wait=LONG))
    eventually(lambda: waiting(served) == 1)
    served.publish(tags="email")
    assert served.take(tags="email", wait=LONG)["tags"] == "email"
    assert waiting(served) == 1
    event_id = served.publish(tags="payment")["id"]
    assert crew.join(60)[0]["id"] == event_id


def test_a_client_that_hangs_up_swallows_nothing(served: Served, eventually: Callable[..., Any]):
    """Who comes after it gets the event at once, at its first attempt (I10)."""
    for turn in range(5):
        with served.socket() as connection:
            request = f"GET /events/subscribe?types=*&worker_id=gone:{turn}&wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.sendall(request.encode())
            eventually(lambda: waiting(served) == 1)
        event_id = served.publish(payload=turn)["id"]
        found = served.take(wait=LONG)
        assert (found["id"], found["attempt"]) == (event_id, 1)
        assert served.act("complete", event_id).status_code == 200
        assert waiting(served) == 0


# ── batches and leases ───────────────────────────────────────────────────────────────────────────────────────────────


def test_limit_takes_a_batch(served: Served):
    """Up to so many, as a list; without it one, bare (S3.2)."""
    ids = [served.publish(payload=number)["id"] for number in range(5)]
    assert [each["id"] for each in served.take(limit=3)["events"]] == ids[:3]
    assert [each["id"] for each in served.take(limit=100)["events"]] == ids[3:]
    assert served.claim(limit=100) is None
    for limit in (0, 101, -1, "x"):
        query = {"worker_id": "w", "types": "*", "limit": limit}
        assert served.http.get("/events/subscribe", params=query).status_code == 422


def test_each_of_a_batch_is_settled_alone(served: Served):
    """One failed, one given back, one done."""
    ids = [served.publish(payload=number)["id"] for number in range(3)]
    epochs = {each["id"]: each["epoch"] for each in served.take(limit=3)["events"]}
    assert len(set(epochs.values())) == 3
    for verb, event_id in zip(("complete", "fail", "release"), ids, strict=True):
        assert served.act(verb, event_id, epoch=epochs[event_id]).status_code == 200
    assert [served.get(event_id)["status"] for event_id in ids] == ["COMPLETED", "PENDING", "PENDING"]
    assert served.take()["id"] == ids[2]


def test_a_lease_lasts_as_long_as_was_asked_for(still: tuple[Served, Site]):
    """lease=10: after ten seconds it is another's, and the attempt counts; 300 s unless said (S3.4)."""
    served, site = still
    event_id = served.publish()["id"]
    first = served.take(lease=10)
    assert first["lease_seconds"] == 10
    site.clock.advance(9)
    assert served.claim(worker_id="w:2") is None
    site.clock.advance(1.1)
    second = served.take(worker_id="w:2")
    assert (second["id"], second["attempt"], second["retry_count"]) == (event_id, 2, 1)
    assert second["lease_seconds"] == 300
    assert second["epoch"] > first["epoch"]
    site.clock.advance(299)
    assert served.claim(worker_id="w:3") is None
    site.clock.advance(1.1)
    assert served.take(worker_id="w:3")["attempt"] == 3
    assert "EXPIRED" in actions(served, event_id)


def test_an_expired_lease_that_nobody_took_can_still_be_completed(still: tuple[Served, Site]):
    """Late work counts while it is nobody else's."""
    served, site = still
    event_id = served.publish()["id"]
    taken = served.take(lease=10)
    site.clock.advance(60)
    assert served.act("complete", event_id, epoch=taken["epoch"]).status_code == 200
    assert served.get(event_id)["status"] == "COMPLETED"


def test_an_event_of_another_subscription_is_its_own(served: Served):
    """Each subscription claims for itself, by its own policy and lease."""
    body = {
        "name": "audit",
        "patterns": ["order.*"],
        "lease": 7,
        "retry": {"max_retries": 0, "base_delay": 1.0, "max_delay": 1.0},
    }
    assert served.http.post("/subscriptions", json=body).status_code == 201
    event_id = served.publish(type="order.placed")["id"]
    taken = served.take(subscription="audit")
    assert (taken["id"], taken["max_retries"], taken["subscription"]) == (event_id, 0, "audit")
    failed = served.act("fail", event_id, subscription="audit", epoch=taken["epoch"])
    assert (failed.status_code, failed.json()["retry_count"], failed.json()["max_retries"]) == (400, 0, 0)
    assert served.get(event_id)["status"] == "PENDING"
    assert served.get(event_id, subscription="audit")["status"] == "FAILED"
    letters = served.http.get("/dlq", params={"subscription": "audit"}).json()["letters"]
    assert [each["event"]["id"] for each in letters] == [event_id]


# ── epochs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("verb", ["complete", "fail", "start", "extend", "release"])
def test_an_old_epoch_changes_nothing(still: tuple[Served, Site], verb: str):
    """The late worker gets 409, whatever it says; the one who holds the lease is not touched (I8)."""
    served, site = still
    event_id = served.publish()["id"]
    old = served.take(lease=1)["epoch"]
    site.clock.advance(2)
    new = served.take(worker_id="w:2")["epoch"]
    before = served.get(event_id, include_logs="true")
    for told in ({"epoch": old}, {}):
        answer = served.act(verb, event_id, **told)
        assert (answer.status_code, answer.json()["type"]) == (409, "/problems/lease-lost")
    assert served.get(event_id, include_logs="true") == before
    assert served.act("complete", event_id, worker_id="w:2", epoch=new).status_code == 200


@pytest.mark.parametrize("verb", ["complete", "fail", "start", "extend", "release"])
def test_a_stranger_changes_nothing(served: Served, verb: str):
    """Who never had the event is 409; of an event that is not there, 404."""
    event_id = served.publish()["id"]
    pending = served.act(verb, event_id)
    assert pending.status_code == 409
    served.take()
    before = served.get(event_id, include_logs="true")
    stranger = served.act(verb, event_id, worker_id="stranger:1")
    assert (stranger.status_code, stranger.json()["type"]) == (409, "/problems/lease-lost")
    assert served.act(verb, event_id, epoch=999_999).status_code == 409
    assert served.get(event_id, include_logs="true") == before
    assert served.act(verb, event_id + 1_000).status_code == 404


@pytest.mark.parametrize("verb", ["complete", "fail"])
def test_a_report_after_a_reset_comes_too_late(served: Served, verb: str):
    """409; the event is due, and goes to whoever comes (S3.10, I8)."""
    event_id = served.publish()["id"]
    taken = served.take()
    assert served.http.post(f"/events/{event_id}/reset", params={"reason": "stuck"}).status_code == 200
    for told in ({"epoch": taken["epoch"]}, {}):
        assert served.act(verb, event_id, **told).status_code == 409
    assert served.get(event_id)["status"] == "PENDING"
    assert served.take(worker_id="w:2")["id"] == event_id


def test_the_same_worker_failing_twice_is_two_failures(served: Served):
    """The second attempt's failure is not taken for a repeat of the first (S3.9)."""
    event_id = served.publish()["id"]
    for _ in range(2):
        served.take()
        body = {"error_message": "the same words", "status_code": 500, "delay": 0.0}
        assert served.act("fail", event_id, **body).status_code == 200
        assert served.act("fail", event_id, **body).status_code == 200
    assert actions(served, event_id) == ["PICKED", "FAILED", "PICKED", "FAILED"]
    assert served.get(event_id)["retry_count"] == 2


def test_another_outcome_for_a_settled_epoch_is_refused(served: Served):
    """Completed is completed: a failure of that attempt is 409, and the other way round (I9)."""
    first, second = served.publish()["id"], served.publish()["id"]
    epochs = {each["id"]: each["epoch"] for each in served.take(limit=2)["events"]}
    assert served.act("complete", first, epoch=epochs[first]).status_code == 200
    assert served.act("fail", first, epoch=epochs[first]).status_code == 409
    assert served.act("fail", second, epoch=epochs[second]).status_code == 200
    assert served.act("complete", second, epoch=epochs[second]).status_code == 409
    assert served.get(first)["status"] == "COMPLETED"


def test_many_repeats_at_once_write_one_row(served: Served, crew: Crew):
    """Twenty complete one attempt at the same time: each is 200, the log has one row (S3.9)."""
    event_id = served.publish()["id"]
    epoch = served.take()["epoch"]
    crew.start(lambda: served.act("complete", event_id, epoch=epoch).status_code, 20)
    assert crew.join(60) == [200] * 20
    assert actions(served, event_id) == ["PICKED", "COMPLETED"]


def test_start_writes_a_row_and_lets_the_lease_run_anew(still: tuple[Served, Site]):
    """STARTED stands in the log; the lease counts from then (S3.7)."""
    served, site = still
    event_id = served.publish()["id"]
    epoch = served.take(lease=10)["epoch"]
    site.clock.advance(8)
    answer = served.act("start", event_id, lease=10)
    assert answer.status_code == 200
    assert answer.json() == {"event_id": event_id, "worker_id": "w:1", "epoch": epoch, "lease_seconds": 10}
    assert actions(served, event_id) == ["PICKED", "STARTED"]
    site.clock.advance(8)
    assert served.claim(worker_id="w:2") is None
    site.clock.advance(3)
    assert served.take(worker_id="w:2")["id"] == event_id


def test_extending_keeps_the_lease(still: tuple[Served, Site]):
    """Again and again, without a row in the log."""
    served, site = still
    event_id = served.publish()["id"]
    epoch = served.take(lease=10)["epoch"]
    for _ in range(5):
        site.clock.advance(8)
        assert served.act("extend", event_id, epoch=epoch, lease=10).json()["lease_seconds"] == 10
        assert served.claim(worker_id="w:2") is None
    assert actions(served, event_id) == ["PICKED"]
    assert served.act("complete", event_id, epoch=epoch).status_code == 200


def test_releasing_burns_no_attempt(still: tuple[Served, Site]):
    """It is due again, at once or after `delay`, as if it had not been claimed."""
    served, site = still
    event_id = served.publish()["id"]
    for _ in range(6):
        served.take()
        assert served.act("release", event_id).status_code == 200
    again = served.take()
    assert (again["attempt"], again["retry_count"]) == (1, 0)
    assert served.act("release", event_id, delay=60).status_code == 200
    assert served.claim() is None
    site.clock.advance(61)
    assert served.take()["id"] == event_id
    assert actions(served, event_id).count("RELEASED") == 7


def test_completing_with_errors_is_said_so(served: Served):
    """Finished all the same, and what went wrong is kept."""
    event_id = served.publish()["id"]
    served.take()
    errors = [{"type": "Timeout", "message": "one of two mails"}, {"message": "and another"}]
    answer = served.act("complete", event_id, errors=errors)
    assert (answer.status_code, answer.json()["action"]) == (200, "COMPLETED_WITH_ERRORS")
    event = served.get(event_id)
    assert event["status"] == "COMPLETED_WITH_ERRORS"
    assert served.http.get("/events", params={"status": "COMPLETED_WITH_ERRORS"}).json()["total"] == 1


def test_a_failure_can_be_the_last_at_once(served: Served):
    """retry=false: 200, for that is what was asked; a dead letter that can be retried (S3.4)."""
    event_id = served.publish()["id"]
    served.take()
    answer = served.act("fail", event_id, retry=False, error_message="no such card", error_type="CardError")
    assert (answer.status_code, answer.json()["retry_scheduled"]) == (200, False)
    assert served.get(event_id)["status"] == "FAILED"
    (letter,) = served.http.get("/dlq").json()["letters"]
    assert (letter["event"]["id"], letter["errors"][0]["message"]) == (event_id, "no such card")
    assert served.http.post(f"/events/{event_id}/reset").status_code == 409
    assert served.http.post(f"/dlq/{event_id}/retry").json() == {"count": 1}
    assert served.take()["retry_count"] == 0


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_is_told_to_end_lets_its_polls_go(kind: str, tmp_path: Path, eventually: Callable[..., Any]):
    """SIGTERM: whoever waits gets 204, and the process exits 0 within two seconds."""
    poll = b"GET /events/subscribe?types=*&worker_id=w&wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with place(kind, tmp_path) as url, process(url) as server, ExitStack() as stack:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        waiting = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(5)]
        for each in waiting:
            each.sendall(poll)
        eventually(lambda: all_was_read(address[1]))
        assert httpx2.get(f"{server.url}/livez", trust_env=False).status_code == 200
        code, seconds = server.end(signal.SIGTERM)
        assert [each.recv(1_000).partition(b"\r\n")[0] for each in waiting] == [b"HTTP/1.1 204 No Content"] * 5
        assert code == 0
        assert seconds < 2


def all_was_read(port: int) -> bool:
    """Return whether the server has taken all that was sent to it, as the kernel tells: then whoever asked waits."""
    name = f"0100007F:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if name in (row[1], row[2]) and row[3] == "01"]
    return len(mine) >= 10 and all(row[4] == "00000000:00000000" for row in mine)
