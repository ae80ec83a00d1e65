"""`postbus import`: an existing table's rows become events, in the order they were made."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from time import monotonic
from typing import Annotated, Any, Final, cast

import typer

from postbus.cli.console import Output, emit, progress, say, table
from postbus.cli.options import DryRun, Format, Url, existing_store
from postbus.config import Settings
from postbus.errors import InvalidEventError, InvalidRequest, NotFound, PostbusError, SchemaMismatch
from postbus.model import Json
from postbus.payload import Draft, draft, parse
from postbus.store import Queue, open_source, open_store
from postbus.store.source import Columns, SourceRow
from postbus.telling import many

__all__ = ["EXAMPLES", "import_table"]

EXAMPLES: Final = """\
Example: postbus import orders --type =order.placed --payload body --dry-run

Example: postbus import shop.audit --type kind --payload data --created-at at --key customer --tags labels

Example: postbus import events --type type --payload payload --from sqlite:///old.db"""
BATCH: Final = 1_000
MOST_TOLD: Final = 1_000
FAILED: Final = 1
Fields = dict[str, Any]


def import_table(
    source_table: Annotated[str, typer.Argument(metavar="TABLE", help="A table or view: orders, shop.orders.")],
    *,
    event_type: Annotated[
        str, typer.Option("--type", metavar="COLUMN|=TYPE", help="The column of the type, or one type for all.")
    ],
    payload: Annotated[str, typer.Option(metavar="COLUMN", help="The column of the payload: JSON, or text of it.")],
    identity: Annotated[str, typer.Option("--id", metavar="COLUMN", help="The column that tells rows apart.")] = "id",
    created_at: Annotated[str, typer.Option(metavar="COLUMN", help="The column they are ordered by.")] = "created_at",
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column of what they are about.")] = None,
    tags: Annotated[str | None, typer.Option(metavar="COLUMN", help="An array, a JSON list, or words,so.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="Where the table is, if not in the bus's own database.")
    ] = None,
    dry_run: DryRun = False,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Publish an event for each row of a table that exists already, by (created_at, id).

    They are new events like any others: every subscription that wants their type gets them, and its handlers run.
    Delete or narrow subscriptions that should not see old rows first; `default` wants everything.

    Each has the uid import:TABLE:ID, so that a second run, or one after a crash, goes on without copies; for 7 days,
    which is how long a uid is remembered. The table's name and the row's time are kept in the metadata.

    A row that makes no event (not JSON, no type …) is named and left out, and the exit code is 1; the others are
    stored. --dry-run checks and counts every row, and stores nothing.
    """
    literal = event_type[1:] if event_type.startswith("=") else None
    columns = Columns(identity, created_at, payload, None if literal is not None else event_type, key, tags)
    run = _Run(source_table, literal)
    with open_source(source or Settings.load(url=url).url, source_table, columns) as found:
        # Before the bus is opened: a table or column that is not there must not even make a file.
        total, rows = found.count(), found.rows()
        first = list(islice(rows, BATCH))
        with _looker(url) if dry_run else _publisher(url) as importer:
            _go_through(run, chain(first, rows), total, importer)
    _tell(run, output, dry_run=dry_run)
    if run.bad:
        raise typer.Exit(FAILED)


@dataclass
class _Run:
    """What is imported, and what has become of it so far."""

    table: str
    literal: str | None
    """The type of every event, unless rows bring their own."""
    rows: int = 0
    imported: int = 0
    known: int = 0
    bad: int = 0
    errors: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    first_id: int | None = None
    last_id: int | None = None
    began: float = field(default_factory=monotonic)

    def refuse(self, identity: object, error: PostbusError) -> None:
        """Take note of a row that makes no event."""
        self.bad += 1
        if len(self.errors) < MOST_TOLD:
            self.errors.append({"id": str(identity), "error": str(error)})
            say(f"row {identity}: {error}", style="red")

    def __str__(self) -> str:
        """Say what is stored."""
        parts = [f"{many(self.imported, 'row')} imported", f"{self.known:,} known already", f"{self.bad:,} bad"]
        return ", ".join(parts)


@contextmanager
def _publisher(url: str | None) -> Generator["_Importer"]:
    settings = Settings.load(url=url)
    store = open_store(
        settings.url, auto_migrate=settings.auto_migrate, direct_url=settings.direct_url, listen=settings.listen
    )
    try:
        yield _Importer(store)
    finally:
        store.close()


@contextmanager
def _looker(url: str | None) -> Generator["_Importer"]:
    """Give what only looks: at the bus, if there is one."""
    with ExitStack() as stack:
        store = None
        with suppress(NotFound, SchemaMismatch):
            store = stack.enter_context(existing_store(url))
        yield _Importer(store, dry=True)


@dataclass(frozen=True)
class _Importer:
    """Stores batches of rows; a dry one only looks what it would store."""

    store: Queue | None
    dry: bool = False

    def take(self, run: _Run, rows: Sequence[SourceRow]) -> None:
        """Publish what is new of a batch, and take note of all of it."""
        drafts = list(_drafts(run, rows))
        known = self.store.known([each.uid for each in drafts]) if self.store is not None else set[str]()
        fresh = [each for each in drafts if each.uid not in known]
        run.known += len(drafts) - len(fresh)
        if self.dry:
            run.imported += len(fresh)
        elif fresh and self.store is not None:
            _publish(self.store, run, fresh)
        run.rows += len(rows)


def _publish(store: Queue, run: _Run, drafts: list[Draft]) -> None:
    """Publish a batch as a whole; if one of its events is refused, the others one by one."""
    try:
        ids = [event.id for event in store.publish(drafts)]
    except InvalidRequest as error:
        if len(drafts) == 1:
            run.refuse(drafts[0].uid.removeprefix(f"import:{run.table}:"), error)
            return
        for each in drafts:
            _publish(store, run, [each])
        return
    run.imported += len(set(ids))
    run.first_id = run.first_id or min(ids)
    run.last_id = max(ids)


def _go_through(run: _Run, rows: Iterator[SourceRow], total: int, importer: _Importer) -> None:
    try:
        with progress(f"importing {run.table}", total) as show:
            while batch := list(islice(rows, BATCH)):
                importer.take(run, batch)
                show(run.rows)
    except KeyboardInterrupt:
        say(f"interrupted: {run}. Run it again to go on.")
        raise
    except PostbusError as error:
        raise type(error)(f"{error}. {run}. Run it again to go on.") from error


def _drafts(run: _Run, rows: Sequence[SourceRow]) -> Iterator[Draft]:
    """Yield the events that rows make, each fit to be published."""
    for row in rows:
        try:
            made = draft(_event(run, row))
        except InvalidRequest as error:
            run.refuse(row.id, error)
        else:
            yield made


def _event(run: _Run, row: SourceRow) -> Fields:
    if row.id is None:
        raise InvalidEventError("the row has no id")
    told = {"imported_from": run.table}
    if row.created_at is not None:
        told["imported_created_at"] = str(row.created_at)
    return {
        "type": run.literal if run.literal is not None else row.type,
        "payload": parse(row.payload) if isinstance(row.payload, str | bytes) else row.payload,
        "key": None if row.key is None else str(row.key),
        "tags": _tags(row.tags),
        "metadata": told,
        "uid": f"import:{run.table}:{row.id}",
    }


def _tags(given: Json) -> list[Any]:
    """Return the tags that a column tells as a list, a JSON list, or words with commas between them."""
    if isinstance(given, str):
        if given[:1] in {"[", '"'}:
            return _tags(parse(given))
        return [word.strip() for word in given.split(",") if word.strip()]
    if given is None or isinstance(given, list):
        return cast("list[Any]", given or [])
    raise InvalidEventError("tags must be a list, or words with commas between them")


def _tell(run: _Run, output: Output, *, dry_run: bool) -> None:
    done = {"rows": run.rows, "imported": run.imported, "known": run.known, "bad": run.bad}
    done |= {"first_id": run.first_id, "last_id": run.last_id}
    row = tuple(str(each) if name.endswith("id") and each else each for name, each in done.items())
    emit(
        output,
        {**done, "errors": run.errors, "dry_run": dry_run},
        lambda: [table("ROWS  IMPORTED  KNOWN  BAD  FIRST ID  LAST ID", [row])],
    )
    if output is Output.TABLE:
        seconds = max(monotonic() - run.began, 0.001)
        told = "only looked, nothing was stored" if dry_run else f"{seconds:,.1f} s, {run.rows / seconds:,.0f} rows/s"
        say(told, style="dim")
    if run.bad:
        say(f"{many(run.bad, 'row')} made no event; mend them and run it again: the others are not stored twice")
