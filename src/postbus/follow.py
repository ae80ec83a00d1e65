"""How an ordered subscription is to be followed: the options of `@bus.follow`, checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, get_args

from postbus.errors import InvalidRequest
from postbus.handlers import Handler, Start, check_start, make_follower
from postbus.model import Event
from postbus.retry import RetryPolicy

__all__ = ["CheckpointMode", "Follow", "InstanceMode", "OnFailure", "make_follow"]

OnFailure = Literal["dead_letter", "stop", "park_key"]
RETRY: Final = RetryPolicy(max_retries=3, base_delay=1, max_delay=60)
MOST: Final = 100_000
SHORTEST_LEASE: Final = 0.3


class InstanceMode(StrEnum):
    """Whether several processes share a subscriber's name."""

    COORDINATED = "coordinated"
    """One of them reads, the others stand by."""
    SINGLE = "single"
    """There is only this one: no lock, no lease. Of two that run all the same, the first one's writes are refused."""


@dataclass(frozen=True, slots=True)
class CheckpointMode:
    """When the checkpoint is moved: after `size` events, or `max_delay` seconds after the first of them."""

    size: int = 1
    max_delay: float = 0.0

    @classmethod
    def synchronous(cls) -> "CheckpointMode":
        """Move it after each event (each list, with `batch`)."""
        return cls()

    @classmethod
    def batched(cls, size: int = 100, max_delay: float = 1.0) -> "CheckpointMode":
        """Move it after `size` events or `max_delay` seconds: faster, and that many are repeated after a crash."""
        if not 1 <= size <= MOST or not 0 < max_delay < MOST:
            raise InvalidRequest(f"a checkpoint is batched by 1 to {MOST:,} events, and within some seconds")
        return cls(size, max_delay)


@dataclass(frozen=True, slots=True)
class Follow:
    """One ordered subscription as this process follows it."""

    name: str
    handler: Handler
    checkpoint: CheckpointMode
    instance: InstanceMode
    retry: RetryPolicy
    batch_size: int
    batch: int | None
    on_error: OnFailure
    start: Start
    lease: float

    def call(self, events: Sequence[Event], *context: Any, **named: Any) -> Any:
        """Call the handler with one event, or with a list of them where it takes lists."""
        prepared = [self.handler.prepared(each) for each in events] if self.handler.model is not None else events
        return self.handler.function(list(prepared) if self.batch is not None else prepared[0], *context, **named)


def make_follow(
    name: str,
    pattern: str,
    function: Callable[..., Any],
    *,
    tags: Sequence[str] = (),
    checkpoint: CheckpointMode = CheckpointMode(),
    instance: InstanceMode | str = InstanceMode.COORDINATED,
    retry: RetryPolicy | Mapping[str, float] | None = None,
    batch_size: int = 100,
    batch: int | None = None,
    on_error: OnFailure = "dead_letter",
    start: Start = "beginning",
    lease: float = 10.0,
    model: Any = None,
) -> Follow:
    """Return how to follow; raise InvalidRequest, naming the option that is wrong."""
    if on_error not in get_args(OnFailure):
        raise InvalidRequest(f"on_error is 'dead_letter', 'stop' or 'park_key', not {on_error!r}")
    if instance not in tuple(InstanceMode):
        raise InvalidRequest(f"instance is InstanceMode.COORDINATED or SINGLE, not {instance!r}")
    if not isinstance(checkpoint, CheckpointMode):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest("checkpoint is CheckpointMode.synchronous() or CheckpointMode.batched(size, max_delay)")
    for what, value in (("batch_size", batch_size), ("batch", 1 if batch is None else batch)):
        if type(value) is not int or not 1 <= value <= MOST:
            raise InvalidRequest(f"{what} is a number of events from 1 to {MOST:,}")
    if not SHORTEST_LEASE <= lease <= MOST:
        raise InvalidRequest(f"lease is {SHORTEST_LEASE} seconds or more")
    handler = make_follower(pattern, function, subscription=name, tags=tags, model=model)
    if handler.transactional and checkpoint.size > 1:
        raise InvalidRequest("a handler with tx commits its checkpoint with its writes: batch=… takes many at a time")
    return Follow(
        name=handler.subscription,
        handler=handler,
        checkpoint=checkpoint,
        instance=InstanceMode(instance),
        retry=RETRY.merged(retry),
        batch_size=max(batch_size, batch or 1),
        batch=batch,
        on_error=on_error,
        start=check_start(start),
        lease=lease,
    )
