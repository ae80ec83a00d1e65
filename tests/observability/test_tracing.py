"""Traces: publish → server → process, across processes, by what the events carry."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from postbus import AsyncEventBus, EventBus, RetryPolicy, tracing
from postbus.observe import bind_events, bound
from postbus.store.remote.link import Link
from postbus.tracing import Spans, processing
from tests.http.serving import serving
from tests.observability.recording import SITE, spans

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("postbus")


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """Give an SDK that this process records with, for one test."""
    made = TracerProvider()
    monkeypatch.setattr(tracing, "_spans", Spans(made))
    return made


@pytest.fixture
def recorded(provider: TracerProvider) -> InMemorySpanExporter:
    """Give what is recorded."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[EventBus]:
    """Give a bus."""
    bus = EventBus(f"sqlite:///{tmp_path / 'bus.db'}", retry=RetryPolicy(max_retries=0))
    yield bus
    bus.shutdown(timeout=5)


def named(recorded: InMemorySpanExporter, name: str) -> Any:
    """Return the one span of a name."""
    (found,) = [each for each in recorded.get_finished_spans() if each.name == name]
    return found


def carried(span: Any) -> str:
    """Return the traceparent of a span."""
    at = span.get_span_context()
    return f"00-{at.trace_id:032x}-{at.span_id:016x}-{at.trace_flags:02x}"


def test_an_event_carries_the_span_it_was_published_in(bus: EventBus, provider: TracerProvider, recorded: Any):
    """`publish TYPE`, PRODUCER, of type send, a child of the span at hand; its traceparent goes with the event."""
    with provider.get_tracer("shop").start_as_current_span("checkout") as checkout:
        event = bus.publish("order.placed", {"n": 1}, metadata={"mine": "kept"})
    span = named(recorded, "publish order.placed")
    assert (span.kind, span.parent.span_id) == (SpanKind.PRODUCER, checkout.get_span_context().span_id)
    assert span.attributes["messaging.operation.type"] == "send"
    assert span.attributes["messaging.message.id"] == event.uid
    assert event.metadata == {"mine": "kept", "traceparent": carried(span)}
    assert bus.get(event.id).metadata == event.metadata


def test_a_traceparent_of_the_user_is_never_altered(bus: EventBus, provider: TracerProvider, recorded: Any):
    """What is in the metadata stays there, whatever span is at hand; the publishing is linked to it, and CLIENT."""
    with provider.get_tracer("shop").start_as_current_span("checkout"):
        for given in (GIVEN, "not a traceparent"):
            event = bus.publish("order.placed", metadata={"traceparent": given})
            assert bus.get(event.id).metadata == {"traceparent": given}
    first, second = [each for each in recorded.get_finished_spans() if each.name.startswith("publish")]
    assert [f"{link.context.span_id:016x}" for link in first.links] == ["b7ad6b7169203331"]
    assert (first.kind, list(second.links)) == (SpanKind.CLIENT, [])


def test_a_batch_is_one_span(bus: EventBus, recorded: Any):
    """However many events: those without a traceparent get that span's, the one that has one keeps it."""
    events = bus.publish_many([{"type": "a"}, {"type": "b"}, {"type": "c", "metadata": {"traceparent": GIVEN}}])
    span = named(recorded, "publish")
    assert span.attributes["messaging.batch.message_count"] == 3
    assert [each.metadata["traceparent"] for each in events] == [carried(span), carried(span), GIVEN]


def test_a_handler_runs_in_a_span_linked_to_the_publishing(bus: EventBus, recorded: Any):
    """`process TYPE`, CONSUMER; what the handler publishes is a child of it, and so the chain goes on."""

    @bus.on("order.placed")
    def ship(event: Any) -> None:
        bus.publish("parcel.sent")

    bus.publish("order.placed")
    bus.run_due()
    first, process, second = recorded.get_finished_spans()[0], named(recorded, "process order.placed"), named(
        recorded, "publish parcel.sent"
    )  # fmt: skip
    assert process.kind is SpanKind.CONSUMER
    assert [link.context.span_id for link in process.links] == [first.get_span_context().span_id]
    assert process.parent is None
    assert second.parent.span_id == process.get_span_context().span_id
    told = process.attributes
    assert (told["messaging.destination.subscription.name"], told["postbus.attempt"]) == ("default", 1)
    assert told["messaging.operation.type"] == "process"


