"""What processes share beside events: handlers, breakers, tokens, and the uids that producers supplied."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import orjson

from postbus.breaker import BreakerState
from postbus.clock import from_micros, to_micros
from postbus.errors import NotFound
from postbus.model import HandlerRecord, Token
from postbus.store.records import moment, split_tags
from postbus.store.session import Session, bump

DEDUP_WINDOW: Final = timedelta(days=7)
TIDY_UIDS: Final = 100_000
SPARE_KINDS: Final = 10_000


def register_handlers(session: Session, handlers: Sequence[HandlerRecord]) -> None:
    """Store, or see again, what a process handles."""
    rows = [
        (each.id, each.name, each.subscription, each.pattern, ",".join(each.tags), each.worker_id, each.owner,
         to_micros(each.seen_at))
        for each in handlers
    ]  # fmt: skip
    session.db.many("see_handler", rows)


def forget_handlers(session: Session, owner: str, ids: Sequence[str] | None = None) -> None:
    """Remove a process's handlers, or the named ones of them."""
    if ids is None:
        session.db.run("forget_owner", (owner,))
    else:
        session.db.many("forget_handler", [(owner, each) for each in ids])


def handlers(session: Session, is_gone: Callable[[str, timedelta], bool]) -> tuple[HandlerRecord, ...]:
    """Return what processes have registered; `is_gone` judges a process by its nonce and the age of its last report."""
    now, rows = from_micros(session.now), session.db.run("handlers")
    gone = {owner: is_gone(owner, now - from_micros(seen)) for *_, owner, seen in rows}
    return tuple(
        HandlerRecord(
            identity, name, subscription, pattern, split_tags(tags), worker, owner, from_micros(seen), gone[owner]
        )
        for identity, name, subscription, pattern, tags, worker, owner, seen in rows
    )


def breaker(session: Session, name: str) -> BreakerState:
    """Return the state of a breaker; one never heard of is closed."""
    return _state(session, "breaker", name)


def change_breaker(
    session: Session, name: str, change: Callable[[BreakerState], BreakerState | None]
) -> tuple[BreakerState, BreakerState]:
    """Move a breaker to the state that `change` returns (None: leave it); return the states before and after."""
    session.db.run("add_breaker", (name,))
    state = _state(session, "breaker_held", name)
    changed = change(state)
    if changed is None or changed == state:
        return state, state
    opened, probe = changed.opened_at, changed.probe_until
    session.db.run("set_breaker", (changed.failures, opened and to_micros(opened), probe and to_micros(probe), name))
    return state, changed


def _state(session: Session, query: str, name: str) -> BreakerState:
    for failures, opened_at, probe_until in session.db.run(query, (name,)):
        return BreakerState(failures, moment(opened_at), moment(probe_until))
    return BreakerState()


def add_token(session: Session, token: Token) -> None:
    """Keep a token for the HTTP API."""
    scopes = orjson.dumps(token.scopes).decode()
    ends = None if token.expires_at is None else to_micros(token.expires_at)
    session.db.run("add_token", (token.id, token.name, token.digest, scopes, to_micros(token.created_at), ends))


def tokens(session: Session) -> tuple[Token, ...]:
    """Return all tokens, oldest first."""
    return tuple(
        Token(identity, name, digest, tuple(orjson.loads(scopes)), from_micros(made), moment(ends), moment(end))
        for identity, name, digest, scopes, made, ends, end in session.db.run("tokens")
    )


def revoke_token(session: Session, identity: str) -> None:
    """Let a token be used no more; raise NotFound."""
    if not session.db.count("revoke_token", (session.now, identity)):
        raise NotFound(f"there is no token {identity!r}")


def known_uids(session: Session, uids: Sequence[str]) -> set[str]:
    """Return which of these uids stand for an event already."""
    return {row[0] for row in session.db.run("known_uids", (orjson.dumps(uids).decode(),))}


def drop_old(session: Session) -> int:
    """Forget some uids that are old enough, and the kinds that no delivery has once there are too many."""
    before = session.now - DEDUP_WINDOW // timedelta(microseconds=1)
    removed = session.db.count("drop_old_uids", (before, TIDY_UIDS))
    if session.db.value("count_kinds") > SPARE_KINDS and session.db.run("lock_kinds"):
        removed += session.db.count("drop_unused_kinds")
        bump(session)
    return removed
