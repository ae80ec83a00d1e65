"""Records the command line: all commands with their options, and what the script's commands print and exit with."""

import json
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any, Final

import pytest
import typer
from typer.testing import CliRunner, Result

from postbus.cli.app import app
from postbus.store import shown
from tests.contract.stores import Site
from tests.golden.command_steps import COMMANDS, Command
from tests.golden.normal import Normaliser
from tests.golden.shop import stocked

__all__ = ["command_names", "command_of", "record_commands"]

TYPERS: Final = frozenset({"install_completion", "show_completion"})
"""Options that Typer adds."""
PLAIN: Final = {"FORCE_COLOR": None, "TTY_COMPATIBLE": None}
"""Variables by which whoever runs the tests may ask for colours."""


def record_commands(site: Site) -> dict[str, Any]:
    """Return all commands with their options, and what the script's commands do on the prepared shop."""
    with closing(sqlite3.connect("old.db")) as old:
        old.execute("CREATE TABLE orders (id INTEGER, created_at TEXT, body TEXT, customer TEXT)")
        rows = [(1, "2029-01-01", '{"a": 1}', "ann"), (2, "2029-01-02", "NaN", "bob"), (3, "2029-01-03", "2", "ann")]
        old.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows)
        old.commit()
    with stocked(site), pytest.MonkeyPatch.context() as patch:
        # Typer's runner makes all commands anew for each call; where it does so by another name, this takes longer.
        patch.setattr("typer.testing._get_command", lambda _: _program(), raising=False)
        normal = Normaliser({site.url: "<url>", shown(site.url): "<url>"})
        runs = [normal(_run(each, site.url)) for each in COMMANDS]
    return {"commands": {" ".join(path): _options(each) for path, each in _tree()}, "runs": runs}


def _run(command: Command, url: str) -> dict[str, Any]:
    arguments = [*shlex.split(command.line), *(() if command.raw else ("-o", "json"))]
    result = CliRunner(env={"POSTBUS_URL": url, **PLAIN}).invoke(app, arguments, input=command.stdin)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    told: dict[str, Any] = {"command": command.line, "exit": result.exit_code}
    told |= {"stdin": command.stdin} if command.stdin is not None else {}
    told |= {"stdout": _printed(result)} if result.stdout else {}
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return told | ({"stderr": errors} if errors else {})


def _printed(result: Result) -> Any:
    """Return what was printed as JSON, as JSON lines, or as lines."""
    text = result.stdout
    if text.startswith(("-- ", "BEGIN;")):
        return "<SQL>"  # the schema is no contract
    lines = text.splitlines()
    for read in (lambda: json.loads(text), lambda: [json.loads(line) for line in lines]):
        try:
            return read()
        except ValueError:
            continue
    return lines


@cache
def _program() -> Any:
    return typer.main.get_command(app)


# ── what there is ────────────────────────────────────────────────────────────────────────────────────────────────────


def _tree() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command and group with the words that lead to it."""
    pending: list[tuple[tuple[str, ...], Any]] = [(("postbus",), _program())]
    while pending:
        path, command = pending.pop()
        yield path, command
        pending += [((*path, name), each) for name, each in getattr(command, "commands", {}).items()]


def _options(command: Any) -> list[str]:
    """Return a command's arguments and options: all names, and the environment variable, that one goes by."""
    told: list[str] = []
    for each in command.params:
        if each.name in TYPERS:
            continue
        option = each.param_type_name == "option"
        names = "/".join([*each.opts, *each.secondary_opts]) if option else (each.metavar or each.name)
        told.append(f"{names} {each.envvar}" if each.envvar else names)
    return sorted(told)


def command_names() -> set[str]:
    """Return all commands that are no groups, as `events list`."""
    return {" ".join(path[1:]) for path, command in _tree() if not hasattr(command, "commands")}


def command_of(line: str) -> str:
    """Return which command a line calls; the empty string for none."""
    words = shlex.split(line)
    return next((name for name in (" ".join(words[:2]), words[0]) if name in command_names()), "")
