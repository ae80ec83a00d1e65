"""The lake beside others: an ingest, a compaction, a writer that was killed or has lost its hold."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from typer.testing import CliRunner

from postbus import EventBus
from postbus.cli.app import app
from postbus.errors import Conflict, InvalidRequest, StoreUnavailable
from postbus.model import Span, Stream
from postbus.payload import draft
from postbus.spark import Lake
from postbus.spark import lake as laking
from postbus.spark import replay as replaying
from postbus.spark.archive import archive, bounds
from postbus.spark.lake import ingest
from postbus.spark.manifest import Entry, Folder, Manifest
from postbus.spark.source import segment_name
from postbus.store import log_of, open_store
from postbus.testing import FrozenClock
from tests.kinds import on_sqlite

TOMORROW = "2999-01-01"
NOW = timedelta(0)
LONG_AGO = "2026-01-01T00:00:00+00:00"


def entry(after: int, through: int, *files: str, log_id: str = "log", generation: int = 0) -> Entry:
    """Return an entry of these rows and files."""
    name = segment_name(after)
    return Entry(name, log_id, after, through, through - after, 0, files, 0, LONG_AGO, generation=generation)


def publish(bus: EventBus, count: int, **fields: Any) -> list[int]:
    """Publish events, all alike."""
    return [event.id for event in bus.publish_many([{"type": "a", **fields}] * count)]


def live(spark: SparkSession, url: str) -> DataFrame:
    """Return the events of the live table."""
    return spark.read.format("postbus").options(url=url).load()


def ids(frame: DataFrame) -> list[int]:
    """Return the ids of a table, in order."""
    return sorted(row[0] for row in frame.select("id").collect())


def on_disk(lake: Lake) -> set[str]:
    """Return the files of events that are there, in the lake or not."""
    folder = Path(lake.manifests[Stream.EVENTS].folder.path)
    return {str(file.relative_to(folder)) for file in folder.rglob("*.parquet")}


def known(lake: Lake) -> set[str]:
    """Return the files of events that entries name."""
    return {file for each in lake.manifests[Stream.EVENTS].all() for file in (*each.files, *each.replaced)}


def killed(*_: Any, **__: Any) -> None:
    """Stand for the end of the process."""
    raise OSError("killed here")


# ── without Spark ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_consumer_that_was_only_idle_is_not_cut_off(tmp_path: Path):
    """It has not moved for long, but what it has not read is young: only an old event makes it stand still (P.5)."""
    clock, lake = FrozenClock(), Lake(tmp_path / "lake")
    store = log_of(open_store(f"sqlite:///{tmp_path / 'bus.db'}", clock=clock))
    log_id = store.span(Stream.EVENTS).log_id
    store.consumer("idle", Stream.EVENTS, 0)
    store.publish([draft({"type": "a"})])
    store.advance("idle", 1, log_id)
    clock.advance(timedelta(days=10))
    store.publish([draft({"type": "a"})])
    lake.manifests[Stream.EVENTS].add(entry(0, 1, log_id=log_id))
    lake.manifests[Stream.EVENTS].add(entry(1, 2, log_id=log_id))
    clock.advance(timedelta(days=2))
    (bound, _) = bounds(store, lake, older_than=timedelta(days=1))
    assert (bound.through, bound.why, bound.past) == (1, "not passed by 'idle' yet", ())
    clock.advance(timedelta(days=6))
    (bound, _) = bounds(store, lake, older_than=timedelta(days=1))
    assert (bound.through, [each.subscription for each in bound.past]) == (2, ["idle"])
    store.close()


def test_a_reader_beside_a_compaction_reads_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Entries that are joined between two looks are not missed, and not counted twice (P.3, I15)."""
    manifest, joined = Manifest(tmp_path, "events"), entry(0, 3, generation=1)
    for number in range(3):
        manifest.add(entry(number, number + 1))
    real = Folder.read

    def read(folder: Folder, below: str) -> bytes:
        text = real(folder, below)
        monkeypatch.setattr(Folder, "read", real)
        manifest.replace(joined)
        manifest.forget(entry(1, 2))
        manifest.forget(entry(2, 3))
        return text

    monkeypatch.setattr(Folder, "read", read)
    assert manifest.entries() == [joined]


@pytest.mark.parametrize("name", ["la*ke", "q?r", "la[k]e", "l{a,b}", "a\\b"])
def test_a_folder_that_spark_takes_for_a_pattern_is_refused(tmp_path: Path, name: str):
    """It could be written to, and never be read (P.3)."""
    with pytest.raises(InvalidRequest, match="for a pattern"):
        Lake(tmp_path / name)


