"""A report shown: as tables for a terminal, as JSON, or as one HTML page that can be sent to a colleague.

Event types, worker names and error messages are other people's text: cleaned for the terminal, and escaped for HTML.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from html import escape
from importlib.resources import files
from string import Template
from typing import Final, NamedTuple

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from postbus.spark.chart import DASH, Series, bars, clean, heat, html_table, length, lines, moment, share, sparkline
from postbus.spark.report import DAYS, Figures, Percentiles, Report, Standing

__all__ = ["render_html", "render_table", "to_json"]

SHOWN: Final = 15
LONGEST_CELL: Final = 200
LONGEST_LIST: Final = 5
LONG_WAIT: Final = timedelta(minutes=5)
MILLI: Final = 1e-3


class Sheet(NamedTuple):
    """A table to show; a column whose name begins with `>` holds figures, with `=` something not to be broken."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def to_json(report: Report) -> str:
    """Return the whole report: moments as RFC 3339 in UTC, lengths of time in milliseconds, as their names say."""
    return orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_UTC_Z).decode()


def render_table(report: Report) -> RenderableType:
    """Return the report for a terminal."""
    parts: list[RenderableType] = [_text(_title(report), "bold"), _text(_summary(report))]
    parts += [_text(f"! {each}", "yellow") for each in _findings(report)]
    if report.timeline and _happened(report):
        parts += ["", _sparklines(report)]
    for sheet in (*_sheets(report), _busiest(report)):
        if sheet.rows:
            parts += ["", _text(sheet.title, "bold"), _grid(sheet)]
    return Group(*parts)


def render_html(report: Report) -> str:
    """Return one self-contained page: nothing is fetched, no script runs, and it prints."""
    findings = "".join(f"<li>{escape(clean(each))}</li>" for each in _findings(report))
    return Template(files(__package__).joinpath("report.html").read_text("utf-8")).substitute(
        title=escape(_title(report)),
        period=escape(_period(report)),
        now=moment(report.now),
        summary=escape(_summary(report)),
        findings=f'<ul class="findings">{findings}</ul>'
        if findings
        else '<p class="fine">Nothing needs attention.</p>',
        cards="".join(_card(*each) for each in _headlines(report)),
        charts="".join(_charts(report)) if _happened(report) else '<p class="fine">Nothing happened in this time.</p>',
        sheets="".join(_section(each) for each in _sheets(report) if each.rows),
    )


# ── in words ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _happened(report: Report) -> bool:
    return bool(report.published or report.total.attempts or any(each.deepest for each in report.timeline))


def _period(report: Report) -> str:
    return f"{moment(report.since)} to {moment(report.until)} UTC"


def _title(report: Report) -> str:
    return f"postbus report, {_period(report)}"


def _summary(report: Report) -> str:
    total = report.total
    if not _happened(report):
        return "No event was published, and nothing was tried or waiting in this time."
    return (
        f"{_many(report.published, 'event')} published, {_many(total.completed, 'delivery', 'deliveries')} completed. "
        f"Of {_many(total.attempts, 'attempt')}, {total.failed:,} failed ({share(total.failed, total.attempts)}), and "
        f"{_many(total.dead, 'dead letter')} came of it."
    )


def _findings(report: Report) -> Iterator[str]:
    """Go through what somebody should look at, the worst first."""
    for each in report.stale_workers:
        if each.lost:
            held = f"{_many(each.silent, 'claim')} without a report, {each.stuck:,} still processing"
            yield f"Worker {each.worker} is lost: {held}; last seen {_ago(report, each.seen_at)} ago."
    for each in report.standing:
        if each.dead:
            yield f"{each.name}: {_many(each.dead, 'dead letter')} to retry or purge."
        if each.oldest and report.now - each.oldest > LONG_WAIT:
            yield f"{each.name}: the oldest has waited for {_ago(report, each.oldest)}."


def _ago(report: Report, when: datetime) -> str:
    return length((report.now - when).total_seconds())


