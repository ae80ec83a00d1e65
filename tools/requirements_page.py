"""Write docs/requirements.md: which test holds which requirement.

A test names what it holds in its docstring ("S1.9", "I8"). This script reads the docstrings with `ast`,
importing nothing, and writes one table a group. With `--check` it writes nothing, and exits 1 if the page
in the repository is not the one the tests give. A number that does not exist is an error either way.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = Path("docs/requirements.md")

GROUPS: Final[dict[str, dict[str, str]]] = {
    "S0. The queue table and its log": {
        "S0.1": "A published event is stored as PENDING, with no attempt counted",
        "S0.2": "`poll` returns at once: the next claimable event as PROCESSING with its attempt counted, or None",
        "S0.3": "What is pending and due, or leased past its time, can be claimed; nothing else can",
        "S0.4": "Of all workers that reach for an event, exactly one gets it",
        "S0.5": "`finalize` writes COMPLETED or FAILED to the audit log and takes the delivery off the queue",
        "S0.6": "The event of a dead process is claimed again once its lease ends, as one more attempt",
        "S0.7": "A worker routes events to registered handlers; a cancelled handler burns no attempt",
        "S0.8": "An event that fails or kills its worker ends after exactly its allowed attempts",
        "S0.9": "Depth, attempts, latency and failures can be read off a running bus",
        "S0.10": "A claim goes through an index, so its cost does not grow with the backlog",
    },
    "S1. The embedded bus": {
        "S1.1": "Every published event ends processed, or as a dead letter that says why",
        "S1.2": "`publish` stores before it dispatches, returns the event, and waits for its end if asked to",
        "S1.3": "`subscribe` returns an id that `unsubscribe` takes; `@bus.on` does the same as a decorator",
        "S1.4": "A pattern is literal text with `*` for any run of characters, dots included",
        "S1.5": "The SQLite file is in WAL mode, sets itself up, is indexed, and changes state atomically",
        "S1.6": "Who handles what is stored; the functions stay in their process",
        "S1.7": "Handlers of one event run one after another, and one failure retries the whole event",
        "S1.8": "A handler that outlasts its timeout has failed",
        "S1.9": "The wait between attempts grows up to a limit; a handler may override part of the policy",
        "S1.10": "A dead letter carries the event, the error of each attempt and the time of the last",
        "S1.11": "Each failed attempt, the last one too, leaves one structured log entry",
        "S1.12": "Dead letters can be listed newest first, retried from scratch and purged by age",
        "S1.13": "The time of death is kept, and a purge can go by it",
        "S1.14": "Shutdown refuses new work, lets running work end, closes once, and may be called twice",
        "S1.15": "Starting takes back what a crashed process left behind",
        "S1.16": "A payload that is not JSON is refused and nothing is stored",
        "S1.17": "A locked store is tried again, with growing pauses",
        "S1.18": "Publishing, dispatch, dead-letter pages and recovery keep above their floors of speed",
        "S1.19": "Statements are prepared once and kept",
        "S1.20": "A breaker stops claims after repeated failures and lets one probe through to test the water",
    },
    "S2. The queue and its manager": {
        "S2.1": "`publish` returns the event as stored",
        "S2.2": "Whoever decides by time is handed the clock",
        "S2.3": "`finalize` with errors ends COMPLETED_WITH_ERRORS; a repeat changes nothing",
        "S2.4": "All matching handlers are run and the error of each is collected, if the subscription says so",
        "S2.5": "A lease lasts 60 s unless told otherwise, and heartbeats keep long work alive",
    },
    "Invariants": {
        "I1": "An acknowledged publish survives any crash",
        "I2": "A batch is stored whole or not at all",
        "I3": "One uid is one event",
        "I4": "No id is used twice",
        "I5": "Whoever has seen a position can find everything before it",
        "I6": "A checkpoint passes no unfinished event, unless it is recorded dead or parked along with the move",
        "I7": "A delivery has at most one live lease, and epochs only rise",
        "I8": "A stale epoch changes nothing",
        "I9": "An event has exactly one current end in a subscription: completed or dead",
        "I10": "Unfinished work can be claimed again within a lease and a poll",
        "I11": "Every repeated execution has a recorded cause",
        "I12": "No event gets more attempts than allowed, crashes counted",
        "I13": "Each transition writes one audit row, in its own transaction",
        "I14": "Only what is archived, verified and passed by everyone is pruned",
        "I15": "The lake holds what the log held, each id once",
        "I16": "A full disk, a corrupt file or unsafe settings are refused, never acknowledged",
        "I17": "No output shows a secret, and no route lacks a scope",
        "I18": "SQLite, PostgreSQL and HTTP agree on every trace",
    },
}
KNOWN: Final = frozenset(number for group in GROUPS.values() for number in group)

_NUMBER: Final = re.compile(r"\b(?:S[0-2]\.\d+|I\d+)\b")


class Claim(NamedTuple):
    """One test, and what its docstring says."""

    test: str
    docstring: str


class UnknownNumber(ValueError):  # noqa: N818  it says what happened
    """A test names a requirement that does not exist."""


def claims(root: Path) -> Iterator[Claim]:
    """Yield every test below `root`/tests with its docstring, in order of path and line."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        yield from _claims_in(tree, path.relative_to(root).as_posix())


