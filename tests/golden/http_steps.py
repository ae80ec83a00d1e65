"""The requests of the golden set, in the order in which they are sent: each builds on what those before it left.

`$name` in a path, a header or a body stands for what an earlier answer has given. Bodies are JSON, unless they are
bytes.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["PAGES", "STEPS", "Advance", "Do", "Page", "Step"]

JSON: Final = "application/json"
STRUCTURED: Final = {"content-type": "application/cloudevents+json"}
BATCH: Final = {"content-type": "application/cloudevents-batch+json"}
ERROR: Final = {"type": "ValueError", "message": "no such card"}


class Step(NamedTuple):
    """A request, and which parts of its answer (as `events.0.epoch`) later requests need."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = {}
    keep: Mapping[str, str] = {}


class Advance(NamedTuple):
    """The bus's clock moves on by so many seconds."""

    seconds: float


class Do(NamedTuple):
    """Something happens that no request can do: `follow` or `drain`."""

    what: str


CLOUDEVENT: Final = {
    "specversion": "1.0",
    "id": "A-1",
    "source": "/shop",
    "type": "cloud.sent",
    "subject": "order/7",
    "time": "2018-04-05T17:31:00Z",
    "partitionkey": "bob",
    "data": {"a": 1},
}
BINARY: Final = {
    "content-type": "text/plain",
    "ce-specversion": "1.0",
    "ce-id": "A-2",
    "ce-source": "/shop",
    "ce-type": "cloud.sent",
    "ce-extra": "Euro%20%E2%82%AC",
}
WORKER: Final = {"worker_id": "w:1"}
MANY: Final = b"[" + b", ".join([b'{"type": "one.of.many"}'] * 501) + b"]"

