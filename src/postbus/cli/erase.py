"""`postbus erase`: personal data, blanked in the log, the audit log and the lake."""

from contextlib import ExitStack
from typing import Annotated, Final

import typer

from postbus.cli.console import Output, confirm, emit, table
from postbus.cli.dlq import ACTOR
from postbus.cli.options import DryRun, Format, Url, Yes, existing_log
from postbus.cli.pipeline import MaybeLake, lake_of, spark_for
from postbus.config import Settings
from postbus.errors import InvalidRequest
from postbus.model import Stream

__all__ = ["EXAMPLES", "erase"]

EXAMPLES: Final = "Example: postbus erase --key customer-8812 --lake lake"


def erase(
    *,
    uid: Annotated[str | None, typer.Option(help="The event with this uid.")] = None,
    key: Annotated[str | None, typer.Option(help="Every event with this key: a customer's, say.")] = None,
    lake: MaybeLake = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Blank what events say of somebody: payload, title, description, metadata, and errors that may quote them.

    Id, uid, type, tags, key and times stay, and an audit row tells who erased when. What is still to be done for these
    events is discarded. With --lake, the lake's files are rewritten too, also for events that were archived; without,
    the lake keeps them. Delta or Iceberg tables in the lake's folder must be removed first; the next ingest builds them
    anew. Backups are not touched. Run again, it finishes what was interrupted.
    """
    if (uid is None) == (key is None):
        raise InvalidRequest("say whose: --uid or --key")
    with ExitStack() as stack:
        store = stack.enter_context(existing_log(url, "erasing"))
        place = None if lake is None else lake_of(lake)
        if place is not None:
            place.require_erasable(store)
        if not dry_run:
            confirm(f"Erase every event with {'uid' if uid is not None else 'key'} {uid or key!r} for good?", yes=yes)
        spark = None if place is None else stack.enter_context(spark_for(Settings.load(url=url).url, None))
        check = None
        if place is not None and not dry_run:
            check = stack.enter_context(store.hold(f"lake {place.url}"))
            place.tidy(store)
        archived = place.find(spark, uid=uid, key=key) if place is not None and spark is not None else []
        if dry_run:
            live = store.erasable(uid=uid, key=key, ids=archived)
            rows = [{"where": "live", "events": live.events, "audit_rows": live.audit}]
            if place is not None and spark is not None:
                kept = place.erasable(spark, live.ids)
                rows.append({"where": "lake", "events": kept[Stream.EVENTS], "audit_rows": kept[Stream.AUDIT]})
            heading = "WHERE  EVENTS TO BLANK  AUDIT ROWS TO BLANK"
            emit(output, rows, lambda: [table(heading, [tuple(row.values()) for row in rows])])
            return
        rewritten = 0
        done = store.erase(uid=uid, key=key, ids=archived, actor=ACTOR)
        if place is not None and spark is not None:
            rewritten = place.erase(spark, sorted({*done.ids, *archived}), check=check)
    told = {"events": len({*done.ids, *archived}), "changed": done.changed, "segments_rewritten": rewritten}
    emit(output, told, lambda: [table("EVENTS  CHANGED  SEGMENTS REWRITTEN", [tuple(told.values())])])
