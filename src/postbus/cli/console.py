"""What commands print: data on stdout as a table, JSON or JSON lines; everything else on stderr."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, cast

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from postbus.errors import InvalidRequest
from postbus.model import Event, Page

__all__ = ["Output", "age", "confirm", "emit", "moment", "progress", "say", "stderr", "stdout", "table", "to_json"]

ENDLESS: Final = 100_000
"""How wide a line may grow where nobody has a screen: nothing is cut off for grep."""
FILLED_BY_GET: Final = ("deliveries", "logs")


class Output(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


def stdout() -> Console:
    """Return the console for data; colours only on a terminal and without NO_COLOR."""
    return Console(width=None if sys.stdout.isatty() else ENDLESS, markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    """Return the console for everything that is not data."""
    wide = None if sys.stderr.isatty() else ENDLESS
    return Console(stderr=True, width=wide, markup=False, highlight=False, emoji=False)


def say(text: str, style: str | None = None) -> None:
    """Tell the person something that is not data."""
    stderr().print(printable(text), style=style)


def printable(value: object) -> str:
    """Return text that cannot move the cursor or colour the screen: events come from anywhere."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in str(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; numbers stand to the right, None is a dash."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    cells = [list(row) for row in rows]
    for place, name in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[place], int | None) for row in cells)
        made.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: object) -> Text:
    match value:
        case None | "":
            return Text("-", style="dim")
        case bool():
            return Text("yes" if value else "no")
        case int():
            return Text(f"{value:,}")
        case datetime():
            return Text(moment(value))
        case timedelta():
            return Text(age(value))
        case _:
            return Text(printable(value))


def moment(value: datetime) -> str:
    """Return a moment for people: UTC, to the second."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def age(value: timedelta) -> str:
    """Return a length of time for people: its two largest units."""
    left, parts = int(value.total_seconds()), list[str]()
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def emit(output: Output, data: object, view: Callable[[], Iterable[RenderableType]]) -> None:
    """Print data: `view` for people, the data itself for machines; a sequence makes one JSON line an item."""
    match output:
        case Output.TABLE:
            for each in view():
                stdout().print(each)
        case Output.JSON:
            typer.echo(to_json(data, indent=2))
        case Output.JSONL:
            for each in cast("Sequence[object]", data) if isinstance(data, list | tuple) else [data]:
                typer.echo(to_json(each))


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON with moments as RFC 3339 in UTC and lengths of time as seconds; integers stay exact."""
    return json.dumps(value, default=_plain, ensure_ascii=False, indent=indent)


def _plain(value: object) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
        case Event():
            shown = {name: part for name, part in _fields(value).items() if part or name not in FILLED_BY_GET}
            return shown | {"last_error": value.last_error}
        case Mapping():
            return dict(cast("Mapping[str, object]", value))
        case _ if is_dataclass(value):
            return _fields(value)
        case _:
            raise TypeError(f"{type(value).__name__} is not JSON")


def _fields(value: Any) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def tell_rest(page: Page[Any], noun: str) -> None:
    """Say on stderr how much of a list was shown, and how to see more."""
    if page.next is not None:
        total = f"{page.total:,}{' or more' if page.total_capped else ''}"
        say(f"{len(page)} of {total} {noun}; the next ones: --after {page.next}", style="dim")
    elif not page.items:
        say(f"no {noun}", style="dim")


def progress(what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal; what it gives takes the count done so far."""
    return _Bar(what, total)


class _Bar:
    def __init__(self, what: str, total: int | None) -> None:
        count = MofNCompleteColumn() if total is not None else TextColumn("{task.completed:,.0f}")
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn()
        self._bar = Progress(*columns, console=stderr(), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda done: self._bar.update(self._task, completed=done)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def confirm(question: str, *, yes: bool) -> None:
    """Return if the person agrees; without a terminal to ask at, only `--yes` agrees."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequest(f"{question} There is no terminal to ask at: add --yes, or --dry-run to only look.")
    typer.confirm(question, abort=True, err=True)