ASKED: Final = (
    Step("the server lives", "GET", "/livez"),
    Step("the server is ready", "GET", "/readyz"),
    Step("each check of readiness", "GET", "/readyz?verbose"),
    Step("each check needs a token", "GET", "/readyz?verbose", headers={"authorization": ""}),
    Step("OpenAPI", "GET", "/openapi.json"),
    Step("the page of the API", "GET", "/docs"),
    Step("the style sheet", "GET", "/style.css"),
    Step("the page of a problem", "GET", "/problems/lease-lost"),
    Step("there is no such problem", "GET", "/problems/nothing"),
    Step("metrics as text", "GET", "/metrics"),
    Step("metrics as OpenMetrics", "GET", "/metrics", headers={"accept": "application/openmetrics-text"}),
    Step("no such path", "GET", "/nothing"),
    Step("another method", "PUT", "/events"),
    Step("a named path takes another method", "GET", "/events/batch"),
    Step("without a token", "GET", "/stats", headers={"authorization": ""}),
    Step("with a token that is none", "GET", "/stats", headers={"authorization": "Bearer postbus_x_y"}),
    Step("with a token of another scope", "GET", "/stats", headers={"authorization": "Bearer $work"}),
    Step("from a page of another site", "GET", "/stats", headers={"origin": "https://evil.example"}),
    Step("to another host", "GET", "/stats", headers={"host": "evil.example"}),
    Step("an address that is not UTF-8", "GET", "/events?type=%ff"),
    Step("an address with NUL", "GET", "/events?type=%00"),
    Step("a query that is too long", "GET", "/events?type=" + "x" * 16_384),
    Step("an empty log", "GET", "/events"),
    Step("an empty queue", "GET", "/events/subscribe?types=*&worker_id=w:1"),
    Step("no dead letters", "GET", "/dlq"),
    Step("figures of an empty bus", "GET", "/stats"),
)
PUBLISHED: Final = (
    Step(
        "an event with all its fields",
        "POST",
        "/events",
        {
            "type": "order.placed",
            "payload": {"order_id": 7},
            "tags": ["eu", "new"],
            "key": "ann",
            "title": "Order 7",
            "description": "Two books",
            "metadata": {"source": "shop"},
            "uid": "order-7",
            "priority": 5,
            "max_retries": 1,
        },
    ),
    Step("an event without a type", "POST", "/events", {"tags": "email,priority-high", "payload": {"to": "a"}}),
    Step("an event that is due later", "POST", "/events", {"type": "report.due", "delay": 60}),
    Step("an event that is due at", "POST", "/events", {"type": "report.due", "at": "2030-01-01T01:00:00Z"}),
    Step("with an idempotency key", "POST", "/events", {"type": "note"}, {"idempotency-key": "k-1"}),
    Step(
        "an integer beyond 64 bits, and a trace",
        "POST",
        "/events",
        b'{"type": "note", "payload": {"n": 1180591620717411303424}}',
        {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
    ),
    Step("a CloudEvent, structured", "POST", "/events", CLOUDEVENT, STRUCTURED),
    Step("a CloudEvent, binary", "POST", "/events", b"hello", BINARY),
    Step("CloudEvents, a batch", "POST", "/events/batch", [{**CLOUDEVENT, "id": "A-3"}], BATCH),
    Step("CloudEvents, an empty batch", "POST", "/events", [], BATCH),
    Step("a batch", "POST", "/events/batch", [{"type": "user.added", "key": "u1"}, {"type": "user.added"}]),
    Step(
        "a batch that is partly wrong", "POST", "/events/batch?partial=true", [{"type": "bad*"}, {"type": "user.left"}]
    ),
    Step("for a remote store", "POST", "/store/publish", {"events": [{"type": "user.left", "payload": 1.5}]}),
    Step("a batch with an idempotency key", "POST", "/events/batch", [{"type": "many"}], {"idempotency-key": "k-2"}),
)
REFUSED: Final = (
    Step("no JSON", "POST", "/events", b'{"payload": NaN}'),
    Step("a name twice", "POST", "/events", b'{"payload": 1, "payload": 2}'),
    Step("no UTF-8", "POST", "/events", b'{"payload": "\xff"}'),
    Step("half a character", "POST", "/events", b'{"payload": "\\ud800"}'),
    Step("no object", "POST", "/events", [1]),
    Step("an empty event", "POST", "/events", {}),
    Step("an unknown field", "POST", "/events", {"type": "a", "colour": "red"}),
    Step("a type that is a pattern", "POST", "/events", {"type": "order.*"}),
    Step("a priority out of range", "POST", "/events", {"type": "a", "priority": 11}),
    Step("delay and at", "POST", "/events", {"type": "a", "delay": 1, "at": "2030-01-01T00:00:00Z"}),
    Step("a moment without a zone", "POST", "/events", {"type": "a", "at": "2030-01-01T00:00:00"}),
    Step("a tag with a comma", "POST", "/events", {"type": "a", "tags": ["a,b"]}),
    Step("an idempotency key that is empty", "POST", "/events", {"type": "a"}, {"idempotency-key": '""'}),
    Step("another media type", "POST", "/events", b"type=a", {"content-type": "text/plain"}),
    Step("a coded body", "POST", "/events", b"{}", {"content-type": JSON, "content-encoding": "gzip"}),
    Step("a payload that is too large", "POST", "/events", {"payload": "x" * 1_048_577}),
    Step("a body that is too large", "POST", "/events", {"payload": "x" * 1_400_000}),
    Step(
        "a CloudEvent without an id", "POST", "/events", {"specversion": "1.0", "type": "a", "source": "b"}, STRUCTURED
    ),
    Step("a CloudEvent with data twice", "POST", "/events", {**CLOUDEVENT, "data_base64": "aGk="}, STRUCTURED),
    Step("an empty batch", "POST", "/events/batch", []),
    Step("a batch of too many", "POST", "/events/batch", MANY),
    Step("a batch that is too large", "POST", "/events/batch", b" " * 8_400_000),
    Step("a batch that may be partly wrong, perhaps", "POST", "/events/batch?partial=maybe", [{"type": "a"}]),
    Step("a batch with one that is wrong", "POST", "/events/batch", [{"type": "a"}, {"type": "*"}]),
    Step("for a remote store, wrong", "POST", "/store/publish", {"events": [{"type": "*"}]}),
    Step("for a remote store, no batch", "POST", "/store/publish", []),
)
WORKED: Final = (
    Step("claim by tags", "GET", "/events/subscribe?tags=email,sms&worker_id=w:1", keep={"email": "epoch"}),
    Step("start", "POST", "/events/2/start", WORKER),
    Step("extend", "POST", "/events/2/extend", {**WORKER, "epoch": "$email", "lease": 120}),
    Step("an event at work", "GET", "/events/2"),
    Step("extend what another holds", "POST", "/events/2/extend", {"worker_id": "w:2"}),
    Step("complete", "POST", "/events/2/complete", {**WORKER, "status_code": 200, "execution_time_ms": 1250}),
    Step("complete again", "POST", "/events/2/complete", {**WORKER, "status_code": 200, "execution_time_ms": 1250}),
    Step("complete what another has done", "POST", "/events/2/complete", {"worker_id": "w:2"}),
    Step("start what is done", "POST", "/events/2/start", WORKER),
    Step("release what is done", "POST", "/events/2/release", WORKER),
    Step("complete what is not there", "POST", "/events/999/complete", WORKER),
    Step("complete what was never claimed", "POST", "/events/4/complete", WORKER),
    Step("complete without a worker", "POST", "/events/2/complete", {}),
    Step("fail with an unknown field", "POST", "/events/2/fail", {**WORKER, "colour": "red"}),
    Step(
        "claim by types",
        "GET",
        "/events/subscribe?types=order.*&worker_id=w:1&lease=30&wait=0",
        keep={"order": "epoch"},
    ),
    Step(
        "fail",
        "POST",
        "/events/1/fail",
        {**WORKER, "error_type": "ValueError", "error_message": "no such card", "traceback": "…", "status_code": 500},
    ),
    Step("nothing is due before its retry", "GET", "/events/subscribe?types=order.*&worker_id=w:1"),
    Advance(300),
    Step("claim the retry", "GET", "/events/subscribe?types=order.*&worker_id=w:1"),
    Step("fail under the epoch before", "POST", "/events/1/fail", {**WORKER, "epoch": "$order"}),
    Step("fail for the last time", "POST", "/events/1/fail", {**WORKER, "error_message": "no such card"}),
    Step("fail for the last time, again", "POST", "/events/1/fail", {**WORKER, "error_message": "no such card"}),
    Step("claim many", "GET", "/events/subscribe?types=note&worker_id=w:1&limit=2"),
    Step("complete with errors", "POST", "/events/5/complete", {**WORKER, "errors": [ERROR]}),
    Step("release", "POST", "/events/6/release", {**WORKER, "delay": 10}),
    Advance(10),
    Step("claim what was released", "GET", "/events/subscribe?types=note&worker_id=w:1"),
    Step("fail, and never again", "POST", "/events/6/fail", {**WORKER, "retry": False}),
    Step("claim what was delayed", "GET", "/events/subscribe?types=report.due&worker_id=w:1"),
    Step("reset", "POST", "/events/3/reset?reason=worker_timeout"),
    Step("complete what was reset", "POST", "/events/3/complete", WORKER),
    Step("reset what is done", "POST", "/events/2/reset"),
    Step("reset what is not there", "POST", "/events/999/reset"),
    Step("claim without a worker", "GET", "/events/subscribe?types=*"),
    Step("claim without tags or types", "GET", "/events/subscribe?worker_id=w:1"),
    Step("claim by empty tags", "GET", "/events/subscribe?tags=&worker_id=w:1"),
    Step("claim too many", "GET", "/events/subscribe?types=*&worker_id=w:1&limit=101"),
    Step("claim from no subscription", "GET", "/events/subscribe?types=*&worker_id=w:1&subscription=nobody"),
    Step("an id that is none", "POST", "/events/0/complete", WORKER),
)
LOOKED: Final = (
    Step("an event and its log", "GET", "/events/1?include_logs=true"),
    Step("an event as a CloudEvent", "GET", "/events/7", headers={"accept": "application/cloudevents+json"}),
    Step("an event as a CloudEvent, binary", "GET", "/events/8?ce=binary"),
    Step("an event that is not there", "GET", "/events/999"),
    Step("an event of no subscription", "GET", "/events/1?subscription=nobody"),
    Step("an id that is no number", "GET", "/events/seven"),
    Step("a page of events", "GET", "/events?limit=2", keep={"cursor": "next"}),
    Step("the next page", "GET", "/events?limit=2&cursor=$cursor"),
    Step("a page by offset", "GET", "/events?limit=1&offset=3"),
    Step("events by status", "GET", "/events?status=COMPLETED"),
    Step("events by type", "GET", "/events?type=user.*"),
    Step("events by tags", "GET", "/events?tags=eu,email"),
    Step(
        "events as CloudEvents", "GET", "/events?type=cloud.*", headers={"accept": "application/cloudevents-batch+json"}
    ),
    Step("events by no status", "GET", "/events?status=GONE"),
    Step("events by status, type and tags", "GET", "/events?status=PENDING&type=user.*&tags=eu"),
    Step("a page of nothing", "GET", "/events?limit=0"),
    Step("a page that is too long", "GET", "/events?limit=501"),
    Step("a cursor that is none", "GET", "/events?cursor=x"),
    Step("a stream from the beginning", "GET", "/stream?after=0&limit=3"),
    Step("a stream by types", "GET", "/stream?after=0&types=user.*&wait=0"),
    Step("a stream by tags", "GET", "/stream?after=0&tags=eu&wait=0"),
    Step("a stream that goes on", "GET", "/stream?limit=1", headers={"last-event-id": "4"}),
    Step("a stream of what comes now", "GET", "/stream?wait=0"),
    Step("a stream from no id", "GET", "/stream", headers={"last-event-id": "x"}),
    Step("a stream from beyond the end", "GET", "/stream?after=9999"),
    Step("figures", "GET", "/stats"),
)
DIED: Final = (
    Step("dead letters", "GET", "/dlq"),
    Step("a page of dead letters", "GET", "/dlq?limit=1", keep={"cursor": "next"}),
    Step("the next page of dead letters", "GET", "/dlq?limit=1&cursor=$cursor"),
    Step("dead letters by type", "GET", "/dlq?type=note&subscription=default"),
    Step("dead letters of no subscription", "GET", "/dlq?subscription=nobody"),
    Step("a dead letter", "GET", "/dlq/1"),
    Step("no dead letter", "GET", "/dlq/2"),
    Step("dead letters, whole", "POST", "/store/dead", {"type": "note", "limit": 1}),
    Step("dead letters after no cursor", "POST", "/store/dead", {"after": "x"}),
    Step("retry a dead letter", "POST", "/dlq/1/retry"),
    Step("retry it again", "POST", "/dlq/1/retry?subscription=default"),
    Step("retry all of a type", "POST", "/dlq/retry?type=note"),
    Step("retry all of no subscription", "POST", "/dlq/retry?subscription=nobody"),
    Step("claim what was retried", "GET", "/events/subscribe?types=order.*,note&worker_id=w:1&limit=2"),
    Step("it dies again", "POST", "/events/1/fail", {**WORKER, "retry": False}),
    Step("and the other", "POST", "/events/6/fail", {**WORKER, "retry": False}),
    Step("purge what is too young", "POST", "/dlq/purge?older_than_days=1&by=died_at"),
    Step("purge by type", "POST", "/dlq/purge?older_than_days=0&type=note"),
    Step("purge without an age", "POST", "/dlq/purge"),
    Step("retry for a remote store", "POST", "/store/dead/retry", {"event_id": 1, "actor": "me"}),
    Step("purge for a remote store", "POST", "/store/dead/purge", {"type": "note", "actor": "me"}),
    Step(
        "purge for a remote store, wrong", "POST", "/store/dead/purge", {"actor": "me", "before": "2030-01-01T00:00:00"}
    ),
)
SUBSCRIBED: Final = (
    Step(
        "make a subscription",
        "POST",
        "/subscriptions",
        {
            "name": "mail",
            "patterns": ["user.*", "mail.*"],
            "tags": [],
            "lease": 90,
            "retry": {"max_retries": 1, "base_delay": 5, "max_delay": 60, "multiplier": 2, "jitter": 0},
            "start": "beginning",
        },
    ),
    Step("make it again", "POST", "/subscriptions", {"name": "mail"}),
    Step(
        "make one that is read in order",
        "POST",
        "/subscriptions",
        {"name": "sales", "mode": "ordered", "patterns": ["order.*"]},
    ),
    Step("make one for Spark", "POST", "/subscriptions", {"name": "lake", "mode": "spark"}),
    Step("make one of no mode", "POST", "/subscriptions", {"name": "a", "mode": "stack"}),
    Step("make one from beyond the end", "POST", "/subscriptions", {"name": "a", "start": 9999}),
    Step("make one by a wrong name", "POST", "/subscriptions", {"name": "a/b"}),
    Step("make one by a wrong pattern", "POST", "/subscriptions", {"name": "a", "patterns": ["\n"]}),
    Step(
        "make one with a wrong retry",
        "POST",
        "/subscriptions",
        {"name": "a", "retry": {"base_delay": 9, "max_delay": 1}},
    ),
    Step("a subscription", "GET", "/subscriptions/mail"),
    Step("no subscription", "GET", "/subscriptions/nobody"),
    Step("claim from it", "GET", "/events/subscribe?types=*&worker_id=w:3&subscription=mail"),
    Step("it has its own lease", "POST", "/events/10/extend", {"worker_id": "w:3", "subscription": "mail"}),
    Step("an event in two subscriptions", "GET", "/events/10?subscription=mail"),
    Step("events of it that wait", "GET", "/events?subscription=mail&status=PENDING&limit=1"),
    Step("pause", "POST", "/subscriptions/mail/pause"),
    Step("nothing is claimed while it is paused", "GET", "/events/subscribe?types=*&worker_id=w:3&subscription=mail"),
    Step("resume", "POST", "/subscriptions/mail/resume"),
    Step("pause none", "POST", "/subscriptions/nobody/pause"),
    Step("resume none", "POST", "/subscriptions/nobody/resume"),
    Step(
        "orders",
        "POST",
        "/events/batch",
        [{"type": "order.placed", "key": each} for each in ("ann", "bob", "bob", "ann")],
    ),
    Do("follow"),
    Step("subscriptions", "GET", "/subscriptions"),
    Step("one that was read", "GET", "/subscriptions/sales"),
    Step("what it left behind", "GET", "/dlq?subscription=sales"),
    Step("figures with a follower", "GET", "/stats"),
    Step("how far it has come", "POST", "/store/position", {"name": "sales"}),
    Step("how far a queue has come", "POST", "/store/position", {"name": "mail"}),
    Step("what stands behind it", "POST", "/store/standing", {"name": "sales"}),
    Step("checkpoints", "GET", "/store/checkpoints"),
    Step("rewind, only to look", "POST", "/subscriptions/sales/rewind", {"to": "beginning", "dry_run": True}),
    Step("rewind to a moment", "POST", "/subscriptions/sales/rewind", {"to": "2030-01-01T00:00:00Z", "dry_run": True}),
    Step("rewind", "POST", "/subscriptions/sales/rewind", {"to": 0}),
    Step("rewind beyond the end", "POST", "/subscriptions/sales/rewind", {"to": 9999}),
    Step("rewind to no moment", "POST", "/subscriptions/sales/rewind", {"to": "tomorrow"}),
    Step("rewind a queue", "POST", "/subscriptions/mail/rewind", {"to": "now"}),
    Step("rewind none", "POST", "/subscriptions/nobody/rewind", {"to": "now"}),
    Step(
        "rewind for a remote store",
        "POST",
        "/store/subscriptions/rewind",
        {"name": "sales", "to": "now", "actor": "me"},
    ),
    Step(
        "rewind for a remote store, wrong",
        "POST",
        "/store/subscriptions/rewind",
        {"name": "sales", "to": "x", "actor": "me"},
    ),
    Step("widen", "POST", "/store/subscriptions/widen", {"name": "mail", "pattern": "post.*", "tags": []}),
    Step("widen again", "POST", "/store/subscriptions/widen", {"name": "mail", "pattern": "post.*", "tags": []}),
    Step("widen none", "POST", "/store/subscriptions/widen", {"name": "nobody", "pattern": "*", "tags": []}),
    Step("pause for a remote store", "POST", "/store/subscriptions/pause", {"name": "mail", "paused": True}),
    Step("resume for a remote store", "POST", "/store/subscriptions/pause", {"name": "mail", "paused": False}),
    Step("delete", "DELETE", "/subscriptions/mail"),
    Step("delete again", "DELETE", "/subscriptions/mail"),
    Step("make one to delete", "POST", "/subscriptions", {"name": "gone", "start": 0}),
    Step("delete for a remote store", "POST", "/store/subscriptions/delete", {"name": "gone", "actor": "me"}),
    Step("delete for a remote store, again", "POST", "/store/subscriptions/delete", {"name": "gone", "actor": "me"}),
)
LEASE: Final = {"event_id": 12, "subscription": "default", "epoch": "$a"}
OTHER: Final = {"event_id": 13, "subscription": "default", "epoch": "$b"}
THIRD: Final = {"event_id": 14, "subscription": "default", "epoch": "$c"}
BACK: Final = {"event_id": 3, "subscription": "default", "epoch": "$d"}
REMOTE: Final = (
    Step(
        "claim with all terms",
        "POST",
        "/events/claim",
        {
            "worker_id": "far:1",
            "subscription": "default",
            "interests": [{"pattern": "user.*", "tags": []}, {"pattern": "many"}],
            "blocked": [{"pattern": "user.added"}],
            "limit": 2,
            "lease": 40,
            "retry": {"max_retries": 2, "base_delay": 1, "max_delay": 1, "multiplier": 1},
            "alone": True,
            "wait": 0,
        },
        keep={"a": "deliveries.0.lease.2", "b": "deliveries.1.lease.2"},
    ),
    Step(
        "claim one more",
        "POST",
        "/events/claim",
        {"worker_id": "far:1", "interests": [{"pattern": "many"}]},
        keep={"c": "deliveries.0.lease.2"},
    ),
    Step(
        "claim what is to be released",
        "POST",
        "/events/claim",
        {"worker_id": "far:1", "interests": [{"pattern": "report.due"}]},
        keep={"d": "deliveries.0.lease.2"},
    ),
    Step("claim nothing", "POST", "/events/claim", {"worker_id": "far:1", "interests": [{"pattern": "none"}]}),
    Step("claim from nowhere", "POST", "/events/claim", {"worker_id": "far:1", "subscription": "nobody"}),
    Step("claim far too many", "POST", "/events/claim", {"worker_id": "far:1", "limit": 101}),
    Step("who holds leases", "GET", "/store/owners"),
    Step(
        "what is left to do", "POST", "/store/work", {"subscription": "default", "interests": [{"pattern": "user.*"}]}
    ),
    Step("what is left nowhere", "POST", "/store/work", {"subscription": "nobody", "interests": [{"pattern": "*"}]}),
    Step("started", "POST", "/store/started", {"lease": LEASE, "worker_id": "far:1"}),
    Step("started under no lease", "POST", "/store/started", {"lease": {**LEASE, "epoch": 0}, "worker_id": "far:1"}),
    Step("extend some", "POST", "/events/extend", {"leases": [LEASE, {**OTHER, "epoch": 0}], "lease": 60}),
    Step("release some", "POST", "/events/release", {"leases": [BACK, {**BACK, "epoch": 0}], "worker_id": "far:1"}),
    Step(
        "settle some: applied, repeated, lost",
        "POST",
        "/events/settle",
        {
            "settlements": [
                {**LEASE, "worker_id": "far:1", "outcome": "retry", "after": 5, "errors": [ERROR]},
                {**OTHER, "worker_id": "far:1", "outcome": "done", "execution_time_ms": 1.5},
                {**OTHER, "worker_id": "far:1", "outcome": "done", "execution_time_ms": 1.5},
                {**THIRD, "worker_id": "far:1", "outcome": "dead", "errors": [ERROR]},
                {**BACK, "worker_id": "far:1", "outcome": "done"},
            ]
        },
    ),
    Step(
        "settle without its error",
        "POST",
        "/events/settle",
        {"settlements": [{**LEASE, "worker_id": "w", "outcome": "dead"}]},
    ),
    Step(
        "settle by no outcome",
        "POST",
        "/events/settle",
        {"settlements": [{**LEASE, "worker_id": "w", "outcome": "gone"}]},
    ),
    Step("an event that has ended", "POST", "/store/settled", {"event_id": 13, "subscriptions": ["default"]}),
    Step("an event that has not", "POST", "/store/settled", {"event_id": 12, "subscriptions": ["default"]}),
    Step("an event, whole", "POST", "/store/event", {"event_id": 12, "subscription": "default"}),
    Step("an event, whole, that is not there", "POST", "/store/event", {"event_id": 999, "subscription": "default"}),
    Step("an event's audit rows", "POST", "/store/logs", {"event_id": 13}),
    Step(
        "events, whole",
        "POST",
        "/store/events",
        {"subscription": "default", "status": "PENDING", "tags": [], "limit": 1},
    ),
    Step(
        "events, whole, of no status",
        "POST",
        "/store/events",
        {"subscription": "default", "status": "GONE", "tags": []},
    ),
    Step("what may kill its worker", "POST", "/events", {"type": "poison"}),
    Step("claim it, and say no more", "GET", "/events/subscribe?types=poison&worker_id=w:4&lease=30"),
    Step("claim, and say no more", "GET", "/events/subscribe?types=cloud.*&worker_id=w:4&lease=30"),
    Step(
        "reset for a remote store",
        "POST",
        "/store/reset",
        {"event_id": 12, "subscription": "default", "reason": "lost", "actor": "me"},
    ),
    Step(
        "reset what has ended",
        "POST",
        "/store/reset",
        {"event_id": 13, "subscription": "default", "reason": "lost", "actor": "me"},
    ),
    Advance(60),
    Step("a lease that ran out", "GET", "/events/7"),
    Step("end expired leases", "POST", "/store/expire", {"retry": {"max_retries": 3, "base_delay": 5, "max_delay": 5}}),
    Step("its attempt has failed", "GET", "/events/7?include_logs=true"),
    Step("claim it again: it is suspect", "GET", "/events/subscribe?types=poison&worker_id=w:5"),
    Step("complete it under the lease that ran out", "POST", "/events/19/complete", {"worker_id": "w:4"}),
    Step("complete it", "POST", "/events/19/complete", {"worker_id": "w:5"}),
    Step(
        "register handlers",
        "POST",
        "/store/handlers",
        {
            "handlers": [
                {
                    "id": "h1",
                    "name": "shop.ship",
                    "subscription": "default",
                    "pattern": "user.*",
                    "tags": ["eu"],
                    "worker_id": "far:1",
                    "owner": "far",
                }
            ]
        },
    ),
    Step("handlers", "GET", "/store/handlers"),
    Step("forget handlers", "POST", "/store/handlers/forget", {"owner": "far", "ids": ["h1"]}),
    Step("a breaker", "POST", "/store/breaker", {"name": "stripe"}),
    Step(
        "change a breaker",
        "POST",
        "/store/breaker/change",
        {"name": "stripe", "found": {}, "wanted": {"failures": 5, "opened_at": "2030-01-01T00:00:00Z"}},
    ),
    Step(
        "change a breaker that stands otherwise",
        "POST",
        "/store/breaker/change",
        {"name": "stripe", "found": {}, "wanted": {}},
    ),
    Step(
        "change a breaker wrongly",
        "POST",
        "/store/breaker/change",
        {"name": "b", "found": {}, "wanted": {"failures": -1}},
    ),
    Step("wake", "GET", "/wake"),
    Step("wake at once", "GET", "/wake?since=0&wait=0"),
    Step("wake after too long", "GET", "/wake?wait=61"),
    Step("figures, whole", "GET", "/store/stats"),
    Step("what can be read", "GET", "/store/span"),
    Step("what can be read of the audit log", "GET", "/store/span?stream=audit"),
    Step("what can be read of nothing", "GET", "/store/span?stream=other"),
)
REPEATED: Final = (  # at the end: what is refused here may take ids, and those that follow would be others
    Step("the same batch again", "POST", "/events/batch", [{"type": "many"}], {"idempotency-key": "k-2"}),
    Step("the same idempotency key again", "POST", "/events", {"type": "note"}, {"idempotency-key": "k-1"}),
    Step("another batch under that key", "POST", "/events/batch", [{"type": "many"}] * 2, {"idempotency-key": "k-2"}),
    Step("another event under that key", "POST", "/events", {"type": "other"}, {"idempotency-key": "k-1"}),
    Step("a uid again, with another payload", "POST", "/events", {"type": "order.placed", "uid": "order-7"}),
    Step("which uids are known", "POST", "/store/known", {"uids": ["order-7", "order-8"]}),
)
DRAINED: Final = (
    Do("drain"),
    Step("a server that is about to end", "GET", "/readyz"),
    Step("it still lives", "GET", "/livez"),
)
STEPS: Final[tuple[Step | Advance | Do, ...]] = (
    *ASKED, *PUBLISHED, *REFUSED, *WORKED, *LOOKED, *DIED, *SUBSCRIBED, *REMOTE, *REPEATED, *DRAINED,
)  # fmt: skip


class Page(NamedTuple):
    """A request for a page of the dashboard: a GET, or a form that is sent from the dashboard itself."""

    path: str
    form: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = {}


PAGES: Final = (
    Page(""),
    Page("/"),
    Page("/sign-in"),
    Page("/sign-in", {"token": "postbus_x_y"}),
    Page("/sign-in?next=/events", {"token": "$all"}),
    Page("/"),
    Page("/events?status=FAILED&type=order.*&tag=eu"),
    Page("/events?number=2"),
    Page("/events?status=GONE"),
    Page("/events?after=x"),
    Page("/events?subscription=nobody"),
    Page("/events/1"),
    Page("/events/999"),
    Page("/events/3/reset", {"subscription": "default"}),
    Page("/events/2/reset", {"subscription": "default"}),
    Page("/events/3/reset", {}, {"origin": "https://evil.example"}),
    Page("/dead?type=order.placed"),
    Page("/dead/confirm?act=retry&letter=14:default"),
    Page("/dead/confirm?act=burn"),
    Page("/dead/act", {"act": "retry", "letter": "14:default"}),
    Page("/dead/act", {"act": "discard"}),
    Page("/subscriptions"),
    Page("/subscriptions/sales/rewind?to=beginning"),
    Page("/subscriptions/sales/rewind?to=tomorrow"),
    Page("/subscriptions/sales/rewind", {"to": "0"}),
    Page("/subscriptions/sales/pause", {}),
    Page("/subscriptions/sales/resume", {}),
    Page("/subscriptions/sales/paint", {}),
    Page("/workers"),
    Page("/pipeline"),
    Page("/pipeline/report"),
    Page("/system"),
    Page("/live"),
    Page("/demo/kill", {}),
    Page("/nothing"),
    Page("/static/dashboard.css"),
    Page("/sign-out", {}),
    Page("/sign-in", {"token": "$read"}),
    Page("/subscriptions/sales/pause", {}),
)
