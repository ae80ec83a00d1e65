"""`postbus.spark.report`: its figures against plain Python over the same log, and how it is shown."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from io import StringIO
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from postbus import EventBus, InvalidRequest, RetryPolicy
from postbus.spark import report
from postbus.spark.chart import Series, bars, length, lines
from postbus.spark.rendering import render_html, render_table, to_json
from postbus.spark.report import Figures, Report
from tests.crash.processes import Child
from tests.spark.history import HOSTILE, START, Rows, frames, live, read

SINCE = START + timedelta(minutes=18, seconds=30)
UNTIL = START + timedelta(minutes=69, seconds=10)
MINUTE = timedelta(minutes=1)
PATIENCE = timedelta(minutes=5)
ENDS = {("COMPLETED", "COMPLETED"), ("COMPLETED_WITH_ERRORS", "COMPLETED_WITH_ERRORS"), ("FAILED", "FAILED")}
Row = dict[str, Any]


class Past:
    """The oracle: what happened, told by plain Python from the rows of the store alone."""

    def __init__(self, rows: Rows, now: datetime) -> None:
        """Look at the rows."""
        self.rows, self.now = rows, now
        self.events = {row["id"]: row for row in rows.events}

    def attempts(self) -> list[Row]:
        """Return the last word on each attempt, of those said in the time looked at."""
        words = {}
        for row in self.rows.audit:
            if row["created_at"] >= SINCE and row["action"] in {
                "COMPLETED", "COMPLETED_WITH_ERRORS", "FAILED", "EXPIRED",
            }:  # fmt: skip
                words[row["event_id"], row["epoch"]] = row
        return [row for row in words.values() if row["created_at"] < UNTIL]

    def figures(self, name: str, rows: Iterable[Row]) -> Figures:
        """Count attempts."""
        said = Counter((row["action"], row["status"]) for row in rows)
        done, noted = said["COMPLETED", "COMPLETED"], said["COMPLETED_WITH_ERRORS", "COMPLETED_WITH_ERRORS"]
        dead, again = said["FAILED", "FAILED"], said["FAILED", "PENDING"] + said["EXPIRED", "PENDING"]
        waits = [
            1_000 * (row["claimed_at"] - row["ready_at"]).total_seconds()
            for row in rows
            if row["ready_at"] and row["claimed_at"] >= row["ready_at"]
        ]
        return Figures(
            name,
            attempts=done + noted + dead + again,
            ended=done + noted + dead,
            completed=done + noted,
            with_errors=noted,
            failed=dead + again,
            retries=again,
            expired=sum(row["error_type"] == "LeaseExpired" for row in rows),
            dead=dead,
            wait_ms=percentiles(waits),
            run_ms=percentiles([row["execution_time_ms"] for row in rows if row["execution_time_ms"] is not None]),
        )

    def by(self, kind: str) -> dict[str, Figures]:
        """Count attempts by type, tag, subscription, worker or minute."""
        groups: defaultdict[str, list[Row]] = defaultdict(list)
        for row in self.attempts():
            event = self.events[row["event_id"]]
            names = {
                "type": [event["type"]],
                "tag": event["tags"],
                "subscription": [row["subscription"]],
                "worker": [row["worker_id"]],
                "minute": [str(minute(row["created_at"]))],
            }[kind]
            for name in names:
                groups[name].append(row)
        return {name: self.figures(name, rows) for name, rows in groups.items()}

    def depth(self, when: datetime) -> int:
        """Follow each delivery to a moment; count those that are then unfinished."""
        changes: defaultdict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in [*self.rows.audit, *self.rows.open]:
            changes[row["event_id"], row["subscription"]] += [row] if "action" in row else []
        deep = 0
        for (event_id, _), rows in changes.items():
            is_open = self.events[event_id]["created_at"] <= when
            for row in (row for row in rows if row["created_at"] <= when):
                if (row["action"], row["status"]) in ENDS or row["action"] == "DISCARDED":
                    is_open = False
                elif row["action"] == "RETRIED":
                    is_open = True
            deep += is_open
        return deep

    def deepest(self, start: datetime, end: datetime) -> int:
        """Look at every moment at which anything happened; return the most that were unfinished at one of them."""
        happened = {row["created_at"] for row in [*self.rows.audit, *self.rows.events]}
        return max(self.depth(when) for when in {start, *(when for when in happened if start <= when <= end)})

    def stale(self) -> dict[str, tuple[int, int, int, datetime]]:
        """Find the workers that left work without a word: silent, expired, stuck, last seen."""
        claims: defaultdict[tuple[int, int], list[Row]] = defaultdict(list)
        for row in (row for row in self.rows.audit if row["created_at"] >= SINCE):
            claims[row["event_id"], row["epoch"]].append(row)
        silent, expired, stuck, seen = Counter(), Counter(), Counter(), defaultdict(list)
        for rows in claims.values():
            own = [row for row in rows if row["error_type"] not in {"LeaseExpired", "Reset"}]
            picked = [row for row in rows if row["action"] == "PICKED"]
            if not picked:
                continue
            worker = picked[0]["worker_id"]
            seen[worker] += [row["created_at"] for row in own]
            silenced = len(own) < len(rows)
            if len(own) == 1 and (silenced or own[0]["created_at"] <= self.now - PATIENCE):
                silent[worker] += 1
                expired[worker] += silenced
        for row in self.rows.open:
            if row["status"] == "PROCESSING" and row["claimed_at"] <= self.now - PATIENCE:
                stuck[row["worker_id"]] += 1
        return {
            worker: (silent[worker], expired[worker], stuck[worker], max(seen[worker]))
            for worker in seen
            if silent[worker] or stuck[worker]
        }


def percentiles(values: list[float]) -> report.Percentiles | None:
    """Return exact percentiles: the smallest value that so many are at most."""
    ordered = sorted(values)
    if not ordered:
        return None
    return report.Percentiles(*(ordered[ceil(rank * len(ordered)) - 1] for rank in (0.5, 0.95, 0.99)))


def minute(when: datetime) -> datetime:
    """Return the minute a moment lies in."""
    return when.replace(second=0, microsecond=0)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """Give the past of a bus that has been through a lot."""
    path: Path = tmp_path_factory.mktemp("report") / "bus.db"
    now = live(path)
    return Past(read(path), now)


@pytest.fixture(scope="module")
def made(spark: SparkSession, past: Past) -> Iterator[Report]:
    """Give the report on a part of it, made by somebody in Tokyo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield report.make(*frames(spark, past.rows), since=SINCE, until=UNTIL, now=past.now)
    time.tzset()


