"""The source's classes without Spark: what they refuse, how they cut ranges, and that values come back exactly."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import apsw
import pytest
from pyspark.sql.types import StructType, VariantVal

from postbus.errors import InvalidRequest, NotFound, StoreUnavailable, UnsafeStore
from postbus.model import AttemptError, Dead, DoneWithErrors, Stream
from postbus.pattern import Interest
from postbus.payload import encode
from postbus.retry import RetryPolicy
from postbus.spark.source import PostbusSource, ReadOptions, Slice, StreamReader, segment_name
from postbus.store import Log
from postbus.store.extract import RELATIONS
from tests.contract.stores import DONE, RETRY, Operator, Site, ids, site_of
from tests.kinds import on_sqlite
from tests.spark.reading import batch_reader, read_slice, rows_of, stream_reader

PG = "postgresql://me:canary@host/shop"


@pytest.fixture
def site(kind: str, tmp_path: Path) -> Iterator[Site]:
    """Give a place for a store, with a clock that stands still at an odd microsecond."""
    site = site_of(kind, tmp_path)
    site.clock.advance(timedelta(microseconds=123_457))
    yield site
    site.close()


@pytest.fixture
def store(site: Site) -> Log:
    """Give an open store."""
    return site.open()


@pytest.fixture
def op(store: Log, site: Site) -> Operator:
    """Give somebody who drives the store."""
    return Operator(store, site.clock)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": ""}, "say where the bus is"),
        ({"startingOffset": "1"}, "no option 'startingOffset', perhaps startingOffsets"),
        ({"zzz": "1"}, "no option 'zzz': there are url, stream"),
        ({"stream": "event"}, "stream is events, audit, deliveries, not 'event'"),
        ({"payloadFormat": "json"}, "payloadFormat is string or variant"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss is true or false"),
        ({"startingTimestamp": "yesterday"}, "'yesterday' is no moment"),
        ({"endingTimestamp": "9" * 30}, "is no moment"),
        ({"startingTimestamp": "²"}, "is no moment"),
        ({"maxOffsetsPerTrigger": "0"}, "'0' is no number of rows"),
        ({"maxOffsetsPerTrigger": "²"}, "is no number of rows"),
        ({"maxOffsetsPerTrigger": "-5"}, "is no number of rows"),
        ({"maxOffsetsPerTrigger": "9" * 20}, "is no number of rows"),
        ({"minPartitions": "two"}, "'two' is no number of rows or partitions"),
        ({"maxRecordsPerPartition": "1.5"}, "is no number of rows or partitions"),
        ({"types": " , "}, "types and tags are names"),
        ({"tags": ""}, "types and tags are names"),
        ({"types": "a\x07"}, "printable"),
        ({"stream": "deliveries", "startingOffsets": "5", "consumer": "c"}, "consumer, startingOffsets is for events"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, str], told: str):
    """Before anything is opened, saying what would make sense, and never repeating the address (P.1, I17)."""
    with pytest.raises(InvalidRequest) as refused:
        ReadOptions.of({"url": PG, **options})
    assert told in str(refused.value)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stream": "deliveries"}, "deliveries is no stream: read it with spark.read"),
        ({"endingOffsets": "5"}, "endingOffsets and endingTimestamp are for spark.read"),
        ({"endingTimestamp": "2030-01-01"}, "endingOffsets and endingTimestamp are for spark.read"),
        ({"startingOffsets": "Latest"}, "need a consumer"),
        ({"startingTimestamp": "2030-01-01"}, "need a consumer"),
    ],
)
def test_what_only_a_batch_can_do_is_refused_on_a_stream(options: dict[str, Any], told: str):
    """A start that moves needs a consumer who remembers it: else a crash in the first batch loses events (P.1)."""
    with pytest.raises(InvalidRequest, match=told):
        stream_reader(PG, **options)


def test_options_are_read_whatever_their_case():
    """As Spark hands them over; a moment without a zone is in UTC, and a number is milliseconds (P.1)."""
    read = ReadOptions.of(
        {
            "URL": PG,
            "startingtimestamp": "2030-01-01T00:00",
            "ENDINGTIMESTAMP": "1893456001500",
            "types": " a.*, b ",
            "failondataloss": "FALSE",
        }
    )
    assert (read.types, read.failOnDataLoss) == (("a.*", "b"), False)
    assert read.startingTimestamp == datetime(2030, 1, 1, tzinfo=UTC)
    assert read.endingTimestamp == datetime(2030, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)


def test_a_schema_of_ones_own_must_name_columns_that_are_there():
    """With their own types, at least one of them (P.1)."""
    read = ReadOptions.of({"url": PG})
    with pytest.raises(InvalidRequest, match="events has no column 'seq': there are id, uid"):
        read.pruned(StructType().add("id", "long").add("seq", "long"))
    with pytest.raises(InvalidRequest, match="column id is bigint"):
        read.pruned(StructType().add("id", "integer"))
    with pytest.raises(InvalidRequest, match="at least one column"):
        read.pruned(StructType())


def test_nothing_is_opened_before_it_must_be(tmp_path: Path):
    """Making the source, its schema and its readers needs no bus; looking does, and makes none (P.1)."""
    url = f"sqlite:///{tmp_path / 'none.db'}"
    source = PostbusSource({"url": url})
    reader = source.reader(source.schema())
    assert isinstance(source.streamReader(source.schema()), StreamReader)
    with pytest.raises(NotFound, match="there is no bus at"):
        reader.partitions()
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("offset", ["first", "-1", "1.5", "²", "", "{}"])
def test_an_offset_is_a_word_or_an_id(store: Log, site: Site, offset: str):
    """Anything else is refused, for the start and for the end (P.1)."""
    for reader in (batch_reader(site.url, startingOffsets=offset), batch_reader(site.url, endingOffsets=offset)):
        with pytest.raises(InvalidRequest, match="an offset is earliest, latest or an id"):
            reader.partitions()


@pytest.mark.parametrize("options", [{"consumer": "lake"}, {"maxOffsetsPerTrigger": 5}])
def test_what_only_a_stream_can_do_is_refused_on_a_batch(store: Log, site: Site, options: dict[str, Any]):
    """And leaves no subscription behind (P.1)."""
    with pytest.raises(InvalidRequest, match="are for readStream"):
        batch_reader(site.url, **options).partitions()
    assert [each.name for each in store.subscriptions()] == ["default"]


def test_no_error_shows_the_password(tmp_path: Path):
    """Neither of the one who looks nor of the one who reads, whether the address is wrong or nobody answers (I17)."""
    for url in (
        f"postgresql://me:canary@/shop?host={tmp_path}",
        "postgresql://me:canary@127.0.0.1:1/shop",
        "postgresql://me:can/ary@127.0.0.1:1/shop",
        "mysql://me:canary@127.0.0.1/shop",
    ):
        reader = batch_reader(url)
        for act in (reader.partitions, lambda reader=reader: list(read_slice(reader, Slice(0, 9, "")))):
            with pytest.raises((StoreUnavailable, InvalidRequest)) as failed:
                act()
            assert "canary" not in str(failed.value)
            assert "ary@" not in str(failed.value)
            assert failed.value.__suppress_context__ or failed.value.__context__ is None


# ── ranges ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("most", [1, 7, 1_000])
@pytest.mark.parametrize("least", [1, 3, 5_000])
@pytest.mark.parametrize(("after", "through"), [(0, 0), (0, 1), (5, 9), (41, 1_000), (3, 26_000)])
def test_slices_cover_a_range_exactly_once(
    monkeypatch: pytest.MonkeyPatch, after: int, through: int, least: int, most: int
):
    """End to end, none empty, none larger than allowed, all of the same segment (P.1, I15)."""
    reader = batch_reader(PG, minPartitions=least, maxRecordsPerPartition=most)
    monkeypatch.setattr(reader, "_filled", lambda slices: slices)
    slices = reader._slices(after, through)
    if after == through:
        assert slices == []
        return
    assert (slices[0].after, slices[-1].through) == (after, through)
    assert all(low.through == high.after for low, high in pairwise(slices))
    assert all(0 < each.through - each.after <= most for each in slices)
    assert len(slices) >= min(least, through - after)
    assert {each.segment for each in slices} == {segment_name(after)}


def test_ids_a_billion_apart_do_not_make_thousands_of_slices(op: Operator, site: Site):
    """After a restore ids go on far above: every row is still read once, in few tasks (P.1, I4)."""
    events = ids(op.publish_all(*[{"type": "a"}] * 3))
    for _ in range(3):
        op.store.restore_mark("ops")
        events += ids(op.publish_all(*[{"type": "a"}] * 3))
    reader = batch_reader(site.url)
    slices = reader.partitions()
    assert len(slices) <= 8
    assert [row["id"] for part in slices for row in read_slice(reader, part)] == events


def test_only_slices_without_a_row_are_left_out(op: Operator, site: Site):
    """A row may be the first or the last of its slice (P.1, I15)."""
    first, *_, last = ids(op.publish_all(*[{"type": "a"}] * 4))
    reader = batch_reader(site.url)
    slices = [Slice(low, high, "") for low, high in pairwise([first - 1, first, last - 1, last, last + 5, last + 9])]
    assert reader._filled(slices) == slices[:3]
    reader.stop()


def test_a_batch_reads_the_range_that_was_asked_for(op: Operator, site: Site):
    """From behind the start up to and with the end, by ids or by moments; an end before the start is empty (P.1)."""
    events: list[int] = []
    for _ in range(6):
        site.clock.advance(10)
        events += ids(op.publish_all({"type": "a"}))
    third = (site.clock.now() - timedelta(seconds=30)).isoformat()
    last = str(int((site.clock.now().timestamp()) * 1000))

    def read(**options: Any) -> list[int]:
        return [row["id"] for row in rows_of(site.url, **options)]

    assert read() == events
    assert read(startingOffsets=events[1]) == events[2:]
    assert read(startingOffsets=events[1], endingOffsets=events[3]) == events[2:4]
    assert read(startingOffsets="latest") == read(endingOffsets="earliest") == []
    assert read(startingOffsets=events[3], endingOffsets=events[1]) == []
    assert read(startingTimestamp=third) == events[2:]
    assert read(endingTimestamp=third) == events[:2]
    assert read(startingTimestamp=last) == events[5:]
    assert (
        read(startingTimestamp="0001-01-01T00:00+14:00") == read(endingTimestamp="9999-12-31T23:59:59-14:00") == events
    )


@pytest.mark.parametrize("stream", list(RELATIONS))
def test_an_empty_bus_has_no_rows(store: Log, site: Site, stream: str):
    """And one slice, since Spark wants one (P.1)."""
    assert rows_of(site.url, stream=stream) == []


def test_a_range_beyond_the_head_stops_loudly(op: Operator, site: Site):
    """As after a restore of an older backup; asked to go on all the same, it reads what there is (I5)."""
    events = ids(op.publish_all(*[{"type": "a"}] * 3))
    with pytest.raises(UnsafeStore, match=r"position 1,000,000 lies beyond the head"):
        rows_of(site.url, startingOffsets=1_000_000)
    with pytest.raises(UnsafeStore, match=r"endingOffsets 1,000,000 lies beyond the head"):
        rows_of(site.url, endingOffsets=1_000_000)
    assert [row["id"] for row in rows_of(site.url, endingOffsets=1_000_000, failOnDataLoss="false")] == events
    assert rows_of(site.url, startingOffsets=10**30, failOnDataLoss="false") == []


def test_a_pruned_range_stops_loudly(op: Operator, site: Site):
    """`earliest` is what is left; an id before that is an error, or the same if data loss is accepted (I5, I14)."""
    op.store.delete_subscription("default", "ops")
    events = ids(op.publish_all(*[{"type": "a"}] * 6))
    op.store.prune(Stream.EVENTS, after=0, through=events[2])
    assert [row["id"] for row in rows_of(site.url)] == events[3:]
    with pytest.raises(UnsafeStore, match=rf"everything up to {events[2]} was pruned, and 1 was asked for"):
        rows_of(site.url, startingOffsets=1)
    assert [row["id"] for row in rows_of(site.url, startingOffsets=1, failOnDataLoss="false")] == events[3:]


def test_what_is_pruned_while_it_is_read_stops_loudly(op: Operator, site: Site):
    """A task that comes late finds out, whatever rows it still got (I5, I14)."""
    op.store.delete_subscription("default", "ops")
    events = ids(op.publish_all(*[{"type": "a"}] * 6))
    strict, lenient = batch_reader(site.url, minPartitions=2), batch_reader(site.url, failOnDataLoss="false")
    (early, late), (all_of_it,) = strict.partitions(), lenient.partitions()
    op.store.prune(Stream.EVENTS, after=0, through=events[1])
    with pytest.raises(UnsafeStore, match=f"pruned up to {events[1]} while it was being read"):
        list(read_slice(strict, early))
    assert [row["id"] for row in read_slice(strict, late)] == events[3:]
    assert [row["id"] for row in read_slice(lenient, all_of_it)] == events[2:]


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────

NESTED: Any = None
for _ in range(64):
    NESTED = [NESTED]
PAYLOADS = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 2**64, 10**100, 0.1, -0.0, 1e308, 5e-324, 123456789.123456789,
    "", " ", "\\", '"', "naïve ☃ 🎉 \U0010ffff é", "\u0001\n\t\r\u2028\ufeff", "NULL", "\\N", "x" * 300_000,
    {}, [], {"": 0}, {"a": {"b": [1, 2.0, None, "x"]}}, {"z": 1, "a": 2}, {"$": "'); DROP TABLE events; --"},
    NESTED, list(range(5_000)),
]  # fmt: skip


@pytest.mark.parametrize("chunk", [3, 10_000])
def test_every_payload_comes_back_as_it_was_published(
    op: Operator, site: Site, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    """The very text, so the very value, whatever stands beside it in a batch (S1.3, P.1, I18)."""
    monkeypatch.setattr("postbus.store.sqlite.extract.CHUNK", chunk)
    op.publish_all(*({"type": "a", "payload": payload} for payload in PAYLOADS))
    rows = rows_of(site.url, StructType().add("payload", "string"))
    assert [row["payload"] for row in rows] == [encode(payload) for payload in PAYLOADS]
    assert [json.loads(row["payload"]) for row in rows] == PAYLOADS


def test_every_column_of_an_event_comes_back_as_the_bus_reads_it(op: Operator, site: Site):
    """NULLs, empty and odd texts, maps, lists, extremes and microseconds, in any order (P.1, I18)."""
    odd = "naïve, ☃ 🎉 '\"\\{}"
    news: list[dict[str, Any]] = [
        {"type": "plain"},
        {
            "type": "odd.type",
            "tags": ["b", "a"],
            "key": odd,
            "title": odd,
            "description": odd + "\n\t",
            "uid": "one-uid",
        },
        {"type": "empty", "tags": [], "key": "k", "title": "", "description": "", "metadata": {}},
        {"type": "meta", "metadata": {"k": "", odd: odd, "a=b": "c,d", "NULL": "null"}},
        {"type": "low", "priority": -10, "max_retries": 0},
        {"type": "high", "priority": 10, "max_retries": 1_000, "tags": ["ü", "x y"]},
        {"type": "plain"},
    ]
    published: list[Any] = []
    for new in news:
        site.clock.advance(timedelta(microseconds=1))
        published += op.publish_all(new)
    rows = rows_of(site.url)
    assert set(rows[0]) == {*RELATIONS["events"].names, "segment"}
    for row, event in zip(rows, map(op.get, published), strict=True):
        assert row.pop("segment") == "s0000000000000000000"
        told = {name: getattr(event, name) for name in row}
        assert row | {"metadata": dict(row["metadata"])} == told | {
            "tags": list(event.tags),
            "payload": encode(event.payload),
            "metadata": dict(event.metadata),
        }
        assert row["created_at"].utcoffset() == timedelta(0)
    assert len({row["created_at"] for row in rows}) == len(news)


def lived(op: Operator) -> None:
    """Let events have every fate: done, done with errors, retried, released, expired, dead, pending, leased."""
    op.subscription("second", ["b.*"])
    op.publish_all({"type": "a", "tags": ["x", "y"], "priority": 3}, {"type": "b.one"}, {"type": "c"}, {"type": "d"})
    odd = AttemptError("Odd'Error", "naïve ☃ \n 'quoted' \"too\" \\", handler="h", traceback="line 1\nline 2")
    op.settle(op.take(), DONE, execution_time_ms=1.5, status_code=204)
    op.settle(op.take(), DoneWithErrors((odd, odd)))
    op.settle(op.take("second"), RETRY)
    op.clock.advance(30)
    op.settle(op.take("second"), Dead(odd))
    op.store.release([op.take().lease], "w")
    op.take()
    op.end_leases()
    op.store.expire(None, RetryPolicy())
    op.publish_all({"type": "late", "delay": 3_600}, {"type": "e"})
    op.take()


def test_the_audit_log_comes_back_as_the_bus_reads_it(op: Operator, site: Site):
    """Every row of every fate, and the row that ends a delivery tells its whole story (P.1, P.3, I13, I18)."""
    lived(op)
    rows = rows_of(site.url, stream="audit")
    assert set(rows[0]) == {*RELATIONS["audit"].names, "segment"}
    entries = sorted((entry for event in op.list().items for entry in op.logs(event)), key=lambda entry: entry.id)
    for row, entry in zip(rows, entries, strict=True):
        assert {name: row[name] for name in entry.__slots__} == {name: getattr(entry, name) for name in entry.__slots__}
    ends = [row for row in rows if row["status"] in {"COMPLETED", "COMPLETED_WITH_ERRORS", "FAILED"}]
    assert {row["status"] for row in ends} == {"COMPLETED", "COMPLETED_WITH_ERRORS", "FAILED"}
    for row in ends:
        event = op.get(row["event_id"])
        assert (row["type"], tuple(row["tags"]), row["priority"]) == (event.type, event.tags, event.priority)
        assert row["event_created_at"] == event.created_at
        assert row["event_created_at"] <= row["ready_at"] <= row["claimed_at"] <= row["created_at"]
    (dead,) = (row for row in ends if row["status"] == "FAILED")
    (letter,) = op.dead().items
    assert [(each["type"], each["message"]) for each in json.loads(dead["errors"])] == [
        (each.type, each.message) for each in letter.errors
    ]
    assert (dead["subscription"], dead["retry_count"], dead["attempt"]) == ("second", 1, 2)


def test_deliveries_come_back_as_they_stand(op: Operator, site: Site):
    """Pending, scheduled, leased and dead, in every subscription, with what their events are (P.1, I18)."""
    lived(op)
    rows = {(row["event_id"], row["subscription"]): row for row in rows_of(site.url, stream="deliveries")}
    events = [op.get(event) for event in op.list().items]
    unfinished = {
        (event.id, stand.subscription): (event, stand)
        for event in events
        for stand in event.deliveries
        if not stand.status.startswith("COMPLETED")
    }
    assert {stand.status.value for _, stand in unfinished.values()} == {"PENDING", "PROCESSING", "FAILED"}
    assert rows.keys() == unfinished.keys()
    for place, row in rows.items():
        event, stand = unfinished[place]
        assert (row["status"], row["attempt"], row["retry_count"]) == (stand.status, stand.attempt, stand.retry_count)
        assert (row["worker_id"], row["updated_at"]) == (stand.worker_id, stand.updated_at)
        assert (row["type"], tuple(row["tags"]), row["priority"]) == (event.type, event.tags, event.priority)
        assert row["created_at"] == event.created_at
        assert (row["due_at"] is None, row["died_at"] is None) == (row["status"] == "FAILED", row["status"] != "FAILED")
        assert row["due_at"] == (stand.lease_until if row["status"] == "PROCESSING" else row["due_at"])


@pytest.mark.parametrize("stream", list(RELATIONS))
def test_any_columns_can_be_read_alone(op: Operator, site: Site, stream: str):
    """In the order asked for, with the values they have beside the others (P.1)."""
    lived(op)
    full = ReadOptions.of({"url": site.url, "stream": stream})
    whole = rows_of(site.url, stream=stream)
    for name in {"events": ["metadata", "payload"], "audit": ["tags", "segment"], "deliveries": ["due_at"]}[stream]:
        alone = rows_of(site.url, StructType([full.schema[name]]), stream=stream)
        assert alone == [{name: row[name]} for row in whole]
    backwards = StructType(full.schema.fields[::-1])
    assert [list(row) for row in rows_of(site.url, backwards, stream=stream)] == [list(row)[::-1] for row in whole]


@pytest.mark.parametrize("stream", list(RELATIONS))
def test_types_and_tags_choose_as_the_bus_does(op: Operator, site: Site, stream: str):
    """By the same patterns, any of the tags, and whether or not the columns are asked for (S1.7, P.1, I18)."""
    kinds = ["order.placed", "order.a.shipped", "order.shipped", "user", "ü.ü"]
    tags = [[], ["x"], ["y", "x"], ["x y"], ["z"]]
    op.publish_all(*({"type": kind, "tags": each} for kind in kinds for each in tags))
    if stream == "audit":
        for delivery in op.take_all():
            op.settle(delivery)
    one = StructType().add("event_id" if stream != "events" else "id", "long")
    for types, wanted in (
        (["*"], ["x"]),
        (["order.*.shipped", "ü*"], []),
        (["*.shipped", "user"], ["z", "x y"]),
        (["none"], ["x"]),
    ):
        interests = [Interest(each, frozenset(wanted)) for each in types]
        options = {"stream": stream, "types": ",".join(types)} | ({"tags": ",".join(wanted)} if wanted else {})
        rows = rows_of(site.url, one, **options)
        events = [each for each in op.list().items if any(i.wants(each.type, each.tags) for i in interests)]
        assert {next(iter(row.values())) for row in rows} == {event.id for event in events}


def test_a_variant_holds_what_the_text_says(op: Operator, site: Site):
    """As near as Spark's type comes: past 38 digits a number is a float, and decimals are Decimals (P.1)."""
    op.publish_all(*({"type": "a", "payload": payload} for payload in PAYLOADS))
    rows = rows_of(site.url, payloadFormat="variant")
    values = [VariantVal(**row["payload"]).toPython() for row in rows]
    near = [float(was) if isinstance(was, float) or was == 10**100 else was for was in PAYLOADS]
    assert [float(each) if isinstance(was, float) else each for each, was in zip(values, near, strict=True)] == near


@on_sqlite
def test_a_damaged_row_is_refused(op: Operator, site: Site):
    """And named by its uid; whoever does not ask for payloads reads on (I16)."""
    op.publish_all(*({"type": "a", "payload": number} for number in range(3)))
    path = site.url.removeprefix("sqlite:///")
    op.store.close()
    connection = apsw.Connection(path)
    connection.execute("UPDATE events SET payload = '7' WHERE id = 2")
    connection.close()
    with pytest.raises(UnsafeStore, match="was damaged on disk"):
        rows_of(site.url)
    assert [row["id"] for row in rows_of(site.url, StructType().add("id", "long"))] == [1, 2, 3]
