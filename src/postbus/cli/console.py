"""What commands print: data on stdout as a table, JSON or JSON lines; everything else on stderr."""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, cast

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from postbus.errors import InvalidRequest
from postbus.model import Event, Page
from postbus.telling import age

__all__ = [
    "Output",
    "confirm",
    "doing",
    "emit",
    "ending_well",
    "flow",
    "line",
    "progress",
    "require_answer",
    "say",
    "stderr",
    "stdout",
    "table",
    "tell_rest",
    "to_json",
]

ENDLESS: Final = 100_000
"""How wide a line may grow where nobody has a screen: nothing is cut off for grep."""
_COMMANDING: Final = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What JSON leaves as it is, and a terminal obeys: DEL, C1 and the controls of writing direction."""
FILLED_BY_GET: Final = ("deliveries", "logs")


class Output(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


def flow(group: typer.Typer) -> None:
    """Let what its commands' docstrings say run to the width of the screen, wherever the source breaks its lines."""
    for each in group.registered_commands:
        paragraphs = (inspect.getdoc(each.callback) or "").split("\n\n")
        each.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


def stdout() -> Console:
    """Return the console for data."""
    return _console(to_stderr=False, terminal=sys.stdout.isatty())


def stderr() -> Console:
    """Return the console for everything that is not data."""
    return _console(to_stderr=True, terminal=sys.stderr.isatty())


def _console(*, to_stderr: bool, terminal: bool) -> Console:
    wide = None if terminal else ENDLESS
    return Console(stderr=to_stderr, width=wide, markup=False, highlight=False, emoji=False)


def say(text: str, style: str | None = None) -> None:
    """Tell the person something that is not data."""
    stderr().print(line(text, style or ""))


def line(value: object, style: str = "") -> Text:
    """Return text that cannot move the cursor or colour the screen by itself: events come from anywhere."""
    safe = (each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in str(value))
    return Text("".join(safe), style=style)


def table(columns: str, rows: Iterable[Sequence[object]]) -> Table:
    """Return a table with the columns named, separated by two spaces; numbers stand to the right, None is a dash."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    cells = [list(row) for row in rows]
    for place, name in enumerate(columns.split("  ")):
        numeric = any(type(row[place]) is int for row in cells)
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
            return Text(f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}")
        case timedelta():
            return Text(age(value))
        case _:
            return line(value)


def emit(output: Output, data: object, view: Callable[[], Iterable[RenderableType]]) -> None:
    """Print data: `view` for people, the data itself for machines; a sequence makes one JSON line an item."""
    match output:
        case Output.TABLE:
            console = stdout()
            for each in view():
                console.print(each)
        case Output.JSON:
            typer.echo(to_json(data, indent=2))
        case Output.JSONL:
            for each in cast("Sequence[object]", data) if isinstance(data, list | tuple) else [data]:
                typer.echo(to_json(each))


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON with moments as RFC 3339 in UTC and lengths of time as seconds; integers stay exact.

    What would move the cursor, colour the screen or turn text around is escaped: events come from anywhere.
    """
    text = json.dumps(value, default=_plain, ensure_ascii=False, indent=indent)
    return _COMMANDING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return value.total_seconds()
        case Mapping():
            return dict(cast("Mapping[str, object]", value))
        case _ if is_dataclass(value):
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
            if isinstance(value, Event):
                parts = {name: part for name, part in parts.items() if part or name not in FILLED_BY_GET}
                parts["last_error"] = value.last_error
            return parts
        case _:
            raise TypeError(f"{type(value).__name__} is not JSON")


def tell_rest(page: Page[Any], noun: str) -> None:
    """Say on stderr how much of a list was shown, and how to see more."""
    if page.next is not None:
        total = f"{page.total:,}{' or more' if page.total_capped else ''}"
        say(f"{len(page)} of {total} {noun}; the next ones: --after {page.next}", style="dim")
    elif not page.items:
        say(f"no {noun}", style="dim")


class _Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s")


@contextmanager
def progress(what: str, total: int | None) -> Generator[Callable[[int], None]]:
    """Show a bar on stderr, if that is a terminal; what it gives takes the count done so far."""
    shown = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate()
    with Progress(
        *shown, TimeElapsedColumn(), console=stderr(), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def doing(what: str) -> Generator[None]:
    """Say at once, on stderr, what takes a while: on a terminal until it is done, elsewhere as a line."""
    with ExitStack() as stack:
        if sys.stderr.isatty():
            stack.enter_context(stderr().status(what))
        else:
            say(what)
        yield


@contextmanager
def ending_well() -> Generator[None]:
    """Take Ctrl-C, and a reader of stdout that has gone (`| head`), for an end like any other."""
    try:
        yield
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it flushes


def require_answer(question: str, *, yes: bool) -> None:
    """Raise InvalidRequest where nobody could agree: without a terminal to ask at, only `--yes` does."""
    if not yes and not sys.stdin.isatty():
        raise InvalidRequest(f"{question} There is no terminal to ask at: add --yes, or --dry-run to only look.")


def confirm(question: str, *, yes: bool) -> None:
    """Return if the person agrees."""
    require_answer(question, yes=yes)
    if not yes:
        typer.confirm(question, abort=True, err=True)
