"""What `--help` looks like on a narrow screen."""

from itertools import pairwise

import pytest
from typer.main import get_command

from postbus.cli.app import app
from tools.cli_page import commands

WIDTH = 80
GROUPS = ("subscriptions", "dlq")
COMMANDS = [(group, name) for group in GROUPS for name in get_command(app).commands[group].commands]  # pyright: ignore[reportAttributeAccessIssue]

ALL = [each.words[1:] for each in commands() if each.function is not None]


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_help_fills_its_lines_and_cuts_nothing_off(command, cli):
    """No line of a paragraph ends where the next word would still have fitted; no word is cut short."""
    shown = cli(*command, "--help").stdout
    if command[0] in GROUPS:
        assert "…" not in shown
    assert "[[" not in shown
    told, *_ = shown.partition("╭")
    for line, following in pairwise(told.splitlines()):
        if line.strip() and following.strip():
            assert len(line.rstrip()) + len(following.split()[0]) + 1 > WIDTH - 1, f"{line!r} has room"


@pytest.mark.parametrize("group", GROUPS)
def test_a_command_is_told_in_a_line(group, cli):
    """Each command of a group takes one line of its list."""
    listed = cli(group, "--help").stdout.partition("Commands")[2].splitlines()[1:]
    lines = [line for line in listed if line.startswith("│")]
    assert [line.split()[1] for line in lines] == [name for each, name in COMMANDS if each == group]
