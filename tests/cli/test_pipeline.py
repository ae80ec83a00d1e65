"""What `postbus pipeline` and `postbus erase` can say without Spark, they say before it is started."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postbus import Discard, EventBus
from postbus.cli.pipeline import spark_for
from postbus.errors import UnsafeStore
from postbus.model import Stream
from postbus.spark import launch
from postbus.spark.manifest import Entry, Manifest
from postbus.store import log_of

from .conftest import URL

REPLAY = ("pipeline", "replay")


@pytest.fixture(autouse=True)
def _no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands fail that would start Spark."""

    @contextmanager
    def refuse(*_: object) -> Generator[Any]:
        pytest.fail("Spark was started")
        yield

    monkeypatch.setattr("postbus.cli.pipeline.spark_for", refuse)
    monkeypatch.setattr("postbus.cli.erase.spark_for", refuse)


@pytest.fixture
def bus() -> Generator[EventBus]:
    """Give the shop: three orders of two customers that were delivered, and one that was not."""
    bus = EventBus(URL)

    @bus.on("order.*")
    def deliver(event: Any) -> None:
        if event.payload["street"] == "nowhere":
            raise Discard("no such street: nowhere")

    orders = {"ada": "home", "bob": "work", "eve": "nowhere"}
    bus.publish_many([{"type": "order.new", "payload": {"street": orders[key]}, "key": key} for key in orders])
    bus.publish("order.new", {"street": "home"}, key="ada")
    bus.run_due()
    yield bus
    bus.shutdown()


def lake_of(bus: EventBus) -> Path:
    """Have a lake say that it holds the log up to its head, and the bus that the lake has come there."""
    for name, stream in (("lake", Stream.EVENTS), ("lake.audit", Stream.AUDIT)):
        span = bus.store.span(stream)
        entry = Entry("s0", span.log_id, 0, span.head, span.head, 0, (), 0, "2020-01-01T00:00:00+00:00")
        Manifest("lake", stream).add(entry)
        log_of(bus.store).consumer(name, stream, span.head)
    return Path("lake")


def be_of_another_log(bus: EventBus, lake: Path) -> None:
    """Have a lake say that it is another bus's."""
    for file in lake.rglob("*.json"):
        file.write_text(file.read_text().replace(bus.store.span(Stream.EVENTS).log_id, "another"))


# ── replay ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["--dry-run", "--yes"])
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--into", "subscription", "--target", "nobody"], 1, "there is no subscription 'nobody'"),
        (["--into", "subscription", "--target", "ledger"], 2, "'ledger' is no queue"),
        (["--into", "subscription"], 2, "--into subscription needs --target: the name"),
        (["--into", "parquet"], 2, "--into parquet needs --target: the folder"),
        (["--into", "parquet", "--target", "taken"], 2, "there is a taken already"),
        (["--into", "bus", "--target", "mysql://root:hunter2@db/x"], 2, "not 'mysql'"),
        (["--into", "bus", "--target", "sqlite:///taken/notes.txt"], 1, "no SQLite file"),
        (["--keep-uids"], 2, "--keep-uids is for another, empty bus"),
        (["--keep-uids", "--into", "parquet", "--target", "files"], 2, "--keep-uids is for another, empty bus"),
        (["--rate", "5", "--into", "parquet", "--target", "files"], 2, "--rate is for --into bus"),
        (["--from", "yesterday"], 2, "'yesterday' is not a length of time"),
        (["--type", "\n"], 2, "a pattern holds printable characters only"),
        (["--lake", "ftp://host/lake"], 2, "is no folder that can be reached"),
    ],
)
def test_a_replay_that_cannot_be_is_refused_at_once(bus, cli, words: list[str], code: int, told: str, how: str):
    """Its target, its range and its options are looked at before Spark starts, in a dry run too (P.6)."""
    bus.subscriptions.create("ledger", "*", mode="ordered")
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("not a database" * 100)
    result = cli(*REPLAY, *words, how, expect=code)
    assert told in result.stderr
    assert "hunter2" not in result.output
    assert not Path("files").exists()