def _claims_in(tree: ast.Module, prefix: str) -> Iterator[Claim]:
    machines = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test"):
                yield Claim(f"{prefix}::{name}", ast.get_docstring(node) or "")
            case ast.ClassDef(name=name) if name.startswith("Test"):
                yield from _claims_of_class(node, f"{prefix}::{name}")
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Attribute(value=ast.Name(id=machine), attr="TestCase")
            ):
                yield Claim(f"{prefix}::{name}", _all_docstrings(machines[machine]) if machine in machines else "")
            case _:
                pass


def _claims_of_class(node: ast.ClassDef, prefix: str) -> Iterator[Claim]:
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test"):
            yield Claim(f"{prefix}::{member.name}", ast.get_docstring(member) or "")


def _all_docstrings(machine: ast.ClassDef) -> str:
    """Return what a Hypothesis state machine claims: its own docstring and those of its rules, run as one test."""
    members = [node for node in machine.body if isinstance(node, ast.FunctionDef)]
    return "\n".join(ast.get_docstring(node) or "" for node in [machine, *members])


def held(root: Path) -> Mapping[str, Sequence[str]]:
    """Return the tests that name each number, in order; raise UnknownNumber for one that does not exist."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for claim in claims(root):
        for number in sorted(set(_NUMBER.findall(claim.docstring))):
            if number not in KNOWN:
                raise UnknownNumber(f"{claim.test} names {number}, which is no requirement")
            tests[number].append(claim.test)
    return tests


def render(tests: Mapping[str, Sequence[str]]) -> str:
    """Return the page as Markdown."""
    head = [
        "# Requirements and the tests that hold them",
        "",
        "<!-- Generated by tools/requirements_page.py from the tests' docstrings. Change those; run `make docs`. -->",
        "",
        "A test's docstring names the requirement (S0.1) or invariant (I1) it holds.",
    ]
    for title, numbers in GROUPS.items():
        head += ["", f"## {title}", "", "| # | what is promised | held by |", "|---|---|---|"]
        head += [f"| {number} | {text} | {_cell(tests.get(number, ()))} |" for number, text in numbers.items()]
    return "\n".join(head) + "\n"


def _cell(tests: Sequence[str]) -> str:
    return "<br>".join(f"`{test}`" for test in tests) or "no test yet"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the page, or with `--check` compare it; return the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/requirements.md from the docstrings of the tests.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args(arguments)
    try:
        page = render(held(root))
    except UnknownNumber as error:
        print(error, file=sys.stderr)
        return 1
    return _check(root / PAGE, page) if options.check else _write(root / PAGE, page)


def _check(path: Path, page: str) -> int:
    if path.is_file() and path.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE} is not what the tests say: run `make docs` and commit it.", file=sys.stderr)
    return 1


def _write(path: Path, page: str) -> int:
    path.parent.mkdir(exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