def test_what_killed_writers_left_goes_and_no_only_copy(tmp_path: Path):
    """Drafts go, and segments whose rows are elsewhere; nothing goes where part of the lake is lost (P.3, I15, I16)."""
    manifest = Manifest(tmp_path, "events")
    folder = Path(manifest.folder.path)
    named, old, covered, pruned, unread = (
        f"data/dt=2026-05-01/seg={segment_name(after)}{nonce}/part.parquet"
        for after, nonce in ((0, "g1-a"), (2, ""), (2, "g0-b"), (5, "g0-c"), (8, "g0-d"))
    )
    draft_folder = "data/.spark-staging-1/dt=2026-05-01/part.parquet"
    for file in (named, old, covered, pruned, unread, draft_folder):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()

    def left() -> set[str]:
        return {str(each.relative_to(folder)) for each in (folder / "data").rglob("*.parquet")}

    manifest.add(Entry(segment_name(0), "log", 0, 5, 5, 0, (named,), 0, LONG_AGO, generation=1, replaced=(old,)))
    manifest.add(entry(5, 5, "data/lost.parquet"))
    manifest.tidy(Span("log", 6, 9))
    assert left() == {named, old, covered, pruned, unread}
    manifest.forget(entry(5, 5))
    manifest.tidy()
    assert left() == {named, old, pruned, unread}
    manifest.tidy(Span("another log", 6, 9))
    assert left() == {named, old, pruned, unread}
    manifest.tidy(Span("log", 6, 9))
    assert left() == {named, old, pruned}


def test_the_work_of_a_compaction_grows_with_its_entries_and_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each entry is added to its group, and compared, a few times, however many there are (P.3)."""
    steps, count = [0], 3_000

    class Size(int):
        def __add__(self, other: int) -> int:
            steps[0] += 1
            return int(self) + other

        __radd__ = __add__

    def alike(one: Entry, other: object) -> bool:
        steps[0] += 1
        return isinstance(other, Entry) and one.segment == other.segment

    entries = [replace(entry(after, after + 1), bytes=Size(1)) for after in range(count)]
    monkeypatch.setattr(Manifest, "all", lambda _: entries)
    monkeypatch.setattr(Manifest, "tidy", lambda _: None)
    monkeypatch.setattr(Entry, "__eq__", alike)
    lake = Lake(tmp_path)
    assert [len(group) for group in lake.joinable(Stream.EVENTS, size=count - 1)] == [count - 1]
    lake.sweep()
    assert len(lake._touched(Stream.EVENTS, range(1, count, 2))) == count / 2
    assert count <= steps[0] <= 10 * count


def test_the_names_of_all_folders_are_on_disk_before_a_store_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the file's own up to where the lake lies: a file without its name is lost too (P.5, I14)."""
    synced: set[Path] = set()
    monkeypatch.setattr("postbus.spark.manifest.sync", synced.add)
    Manifest(tmp_path / "lake", "events").folder.flush(["data/dt=1/seg=s/part"])
    lake = tmp_path / "lake"
    data = lake / "events" / "data"
    assert synced == {
        tmp_path,
        lake,
        lake / "events",
        data,
        data / "dt=1",
        data / "dt=1/seg=s",
        data / "dt=1/seg=s/part",
    }


# ── with Spark ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@on_sqlite
def test_an_ingest_beside_a_union_doubles_nothing(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What comes into the lake after it was looked at is read from the live table, and only there (P.6)."""
    lake, real = Lake(tmp_path / "lake"), replaying.reach
    events = publish(bus, 3)
    ingest(spark, url, lake)
    events += publish(bus, 2)

    def reach(*arguments: Any, **named: Any) -> Any:
        seen = real(*arguments, **named)
        ingest(spark, url, lake)
        return seen

    monkeypatch.setattr(replaying, "reach", reach)
    assert ids(replaying.union(spark, url, bus.store, lake, Stream.EVENTS)) == events
    assert lake.manifests[Stream.EVENTS].through == events[-1]


@pytest.mark.slow
@on_sqlite
def test_a_second_compaction_knows_what_the_first_replaced(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path
):
    """Every old file is named until it is swept, so that what is erased is gone from all of them (P.3, P.5)."""
    lake = Lake(tmp_path / "lake")
    publish(bus, 4)
    ingest(spark, url, lake, rows=2)
    lake.compact(spark, today=TOMORROW)
    publish(bus, 1)
    ingest(spark, url, lake)
    lake.compact(spark, today=TOMORROW)
    (last,) = lake.manifests[Stream.EVENTS].entries()
    assert len(last.replaced) == len(set(last.replaced)) == len(on_disk(lake)) - len(last.files)
    assert on_disk(lake) == known(lake)
    lake.sweep(NOW)
    assert on_disk(lake) == set(last.files)


@on_sqlite
def test_an_erase_killed_before_it_swept_is_finished_by_another(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The rewritten rows say nothing any more, and yet their old files go (P.3, P.5)."""
    lake = Lake(tmp_path / "lake")
    secret = publish(bus, 2, payload="canary")
    ingest(spark, url, lake)
    before = on_disk(lake)
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "sweep", killed)
        with pytest.raises(OSError, match="killed here"):
            lake.erase(spark, secret)
    assert before < on_disk(lake)
    assert lake.erase(spark, secret) == 0
    assert on_disk(lake) == known(lake)
    assert not before & on_disk(lake)