def _many(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _three(values: Percentiles | None) -> list[str]:
    return [DASH] * 3 if values is None else [length(each * MILLI) for each in (values.p50, values.p95, values.p99)]


# ── the tables ───────────────────────────────────────────────────────────────────────────────────────────────────


def _sheets(report: Report) -> Sequence[Sheet]:
    """Return the tables, empty ones too, but that of the busiest hours, which a page shows as a chart."""
    return (
        _stale(report),
        _subscriptions(report),
        _faults(report),
        _by("type", report.types),
        _by("tag", report.tags),
        _by("worker", report.workers),
        _slowest(report),
        _dead(report),
    )


def _by(name: str, figures: Sequence[Figures]) -> Sheet:
    columns = [
        name, ">attempts", ">completed", ">failed", ">rate", ">retries", ">dead",
        ">wait p50", ">p95", ">p99", ">run p50", ">p95", ">p99",
    ]  # fmt: skip
    rows = [
        [each.name, f"{each.attempts:,}", f"{each.completed:,}", f"{each.failed:,}", share(each.failed, each.attempts),
         f"{each.retries:,}", f"{each.dead:,}", *_three(each.wait_ms), *_three(each.run_ms)]
        for each in figures[:SHOWN]
    ]  # fmt: skip
    return Sheet(f"By {name}", _rest(figures, "most dead letters and failures first"), columns, rows)


def _rest(items: Sequence[object], order: str) -> str:
    return order if len(items) <= SHOWN else f"{order}; {len(items) - SHOWN:,} more in the JSON"


def _subscriptions(report: Report) -> Sheet:
    columns = [
        "subscription", ">completed", ">failed", ">died",
        ">pending now", ">processing", ">dead letters", ">oldest waits",
    ]  # fmt: skip
    figures = {each.name: each for each in report.subscriptions}
    standing = {each.name: each for each in report.standing}
    rows: list[list[str]] = []
    for name in sorted(figures | standing):
        did, now = figures.get(name, Figures(name)), standing.get(name, Standing(name, 0, 0, 0, None))
        numbers = (did.completed, did.failed, did.dead, now.pending, now.processing, now.dead)
        rows.append([name, *(f"{each:,}" for each in numbers), _ago(report, now.oldest) if now.oldest else DASH])
    return Sheet("Subscriptions", "what they did in this time, and how they stand now", columns, rows)


def _slowest(report: Report) -> Sheet:
    rows = [[each.name, f"{each.attempts:,}", *_three(each.run_ms)] for each in report.slowest[:SHOWN]]
    columns = ["type", ">attempts", ">run p50", ">p95", ">p99"]
    return Sheet("Slowest types", "by the time that 95 % of their attempts stay below", columns, rows)


def _faults(report: Report) -> Sheet:
    rows = [
        [f"{each.count:,}", each.error_type or DASH, _cut(each.fingerprint), _list(each.types), moment(each.first_seen),
         moment(each.last_seen), _list(each.event_ids)]
        for each in report.faults[:SHOWN]
    ]  # fmt: skip
    note = _rest(report.faults, "messages with ids, numbers and quoted text folded; the latest events that met them")
    return Sheet("Errors", note, [">times", "error", "message", "types", "=first seen", "=last seen", "events"], rows)


def _cut(text: str | None) -> str:
    return DASH if not text else text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}…"


def _list(items: Sequence[object]) -> str:
    more = f" and {len(items) - LONGEST_LIST} more" if len(items) > LONGEST_LIST else ""
    return ", ".join(map(str, items[:LONGEST_LIST])) + more or DASH


def _stale(report: Report) -> Sheet:
    rows = [
        [each.worker, "lost" if each.lost else "recent", f"{each.silent:,}", f"{each.expired:,}", f"{each.stuck:,}",
         moment(each.claimed_at), moment(each.seen_at), _list(each.event_ids)]
        for each in report.stale_workers[:SHOWN]
    ]  # fmt: skip
    columns = ["worker", "state", ">silent claims", ">expired", ">stuck now", "=oldest claim", "=last seen", "events"]
    return Sheet("Stale workers", _rest(report.stale_workers, "claimed work, and gave no word of it"), columns, rows)


def _dead(report: Report) -> Sheet:
    told = [each for each in report.timeline if each.figures.dead or each.revived or each.purged]
    rows = [
        [moment(each.start), f"{each.figures.dead:,}", f"{each.revived:,}", f"{each.purged:,}"]
        for each in told[-SHOWN:]
    ]
    note = "the latest times at which any were made or dealt with"
    return Sheet("Dead letters", note, ["=from", ">died", ">retried", ">purged"], rows)


