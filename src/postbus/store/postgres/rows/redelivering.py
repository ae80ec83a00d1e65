"""Delivering events of the log again, to one subscription; inside a transaction."""

from collections.abc import Sequence
from typing import Final

from postbus.errors import InvalidRequest
from postbus.model import Action, Mode, Status
from postbus.store.postgres.rows.session import Session
from postbus.store.records import split_tags

__all__ = ["redeliver"]

_NOTHING: Final = (None, None, None, None)


def redeliver(session: Session, subscription: str, ids: Sequence[int], actor: str) -> int:
    """Make events due in a subscription that has no delivery of them; return how many. See the contract."""
    db, catalog, now = session
    if catalog.subscription(subscription).mode is not Mode.QUEUE:
        raise InvalidRequest(f"{subscription!r} is no queue: an ordered subscription is rewound instead")
    events = db.many("ways_of", [(each,) for each in ids])
    gone = sorted(set(ids) - {row[0] for row in events})
    if gone:
        raise InvalidRequest(f"{len(gone):,} of these events were pruned, {gone[0]:,} first: publish them anew instead")
    rows = [
        (
            event_id,
            subscription,
            catalog.file_under(db, subscription, priority, kind, split_tags(tags)),
            now,
            created,
            most,
        )
        for event_id, kind, tags, priority, most, created in events
    ]
    made = [row[0] for row in db.many("redeliver", rows)]
    told = (subscription, Action.REPLAYED, now, Status.PENDING, 0, None, actor, *_NOTHING)
    db.many("log", [(event_id, *told) for event_id in made])
    return len(made)