@pytest.mark.parametrize("started", [False, True])
def test_async_handlers_and_buses_keep_their_context(tmp_path: Path, recorded: Any, started: bool):  # noqa: FBT001
    """Across await, and into the threads of an AsyncEventBus."""

    async def main() -> None:
        bus = AsyncEventBus(f"sqlite:///{tmp_path / 'bus.db'}")

        @bus.on("order.placed")
        async def ship(event: Any) -> None:
            await asyncio.sleep(0)
            await bus.publish("parcel.sent")

        await bus.publish("order.placed")
        if started:
            async with bus:
                await bus.wait_idle(10)
        else:
            await asyncio.to_thread(bus.wrapped.run_due)
            await bus.shutdown()

    asyncio.run(main())
    process, second = named(recorded, "process order.placed"), named(recorded, "publish parcel.sent")
    assert second.parent.span_id == process.get_span_context().span_id


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("batch", [None, 3])
def test_a_follower_is_traced_too(bus: EventBus, recorded: Any, *, is_async: bool, batch: int | None):
    """One span for what it gets at once, linked to each event; async ones see it as well."""
    seen: list[int] = []

    def plain(events: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    async def awaited(events: Any) -> None:
        plain(events)

    bus.publish_many([{"type": "a", "metadata": {"traceparent": GIVEN[:-4] + f"{n}-01"}} for n in "123"])
    bus.follow("sales", batch=batch)(awaited if is_async else plain)
    with bus:
        bus.wait_for("sales", 3, timeout=10)
    found = [each for each in recorded.get_finished_spans() if each.name == "process a"]
    assert [each.get_span_context().span_id for each in found] == seen
    assert [len(each.links) for each in found] == ([3] if batch else [1, 1, 1])


def test_a_failed_attempt_is_a_failed_span(bus: EventBus, recorded: Any):
    """With the error's type."""

    @bus.on("*")
    def fail(event: object) -> None:
        raise KeyError("gone")

    bus.publish("order.placed")
    bus.run_due()
    span = named(recorded, "process order.placed")
    assert (span.status.status_code.name, span.attributes["error.type"]) == ("ERROR", "KeyError")
    assert bus.dlq.get(1)[0].errors[0].type == "KeyError"


def test_work_on_what_was_polled_can_be_traced(bus: EventBus, recorded: Any):
    """In a block of one's own: linked, current, and known to the log."""
    bind_events()
    bus.publish("order.placed")
    delivery = bus.poll()
    assert delivery is not None
    with processing(delivery):
        span_id = trace.get_current_span().get_span_context().span_id
        assert bound() == {
            "event_id": 1,
            "event_type": "order.placed",
            "attempt": 1,
            "subscription": "default",
            "trace_id": f"{trace.get_current_span().get_span_context().trace_id:032x}",
            "span_id": f"{span_id:016x}",
        }
    assert bound() == {}
    assert named(recorded, "process order.placed").get_span_context().span_id == span_id


@pytest.mark.parametrize("path", ["/events", "/events/batch"])
def test_a_server_is_part_of_its_senders_trace(tmp_path: Path, recorded: Any, path: str):
    """Its span is a child of the one that the request tells of, which is the one that the event carries."""
    with serving("sqlite", tmp_path) as served:
        body: Any = {"type": "order.placed"}
        sent = served.http.post(path, json=[body] if "batch" in path else body, headers={"traceparent": GIVEN})
        made = sent.json()
        alone = served.publish(type="parcel.sent")
    event = made["events"][0] if "batch" in path else made
    assert event["metadata"] == {"traceparent": GIVEN}
    span = named(recorded, "publish order.placed")
    assert (f"{span.get_span_context().trace_id:032x}", f"{span.parent.span_id:016x}") == tuple(GIVEN.split("-")[1:3])
    assert alone["metadata"] == {"traceparent": carried(named(recorded, "publish parcel.sent"))}


# ── nothing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_an_sdk_nothing_is_recorded_or_added(bus: EventBus):
    """The API alone, which records nothing, adds nothing to events."""
    assert tracing.spans() is None
    assert bus.publish("order.placed").metadata == {}


def test_importing_postbus_imports_neither_prometheus_nor_opentelemetry():
    """Nor does using it: who wants no figures and no traces pays for neither."""
    program = (
        "import sys, postbus, postbus.testing as t\n"
        "with t.temporary_bus() as bus:\n"
        "    bus.on('*')(lambda event: None); bus.publish('a'); assert bus.run_due() == 1\n"
        "print([each for each in sys.modules if each.split('.')[0] in ('prometheus_client', 'opentelemetry')])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


# ── three processes ──────────────────────────────────────────────────────────────────────────────────────────────────

SHOP = """
from postbus import EventBus
bus = EventBus(poll_interval=0.1)

@bus.on("order.placed")
def ship(event, ctx):
    ctx.log.info("shipping")
    bus.publish("parcel.sent")

@bus.follow("sales", "parcel.sent")
def sell(event):
    pass
"""
BUY = """
import sys, httpx2
from opentelemetry import propagate, trace
with trace.get_tracer("web").start_as_current_span("checkout"):
    headers = {}
    propagate.inject(headers)
    sent = httpx2.post(sys.argv[1] + "/events", json={"type": "order.placed"}, headers=headers, trust_env=False)
    sent.raise_for_status()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start programs that record their spans in a file."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "shop.py").write_text(SHOP)
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "SPANS": str(tmp_path / "spans")}
    environment["POSTBUS_URL"] = f"sqlite:///{tmp_path / 'shop.db'}"
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *command: str | Path) -> subprocess.Popen[str]:
        env = {**environment, "SPANS_OF": name}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        if each.poll() is None:
            each.terminate()
        each.communicate(timeout=60)


def test_one_trace_goes_through_three_processes(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, eventually: Callable[..., Any]
):
    """A web shop's span, the server's, the worker's, and on to its follower: each leads to the next by what is kept."""
    server = start("server", PROGRAM, "serve", "--port", "0")
    line = next(each for each in server.stderr or () if " at http://" in each)
    url = line.partition(" at ")[2].split()[0]
    worker = start("worker", PROGRAM, "worker", "shop:bus")
    assert start("web", sys.executable, "-c", BUY, url).wait(60) == 0

    def found() -> dict[str, dict[str, Any]] | None:
        told = {each["name"]: each for each in spans(tmp_path / "spans")}
        return told if {"process order.placed", "process parcel.sent"} <= set(told) else None  # either may end first

    told = eventually(found, within=60)
    checkout, served = told["checkout"], told["publish order.placed"]
    shipped, sent, sold = told["process order.placed"], told["publish parcel.sent"], told["process parcel.sent"]
    assert [each["process"] for each in (checkout, served, shipped, sent, sold)] == [
        "web", "server", "worker", "worker", "worker",
    ]  # fmt: skip
    assert len({each["pid"] for each in told.values()}) == 3
    assert (served["trace"], served["parent"]) == (checkout["trace"], checkout["span"])
    assert shipped["links"] == [checkout["span"]]
    assert (sent["trace"], sent["parent"]) == (shipped["trace"], shipped["span"])
    assert sold["links"] == [sent["span"]]
    # What the handler logs tells of its event and of its span.
    entries = (json.loads(each) for each in worker.stderr or ())
    entry = next(each for each in entries if each["event"] == "shipping")
    assert (entry["trace_id"], entry["span_id"]) == (shipped["trace"], shipped["span"])
    assert (entry["event_id"], entry["event_type"], entry["attempt"]) == (1, "order.placed", 1)


def test_a_remote_bus_asks_within_the_trace_at_hand(provider: TracerProvider):
    """Each of its own requests tells the server of the span that is active, and of none where there is none."""
    told: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.append(self.headers.get("traceparent"))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET  # noqa: N815  as http.server calls it

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        link = Link(f"http://127.0.0.1:{server.server_port}", None)
        try:
            link.get("/store/span")
            with provider.get_tracer("test").start_as_current_span("mine") as span:
                link.post("/events/release", b"{}", again=True)
            link.get("/store/span")
        finally:
            link.close()
            server.shutdown()
            thread.join()
    context = span.get_span_context()
    carried = f"00-{context.trace_id:032x}-{context.span_id:016x}-"
    assert [each and each[: len(carried)] for each in told] == [None, carried, None]
