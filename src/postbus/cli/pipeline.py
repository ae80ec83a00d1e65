"""`postbus pipeline`: the log in a lake, reports, archive and replay, on Spark."""

import re
import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from postbus.cli.console import Output, confirm, doing, emit, progress, require_answer, say, table
from postbus.cli.dlq import ACTOR
from postbus.cli.options import DryRun, Format, Tags, Url, Yes, existing_log, moment_before, parse_seconds
from postbus.config import Settings
from postbus.errors import InvalidRequest, NotFound, SchemaMismatch
from postbus.model import Mode, Stream
from postbus.store import Log, exists, open_store, shown
from postbus.telling import many

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from postbus.spark.lake import Lake, Progress

__all__ = ["MaybeLake", "group", "lake_of", "spark_for"]

group = typer.Typer(
    name="pipeline",
    no_args_is_help=True,
    epilog="Example: postbus pipeline ingest --lake lake && postbus pipeline report --lake lake",
)

LakeFolder = Annotated[str, typer.Option("--lake", metavar="DIR", help="The lake's folder: lake, s3://bucket/lake.")]
MaybeLake = Annotated[
    str | None, typer.Option("--lake", metavar="DIR", help="The lake, for what is not live any more.")
]
Master = Annotated[
    str | None,
    typer.Option(
        envvar="SPARK_MASTER", help="local[4], spark://host:7077, k8s://…, yarn. Else all cores of this host."
    ),
]
Since = Annotated[str | None, typer.Option(metavar="TIME", help="From this moment on: 2026-05-01T00:00:00Z, or 7d.")]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Until this moment.")]


class Kind(StrEnum):
    """How a report is given."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"


class Into(StrEnum):
    """Where a replay goes."""

    BUS = "bus"
    SUBSCRIPTION = "subscription"
    PARQUET = "parquet"


@group.callback()
def pipeline() -> None:
    """Keep the log in a lake, report on it, archive it and replay it: on Spark.

    Needs postbus with its extra `spark`, and Java 17 or newer, which the extra `jdk` brings.
    """


@contextmanager
def _needing_spark() -> Generator[None]:
    """Say what to install where an import shows that Spark is not."""
    try:
        yield
    except ImportError as error:
        raise InvalidRequest(f"the pipeline needs Spark: pip install 'postbus[spark]' ({error})") from None


@contextmanager
def spark_for(url: str, master: str | None) -> Generator["SparkSession"]:
    """Start Spark, saying so, since it takes a while, and stop it again; or use the session that there is."""
    with _needing_spark():
        from pyspark.sql import SparkSession  # noqa: PLC0415  Spark only where it is used

        from postbus.spark.launch import quiet_java, refuse_remote_file, session  # noqa: PLC0415
    refuse_remote_file(url, master or "local[*]")
    if SparkSession.getActiveSession() is not None:
        yield session(master)
        return
    with _needing_spark(), doing("Starting Spark …"):
        quiet_java()
        spark = session(master)
    try:
        yield spark
    finally:
        spark.stop()


def lake_of(path: str) -> "Lake":
    """Return the lake in a folder."""
    with _needing_spark():
        from postbus.spark.lake import Lake  # noqa: PLC0415

    return Lake(path)


def _url(url: str | None) -> str:
    return Settings.load(url=url).url


def _moment(text: str | None, now: datetime) -> datetime | None:
    """Read a moment, or a length of time before now."""
    return None if text is None else moment_before(text, now)


@group.command(
    epilog="Example: postbus pipeline ingest --lake s3://bucket/lake --continuous 30s --master spark://host:7077"
)
def ingest(
    *,
    lake: LakeFolder,
    continuous: Annotated[
        str | None, typer.Option(metavar="TIME", help="Go on for ever, looking again after so long: 30s.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows a segment has at most.")] = 250_000,
    consumer: Annotated[str, typer.Option(help="The subscription that shows how far the lake has come.")] = "lake",
    format_: Annotated[
        str, typer.Option("--format", help="parquet, or delta where your Spark has its jars.")
    ] = "parquet",
    master: Master = None,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Write what is new in the log, events and audit rows, to Parquet files by day.

    Each row is there once, whatever is killed when: run it again, and it goes on where the lake's manifest ends.
    Read the lake through its manifest: `Lake("lake").read(spark)`, or `duckdb.read_parquet(Lake("lake").files())`.
    """
    settings = Settings.load(url=url)
    where = settings.url
    every = None if continuous is None else parse_seconds(continuous)
    with existing_log(url, "the pipeline") as store:
        place = lake_of(lake)
        from postbus.spark.lake import ingest as run  # noqa: PLC0415
        from postbus.spark.lake import is_current  # noqa: PLC0415

        if every is None and format_ == "parquet" and is_current(store, place, consumer):
            say("nothing new", style="dim")
            written = dict.fromkeys(Stream, 0)
        else:
            with spark_for(where, master) as spark:
                if format_ != "parquet":
                    place.require_format(spark, format_)
                heads = {stream: store.span(stream).head for stream in Stream}
                left = sum(heads[stream] - (place.manifests[stream].through or 0) for stream in Stream)
                with _watching(every, left) as watch:
                    written = run(
                        spark, where, place, direct_url=settings.direct_url, continuous=every, rows=rows,
                        consumer=consumer, watch=watch,
                    )  # fmt: skip
                if format_ != "parquet":
                    with store.hold(f"lake {place.url}"):
                        place.mirror(spark, format_)
    data = {stream.value: written[stream] for stream in Stream}
    emit(output, data | {"lake": place.url}, lambda: [table("STREAM  ROWS WRITTEN", data.items())])


