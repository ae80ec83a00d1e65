"""Every command at a terminal and in a pipe, every `--help` with examples that are commands, and the page of them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import apsw
import httpx2
import pytest
from typer.main import get_command

from postbus import Discard, EventBus
from postbus.cli.app import app
from tools.cli_page import PAGE, commands, main

from .conftest import PROGRAM, URL, Terminal

COMMANDS = [each for each in commands() if each.function is not None]
EXAMPLES = [
    (each.words, shown) for each in commands() for shown in re.findall(r"^Example: (.*)$", each.epilog, re.MULTILINE)
]


class Run(NamedTuple):
    """A command, what it must show, and its exit code."""

    line: str
    shows: str
    code: int = 0


RUNS = [
    Run("grafana --what alerts", "PostbusQueueOld"),
    Run("migrate", "up to date"),
    Run("publish ping", "ping"),
    Run("events list --limit 5", "payment.due"),
    Run("events show 1", "no such card"),
    Run("tail -n 5", "order.placed"),
    Run("tail --audit", "FAILED"),
    Run("stats", "default"),
    Run("top --once", "SUBSCRIPTION"),
    Run("doctor", "dead letters", 3),
    Run("check dead --crit 1", "CRITICAL", 3),
    Run("bench --seconds 0.1 --events 20", "delay at"),
    Run("torture --list", "kill-worker"),
    Run("dlq list", "Discard"),
    Run("dlq show 1", "payment.due"),
    Run("dlq retry 1", "1 dead letter retried"),
    Run("dlq purge 2 --yes", "1 dead letter purged"),
    Run("subscriptions list", "sales"),
    Run("subscriptions pause sales", "is now paused"),
    Run("subscriptions resume sales", "running"),
    Run("subscriptions rewind sales --to beginning --yes", "goes on after 0"),
    Run("subscriptions delete sales --yes", "deleted sales"),
    Run("token create web --scope publish", "shown only this once"),
    Run("token list", "SCOPES"),
    Run("token revoke nobody --yes", "there is no token", 1),
    Run("import things --type =thing --payload body --from sqlite:///old.db", "IMPORTED"),
    Run("erase --key ann --yes", "CHANGED"),
    Run("restore-mark --dry-run", "would be put back"),
    *(
        Run(f"pipeline {name} --help", "Example")
        for name in ("ingest", "compact", "report", "archive", "replay", "run")
    ),
]
LIVE = {"demo", "serve", "worker"}
ALL_OF_THEM = """
import json, sys
from postbus.cli.app import app
for line in json.load(open("runs.json")):
    print(f"<{line['number']}>", flush=True)
    try:
        app(line["arguments"])
    except SystemExit as end:
        print(f"</{line['number']} {end.code}>", flush=True)