def named(figures: Iterable[Figures]) -> dict[str, Figures]:
    """Return figures by name."""
    return {each.name: each for each in figures}


def test_figures_are_those_counted_by_hand(past: Past, made: Report):
    """By type, tag, subscription and worker, retries, late reports and dead letters included (P.4, S0.9)."""
    assert made.total == past.figures("all", past.attempts())
    assert 0 < made.total.expired < made.total.retries, "the past holds what is to be told apart"
    assert named(made.types) == past.by("type")
    assert named(made.tags) == past.by("tag")
    assert named(made.subscriptions) == past.by("subscription")
    assert named(made.workers) == past.by("worker")
    runs = [each.run_ms.p95 for each in made.slowest if each.run_ms]
    assert runs == sorted(runs, reverse=True)
    assert len(runs) == len(past.by("type"))


def test_the_timeline_is_that_followed_by_hand(past: Past, made: Report):
    """Published, completed, percentiles, depth and what became of dead letters, a bucket at a time (P.4, S0.9)."""
    assert made.bucket_ms == 60_000
    starts = [minute(SINCE) + number * MINUTE for number in range(52)]
    assert [each.start for each in made.timeline] == starts
    published = Counter(minute(row["created_at"]) for row in past.rows.events if SINCE <= row["created_at"] < UNTIL)
    verbs = Counter(
        (row["action"], minute(row["created_at"])) for row in past.rows.audit if SINCE <= row["created_at"] < UNTIL
    )
    counted = past.by("minute")
    for bucket in made.timeline:
        name = f"{bucket.start:%Y-%m-%dT%H:%M:%SZ}"
        assert bucket.figures == replace(counted.get(str(bucket.start), Figures("")), name=name)
        assert bucket.published == published[bucket.start]
        assert bucket.revived == verbs["RETRIED", bucket.start]
        assert bucket.purged == verbs["PURGED", bucket.start]
        end = min(bucket.start + MINUTE, UNTIL)
        assert bucket.depth == past.depth(end)
        assert bucket.deepest == past.deepest(max(bucket.start, SINCE), end)
    assert any(each.deepest > each.depth for each in made.timeline[1:]), "some was finished before its bucket's end"
    assert made.published == sum(published.values())
    assert sum(each.revived for each in made.timeline)
    assert sum(each.purged for each in made.timeline)
    hours = Counter(f"{row['created_at']:%a %H}" for row in past.rows.events if SINCE <= row["created_at"] < UNTIL)
    assert made.hours == hours
    assert len(hours) == 2, "the night from Tuesday to Wednesday"


