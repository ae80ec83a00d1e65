"""The short way: taken by what is plainly right, and by nothing else; it leads to the same answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.http import quick
from tests.http.serving import Served, serving

PLAIN = [
    ("POST", "/events", ""),
    ("POST", "/events/7/complete", ""),
    ("POST", "/events/999999999999999999/fail", ""),
    ("GET", "/events/subscribe", "worker_id=w:1&types=*"),
    ("GET", "/events/subscribe", "worker_id=w%3A1&tags=a,b&wait=30&limit=100&lease=0.5&subscription=s"),
]
ODD = [
    ("GET", "/events", ""),
    ("POST", "/events/", ""),
    ("POST", "/events/0/complete", ""),
    ("POST", "/events/07/complete", ""),
    ("POST", "/events/\u0661/complete", ""),
    ("POST", "/events/9999999999999999999/fail", ""),
    ("POST", "/events/7/start", ""),
    ("GET", "/events/subscribe", ""),
    ("GET", "/events/subscribe", "worker_id="),
    ("GET", "/events/subscribe", "worker_id=w:1&worker_id=w:2"),
    ("GET", "/events/subscribe", "worker_id=w:1&wait=61"),
    ("GET", "/events/subscribe", "worker_id=w:1&wait=-1"),
    ("GET", "/events/subscribe", "worker_id=w:1&wait=nan"),
    ("GET", "/events/subscribe", "worker_id=w:1&limit=0"),
    ("GET", "/events/subscribe", "worker_id=w:1&limit=1.5"),
    ("GET", "/events/subscribe", "worker_id=w:1&lease=0.05"),
    ("GET", "/events/subscribe", "worker_id=w:1&other=1"),
    ("GET", "/events/subscribe", f"worker_id={'w' * 256}"),
]


@pytest.fixture
def served(kind: str, tmp_path: Path) -> Iterator[Served]:
    """Give a server."""
    with serving(kind, tmp_path) as served:
        yield served


@pytest.mark.parametrize("request_line", PLAIN, ids=" ".join)
def test_what_is_plainly_right_goes_the_short_way(request_line: tuple[str, str, str]):
    """Else it would be no faster."""
    method, path, query = request_line
    assert quick.find({"method": method, "path": path, "query_string": query.encode()})


@pytest.mark.parametrize("request_line", ODD, ids=" ".join)
def test_whatever_is_odd_goes_the_long_way(request_line: tuple[str, str, str]):
    """There it is told what is wrong."""
    method, path, query = request_line
    assert not quick.find({"method": method, "path": path, "query_string": query.encode()})


def test_both_ways_lead_to_the_same_answer(served: Served):
    """A wait of more decimals than anybody writes goes the long way."""
    short, long = {"types": "*", "worker_id": "w:1"}, {"types": "*", "worker_id": "w:1", "wait": "0.00000001"}
    first, second = served.publish(payload=1), served.publish(payload=1)
    answers = [served.http.get("/events/subscribe", params=each).json() for each in (short, long)]
    assert [each["id"] for each in answers] == [first["id"], second["id"]]
    differ = {name for name in answers[0] if answers[0][name] != answers[1][name]}
    assert differ <= {"id", "uid", "epoch", "created_at", "lease_until"}
    assert answers[0].keys() == answers[1].keys()