def _busiest(report: Report) -> Sheet:
    hours = sorted(report.hours.items(), key=lambda each: -each[1])[:5]
    rows = [[f"{name}:00", f"{number:,}", share(number, report.published)] for name, number in hours]
    return Sheet("Busiest hours", "UTC", ["hour", ">published", ">of all"], rows)


# ── for a terminal ───────────────────────────────────────────────────────────────────────────────────────────────


def _text(text: str, style: str = "") -> Text:
    return Text(clean(text), style=style)


def _grid(sheet: Sheet) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in sheet.columns:
        table.add_column(name.lstrip(">="), justify="right" if name[:1] == ">" else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(_text, row))
    return table


def _sparklines(report: Report) -> Table:
    rows = {
        "published": [each.published for each in report.timeline],
        "completed": [each.figures.completed for each in report.timeline],
        "failed": [each.figures.failed for each in report.timeline],
        "depth": [each.deepest for each in report.timeline],
    }
    told = [[name, sparkline(values), f"{max(values):,}"] for name, values in rows.items()]
    return _grid(Sheet("", "", [f"per {length(report.bucket_ms * MILLI)}", "", ">highest"], told))


# ── for a browser ────────────────────────────────────────────────────────────────────────────────────────────────


def _headlines(report: Report) -> Iterator[tuple[str, str, str]]:
    total, standing = report.total, report.standing
    yield "Published", f"{report.published:,}", "events"
    yield (
        "Completed",
        f"{total.completed:,}",
        f"{total.with_errors:,} with errors" if total.with_errors else "deliveries",
    )
    yield "Failed attempts", share(total.failed, total.attempts), f"{total.failed:,} of {total.attempts:,}"
    yield "Dead letters now", f"{sum(each.dead for each in standing):,}", f"{total.dead:,} died in this time"
    yield "Unfinished now", f"{sum(each.pending + each.processing for each in standing):,}", "waiting or running"
    yield "Wait, 95 %", _three(total.wait_ms)[1], f"half within {_three(total.wait_ms)[0]}"
    yield "Run, 95 %", _three(total.run_ms)[1], f"half within {_three(total.run_ms)[0]}"


def _card(name: str, value: str, note: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(note)}</dd></div>"


def _charts(report: Report) -> Iterator[str]:
    timeline, each = report.timeline, f"per {length(report.bucket_ms * MILLI)}"
    times = [bucket.start for bucket in timeline]
    figures = [bucket.figures for bucket in timeline]
    published = Series("published", "first", [bucket.published for bucket in timeline])
    completed = Series("completed", "second", [figure.completed for figure in figures])
    retries = Series("tried again", "warn", [figure.retries for figure in figures])
    dead = Series("died", "bad", [figure.dead for figure in figures])
    revived = Series("retried", "first", [bucket.revived for bucket in timeline])
    purged = Series("purged", "third", [bucket.purged for bucket in timeline])
    depth = Series("unfinished", "first", [bucket.deepest for bucket in timeline])
    yield lines("Throughput", f"events published and deliveries completed {each}", times, [published, completed])
    yield lines("Queue depth", f"the most deliveries that were not finished at once, {each}", times, [depth])
    yield lines("Wait", "from ready to claimed", times, _spread([figure.wait_ms for figure in figures]), length)
    yield lines("Run time", "of handlers", times, _spread([figure.run_ms for figure in figures]), length)
    yield bars("Failed attempts", f"{each}, by what came of them", times, [dead, retries])
    dealt = [series for series in (revived, purged) if any(series.values)]
    yield bars("Dead letters", f"made {each}, and dealt with", times, [dead, *dealt])
    short = report.until - report.since < timedelta(days=6)
    days = [day for day in DAYS if not short or any(hour.startswith(day) for hour in report.hours)]
    yield heat("Busiest hours", "events published by hour of the week, UTC", report.hours, days)


def _spread(values: Sequence[Percentiles | None]) -> list[Series]:
    return [
        Series(name, name, [None if value is None else getattr(value, name) * MILLI for value in values])
        for name in ("p50", "p95", "p99")
    ]


def _section(sheet: Sheet) -> str:
    table = html_table(sheet.columns, sheet.rows)
    return f"<section><h2>{escape(sheet.title)}</h2><p>{escape(sheet.note)}</p>{table}</section>"