def test_errors_are_gathered_by_fingerprint(past: Past, made: Report):
    """With their number, first and last time, types, and the latest events that met them (P.4)."""
    kinds = {"order": "order <n> of <n>", "only": "only noted <n> times"}
    kinds["worker"] = "worker <worker> was lost, or its lease ran out, before it reported an outcome"
    groups: defaultdict[str | None, list[Row]] = defaultdict(list)
    for row in past.attempts():
        if row["error_message"] is not None:
            groups[kinds.get(row["error_message"].split()[0])].append(row)
    found = {each.fingerprint if each.fingerprint in kinds.values() else None: each for each in made.faults}
    assert len(found) == len(made.faults) == 4
    for fingerprint, rows in groups.items():
        fault = found[fingerprint]
        assert fault.count == len(rows)
        assert (fault.first_seen, fault.last_seen) == (
            min(row["created_at"] for row in rows),
            max(row["created_at"] for row in rows),
        )
        assert fault.event_ids == tuple(sorted({row["event_id"] for row in rows}, reverse=True)[:5])
        assert set(fault.types) == {past.events[row["event_id"]]["type"] for row in rows}


def test_workers_that_left_work_are_those_found_by_hand(past: Past, made: Report):
    """Claims never reported on, and what is processing for too long (P.4, S3.8)."""
    found = {each.worker: (each.silent, each.expired, each.stuck, each.seen_at) for each in made.stale_workers}
    assert found == past.stale()
    assert found["gamma:9"][0::2] == (1, 1)
    assert all(each.lost == (each.seen_at <= past.now - PATIENCE) for each in made.stale_workers)


def test_a_killed_worker_is_found(spark: SparkSession, tmp_path: Path):
    """SIGKILL leaves no word: it is found by what it still holds, and afterwards by what expired (P.4, S3.8)."""
    url = f"sqlite:///{tmp_path / 'bus.db'}"
    bus = EventBus(url, worker_id="honest:1")
    bus.publish_many([{"type": "trial.one"}] * 5)
    done = bus.poll()
    assert done is not None
    bus.finalize(done, success=True)
    killed, owners = [], []
    for count in (1, 2):
        with closing(Child(tmp_path, role="hold", url=url, count=count)) as child:
            child.hear()
            owners.append(bus.store.owners())
            child.kill()
            killed.append(child.pid)
    assert bus.store.expire(owners[0], RetryPolicy(max_retries=9)) == 1
    now = datetime.now(UTC) + 2 * PATIENCE
    bus.shutdown()
    told = report.make(*frames(spark, read(tmp_path / "bus.db")), now=now)
    found = {int(each.worker.split(":")[1]): each for each in told.stale_workers}
    assert {pid: (each.silent, each.expired, each.stuck) for pid, each in found.items()} == {
        killed[0]: (1, 1, 0),
        killed[1]: (2, 0, 2),
    }
    assert all(each.lost for each in found.values())
    assert f"{found[killed[1]].worker} is lost: 2 claims without a report, 2 still processing" in render_html(told)
    assert (told.published, told.total.completed, told.timeline[-1].depth) == (5, 1, 4)


def test_nothing_at_all_makes_an_honest_report(spark: SparkSession):
    """No events: no figures are invented, and every form of it can be shown (P.4)."""
    empty = report.make(*frames(spark, Rows([], [], [])), now=START)
    assert (empty.since, empty.until) == (START - timedelta(hours=1), START)
    assert empty.total == Figures("all")
    assert not any((empty.published, empty.types, empty.workers, empty.faults, empty.stale_workers, empty.hours))
    assert {(each.published, each.depth, each.figures.attempts) for each in empty.timeline} == {(0, 0, 0)}
    assert "No event was published" in shown(empty)
    assert "Nothing happened in this time" in render_html(empty)
    assert json.loads(to_json(empty))["published"] == 0
    with pytest.raises(InvalidRequest):
        report.make(*frames(spark, Rows([], [], [])), since=START, until=START, now=START)


