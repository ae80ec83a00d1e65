"""Spans as lines of JSON in a file: what each process of a test records, joined by the test."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

__all__ = ["SITE", "record", "spans"]

SITE = """
import os
if os.environ.get("SPANS"):
    from tests.observability.recording import record
    record(os.environ["SPANS"], os.environ.get("SPANS_OF", ""))
"""
"""A sitecustomize.py: what `opentelemetry-instrument` does for an application, for a program of the test."""


class _File(SpanExporter):
    def __init__(self, path: str, process: str) -> None:
        self._path = path
        self._process = process

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with Path(self._path).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_told(each) | {"process": self._process}) + "\n" for each in spans)
        return SpanExportResult.SUCCESS


def _told(span: ReadableSpan) -> dict[str, Any]:
    own = span.get_span_context()
    assert own is not None
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": f"{own.trace_id:032x}",
        "span": f"{own.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
        "links": [f"{each.context.span_id:016x}" for each in span.links],
        "attributes": dict(span.attributes or {}),
        "status": span.status.status_code.name,
        "pid": os.getpid(),
    }


def record(path: str, process: str = "") -> None:
    """Have this process record its spans."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_File(path, process)))
    trace.set_tracer_provider(provider)


def spans(path: Path) -> list[dict[str, Any]]:
    """Return what was recorded, by whichever process."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
