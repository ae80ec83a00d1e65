"""What the documents show is what happens: their Python runs, their commands exist, their links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, LiteralString, NamedTuple, cast

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from postbus.cli.app import app
from postbus.store import grant_roles
from tests.postgres.server import query, server

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVED = "http.md"  # needs a server: test_http_page runs it
POSTGRESQL = ROOT / "docs" / "postgresql.md"


class Block(NamedTuple):
    """A fenced block: its language, the line it begins on, and its text."""

    language: str
    line: int
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """Return the fenced blocks of one language in a page."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    made = (Block(each[1], text.count("\n", 0, each.start(2)), each[2]) for each in found)
    return [each for each in made if each.language == language]


def commands(group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Go through every command with the words that call it; groups are commands too."""
    yield path, group
    for name, each in getattr(group, "commands", {}).items():
        yield from commands(each, (*path, name))


COMMANDS = dict(commands(get_command(app)))


def lines_of_sh(page: Path) -> Iterator[str]:
    """Go through the `postbus …` lines of a page's shell blocks."""
    for block in blocks(page, "sh"):
        yield from (line for line in block.text.splitlines() if line.startswith("postbus "))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page.name != SERVED], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path):
    """The blocks of a page run in order as one program, without a warning, and print its `output` blocks."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    program = tmp_path / f"{page.stem.lower()}_examples.py"  # line numbers are those of the page
    program.write_text("\n".join(lines), encoding="utf-8")
    with server().database() if "DATABASE_URL" in program.read_text(encoding="utf-8") else nullcontext("") as url:
        ran = subprocess.run(
            [sys.executable, "-W", "error", program],
            check=False,
            cwd=tmp_path,
            env={**os.environ, "DATABASE_URL": url},
            capture_output=True,
            text=True,
            timeout=240 if page.name == "pipeline.md" else 60,  # Spark starts
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "".join(block.text for block in blocks(page, "output"))


def test_the_sql_of_the_postgresql_page_runs():
    """Its statements publish what they say, from a trigger too, and its roles can be had (S3.13)."""
    with server().database() as url:
        grant_roles(url)
        try:
            for block in blocks(POSTGRESQL, "sql"):
                query(url, cast("LiteralString", block.text))
            assert query(url, "SELECT type, key FROM events ORDER BY id") == [
                ("order.placed", None), ("parcel.packed", "1"), ("parcel.packed", "2"), ("parcel.sent", "1"),
            ]  # fmt: skip
        finally:
            for name in ("shop_web", "shop_worker", "shop_grafana"):
                query(url, cast("LiteralString", f"DROP ROLE IF EXISTS {name}"))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_a_help_text_with_an_example(path):
    """`--help` explains each command and shows how to call it, with a command that exists."""
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    assert COMMANDS[path].help
    examples = re.findall(r"^Example: (postbus .*)$", COMMANDS[path].epilog or "", re.MULTILINE)
    assert examples
    assert "Example: postbus" in result.output
    for example in examples:
        check_usage(example)


@pytest.mark.parametrize("page", [page for page in PAGES if any(lines_of_sh(page))], ids=lambda page: page.name)
def test_every_command_a_page_shows_exists_with_its_options(page):
    """No page tells to type what the program does not know."""
    for line in lines_of_sh(page):
        check_usage(line)


def check_usage(line: str) -> None:
    """Fail unless the words of a `postbus …` line are a command, and its options are options of it."""
    words = shlex.split(re.split(r" [|<>(] ?", line)[0], comments=True)[1:]
    path = max((path for path in COMMANDS if tuple(words[: len(path)]) == path), key=len)
    assert path, line
    known = {name for parameter in COMMANDS[path].params for name in parameter.opts} | {"--help"}
    options = {word.partition("=")[0] for word in words[len(path) :] if re.match(r"--?[a-z]", word)}
    assert options <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    """Every relative link is a file."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