def test_a_replay_without_anybody_to_ask_is_refused_at_once(bus, cli):
    """Also where a part of the range is in no lake that was named (P.6)."""
    assert "no terminal to ask at: add --yes" in cli(*REPLAY, expect=2).stderr
    log_of(bus.store).prune(Stream.EVENTS, after=0, through=2)
    assert "events up to 2 were pruned: name the lake" in cli(*REPLAY, "--dry-run", expect=2).stderr
    assert "events up to 2 were pruned: name the lake" in cli("pipeline", "report", expect=2).stderr


def test_a_table_is_not_written_to_a_file(bus, cli):
    """Which is said at once (P.4)."""
    assert "a table goes to the terminal" in cli("pipeline", "report", "--to", "report.txt", expect=2).stderr


# ── nothing to do ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_ingest_of_nothing_new_starts_nothing(bus, cli, data):
    """The lake and its subscriptions are where the log is: that is seen without Spark (P.3)."""
    lake = lake_of(bus)
    words = ("pipeline", "ingest", "--lake", str(lake))
    assert data(*words) == {"events": 0, "audit": 0, "lake": str(lake.absolute())}
    assert "nothing new" in cli(*words).stderr
    for more in (["--continuous", "1s"], ["--consumer", "another"], ["--format", "delta"]):
        with pytest.raises(pytest.fail.Exception, match="Spark was started"):
            cli(*words, *more)
    bus.publish("order.new")
    with pytest.raises(pytest.fail.Exception, match="Spark was started"):
        cli(*words)


def test_an_ingest_into_another_s_lake_is_refused_at_once(bus, cli):
    """Whatever it holds, it is not nothing new (I15)."""
    be_of_another_log(bus, lake_of(bus))
    assert "holds the events of another log" in cli("pipeline", "ingest", "--lake", "lake", expect=1).stderr


def test_a_compaction_of_nothing_starts_nothing(bus, cli, data):
    """One segment cannot be joined with any; what was replaced long ago still goes (P.3)."""
    lake = lake_of(bus)
    old = lake / "events" / "data" / "old.parquet"
    old.parent.mkdir()
    old.touch()
    manifest = Manifest(lake, Stream.EVENTS)
    (entry,) = manifest.entries()
    manifest.replace(replace(entry, replaced=("data/old.parquet",)))
    told = data("pipeline", "compact", "--lake", "lake")
    assert told == [{"stream": stream.value, "before": 1, "after": 1} for stream in Stream]
    assert not old.exists()
    assert "nothing to join" in cli("pipeline", "compact", "--lake", "lake").stderr


# ── what would be done ───────────────────────────────────────────────────────────────────────────────────────────────


def test_an_archive_tells_how_much_would_go(bus, cli, data):
    """Rows of events and of the audit log, and what holds up what follows, if anything does (P.5)."""
    lake_of(bus)
    words = ("pipeline", "archive", "--lake", "lake", "--dry-run")
    events, audit = data(*words, "--older-than", "0s")
    assert (events["would_remove"], events["would_go_through"], events["what_follows_is"]) == (3, 4, None)
    head = bus.store.span(Stream.AUDIT).head
    assert (audit["would_remove"], audit["would_go_through"], audit["what_follows_is"]) == (6, head, None)
    told = cli(*words, "--older-than", "30d").stdout
    assert "younger than 30 days\n" in told.replace(" \n", "\n")
    assert "WOULD REMOVE" in told
    bus.publish("order.new")
    assert data(*words, "--older-than", "0s")[0]["what_follows_is"] == "not in the lake yet"
    assert bus.list().total == 5


def test_an_archive_that_cuts_somebody_off_must_be_agreed_to(bus, cli, data):
    """Without anybody to ask it is refused at once, and nothing is removed; who is cut off already is no news (I14)."""
    lake_of(bus)
    bus.subscriptions.create("ledger", "*", mode="ordered", start="beginning")
    words = ("pipeline", "archive", "--lake", "lake", "--older-than", "0s", "--max-hold", "0s")
    refused = cli(*words, expect=2).stderr
    assert "'ledger' stands at 0 since" in refused
    assert "cut off ledger? There is no terminal to ask at: add --yes" in refused
    cli(*words, "--dry-run")
    with pytest.raises(pytest.fail.Exception, match="Spark was started"):
        cli(*words, "--yes")
    assert bus.list().total == 4
    log_of(bus.store).prune(Stream.EVENTS, after=0, through=2, past=["ledger"])
    with pytest.raises(pytest.fail.Exception, match="Spark was started"):
        cli(*words)


