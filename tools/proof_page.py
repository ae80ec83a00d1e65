"""Write the table of trials in docs/guarantees.md, from what `postbus torture` and tools/planted_bugs.py found.

`--results FILE …` takes in the results.json of runs first: a row of docs/proof.json for each fault and store, replaced
when there is a newer one; `--more FILE …` adds what further runs found to the rows there are. With `--check` it writes
nothing, and exits 1 if the page is not the one the results give.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from postbus.torture.checker import RULES
from postbus.torture.nemesis import FAULTS

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "guarantees.md"
PROOF: Final = ROOT / "docs" / "proof.json"
PLANTED: Final = ROOT / "docs" / "planted-bugs.json"
BEGIN: Final = "<!-- trials: written by tools/proof_page.py -->"
END: Final = "<!-- end of trials -->"
COUNTS: Final = ("strikes", "events", "executions", "repeated", "unknown")
SHOWN: Final = ("lost", "duplicate", "reordered", "stuck")
ROWS: Final = [
    *((fault.name, f"{fault.what}. *{fault.holds}*", store) for fault in FAULTS.values() for store in fault.stores),
    *(
        ("soak", "Strike now here, now there. *Every promise holds, and neither memory nor tables grow*", store)
        for store in ("sqlite", "postgres")
    ),
]


def take_in(files: list[Path], *, more: bool) -> None:
    """Put what runs found into the results, a row for each fault and store; `more` of them go with those there are."""
    rows: dict[str, dict[str, Any]] = json.loads(PROOF.read_text()) if PROOF.exists() else {}
    for file in files:
        found: dict[str, list[dict[str, Any]]] = {}
        for run in json.loads(file.read_text()):
            found.setdefault(f"{run['fault']} {run['store']}", []).append(run)
        made = {key: summed(runs) for key, runs in found.items()}
        rows |= {key: joined(rows[key], row) if more and key in rows else row for key, row in made.items()}
    order = [f"{name} {store}" for name, _, store in ROWS]
    PROOF.write_text(json.dumps({key: rows[key] for key in order if key in rows}, indent=1) + "\n")


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of all runs of a fault on a store."""
    counts = {name: sum(run[name] for run in runs) for name in COUNTS}
    rules = Counter[str](verdict[0] for run in runs for verdict in run["verdicts"])
    slowest = round(max(run["back"] for run in runs), 1)
    samples = [sample for run in runs for sample in run["samples"]]
    hours = round(sum(run["seconds"] for run in runs) / 3_600, 2)
    more = {"back": slowest, "verdicts": dict(rules), "on": f"{datetime.now(UTC):%Y-%m-%d}", "hours": hours}
    return {**counts, **more, **({"samples": samples} if samples else {})}


def joined(before: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of both."""
    both = {name: before[name] + row[name] for name in COUNTS}
    rules = Counter[str](before["verdicts"]) + Counter[str](row["verdicts"])
    more = {"back": max(before["back"], row["back"]), "verdicts": dict(rules), "on": row["on"]}
    return {**before, **both, **more, "hours": round(before["hours"] + row["hours"], 2)}


def trials() -> Iterator[str]:
    """Yield the table of faults."""
    rows: dict[str, dict[str, Any]] = json.loads(PROOF.read_text()) if PROOF.exists() else {}
    yield (
        "| fault | what is done; what must hold | store | trials | events | repeated | unknown "
        "| lost | dup. | reord. | stuck | other | back after |"
    )
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, what, store in ROWS:
        told = f"| `{name}` | {what} | {store} |"
        row = rows.get(f"{name} {store}")
        if row is None:
            yield f"{told} not run | | | | | | | | | |"
            continue
        rules = Counter[str](row["verdicts"])
        other = sum(rules.values()) - sum(rules[rule] for rule in SHOWN)
        counts = [row[name] for name in ("strikes", "events", "repeated", "unknown")]
        counts += [*(rules[rule] for rule in SHOWN), other]
        yield f"{told} {' | '.join(f'{count:,}' for count in counts)} | {row['back']:.1f} s |"
    kept = [row for row in rows.values() if not row["verdicts"]]
    events, strikes = (sum(row[name] for row in rows.values()) for name in ("events", "strikes"))
    yield ""
    hours = sum(row["hours"] for row in rows.values())
    yield (
        f"{strikes:,} trials with {events:,} events in {len(rows)} rows and {hours:,.1f} hours; "
        f"in {len(kept)} of the rows no promise was broken."
    )
    yield from soaks(rows)


def soaks(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what soaks took up, from the first to the last look."""
    for key, row in rows.items():
        if samples := row.get("samples"):
            memory, tables = ([f"{sample[place] / 1e6:,.1f}" for sample in samples] for place in (0, 1))
            yield ""
            yield f"`{key}`, {row['hours']:.1f} hours: memory of the whole crew {', '.join(memory)} MB; "
            yield f"tables, each time after pruning, {', '.join(tables)} MB."


def planted() -> Iterator[str]:
    """Yield the table of planted bugs."""
    bugs: list[dict[str, Any]] = json.loads(PLANTED.read_text()) if PLANTED.exists() else []
    yield "| planted bug | where | caught by | verdicts |"
    yield "|---|---|---|---|"
    for bug in bugs:
        by = bug["caught_by"]
        if not by.startswith("tests/"):
            fault, _, number = by.split()
            by = f"postbus torture {f'--soak {number}' if fault == 'soak' else fault}"
        verdicts = ", ".join(bug["verdicts"]) or "the test fails"
        yield f"| {bug['what']} | `{bug['file']}` | `{by}` | {verdicts if bug['caught'] else '**not caught**'} |"
    yield ""
    yield f"{sum(bug['caught'] for bug in bugs)} of {len(bugs)} were caught."


def section() -> str:
    """Return what stands between the marks."""
    verdicts = (f"| {rule} | {what} |" for rule, what in RULES.items())
    parts = [
        BEGIN,
        "",
        *trials(),
        "",
        "### The verdicts",
        "",
        "| verdict | what it says |",
        "|---|---|",
        *verdicts,
        "",
        "### The proof can fail",
        "",
        "`python tools/planted_bugs.py` changes one line of a copy of the sources, and runs what must notice:",
        "",
        *planted(),
        "",
        END,
    ]
    return "\n".join(parts)


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description="Write the table of trials in docs/guarantees.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    parser.add_argument("--results", nargs="+", type=Path, default=[], help="results.json of runs to take in first")
    parser.add_argument("--more", nargs="+", type=Path, default=[], help="the same, added to the rows there are")
    asked = parser.parse_args()
    if asked.results or asked.more:
        take_in(asked.results, more=False)
        take_in(asked.more, more=True)
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    made = f"{before}{section()}{rest.partition(END)[2]}"
    if asked.check:
        if made != text:
            print("docs/guarantees.md is not what the results give: run `make docs`", file=sys.stderr)
        return made != text
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
