"""RemoteStore: a queue behind a postbus server, over HTTP.

A publisher's token needs the scope publish; a worker's work and read; an operator's read and admin. A handler whose
subscription does not exist yet needs admin too, to make it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from postbus.breaker import BreakerState
from postbus.errors import InvalidRequest, StoreUnavailable
from postbus.model import (
    AttemptError,
    Checkpoint,
    Dead,
    DeadLetter,
    Done,
    DoneWithErrors,
    Event,
    HandlerRecord,
    Lease,
    LogEntry,
    Mode,
    Outcome,
    Page,
    Retry,
    Span,
    State,
    Stats,
    Status,
    Stream,
    Subscription,
)
from postbus.pattern import Interest
from postbus.payload import Draft
from postbus.retry import RetryPolicy
from postbus.store.contract import (
    Claim,
    Claimed,
    DeadFilter,
    Rewound,
    Settled,
    Settlement,
    Watch,
    Work,
    needs_database,
)
from postbus.store.remote import shapes
from postbus.store.remote.link import Link
from postbus.store.remote.watch import Waker

T = TypeVar("T")
WAKE_WAIT: Final = 30.0
LONG: Final = 600.0
"""How long, in seconds, what goes through many rows may take."""
CHUNK_BYTES: Final = 500_000
LISTED: Final = TypeAdapter(dict[str, tuple[Subscription, ...]])
FIGURE: Final = TypeAdapter(dict[str, int])
NAMES: Final = TypeAdapter(list[str])
ANSWER: Final = TypeAdapter(dict[str, bool])


class RemoteStore:
    """A `Queue` behind a server. Every lease it takes ends by time alone: no server knows whether its worker lives."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """Ask the server at a URL, with a token if it wants one; nothing is asked yet."""
        self._link = Link(url, token)
        self._waker = Waker(self._rings)

    @property
    def url(self) -> str:
        return self._link.url

    def now(self) -> datetime:
        return self._link.now()

    def close(self) -> None:
        self._waker.close()
        self._link.close()

    def _get(self, shape: TypeAdapter[T], path: str, **parameters: Any) -> T:
        return self._read(shape, self._link.get(path, parameters))

    def _post(
        self, shape: TypeAdapter[T], path: str, body: Mapping[str, Any], *, again: bool = True, long: bool = False
    ) -> T:
        seconds = {"seconds": LONG} if long else {}
        return self._read(shape, self._link.post(path, _json(body), again=again, **seconds))

    def _read(self, shape: TypeAdapter[T], answer: bytes) -> T:
        try:
            return shape.validate_json(answer)
        except ValidationError as error:
            told = f"{error.error_count()} of its fields are not as expected"
            raise StoreUnavailable(f"{self.url} does not speak as this postbus does: {told}") from None

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, drafts: Sequence[Draft]) -> list[Event]:
        if not drafts:
            return []
        body = _json({"events": [_news(each) for each in drafts]})
        if len(drafts) > shapes.MOST_PUBLISHED or len(body) > shapes.MAX_BATCH:
            raise InvalidRequest(
                f"a batch over HTTP holds up to {shapes.MOST_PUBLISHED:,} events and {shapes.MAX_BATCH:,} bytes, "
                "all of them or none: publish this one in parts"
            )
        return self._read(shapes.EVENTS, self._link.post("/store/publish", body, again=True))

    def known(self, uids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for part in _parts(uids, shapes.MOST_SETTLED):
            found.update(self._post(NAMES, "/store/known", {"uids": list(part)}))
        return found

    # ── the lease verbs ──────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, claim: Claim) -> Claimed:
        body = {
            "subscription": claim.subscription,
            "worker_id": claim.worker_id,
            "interests": _interests(claim.interests),
            "blocked": _interests(claim.blocked),
            "limit": min(claim.limit, shapes.MOST_CLAIMED),
            "lease": claim.lease.total_seconds(),
            "retry": claim.policy.to_dict(),
            "alone": claim.alone,
            "free": claim.free,
        }
        return self._post(shapes.CLAIMED, "/events/claim", body, again=False)

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled]:
        results: list[Settled] = []
        for part in _batches([_json(_told(each)) for each in settlements]):
            body = {"settlements": [orjson.Fragment(each) for each in part]}
            results += self._post(shapes.SETTLED, "/events/settle", body)
        return results

    def extend(self, leases: Sequence[Lease], lease: timedelta) -> set[Lease]:
        lost: set[Lease] = set()
        for part in _parts(leases, shapes.MOST_SETTLED):
            body = {"leases": [each._asdict() for each in part], "lease": lease.total_seconds()}
            lost.update(self._post(shapes.LEASES, "/events/extend", body))
        return lost

    def release(self, leases: Sequence[Lease], worker_id: str, delay: timedelta = timedelta(0)) -> int:
        count = 0
        for part in _parts(leases, shapes.MOST_SETTLED):
            held = [each._asdict() for each in part]
            body = {"leases": held, "worker_id": worker_id, "delay": delay.total_seconds()}
            count += self._count("/events/release", body)
        return count

    def started(self, lease: Lease, worker_id: str) -> None:
        self._count("/store/started", {"lease": lease._asdict(), "worker_id": worker_id})

    def reset(self, event_id: int, subscription: str, reason: str, actor: str) -> None:
        body = {"event_id": event_id, "subscription": subscription, "reason": reason, "actor": actor}
        self._count("/store/reset", body)

    def expire(self, owners: Iterable[str] | None, policy: RetryPolicy, limit: int = 10_000) -> int:
        if owners is not None:
            raise needs_database("freeing what dead processes held")
        return self._count("/store/expire", {"retry": policy.to_dict(), "limit": limit})

    def owners(self) -> set[str]:
        return set(self._get(NAMES, "/store/owners"))

    def _count(self, path: str, body: Mapping[str, Any], *, long: bool = False) -> int:
        """Return how many a change concerned; not repeated, since a second time it would be none."""
        return self._post(FIGURE, path, body, again=False, long=long)["count"]

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, subscription: str, interests: tuple[Interest, ...]) -> Work:
        body = {"subscription": subscription, "interests": _interests(interests)}
        return self._post(shapes.WORK, "/store/work", body)

    def settled(self, event_id: int, subscriptions: Iterable[str]) -> bool:
        body = {"event_id": event_id, "subscriptions": list(subscriptions)}
        return self._post(ANSWER, "/store/settled", body)["settled"]

    def get(self, event_id: int, subscription: str) -> Event:
        return self._post(shapes.EVENT, "/store/event", {"event_id": event_id, "subscription": subscription})

    def logs(self, event_id: int) -> tuple[LogEntry, ...]:
        return self._post(shapes.ENTRIES, "/store/logs", {"event_id": event_id})

    def list(
        self,
        *,
        subscription: str,
        status: Status | None,
        type: str | None,  # noqa: A002  the public word for it
        tags: Sequence[str],
        limit: int,
        offset: int,
        after: int | str | None,
        within: timedelta | None = None,
    ) -> Page[Event]:
        if within is not None:
            raise needs_database("a search that ends in time")
        body = {"subscription": subscription, "status": status, "type": type, "tags": [*tags]}
        return self._page(shapes.EVENT_PAGE, "/store/events", body, limit=limit, offset=offset, after=after)

    def dead_letters(self, which: DeadFilter, *, limit: int, offset: int, after: int | str | None) -> Page[DeadLetter]:
        return self._page(shapes.LETTER_PAGE, "/store/dead", asdict(which), limit=limit, offset=offset, after=after)

    def _page(
        self,
        shape: TypeAdapter[Page[T]],
        path: str,
        body: Mapping[str, Any],
        *,
        limit: int,
        offset: int,
        after: int | str | None,
    ) -> Page[T]:
        """Return a page, put together from several if a server would not send as much at once."""

        def ask(count: int, offset: int, after: int | str | None) -> Page[T]:
            place = {"limit": min(count, shapes.MOST_LISTED), "offset": offset}
            return self._post(shape, path, {**body, **place, "after": None if after is None else str(after)})

        first = last = ask(limit, offset, after)
        items = list(first.items)
        while last.next is not None and len(items) < limit:
            last = ask(limit - len(items), 0, last.next)
            items += last.items
        return replace(first, items=tuple(items), limit=limit, next=last.next)

    def retry_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        return self._change_dead("/store/dead/retry", which, actor, progress)

    def purge_dead(self, which: DeadFilter, actor: str, progress: Callable[[int], None] | None = None) -> int:
        return self._change_dead("/store/dead/purge", which, actor, progress)

    def _change_dead(self, path: str, which: DeadFilter, actor: str, progress: Callable[[int], None] | None) -> int:
        count = self._count(path, {**asdict(which), "actor": actor}, long=True)
        if progress is not None:
            progress(count)
        return count

    def stats(self) -> Stats:
        return self._get(shapes.STATS, "/store/stats")

    def span(self, stream: Stream) -> Span:
        return self._get(shapes.SPAN, "/store/span", stream=stream.value)

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return self._get(shapes.CHECKPOINTS, "/store/checkpoints")

    def position(self, name: str) -> int:
        return self._post(FIGURE, "/store/position", {"name": name})["position"]

    def standing(self, name: str) -> Sequence[tuple[int, str | None, State]]:
        return self._post(shapes.STANDING, "/store/standing", {"name": name})

    # ── subscriptions, handlers, breakers ────────────────────────────────────────────────────────────────────────

    def subscriptions(self) -> tuple[Subscription, ...]:
        return self._get(LISTED, "/subscriptions")["subscriptions"]

    def create_subscription(
        self,
        name: str,
        patterns: Sequence[str],
        tags: Sequence[str],
        *,
        mode: Mode,
        lease: timedelta | None,
        retry: RetryPolicy | None,
        start: str | int,
    ) -> Subscription:
        body = {
            "name": name,
            "patterns": [*patterns],
            "tags": [*tags],
            "mode": mode,
            "lease": None if lease is None else lease.total_seconds(),
            "retry": None if retry is None else retry.to_dict(),
            "start": start,
        }
        return self._post(shapes.SUBSCRIPTION, "/subscriptions", body, again=False, long=True)

    def widen_subscription(self, name: str, pattern: str, tags: Sequence[str] = ()) -> bool:
        body = {"name": name, "pattern": pattern, "tags": [*tags]}
        return bool(self._count("/store/subscriptions/widen", body))

    def pause_subscription(self, name: str, paused: bool) -> None:  # noqa: FBT001  the state itself
        self._count("/store/subscriptions/pause", {"name": name, "paused": paused})

    def delete_subscription(self, name: str, actor: str) -> int:
        return self._count("/store/subscriptions/delete", {"name": name, "actor": actor}, long=True)

    def rewind(self, name: str, to: int | datetime | str, actor: str, *, dry_run: bool = False) -> Rewound:
        place = to.isoformat() if isinstance(to, datetime) else to
        body = {"name": name, "to": place, "actor": actor, "dry_run": dry_run}
        return self._post(shapes.REWOUND, "/store/subscriptions/rewind", body, again=dry_run, long=True)

    def register_handlers(self, handlers: Sequence[HandlerRecord]) -> None:
        for part in _parts(handlers, shapes.MOST_SETTLED):
            told = [asdict(each) for each in part]
            for each in told:
                del each["seen_at"], each["gone"]  # the server says when, and who lives
            self._post(FIGURE, "/store/handlers", {"handlers": told})

    def forget_handlers(self, owner: str, ids: Sequence[str] | None = None) -> None:
        body = {"owner": owner, "ids": None if ids is None else [*ids]}
        self._post(FIGURE, "/store/handlers/forget", body)

    def handlers(self) -> tuple[HandlerRecord, ...]:
        return self._get(shapes.HANDLERS, "/store/handlers")

    def breaker(self, name: str) -> BreakerState:
        return self._post(shapes.BREAKER, "/store/breaker", {"name": name})

    def change_breaker(self, name: str, change: Callable[[BreakerState], BreakerState | None]) -> BreakerState:
        state = self.breaker(name)
        while (wanted := change(state)) is not None:
            body = {"name": name, "found": asdict(state), "wanted": asdict(wanted)}
            changed, state = self._post(shapes.CHANGED, "/store/breaker/change", body, again=False)
            if changed:  # else another came first
                return state
        return state

    # ── being woken ──────────────────────────────────────────────────────────────────────────────────────────────

    def watch(self) -> Watch:
        return self._waker.watch()

    def _rings(self, since: int) -> int:
        asked = {"since": since, "wait": WAKE_WAIT}
        return self._read(FIGURE, self._link.get("/wake", asked, seconds=WAKE_WAIT + 5))["rings"]


def _json(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise InvalidRequest(f"this cannot be sent as JSON: {error}") from None


def _news(draft: Draft) -> dict[str, Any]:
    """Return a draft's fields; always with its uid, so that the server keeps one event however often it is asked."""
    fields: dict[str, Any] = {
        "uid": draft.uid,
        "type": draft.type,
        "payload": orjson.Fragment(draft.payload),
        "metadata": orjson.Fragment(draft.metadata),
        "tags": draft.tags,
        "key": draft.key,
        "title": draft.title,
        "description": draft.description,
        "delay": None if draft.delay is None else draft.delay.total_seconds(),
        "at": None if draft.at is None else draft.at.isoformat(),
        "priority": draft.priority,
        "max_retries": draft.max_retries,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _interests(interests: Iterable[Interest]) -> list[dict[str, Any]]:
    return [{"pattern": each.pattern, "tags": sorted(each.tags)} for each in interests]


def _told(settlement: Settlement) -> dict[str, Any]:
    return {
        **settlement.lease._asdict(),
        "worker_id": settlement.worker_id,
        "status_code": settlement.status_code,
        "execution_time_ms": settlement.execution_time_ms,
        **_ended(settlement.outcome),
    }


def _ended(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Done():
            return {"outcome": "done"}
        case DoneWithErrors(errors):
            return {"outcome": "done_with_errors", "errors": [_error(each) for each in errors]}
        case Retry(after, error):
            return {"outcome": "retry", "errors": [_error(error)], "after": after.total_seconds()}
        case Dead(error):
            return {"outcome": "dead", "errors": [_error(error)]}


def _error(error: AttemptError) -> dict[str, Any]:
    return asdict(error)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _batches(texts: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield what fits into one request: so many, and so many bytes, but one at least."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        if batch and (len(batch) >= shapes.MOST_SETTLED or size + len(text) > CHUNK_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
