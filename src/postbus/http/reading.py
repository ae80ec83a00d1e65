"""Reading requests: bodies within bounds of size and time, as JSON that means what it says, or a problem."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from postbus.errors import InvalidPayloadError
from postbus.http.wire import PROBLEMS, problem
from postbus.payload import MAX_PAYLOAD, encode, parse

__all__ = [
    "ENVELOPE",
    "Refused",
    "aside",
    "checked",
    "media_type",
    "read_body",
    "read_json",
    "require_json",
    "validated",
]

ENVELOPE: Final = 262_144
"""How much larger than a payload a body may be: for titles, tags, metadata and errors."""
LARGE: Final = 65_536
"""From this size on a body is taken apart in a thread, so that others need not wait."""

M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
R = TypeVar("R")


class Refused(Exception):  # noqa: N818  said of the request
    """A request that is answered with a problem."""

    def __init__(self, name: str, status: int, detail: str, *, headers: Mapping[str, str] = {}, **more: Any) -> None:
        """Say which problem it is."""
        super().__init__(detail)
        self.status = status
        self.body = problem(name, status, detail, **more)
        self.headers = headers


def media_type(request: Request) -> str:
    """Return the kind of a body, less its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """Return a body; refuse one that is too large before it is read whole, and one that comes too slowly."""
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise Refused("unsupported-media-type", 415, f"a body is sent as it is, not as {coding!r:.40}")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise Refused(
            "too-slow", 408, f"the body took more than {seconds:g} s to come", headers={"connection": "close"}
        ) from None
    return b"".join(parts)


def _too_large(limit: int) -> Refused:
    return Refused(
        "too-large",
        413,
        f"the body has more than {limit:,} bytes: store what is large elsewhere, and publish a reference to it",
        headers={"connection": "close"},
    )


async def read_json(request: Request, *, limit: int = MAX_PAYLOAD + ENVELOPE, seconds: float = 30.0) -> Any:
    """Return the value of a JSON body; refuse what is none, or what Python would read as something else."""
    require_json(request)
    body = await read_body(request, limit, seconds)
    return await aside(len(body), parsed, body, limit)


def require_json(request: Request) -> None:
    """Refuse a body of another kind."""
    if media_type(request) != "application/json":
        raise Refused("unsupported-media-type", 415, PROBLEMS["unsupported-media-type"].help)


async def aside(size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function; in a thread, so that others need not wait, if what it takes apart is large."""
    return await asyncio.to_thread(function, *args, **kwargs) if size > LARGE else function(*args, **kwargs)


def parsed(body: bytes, limit: int) -> Any:
    """Return the value of JSON text."""
    try:
        return parse(body.decode(), limit=limit)
    except UnicodeDecodeError:
        raise Refused("not-json", 400, "the body is not UTF-8") from None
    except InvalidPayloadError as error:
        raise Refused("not-json", 400, str(error).replace("the payload", "the body")) from None


def checked(value: Any) -> Any:
    """Return a value that can be kept as it is; refuse NUL, lone surrogates and the like."""
    try:
        encode(value)
    except InvalidPayloadError as error:
        raise Refused("invalid-request", 422, str(error).replace("the payload", "the body")) from None
    return value


def validated(model: type[M], value: Any) -> M:
    """Return a body's fields; refuse it, naming every field that is wrong."""
    try:
        return model.model_validate(checked(value))
    except ValidationError as error:
        wrong = [
            {"field": ".".join(map(str, each["loc"])) or "body", "message": each["msg"]}
            for each in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        told = "; ".join(f"{each['field']}: {each['message']}" for each in wrong[:5])
        raise Refused("invalid-request", 422, told, errors=wrong) from None


async def read_model(request: Request, model: type[M]) -> M:
    """Return a JSON body as a model has it."""
    return validated(model, await read_json(request, seconds=request.app.state.desk.body_seconds))