@on_sqlite
def test_a_writer_that_lost_its_hold_harms_nobody(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """It overwrites no file of its heir's, replaces no entry, and what it wrote is swept (P.3, I15)."""
    lake, log_id = Lake(tmp_path / "lake"), bus.store.span(Stream.EVENTS).log_id
    events = publish(bus, 2, payload="canary")
    heirs = lake.write(live(spark, url), Stream.EVENTS, log_id, 0)
    assert heirs is not None
    lake.manifests[Stream.EVENTS].add(heirs)
    lake.write(live(spark, url), Stream.EVENTS, log_id, 0)

    def lost() -> None:
        raise StoreUnavailable("the hold is lost")

    with pytest.raises(StoreUnavailable, match="is lost"):
        lake.erase(spark, events, check=lost)
    assert lake.manifests[Stream.EVENTS].entries() == [heirs]
    assert len(on_disk(lake)) == 3 * len(heirs.files)
    lake.tidy(bus.store)
    assert on_disk(lake) == set(heirs.files)
    assert ids(lake.read(spark)) == events


@on_sqlite
def test_days_are_utc_whatever_the_session_says(spark: SparkSession, bus: EventBus, url: str, tmp_path: Path):
    """A lake that is written from two time zones has each day once (P.3)."""
    lake, log_id = Lake(tmp_path / "lake"), bus.store.span(Stream.EVENTS).log_id
    publish(bus, 1)
    late = live(spark, url).withColumn("created_at", sf.lit("2026-05-01T23:59:59.999999Z").cast("timestamp"))
    zone = "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    spark.conf.set(zone, "Pacific/Kiritimati")
    try:
        made = lake.write(late, Stream.EVENTS, log_id, 0)
    finally:
        spark.conf.set(zone, before or "UTC")
    assert made is not None
    assert made.days == ("2026-05-01",)


@pytest.mark.slow
@on_sqlite
def test_a_stream_that_dies_ends_a_continuous_ingest(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other does not go on without it: what ended the one is raised (P.3)."""
    (event,) = publish(bus, 1)
    start, add = laking._Ingest.start, Manifest.add

    def start_late(run: Any, **trigger: Any) -> None:
        if "processingTime" in trigger and run.stream is Stream.AUDIT:
            log_of(bus.store).erase(ids=[event], actor="test")
        start(run, **trigger)

    def fill_up(manifest: Manifest, entry: Entry) -> None:
        if manifest.stream is Stream.AUDIT:
            raise OSError("the disk is full")
        add(manifest, entry)

    monkeypatch.setattr(laking._Ingest, "start", start_late)
    monkeypatch.setattr(Manifest, "add", fill_up)
    with pytest.raises(Exception, match="the disk is full"):
        ingest(spark, url, Lake(tmp_path / "lake"), continuous=0.1)


@pytest.mark.slow
@on_sqlite
def test_an_ingest_killed_before_spark_s_word_goes_on_after_an_archive(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Spark would bring again what is pruned by now, and in the lake: it begins where that ends (P.3, P.5, I15)."""
    lake = Lake(tmp_path / "lake")
    events = publish(bus, 3)
    with monkeypatch.context() as patch:
        patch.setattr(laking, "probe", kill_at("ingest.before_commit_log"))
        with pytest.raises(Exception, match="killed here"):
            ingest(spark, url, lake)
    (bound, _) = bounds(log_of(bus.store), lake, older_than=NOW)
    archive(spark, url, log_of(bus.store), lake, bound)
    assert bus.store.span(Stream.EVENTS).pruned == events[-1]
    events += publish(bus, 2)
    assert ingest(spark, url, lake)[Stream.EVENTS] == 2
    assert ids(lake.read(spark)) == events


def kill_at(moment: str) -> Callable[[str], None]:
    """Return a probe that ends the process, as it were, at a moment."""

    def probe(name: str) -> None:
        if name == moment:
            killed()

    return probe


@on_sqlite
def test_an_erase_looks_for_events_while_nobody_writes(
    spark: SparkSession, bus: EventBus, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What an ingest brings between the look and the hold would not be erased (P.3, P.5)."""
    real, found = Lake.find, list[int]()

    def find(lake: Lake, *arguments: Any, **named: Any) -> list[int]:
        with pytest.raises(Conflict), log_of(bus.store).hold(f"lake {lake.url}"):
            pass
        found.extend(real(lake, *arguments, **named))
        return found

    monkeypatch.setattr(Lake, "find", find)
    lake = Lake(tmp_path / "lake")
    events = publish(bus, 1, key="customer-8")
    ingest(spark, url, lake)
    done = CliRunner().invoke(app, ["erase", "--key", "customer-8", "--lake", lake.path, "--url", url, "--yes"])
    assert (done.exit_code, found) == (0, events), done.output
