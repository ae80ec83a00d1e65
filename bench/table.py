"""Results for people: tables on the terminal and in Markdown, and JSON for programs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from bench.measure import Bar, Line, Result, Verdict

__all__ = ["as_json", "losses", "markdown", "show"]

NUMBERS: Final = ("median", "spread")
_COLOURS: Final = {Verdict.OK: "green", Verdict.MISSED: "bold red", Verdict.SHOWN: "dim"}


def show(console: Console, results: Sequence[Result], machine: Mapping[str, Any]) -> None:
    """Print the machine, every figure, and every bar with its verdict."""
    console.print(_machine(machine), highlight=False)
    figures = _table("Figures", "subject", "figure", "median", "spread")
    bars = _table("Bars", "claim", "bar", "median", "spread", "verdict")
    for result in results:
        for each in (figures, bars):
            each.add_section()
            each.add_row(f"[bold]{result.measure.name}[/]: {result.measure.title}")
        for row in _figures(result):
            figures.add_row(*row)
        for line in result.lines:
            bars.add_row(*_bar(line), f"[{_COLOURS[line.verdict]}]{line.verdict}[/]")
            if line.reason:
                bars.add_row(f"[dim]{line.reason}[/]")
    console.print(figures)
    console.print(bars)


def markdown(results: Sequence[Result], machine: Mapping[str, Any], when: datetime) -> str:
    """Return the page's generated part: where we lose first, then bars, then figures."""
    rounds = max(len(each.rounds) for each in results)
    parts = [f"Measured {when:%Y-%m-%d %H:%M} UTC, {rounds} rounds. {_machine(machine)}", "### Where we lose"]
    parts.append("\n".join(f"- {each}" for each in losses(results)) or "Nowhere in this run.")
    parts += ["### Bars", _markdown_table("measure|claim|bar|median|spread|verdict", _bar_rows(results))]
    rows = [[result.measure.name, *row] for result in results for row in _figures(result)]
    parts += ["### Figures", _markdown_table("measure|subject|figure|median|spread", rows)]
    return "\n\n".join(parts)


def losses(results: Iterable[Result]) -> list[str]:
    """Say in words where a bar was missed, and where a peer is ahead of postbus."""
    said: list[str] = []
    for result in results:
        where = f"**{result.measure.name}**"
        said += [
            f"{where}: {line.bar.claim}: {_amount(line.bar, line.spread.median)}, and the bar is {line.bar.wording}."
            for line in result.lines
            if line.verdict is Verdict.MISSED
        ]
        figures = result.figures()
        for peer in result.measure.peers:
            ours, theirs = figures["postbus", "rate"].median, figures[peer, "rate"].median
            if theirs > ours:
                said.append(f"{where}: {result.measure.title}: {peer} does {theirs:,.0f}/s, postbus {ours:,.0f}/s.")
    return said


def as_json(results: Sequence[Result], machine: Mapping[str, Any], when: datetime, options: Mapping[str, Any]) -> Any:
    """Return everything measured, every single sample too, as plain JSON values."""
    return {
        "measured_at": when.astimezone(UTC).isoformat(),
        "options": dict(options),
        "machine": dict(machine),
        "measures": [
            {
                "name": result.measure.name,
                "title": result.measure.title,
                "store": result.measure.store,
                "seconds": round(result.seconds, 1),
                "rounds": list(result.rounds),
                "bars": [_line_json(line) for line in result.lines],
            }
            for result in results
        ],
    }


def _line_json(line: Line) -> dict[str, Any]:
    return {
        "claim": line.bar.claim,
        "bar": line.bar.wording,
        "median": line.spread.median,
        "lowest": line.spread.low,
        "highest": line.spread.high,
        "unit": line.bar.unit,
        "verdict": line.verdict,
        "reason": line.reason,
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if column in NUMBERS else "left", no_wrap=number > 0)
    return table


def _figures(result: Result) -> list[list[str]]:
    def shown(value: float) -> str:
        match result.measure.unit:
            case "/s":
                return f"{value:,.0f}/s"
            case "ms":
                return f"{value * 1000:,.2f} ms"
            case "each":
                return f"{value:,.2f}"

    return [
        [subject, figure, shown(spread.median), f"{shown(spread.low)} … {shown(spread.high)}"]
        for (subject, figure), spread in result.figures().items()
    ]


def _bar(line: Line) -> list[str]:
    spread, bar = line.spread, line.bar
    between = f"{_amount(bar, spread.low)} … {_amount(bar, spread.high)}"
    return [bar.claim, bar.wording, _amount(bar, spread.median), between]


def _bar_rows(results: Iterable[Result]) -> list[list[str]]:
    return [
        [result.measure.name, *_bar(line), f"{line.verdict}: {line.reason}" if line.reason else str(line.verdict)]
        for result in results
        for line in result.lines
    ]


def _amount(bar: Bar, value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f} x" if bar.unit == "x" else f"{value:.2f} {bar.unit}"


def _markdown_table(header: str, rows: Iterable[Sequence[str]]) -> str:
    names = header.split("|")
    ruler = ["---:" if name in NUMBERS else "---" for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ruler, *rows))


def _machine(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    postgres = f"; PostgreSQL {machine['postgres']}" if machine["postgres"] else ""
    return (
        f"{machine['cores']} cores ({machine['cpu']}), load {machine['load']:.1f} at the start, an fsync of 4 KiB "
        f"takes {machine['fsync_ms']:.2f} ms; Python {machine['python']}, SQLite {machine['sqlite_of_apsw']} in apsw "
        f"and {machine['sqlite_of_python']} in Python's own module{postgres}; {packages}."
    )
