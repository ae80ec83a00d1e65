"""Spans for OpenTelemetry: what they are called, what they tell, and how a trace goes on from process to process.

The names are those of OpenTelemetry's messaging conventions, which are still being developed: they stand here and
nowhere else. An event carries the context of its publishing as `traceparent` in its metadata; whoever handles it opens
a span of its own, linked to that. Nothing is imported, and nothing recorded, unless the application has set up an SDK.
"""

import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import orjson

from postbus import figures, observe
from postbus.model import Delivery, Event
from postbus.payload import Draft

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span

__all__ = ["Handling", "Spans", "is_watched", "processing", "publishing", "spans"]

SYSTEM: Final = "postbus"
PARENT: Final = "traceparent"
CARRIED: Final = (PARENT, "tracestate")


class Spans:
    """Makes the spans of this process, from when there is somebody to record them."""

    def __init__(self, provider: Any) -> None:
        """Make them for the SDK's provider."""
        from opentelemetry import context, trace  # noqa: PLC0415  whoever has a provider has these
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._context, self._trace = context, trace
        self._carrying = TraceContextTextMapPropagator()
        self._tracer: trace.Tracer = provider.get_tracer(SYSTEM, version(SYSTEM))

    @property
    def current(self) -> "Span":
        """The span at hand; one that is not valid if there is none."""
        return self._trace.get_current_span()

    def publish(
        self, drafts: Sequence[Draft], carried: Sequence[Mapping[str, str]], sender: Mapping[str, str]
    ) -> "AbstractContextManager[Span]":
        """Open the span of a publishing: PRODUCER if an event is to carry its context, CLIENT if all bring another."""
        bare = any(PARENT not in each for each in carried)
        kinds = sorted({each.type for each in drafts})
        told = _told("publish", "send", kinds, drafts[0].uid, len(drafts))
        parent = None
        if PARENT in sender and not self.current.get_span_context().is_valid:
            parent = self._carrying.extract({name: sender[name] for name in CARRIED if name in sender})
        return self._tracer.start_as_current_span(
            " ".join(("publish", *kinds[: len(kinds) == 1])),
            parent,
            self._trace.SpanKind.PRODUCER if bare else self._trace.SpanKind.CLIENT,
            told,
            self._links(carried),
        )

    def process(
        self, events: Sequence[Event], subscription: str, attempt: int, handler: str
    ) -> "AbstractContextManager[Span]":
        """Open the span of a handler, linked to where its events were published."""
        first = events[0]
        told = _told("process", "process", [first.type], first.uid, len(events)) | {
            "messaging.destination.subscription.name": subscription,
            "messaging.consumer.group.name": subscription,
            "postbus.event.id": first.id,
            "postbus.attempt": attempt,
            "postbus.handler": handler,
        }
        links = self._links([each.metadata for each in events])
        return self._tracer.start_as_current_span(
            f"process {first.type}", None, self._trace.SpanKind.CONSUMER, told, links
        )

    def carrier(self, span: "Span") -> dict[str, str]:
        """Return what tells another process of a span; nothing of one that is not recorded."""
        carrier: dict[str, str] = {}
        if span.is_recording():
            self._carrying.inject(carrier, self._trace.set_span_in_context(span))
        return carrier

    def outgoing(self) -> dict[str, str]:
        """Return what tells a server of the span at hand; nothing if there is none."""
        carrier: dict[str, str] = {}
        self._carrying.inject(carrier)
        return carrier

    def _links(self, carried: Sequence[Mapping[str, str]]) -> "list[Link]":
        """Return links to the spans that are told of, each once."""
        told = {each[PARENT]: each for each in carried if PARENT in each}
        empty = self._context.Context()
        contexts = [self._carrying.extract(each, empty) for each in told.values()]
        known = [self._trace.get_current_span(each).get_span_context() for each in contexts]
        return [self._trace.Link(each) for each in known if each.is_valid]


def _told(name: str, kind: str, types: Sequence[str], uid: str, count: int) -> dict[str, str | int]:
    told: dict[str, str | int] = {"messaging.system": SYSTEM, "messaging.operation.name": name}
    told["messaging.operation.type"] = kind
    if len(types) == 1:
        told["messaging.destination.name"] = types[0]
    return told | ({"messaging.message.id": uid} if count == 1 else {"messaging.batch.message_count": count})


_spans: Spans | None = None


def spans() -> Spans | None:
    """Return what makes spans; None as long as this process has set up nothing to record them."""
    global _spans  # noqa: PLW0603  set up once
    if _spans is not None:
        return _spans
    api = sys.modules.get("opentelemetry.trace")
    if api is not None and hasattr(api, "use_span"):  # the last it defines: it may be under way in another thread
        provider = api.get_tracer_provider()
        if not isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
            _spans = Spans(provider)
    return _spans


def is_watched() -> bool:
    """Return whether anybody wants to know what handlers do: figures, logs or traces."""
    return figures.listener is not None or observe.binding or spans() is not None


@contextmanager
def publishing(drafts: list[Draft], sender: Mapping[str, str] | None = None) -> Generator[list[Draft]]:
    """Record that events are published; give them as they are to be stored.

    One that brings a `traceparent` keeps it, the others get that of the span. A request's headers may tell of the
    `sender`'s span: then that is the parent, unless there is one already.
    """
    made = spans()
    if made is None or not drafts:
        yield drafts
        return
    carried: list[dict[str, str]] = [orjson.loads(each.metadata) for each in drafts]
    with made.publish(drafts, carried, sender or {}) as span:
        own = made.carrier(span)
        yield [
            each if PARENT in has or not own else each._replace(metadata=orjson.dumps(has | own).decode())
            for each, has in zip(drafts, carried, strict=True)
        ]


class Handling(AbstractContextManager[None]):
    """A handler at work on an event, or on several: timed, known to the log, and the current span."""

    __slots__ = ("_began", "_given", "_span", "_token")

    def __init__(self, events: Sequence[Event], subscription: str, attempt: int, handler: str) -> None:
        """Tell of events that are about to be handled."""
        self._given = events, subscription, attempt, handler
        made = spans()
        self._span = None if made is None else made.process(events, subscription, attempt, handler)

    def __enter__(self) -> None:
        """Begin."""
        if self._span is not None:
            self._span.__enter__()
        self._token = observe.handling.set(self._bound)
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; whatever was raised passes."""
        if figures.listener is not None:
            _, subscription, _, handler = self._given
            figures.listener.handled(subscription, handler, time.perf_counter() - self._began)
        observe.handling.reset(self._token)
        if self._span is not None:
            if kind is not None and (made := spans()) is not None:
                made.current.set_attribute("error.type", kind.__qualname__)
            self._span.__exit__(kind, error, trace)

    def _bound(self) -> dict[str, object]:
        events, subscription, attempt, _ = self._given
        told: dict[str, object] = {"event_id": events[0].id, "event_type": events[0].type, "attempt": attempt}
        told["subscription"] = subscription
        if (made := spans()) is not None:
            at = made.current.get_span_context()
            told |= {"trace_id": f"{at.trace_id:032x}", "span_id": f"{at.span_id:016x}"}
        return told


def processing(delivery: Delivery, handler: str = "poll") -> AbstractContextManager[None]:
    """Return a block in which the work on a polled delivery is told of as that of a handler."""
    if not is_watched():
        return nullcontext()
    return Handling((delivery.event,), delivery.subscription, delivery.attempt, handler)