"""
WORKER = "from postbus import EventBus\nbus = EventBus()\nbus.subscribe('ping', print)\n"


def furnish(folder: Path) -> None:
    """Put a shop with three dead letters, a follower and an old table into a folder."""
    bus = EventBus(f"sqlite:///{folder / 'shop.db'}")

    @bus.on("*")
    def refuse(event: object) -> None:
        raise Discard("no such card")

    for kind in ("payment.due", "payment.late", "order.placed"):
        bus.publish(kind, {"card": 4111}, key="ann")
    bus.run_due()
    bus.follow("sales", start="beginning")(print)
    bus.shutdown()
    old = apsw.Connection(str(folder / "old.db"))
    old.execute("CREATE TABLE things (id, created_at, body); INSERT INTO things VALUES (1, '2030-01-01', '{}')")
    old.close()


@pytest.fixture(scope="module")
def at_terminal(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, str]]:
    """Run them all in one process at one terminal, one after the other; give exit code and text of each."""
    folder = tmp_path_factory.mktemp("terminal")
    furnish(folder)
    asked = [{"number": number, "arguments": shlex.split(each.line)} for number, each in enumerate(RUNS)]
    (folder / "runs.json").write_text(json.dumps(asked))
    screen = Terminal(sys.executable, "-c", ALL_OF_THEM, cwd=folder, env={**os.environ, "POSTBUS_URL": URL})
    code, shown = screen.end()
    screen.close()
    assert code == 0, shown
    found = re.findall(r"<(\d+)>(.*?)</\1 (\d+)>", shown, re.DOTALL)
    return {int(number): (int(ended), text) for number, text, ended in found}


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[each.line for each in RUNS])
def test_at_a_terminal(number, at_terminal):
    """It shows what it has to show, with the exit code that is promised."""
    code, shown = at_terminal[number]
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    assert RUNS[number].shows in plain
    assert code == RUNS[number].code


@pytest.mark.parametrize("run", RUNS, ids=[each.line for each in RUNS])
def test_in_a_pipe(run, folder, cli):
    """The same without a terminal, where nothing is coloured and nobody is asked."""
    furnish(folder)
    done = cli(*shlex.split(run.line), expect=run.code)
    assert run.shows in done.output
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("line", ["serve --port 0", "worker shop:bus"])
@pytest.mark.parametrize("place", ["terminal", "pipe"])
def test_what_runs_until_it_is_stopped(place, line, folder, terminal, command, eventually):
    """Ctrl-C at a terminal and SIGTERM in a pipe end a server and a worker with 0 (S1.14)."""
    (folder / "shop.py").write_text(WORKER)
    begun = r"http://127\.0\.0\.1:\d+" if "serve" in line else "worker_process_started"
    if place == "terminal":
        screen = terminal(*line.split())
        wait_for_start(screen.find(begun), eventually)
        screen.press("\x03")
        assert screen.end()[0] == 0
    else:
        process = command(*line.split())
        wait_for_start(next(found[0] for each in process.stderr if (found := re.search(begun, each))), eventually)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def wait_for_start(begun: str, eventually: Callable[..., object]) -> None:
    """Wait until a server answers: it says where it is a moment before."""

    def answers() -> bool:
        try:
            return httpx2.get(f"{begun}/livez").is_success
        except httpx2.TransportError:
            return False

    if begun.startswith("http"):
        eventually(answers)


def test_the_demo_at_a_terminal(terminal):
    """The first thing a person tries; in a pipe it has tests of its own."""
    code, shown = terminal("demo", "--events", "40", "--no-report").end()
    assert code == 0
    assert "No event was lost." in shown


def test_none_is_forgotten():
    """Every command that there is, is run above."""
    run = {" ".join(shlex.split(each.line)[:2]) for each in RUNS} | {each.line.split()[0] for each in RUNS} | LIVE
    assert [each.words for each in COMMANDS if " ".join(each.words[1:]) not in run] == []


@pytest.mark.parametrize("each", list(commands()), ids=lambda each: " ".join(each.words))
def test_every_help_has_an_example_of_itself(each):
    """Whoever asks for help sees a line to copy, which begins with the command asked about."""
    mine = [shown for words, shown in EXAMPLES if words == each.words]
    assert mine
    assert all(" ".join(each.words) in shown for shown in mine)


@pytest.mark.parametrize("example", [shown for _, shown in EXAMPLES])
def test_an_example_is_a_command(example):
    """Every postbus in an example is one that the command line takes, argument by argument."""
    parts = shlex.shlex(re.sub(r" {3}\(.*\)$", "", example), posix=True, punctuation_chars="|&<>")
    parts.whitespace_split = True
    for between, words in groupby(parts, key=lambda word: word in {"|", "&&", "<", ">"}):
        line = list(words)
        if not between and line[0] == "postbus":
            accepted(line[1:])


def accepted(words: list[str]) -> None:
    """Have a line parsed all the way down, running nothing."""
    command, context = get_command(app), None
    while words:
        group = hasattr(command, "commands")
        if not group:
            command.make_context(command.name, list(words), parent=context)
            return
        command, words = command.commands[words[0]], words[1:]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete(shell):
    """What the completion scripts call gives the commands and options that fit (typer's own protocol)."""
    asked = {"_POSTBUS_COMPLETE": f"complete_{shell}", "COMP_WORDS": "postbus ta", "COMP_CWORD": "1"}
    asked |= {"_TYPER_COMPLETE_ARGS": "postbus ta", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [PROGRAM], check=False, capture_output=True, text=True, timeout=60, env={**os.environ, **asked}
    )
    assert "tail" in done.stdout
    assert "worker" not in done.stdout


def test_the_page_is_what_the_commands_say(tmp_path, capsys):
    """docs/cli.md is the one that the command tree gives; a stale or missing one is refused, with the remedy."""
    assert main(["--check"]) == 0
    assert main(["--check"], root=tmp_path) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([], root=tmp_path) == 0
    assert main(["--check"], root=tmp_path) == 0
    page = (tmp_path / PAGE).read_text()
    assert all(f"# {' '.join(each.words)}\n" in page for each in COMMANDS)
    assert "--install-completion" in page