# ── how it is shown ──────────────────────────────────────────────────────────────────────────────────────────────


def shown(told: Report) -> str:
    """Return the report as a terminal would get it."""
    screen = StringIO()
    Console(file=screen, width=400, color_system=None).print(render_table(told))
    return screen.getvalue()


class Page(HTMLParser):
    """Reads a page as a browser would: what elements there are, what they fetch, and whether each is closed."""

    EMPTY = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        """Read it."""
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.stack: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that begins."""
        self.elements[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.EMPTY:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element without content."""
        self.elements[tag] += 1
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        """Close the element that is open."""
        assert self.stack.pop() == tag


def test_hostile_text_stays_text(made: Report):
    """Types, tags and messages with markup, control and direction characters harm neither page nor terminal (P.4)."""
    assert any(HOSTILE[:20] in (each.sample or "") for each in made.faults)
    html, screen = render_html(made), shown(made)
    page = Page(html)
    assert not page.stack
    assert not {"script", "img", "b", "i", "iframe", "link", "object"} & set(page.elements)
    assert not {name for name in page.attributes if name.startswith("on") or name in {"src", "href"}}
    assert "&lt;script&gt;alert(<n>)".replace("<n>", "&lt;n&gt;") in html
    assert "&lt;b&gt;bold&lt;/b&gt;" in html
    for text in (html, screen):
        assert not {"\x1b", "\u202e"} & set(text)
        assert "\\x1b" in text


def test_the_page_needs_nothing_and_can_be_heard(made: Report):
    """One file: nothing fetched, no script; each chart has a name, a description and its figures as a table (P.4)."""
    html = render_html(made)
    page = Page(html)
    assert "http" not in html.replace("http-equiv", "")
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert page.elements["svg"] == page.elements["desc"] == page.elements["details"] == 6
    assert html.count('role="img"><title>') == 6
    for title in ("Stale workers", "Subscriptions", "Errors", "By type", "By tag", "By worker", "Slowest types"):
        assert f"<h2>{title}</h2>" in html
        assert title in shown(made)
    assert ".dot {" in html
    assert html.count(">Busiest hours<") == shown(made).count("Busiest hours") == 1


def test_json_holds_the_whole_report(made: Report):
    """Plain values under the names of the fields, moments in UTC, lengths of time in milliseconds (P.4)."""
    told = json.loads(to_json(made))
    assert told["total"] == asdict(made.total)
    assert told["total"].keys() >= {"wait_ms", "run_ms"}
    assert told["bucket_ms"] == 60_000
    assert told["since"] == "2030-01-01T23:25:30Z"
    assert [each["depth"] for each in told["timeline"]] == [each.depth for each in made.timeline]
    assert told["types"] == [asdict(each) for each in made.types]


def test_a_value_alone_is_a_dot():
    """A line of one point would be invisible; the others are lines (P.4)."""
    times = [START + number * MINUTE for number in range(5)]
    chart = lines("t", "n", times, [Series("a", "first", [1, None, 2, 3, None])])
    assert chart.count('<path class="dot first" d="M100.0 ') == chart.count('class="dot') == 1
    assert chart.count('class="line') == chart.count('class="area') == 1


def test_charts_take_any_figures():
    """Nothing, one value, holes, zeros and large numbers are drawn within the frame (P.4)."""
    times = [START + number * MINUTE for number in range(4)]
    for values in ([0, 0, 0, 0], [None] * 4, [1, None, 2, 3], [0, 1e12, 5, 0.5], [3, 3, 3, 1e-9]):
        for say in ({}, {"say": length}):
            Page(lines("t", "n", times, [Series("a", "first", values), Series("b", "second", values)], **say))
        chart = bars("t", "n", times, [Series("a", "first", values), Series("b", "second", values)])
        Page(chart)
        assert 'height="-' not in chart
        assert 'y="-' not in chart
    for span, text in ((0.0005, "500 µs"), (0.25, "250 ms"), (59.94, "59.9 s"), (900, "15 min"), (90_061, "1 d 1 h")):
        assert length(span) == text