@contextmanager
def _watching(every: float | None, left: int) -> Generator[Callable[["Progress"], None]]:
    """Show a bar, or a line for each segment of a run without end."""
    done: dict[Stream, Progress] = {}
    with progress("Ingesting", left if every is None else None) as show:

        def watch(told: "Progress") -> None:
            done[told.stream] = told
            show(sum(each.rows for each in done.values()))
            if every is not None:
                say(
                    f"{told.stream}: {told.rows:,} rows written, at {told.position:,}, {told.lag:,} behind", style="dim"
                )

        yield watch


@group.command(epilog="Example: postbus pipeline compact --lake lake")
def compact(
    *,
    lake: LakeFolder,
    keep: Annotated[str, typer.Option(metavar="TIME", help="How long replaced files stay for their readers.")] = "24h",
    master: Master = None,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Join the small segments of days that are over into large ones, and remove what was replaced long ago."""
    where, grace = _url(url), timedelta(seconds=parse_seconds(keep))
    with existing_log(url, "the pipeline") as store:
        place = lake_of(lake)
        if any(place.joinable(stream) for stream in Stream):
            with spark_for(where, master) as spark, store.hold(f"lake {place.url}") as check:
                found = place.compact(spark, grace=grace, check=check)
        else:
            say("nothing to join", style="dim")
            with store.hold(f"lake {place.url}"):
                place.sweep(grace)
            found = {stream: (count, count) for stream, count in place.segments().items()}
    rows = [{"stream": stream.value, "before": before, "after": after} for stream, (before, after) in found.items()]
    emit(output, rows, lambda: [table("STREAM  SEGMENTS BEFORE  AFTER", [tuple(row.values()) for row in rows])])


@group.command(epilog="Example: postbus pipeline report --lake lake --since 7d --output html --to report.html")
def report(
    *,
    lake: MaybeLake = None,
    since: Since = None,
    until: Until = None,
    output: Annotated[Kind, typer.Option("--output", "-o", help="How to give it.")] = Kind.TABLE,
    to: Annotated[Path | None, typer.Option(help="Write it to a file.")] = None,
    master: Master = None,
    url: Url = None,
) -> None:
    """Tell what the bus did: throughput, depth, waiting and run times, failures, errors, stale workers, busiest hours.

    Reads the live tables, and the lake for what they do not hold any more.
    """
    where = _url(url)
    if output is Kind.TABLE and to is not None:
        raise InvalidRequest("a table goes to the terminal: --output html or json for a file")
    with existing_log(url, "the pipeline") as store:
        with _needing_spark():
            from postbus.spark import rendering  # noqa: PLC0415
            from postbus.spark import report as reporting  # noqa: PLC0415
            from postbus.spark.replay import reach, union  # noqa: PLC0415

        now = store.now()
        begin, end = _moment(since, now), _moment(until, now)
        place = None if lake is None else lake_of(lake)
        for stream in Stream:
            reach(store, place, stream)
        with spark_for(where, master) as spark, doing("Reading the log …"):
            audit, events = (union(spark, where, store, place, stream) for stream in (Stream.AUDIT, Stream.EVENTS))
            standing = spark.read.format("postbus").options(url=where, stream="deliveries").load()
            made = reporting.make(audit, events, standing, since=begin, until=end, now=now)
    match output:
        case Kind.TABLE:
            emit(Output.TABLE, None, lambda: [rendering.render_table(made)])
        case Kind.JSON:
            _give(rendering.to_json(made), to)
        case Kind.HTML:
            _give(rendering.render_html(made), to)


def _give(text: str, to: Path | None) -> None:
    if to is None:
        typer.echo(text)
    else:
        to.write_text(text, encoding="utf-8")
        say(f"written: {to}", style="dim")


@group.command(epilog="Example: postbus pipeline archive --lake lake --older-than 30d --dry-run")
def archive(
    *,
    lake: LakeFolder,
    older_than: Annotated[str, typer.Option(metavar="TIME", help="Leave what is younger: 30d, 12h.")],
    max_hold: Annotated[
        str, typer.Option(metavar="TIME", help="How long a subscription that stands still holds the others up.")
    ] = "7d",
    dry_run: DryRun = False,
    yes: Yes = False,
    master: Master = None,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Verify that the lake holds what is old, then remove it from the live tables.

    What is unfinished or dead stays, row by row. What a follower or a Spark stream has not passed stays, unless it has
    stood still for --max-hold: before one is cut off so, it asks. The lake's files are read again and compared with the
    table first; where they differ, nothing is removed.
    """
    where = _url(url)
    age, hold = (timedelta(seconds=parse_seconds(each)) for each in (older_than, max_hold))
    with _needing_spark():
        from postbus.spark import archive as archiving  # noqa: PLC0415

    with existing_log(url, "the pipeline") as store:
        place = lake_of(lake)
        found = archiving.bounds(store, place, older_than=age, max_hold=hold)
        for bound in found:
            for each in bound.past:
                verdict = "cut off" if each.position < bound.pruned else "to be cut off"
                told = f"{each.subscription!r} stands at {each.position:,} since {each.moved_at:%F %T}"
                say(f"{told}: {verdict}", style="yellow")
        # Who was cut off before is asked about no more, or every night's run would want an answer from then on.
        lost = [each.subscription for bound in found for each in bound.past if each.position >= bound.pruned]
        if lost and not dry_run:
            confirm(f"Go on, and cut off {', '.join(lost)}?", yes=yes)
        would = {bound.stream: store.prunable(bound.stream, bound.through) for bound in found}
        removed = dict.fromkeys(Stream, 0)
        if not dry_run and any(bound.rows or would[bound.stream] for bound in found):
            with spark_for(where, master) as spark:
                for bound in found:
                    removed[bound.stream] = _prune(spark, where, store, place, bound)
    rows = [
        {
            "stream": bound.stream.value,
            "pruned_through": bound.pruned if dry_run else max(bound.pruned, bound.through),
            "removed": None if dry_run else removed[bound.stream],
            "would_go_through": bound.through if dry_run else None,
            "would_remove": would[bound.stream] if dry_run else None,
            "what_follows_is": bound.why,
        }
        for bound in found
    ]
    names = ("would_go_through", "would_remove") if dry_run else ("removed",)
    columns = ["stream", "pruned_through", *names, "what_follows_is"]
    heading = "  ".join(columns).replace("_", " ").upper()
    emit(output, rows, lambda: [table(heading, [[row[name] for name in columns] for row in rows])])


def _prune(spark: "SparkSession", url: str, store: Log, lake: "Lake", bound: Any) -> int:
    from postbus.spark.archive import archive as run  # noqa: PLC0415

    with progress(f"Pruning {bound.stream}", bound.through) as show:
        return run(spark, url, store, lake, bound, watch=lambda step: show(step.reached))


@group.command(
    epilog="Example: postbus pipeline replay --lake lake --from 2026-05-01T00:00:00Z --type 'order.*' --dry-run"
)
def replay(
    *,
    first: Annotated[
        str | None, typer.Option("--from", metavar="ID|TIME", help="The first id, or from this moment.")
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="ID|TIME", help="The last id, or until this moment.")
    ] = None,
    types: Annotated[
        list[str] | None, typer.Option("--type", help="Only this type; * is any; may be given again.")
    ] = None,
    tags: Tags = None,
    into: Annotated[Into, typer.Option(help="Where to: published anew, one subscription again, or files.")] = Into.BUS,
    target: Annotated[
        str | None,
        typer.Option(help="The other bus's URL, the subscription's name, or the folder.", show_default=False),
    ] = None,
    keep_uids: Annotated[
        bool, typer.Option("--keep-uids", help="Into an empty bus: the events keep their uids.")
    ] = False,
    rate: Annotated[float | None, typer.Option(min=0.001, help="At most so many events a second.")] = None,
    name: Annotated[str | None, typer.Option(help="Go on with the replay of this name after a crash.")] = None,
    lake: MaybeLake = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    master: Master = None,
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Take a range of history, from lake and live table as one, and bring it back.

    Into a bus they are new events that every subscription gets, told by `replay_of` in their metadata; with
    --keep-uids, for another bus that is empty, they keep their uids. Into a subscription, it alone gets the events
    again. Into parquet, they are written to files.
    """
    where = _url(url)
    if rate is not None and into is not Into.BUS:
        raise InvalidRequest("--rate is for --into bus: nothing else is published")
    if keep_uids and (into is not Into.BUS or target is None):
        raise InvalidRequest(
            "--keep-uids is for another, empty bus, --target: in this one they stand for the first events"
        )
    if name is not None and not re.fullmatch(r"[\w.-]{1,64}", name):
        raise InvalidRequest("--name is a word of up to 64 letters, digits, dots and dashes")
    with existing_log(url, "the pipeline") as store, ExitStack() as stack:
        with _needing_spark():
            from postbus.spark import replay as replaying  # noqa: PLC0415

        now, place = store.now(), None if lake is None else lake_of(lake)
        wanted = replaying.Wanted(_place(first, now), _place(last, now), tuple(types or ("*",)), tuple(tags or ()))
        replaying.reach(store, place, Stream.EVENTS, first=wanted.first_id)
        goal = _goal(store, into, target)
        if not dry_run:
            require_answer(f"Replay into {goal}?", yes=yes)
        spark = stack.enter_context(spark_for(where, master))
        frame = replaying.history(spark, where, store, place, wanted)
        found = replaying.preview(frame)
        columns = "TYPE  EVENTS  FIRST ID  LAST ID  FIRST PUBLISHED  LAST PUBLISHED"
        emit(output, found, lambda: [table(columns, [tuple(row.values()) for row in found])])
        total = sum(row["events"] for row in found)
        if dry_run or not total:
            say(f"{many(total, 'event')} would be replayed into {goal}", style="dim")
            return
        confirm(f"Replay {many(total, 'event')} into {goal}?", yes=yes)
        run = _Replay(store, name or uuid4().hex[:12], target, keep_uids=keep_uids, rate=rate)
        with progress("Replaying", total) as show:
            count = run.go(frame, into, show)
    say(f"{many(count, 'event')} replayed into {goal}" + (f" (--name {run.name})" if into is Into.BUS else ""))


def _goal(store: Log, into: Into, target: str | None) -> str:
    """Return in words where a replay goes, having looked, and made nothing; raise what tells why it cannot go there."""
    match into, target:
        case Into.BUS, None:
            return store.url
        case Into.BUS, str():
            _require_bus(target)
            return shown(target)
        case _, None:
            raise InvalidRequest(f"--into {into} needs --target: the {'folder' if into is Into.PARQUET else 'name'}")
        case Into.SUBSCRIPTION, str():
            _require_queue(store, target)
        case Into.PARQUET, str():
            _require_new(target)
    return f"{into} {target}"


def _require_bus(url: str) -> None:
    if exists(url):
        with suppress(SchemaMismatch):  # it is migrated when the events come
            open_store(url, auto_migrate=False, listen=False).close()


def _require_queue(store: Log, name: str) -> None:
    modes = {each.name: each.mode for each in store.subscriptions()}
    if name not in modes:
        raise NotFound(f"there is no subscription {name!r}")
    if modes[name] is not Mode.QUEUE:
        raise InvalidRequest(f"{name!r} is no queue: an ordered subscription is rewound instead")


def _require_new(folder: str) -> None:
    from postbus.spark.manifest import Folder  # noqa: PLC0415

    if Folder(folder).is_there:
        raise InvalidRequest(f"there is a {folder} already: choose another folder")


def _place(text: str | None, now: datetime) -> int | datetime | None:
    return int(text) if text is not None and text.isdigit() else _moment(text, now)


class _Replay:
    """A replay on its way."""

    def __init__(self, store: Log, name: str, target: str | None, *, keep_uids: bool, rate: float | None) -> None:
        self.name = name
        self._store, self._target, self._keep, self._rate = store, target, keep_uids, rate

    def go(self, frame: Any, into: Into, show: Callable[[int], None]) -> int:
        """Bring the events where they are wanted; return how many."""
        from postbus.spark import replay as replaying  # noqa: PLC0415
        from postbus.spark.manifest import Folder  # noqa: PLC0415

        if into is Into.PARQUET:
            frame.write.mode("errorifexists").parquet(Folder(self._target or "").url)
            return frame.count()
        if into is Into.SUBSCRIPTION:
            return replaying.replay_into_subscription(frame, self._store, self._target or "", ACTOR, show)
        if self._target is None:
            return replaying.replay_into_bus(frame, self._store, self.name, rate=self._rate, watch=show)
        other = open_store(self._target, listen=False)
        try:
            return replaying.replay_into_bus(frame, other, self.name, keep_uids=self._keep, rate=self._rate, watch=show)
        finally:
            other.close()


@group.command(
    epilog="Example: postbus pipeline run --lake s3://bucket/lake --older-than 30d --port 9108 --master k8s://…"
)
def run(
    *,
    lake: LakeFolder,
    every: Annotated[str, typer.Option(metavar="TIME", help="How long to wait between two looks at the log.")] = "30s",
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Archive what is older: 30d. Without it, nothing is removed.")
    ] = None,
    housekeeping: Annotated[str, typer.Option(metavar="TIME", help="How often to compact and archive.")] = "1h",
    host: Annotated[str, typer.Option(help="Where /livez, /readyz and /metrics are answered.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help="The port of these; without it, none.")] = None,
    master: Master = None,
    url: Url = None,
) -> None:
    """Ingest, compact and archive until stopped: the whole pipeline as one application for a cluster.

    A store that is away is waited for. What must not go on unseen (a lake of another log, files that are not what was
    written, a range that was pruned) ends it with an error.
    """
    settings = Settings.load(url=url)
    where = settings.url
    lengths = parse_seconds(every), parse_seconds(housekeeping)
    age = None if older_than is None else timedelta(seconds=parse_seconds(older_than))
    with existing_log(url, "the pipeline"), spark_for(where, master) as spark:
        from postbus.spark.service import Service, serve_health  # noqa: PLC0415

        service = Service(
            spark, where, lake_of(lake), every=lengths[0], direct_url=settings.direct_url, older_than=age,
            housekeeping=lengths[1],
        )  # fmt: skip
        server = None if port is None else serve_health(service.health, host, port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
        say(
            f"{shown(where)} into {lake}, every {every}"
            + (f"; http://{host}:{server.server_port}/metrics" if server else "")
        )
        try:
            service.run()
        finally:
            if server is not None:
                server.shutdown()
    say("stopped", style="dim")
