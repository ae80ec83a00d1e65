"""`python -m bench`: measure postbus and its peers in one run, and hold the ratios against their bars."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import followcatalogue, httpcatalogue, machine, pgcatalogue, pgpeers, postgres, runner, sparkcatalogue, table
from bench.catalogue import measures
from bench.measure import Measure, Result, Verdict

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
BEGIN: Final = "<!-- figures: written by `python -m bench --write-docs`, never by hand -->"
END: Final = "<!-- /figures -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return 1 if a bar was missed and `--strict` given, else 0."""
    options = _options(arguments)
    chosen = _chosen(options)
    if options.list:
        print("\n".join(f"{each.name:13} {each.title}" for each in chosen))
        return 0
    console = _console()
    if any(each.store == "postgres" for each in chosen) and not pgpeers.node_versions():
        console.print("Node's packages are not installed in bench/node: Graphile Worker and pg-boss are left out.")
    when = datetime.now(UTC)
    options.dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="run-", dir=options.dir) as place,
        _server(chosen, Path(place)) as server,
    ):
        facts = machine.facts(Path(place), server and postgres.facts(server), pgpeers.node_versions())
        with console.status("measuring") as status:
            results = [
                runner.run(each, Path(place), options.rounds, facts, status.update, server=server) for each in chosen
            ]
    table.show(console, results, facts)
    console.print(f"{sum(each.seconds for each in results):.0f} s", highlight=False)
    if options.json:
        ran = {"quick": options.quick, "rounds": options.rounds, "only": options.only, "store": options.store}
        text = json.dumps(table.as_json(results, facts, when, ran), indent=1, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.write_docs:
        _write_docs(table.markdown(results, facts, when))
    return int(options.strict and _missed(results))


def _server(chosen: Sequence[Measure], folder: Path) -> AbstractContextManager[str | None]:
    """Return what starts a PostgreSQL if one of the measures needs it."""
    return postgres.server(folder) if any(each.store == "postgres" for each in chosen) else nullcontext()


def _console() -> Console:
    """Return a console wide enough for the tables, whatever a pipe or a CI log claims to be."""
    console = Console()
    return console if console.is_terminal else Console(width=130)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the measures and do nothing")
    parser.add_argument("--store", choices=("sqlite", "postgres"), help="take the measures of this store only")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="take these measures only")
    parser.add_argument("--quick", action="store_true", help="small sizes, two rounds: does it run at all?")
    parser.add_argument("--rounds", type=int, metavar="N", help="samples of every subject (5; 2 with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the machine's facts here")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the figures of this full run into docs/benchmarks.md"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument(
        "--dir", type=Path, default=RESULTS, help="a folder on the disk to measure (10 GB, freed again)"
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 5)
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if options.write_docs and (options.quick or options.only or options.store):
        parser.error("--write-docs takes the figures of a full run: leave out --quick, --only and --store")
    return options


def _chosen(options: argparse.Namespace) -> list[Measure]:
    node = bool(pgpeers.node_versions())
    taken = [
        *measures(quick=options.quick),
        *pgcatalogue.measures(quick=options.quick, node=node),
        *sparkcatalogue.measures(quick=options.quick),
        *followcatalogue.measures(quick=options.quick),
        *httpcatalogue.measures(quick=options.quick),
    ]
    known = {each.name: each for each in taken if options.store in (None, each.store)}
    if unknown := set(options.only or ()) - set(known):
        sys.exit(f"there is no measure {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return [each for name, each in known.items() if not options.only or name in options.only]


def _missed(results: Sequence[Result]) -> bool:
    return any(line.verdict is Verdict.MISSED for result in results for line in result.lines)


def _write_docs(figures: str) -> None:
    """Replace what stands between the page's two marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
