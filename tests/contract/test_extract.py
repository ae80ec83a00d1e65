"""The tables as Arrow: what Spark and `tail` read."""

from collections.abc import Sequence
from typing import Any

from postbus.clock import to_micros
from postbus.model import Mode
from postbus.store import as_arrow
from postbus.store.contract import Settlement
from postbus.store.extract import RELATIONS
from tests.contract.following import lead, step
from tests.contract.stores import DEAD, DONE, LEASE, RETRY, Operator, Site, wanting

LAST = 1 << 62


def extracted(
    site: Site, relation: str, after: int = 0, through: int = LAST, columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a range."""
    asked = columns or RELATIONS[relation].names
    return [row for batch in as_arrow(site.url, relation, asked, after, through) for row in batch.to_pylist()]


def test_entries_that_were_recorded_together_come_one_by_one(site: Site, op: Operator):
    """As `logs` tells them, from any entry to any other."""
    op.subscription("gone")
    events = op.publish_all(*[{"type": "a", "tags": ["x", "b"]}] * 5)
    taken = op.claim(5, shared=True)
    op.store.settle([Settlement(each.lease, DONE, "w", None, 1.5) for each in taken[:3]])
    op.settle(taken[3], DEAD)
    op.settle(op.take("gone"))
    op.store.delete_subscription("gone", "ops")
    entries = sorted((row for event in events for row in op.store.logs(event.id)), key=lambda row: row.id)
    found = extracted(site, "audit")
    names = ("id", "event_id", "subscription", "action", "attempt", "epoch", "worker_id", "execution_time_ms")
    assert [[row[name] for name in names] for row in found] == [
        [getattr(each, name) for name in names] for each in entries
    ]
    assert "gone" in {row["subscription"] for row in found}
    ends = [row for row in found if row["action"] == "COMPLETED" and row["subscription"] == "default"]
    assert [(row["type"], sorted(row["tags"]), row["event_created_at"], row["priority"]) for row in ends] == [
        ("a", ["b", "x"], events[0].created_at, 0)
    ] * 3
    ids = [each.id for each in entries]
    for place, after in enumerate([0, *ids]):
        for end, through in enumerate(ids):
            part = extracted(site, "audit", after, through, ["action", "id"])
            assert [row["id"] for row in part] == ids[place : end + 1]


def test_unfinished_deliveries_come_as_they_stand(site: Site, op: Operator):
    """Waiting in the log, in a row, leased with or without a history, dead or parked; nothing that is finished."""
    op.subscription("few", ["b"])
    op.subscription("s", mode=Mode.ORDERED, start="beginning")
    op.publish_all(*[{"type": "a", "tags": ["x"]}] * 5, {"type": "b", "delay": 60}, {"type": "c"})
    done, dead, retried, again, leased = op.claim(5)
    op.settle(done)
    op.settle(dead, DEAD)
    op.settle(retried, RETRY)
    op.settle(again, RETRY)
    op.clock.advance(RETRY.after)
    (held, *_) = op.claim(1, interests=wanting("a"))
    op.store.erase(ids=[7], actor="privacy")
    op.publish("d")
    op.store.move(step(lead(op.store), 2, parked=[op.get(1)]))
    found = {(row["subscription"], row["event_id"]): row for row in extracted(site, "deliveries")}
    told = {key: (row["status"], row["attempt"], row["worker_id"]) for key, row in found.items()}
    assert told == {
        ("default", dead.id): ("FAILED", 1, "w"),
        ("default", held.id): ("PROCESSING", 2, "w"),
        ("default", again.id): ("PENDING", 1, "w"),
        ("default", leased.id): ("PROCESSING", 1, "w"),
        ("default", 6): ("PENDING", 0, None),
        ("default", 8): ("PENDING", 0, None),
        ("few", 6): ("PENDING", 0, None),
        ("s", 1): ("PENDING", 0, None),
    }
    assert held.id == retried.id
    assert found["default", leased.id]["tags"] == ["x"]
    assert to_micros(found["default", 6]["due_at"]) == to_micros(op.get(6).created_at) + 60_000_000
    assert found["default", held.id]["due_at"] == op.clock.now() + LEASE
    assert {row["event_id"] for row in extracted(site, "deliveries", 3, 6)} == {again.id, leased.id, 6}
