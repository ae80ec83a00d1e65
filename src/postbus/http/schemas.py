"""What OpenAPI tells of the shapes that are written by hand, for speed, in `wire`."""

from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from postbus.http import asks, remote, wire

__all__ = ["components"]

TEXT: Final = {"type": "string"}
MAYBE: Final = {"type": ["string", "null"]}
WHOLE: Final = {"type": "integer"}
SOME: Final = {"type": ["integer", "null"]}
NUMBER: Final = {"type": ["number", "null"]}
MOMENT: Final = {"type": "string", "format": "date-time"}
LATER: Final = {"type": ["string", "null"], "format": "date-time"}
FLAG: Final = {"type": "boolean"}
STATUS: Final = {
    "type": ["string", "null"],
    "enum": ["PENDING", "PROCESSING", "COMPLETED", "COMPLETED_WITH_ERRORS", "FAILED", None],
}


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(name: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}


EVENT: Final[dict[str, Any]] = {
    "id": WHOLE,
    "title": MAYBE,
    "description": MAYBE,
    "tags": {**TEXT, "examples": ["email,priority-high"]},
    "status": STATUS,
    "payload": {},
    "retry_count": WHOLE,
    "max_retries": WHOLE,
    "next_retry_at": LATER,
    "created_at": MOMENT,
    "updated_at": MOMENT,
    "uid": TEXT,
    "type": TEXT,
    "key": MAYBE,
    "priority": WHOLE,
    "metadata": {"type": "object", "additionalProperties": TEXT},
}
ENTRY: Final[dict[str, Any]] = {
    "id": WHOLE,
    "event_id": WHOLE,
    "worker_id": TEXT,
    "action": TEXT,
    "status_code": SOME,
    "error_message": MAYBE,
    "execution_time_ms": NUMBER,
    "created_at": MOMENT,
    "subscription": TEXT,
    "attempt": WHOLE,
    "epoch": WHOLE,
    "error_type": TEXT,
}
SPARSE: Final = (
    "id",
    "worker_id",
    "status_code",
    "error_message",
    "execution_time_ms",
    "attempt",
    "epoch",
    "error_type",
)
ERROR: Final[dict[str, Any]] = {
    "type": TEXT,
    "message": TEXT,
    "attempt": WHOLE,
    "worker_id": MAYBE,
    "at": LATER,
    "traceback": MAYBE,
    "handler": MAYBE,
}
CLAIMED: Final[dict[str, Any]] = {
    **{name: EVENT[name] for name in EVENT if name not in ("next_retry_at", "updated_at")},
    "subscription": TEXT,
    "epoch": {**WHOLE, "description": "Names this claim: send it along with complete, fail, extend and release."},
    "attempt": WHOLE,
    "lease_seconds": {"type": "number"},
    "lease_until": MOMENT,
    "suspect": {**FLAG, "description": "Its last attempt ended without a word."},
}
STATE: Final[dict[str, Any]] = {
    "subscription": TEXT,
    "status": STATUS,
    "attempt": WHOLE,
    "retry_count": WHOLE,
    "next_retry_at": LATER,
    "updated_at": MOMENT,
    "worker_id": MAYBE,
    "lease_until": LATER,
    "lease_expired": FLAG,
}
SUBSCRIPTION: Final[dict[str, Any]] = {
    "name": TEXT,
    "mode": TEXT,
    "patterns": {"type": "array", "items": TEXT},
    "tags": {"type": "array", "items": TEXT},
    "paused": FLAG,
    "lease": NUMBER,
    "retry": {"type": ["object", "null"]},
    "created_at": MOMENT,
    "position": SOME,
    "lag": SOME,
    "lag_seconds": NUMBER,
    "worker_id": MAYBE,
}
PAGE: Final[dict[str, Any]] = {"total": WHOLE, "limit": WHOLE, "offset": WHOLE, "total_capped": FLAG, "next": MAYBE}
LETTER: Final[dict[str, Any]] = {
    "event": {"$ref": "#/components/schemas/Event"},
    "subscription": TEXT,
    "attempts": WHOLE,
    "errors": _list("AttemptError"),
    "died_at": LATER,
    "last_retry_at": LATER,
}
CLOUDEVENT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "specversion": {"const": "1.0"},
        "id": {"type": "string", "minLength": 1},
        "source": {"type": "string", "minLength": 1},
        "type": {"type": "string", "minLength": 1},
        "subject": {**MAYBE, "minLength": 1},
        "time": LATER,
        "datacontenttype": {**MAYBE, "minLength": 1},
        "dataschema": {**MAYBE, "minLength": 1},
        "data": {},
        "data_base64": {**TEXT, "contentEncoding": "base64"},
    },
    "required": ["specversion", "id", "source", "type"],
    "propertyNames": {"pattern": "^([a-z0-9]{1,255}|data_base64)$"},
    "additionalProperties": {
        "description": "Extension attributes.",
        "type": ["string", "boolean", "integer", "null"],
        "minimum": -2_147_483_648,
        "maximum": 2_147_483_647,
    },
    "not": {"required": ["data", "data_base64"]},
    "examples": [{"specversion": "1.0", "id": "A234-1234-1234", "source": "/shop", "type": "order.placed", "data": {}}],
}
PROBLEM: Final[dict[str, Any]] = {
    **_object({"type": TEXT, "title": TEXT, "status": WHOLE, "detail": TEXT}),
    "examples": [wire.problem("not-found", 404, "there is no event 7")],
}
WRITTEN: Final[dict[str, Any]] = {
    "Event": _object(EVENT),
    "Events": _object({"events": _list("Event")}),
    "WholeEvent": _object(
        {**EVENT, "errors": _list("AttemptError"), "deliveries": _list("Delivery"), "logs": _list("LogRow")}, ("logs",)
    ),
    "EventPage": _object({"events": _list("Event"), **PAGE}, ("total_capped",)),
    "AttemptError": _object(ERROR),
    "Delivery": _object(STATE),
    "LogRow": _object(ENTRY, SPARSE),
    "Entry": _object({name: ENTRY[name] for name in ENTRY if name != "id"}, ("error_message", "error_type", "attempt")),
    "Failure": _object(
        {**{name: ENTRY[name] for name in ENTRY if name != "id"}, "retry_scheduled": FLAG, "next_retry_at": LATER},
        ("error_message", "error_type", "attempt"),
    ),
    "Claimed": {"anyOf": [_object(CLAIMED), _object({"events": {"type": "array", "items": _object(CLAIMED)}})]},
    "Held": _object({"event_id": WHOLE, "worker_id": TEXT, "epoch": WHOLE, "lease_seconds": {"type": "number"}}),
    "Letter": _object(LETTER),
    "LetterPage": _object({"letters": _list("Letter"), **PAGE}, ("total_capped",)),
    "Subscription": _object(SUBSCRIPTION),
    "CloudEvent": CLOUDEVENT,
    "StreamFrame": _object(
        {
            "id": {**TEXT, "description": "The position: send it as Last-Event-ID to go on after it."},
            "event": TEXT,
            "data": {**TEXT, "contentMediaType": "application/json"},
        },
        ("id", "event"),
    ),
    "Problem": PROBLEM,
}
READ: Final = (
    wire.Publish,
    wire.Completed,
    wire.Failed,
    wire.Extending,
    wire.Releasing,
    wire.NewSubscription,
    wire.Rewind,
    *asks.ASKS,
)


class _Told(GenerateJsonSchema):
    """Tells of lengths of time as they are written: JSON Schema's own `duration` has no fractions of a second."""

    def timedelta_schema(self, schema: Any) -> dict[str, Any]:
        """Return what a length of time is."""
        del schema
        return {"type": "string", "description": "A length of time as ISO 8601 has it, such as PT1.5S."}


def components() -> dict[str, Any]:
    """Return the schemas of all that is read and written, by name."""
    schemas = dict(WRITTEN)
    for model in READ:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    for name, shape in remote.SHAPES.items():
        schema = shape.json_schema(
            mode="serialization", ref_template="#/components/schemas/Stored_{model}", schema_generator=_Told
        )
        schemas |= {f"Stored_{part}": told for part, told in schema.pop("$defs", {}).items()}
        schemas[name] = schema
    return schemas