def test_an_archive_of_nothing_starts_nothing(bus, data):
    """Nothing is old enough, and nothing that was held before is finished (P.5)."""
    lake_of(bus)
    rows = data("pipeline", "archive", "--lake", "lake", "--older-than", "30d")
    assert [(row["removed"], row["pruned_through"]) for row in rows] == [(0, 0), (0, 0)]


def test_an_erase_tells_how_much_would_be_blanked(bus, cli, data):
    """In the log and the audit log; nothing is asked, and nothing changed (P.5)."""
    assert data("erase", "--key", "eve", "--dry-run") == [{"where": "live", "events": 1, "audit_rows": 1}]
    assert data("erase", "--key", "ada", "--dry-run") == [{"where": "live", "events": 2, "audit_rows": 0}]
    assert "EVENTS TO BLANK" in cli("erase", "--uid", "nobody", "--dry-run").stdout
    assert bus.get(3).payload == {"street": "nowhere"}
    assert "no terminal to ask at" in cli("erase", "--key", "eve", "--lake", "lake", expect=2).stderr


# ── what must not be done ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["--dry-run", "--yes"])
def test_an_erase_in_another_s_lake_is_refused_at_once(bus, cli, how: str):
    """Its ids are other events', of other people: nothing is blanked anywhere (I15)."""
    be_of_another_log(bus, lake_of(bus))
    told = cli("erase", "--key", "eve", "--lake", "lake", how, expect=1).stderr
    assert "holds the events of another log" in told
    assert bus.get(3).payload == {"street": "nowhere"}


@pytest.mark.parametrize("how", ["--dry-run", "--yes"])
@pytest.mark.parametrize("name", ["delta", "iceberg"])
def test_an_erase_that_would_leave_copies_is_refused_at_once(bus, cli, name: str, how: str):
    """Tables of another format are not rewritten: it says so, with what to do, and erases nothing (P.3, P.5)."""
    (lake_of(bus) / name / "events").mkdir(parents=True)
    told = cli("erase", "--key", "eve", "--lake", "lake", how, expect=1).stderr
    assert f"lake/{name} has copies that an erase does not reach; nothing was erased. Remove that folder" in told
    assert bus.get(3).payload == {"street": "nowhere"}


@pytest.mark.parametrize("command", ["ingest", "run"])
def test_a_lake_is_held_past_a_pooler(command: str, bus, cli, monkeypatch: pytest.MonkeyPatch):
    """A pooler lends connections to others, locks and all: two would hold the lake at once (P.3, I15)."""
    asked = list[str | None]()

    def seen(url: str, **options: Any) -> Any:
        asked.append(options.get("direct_url"))
        raise UnsafeStore("seen enough")

    monkeypatch.setenv("POSTBUS_DIRECT_URL", "postgresql://past/it")
    monkeypatch.setattr("postbus.cli.pipeline.spark_for", lambda *_: nullcontext())
    monkeypatch.setattr("postbus.spark.source.open_store", seen)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert "seen enough" in cli("pipeline", command, "--lake", "lake", expect=1).stderr
    assert asked == ["postgresql://past/it"]


# ── starting Spark ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_start_of_spark_is_told_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """It takes a while: what is going on stands on stderr before it begins (P.7)."""
    said = list[str]()

    class Session:
        """Stands for Spark."""

        def stop(self) -> None:
            """End."""

    def session(_: object) -> Session:
        said.append(capsys.readouterr().err)
        return Session()

    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr(launch, "session", session)
    monkeypatch.setattr(launch, "quiet_java", lambda: None)
    with spark_for(URL, None):
        assert said == ["Starting Spark …\n"]
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", Session)
    with spark_for(URL, None):
        assert said[1:] == [""], "one that is there need not be started"
