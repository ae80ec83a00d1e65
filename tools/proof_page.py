"""Write the table of trials in docs/guarantees.md, from what `postbus torture` and tools/planted_bugs.py found.

`--results FILE …` takes in the results.json of runs first: a row of docs/proof.json for each fault and store, replaced
when there is a newer one. With `--check` it writes nothing, and exits 1 if the page is not the one the results give.
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
SHOWN: Final = ("lost", "duplicate", "reordered", "stuck")


def take_in(files: list[Path]) -> None:
    """Put what runs found into the results, a row for each fault and store."""
    rows: dict[str, dict[str, Any]] = json.loads(PROOF.read_text()) if PROOF.exists() else {}
    for file in files:
        found: dict[str, list[dict[str, Any]]] = {}
        for run in json.loads(file.read_text()):
            found.setdefault(f"{run['fault']} {run['store']}", []).append(run)
        rows |= {key: summed(runs) for key, runs in found.items()}
    order = [f"{fault.name} {store}" for fault in FAULTS.values() for store in fault.stores]
    PROOF.write_text(json.dumps({key: rows[key] for key in order if key in rows}, indent=1) + "\n")


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of all runs of a fault on a store."""
    counts = {
        name: sum(run[name] for run in runs) for name in ("strikes", "events", "executions", "repeated", "unknown")
    }
    rules = Counter[str](verdict[0] for run in runs for verdict in run["verdicts"])
    slowest = round(max(run["back"] for run in runs), 1)
    return {**counts, "back": slowest, "verdicts": dict(rules), "on": f"{datetime.now(UTC):%Y-%m-%d}"}


def trials() -> Iterator[str]:
    """Yield the table of faults."""
    rows: dict[str, dict[str, Any]] = json.loads(PROOF.read_text()) if PROOF.exists() else {}
    yield (
        "| fault | what is done; what must hold | store | trials | events | repeated | unknown "
        "| lost | dup. | reord. | stuck | other | back after |"
    )
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for fault in FAULTS.values():
        for store in fault.stores:
            told = f"| `{fault.name}` | {fault.what}. *{fault.holds}* | {store} |"
            row = rows.get(f"{fault.name} {store}")
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
    yield f"{strikes:,} trials with {events:,} events in {len(rows)} rows, of which {len(kept)} broke no promise."


def planted() -> Iterator[str]:
    """Yield the table of planted bugs."""
    bugs: list[dict[str, Any]] = json.loads(PLANTED.read_text()) if PLANTED.exists() else []
    yield "| planted bug | where | caught by | verdicts |"
    yield "|---|---|---|---|"
    for bug in bugs:
        by = (
            bug["caught_by"]
            if bug["caught_by"].startswith("tests/")
            else f"postbus torture {bug['caught_by'].split()[0]}"
        )
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
    asked = parser.parse_args()
    if asked.results:
        take_in(asked.results)
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
