"""One trial: a crew at work, a fault that strikes, then everything is let come to its end, and checked."""

import random
import resource
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from postbus.bus import EventBus
from postbus.torture import checker
from postbus.torture.checker import Database, Verdict
from postbus.torture.crew import PROJECTION, QUEUES, READER
from postbus.torture.history import UNKNOWN, Entry, answers
from postbus.torture.nemesis import FAULTS, Fault, Play
from postbus.torture.stage import Late, Stage, Store, on_stage

__all__ = ["Result", "check", "run", "soak"]

ARCHIVE_EVERY: Final = 900.0
"""Seconds between prunings in a soak; less in a short one, so that there are a few of them."""
FEWEST: Final = 5
"""Of fewer samples than this nobody can tell whether something grows."""
SHORTEST: Final = 60.0
"""What Spark takes to prune, and some."""


@dataclass(frozen=True)
class Result:
    """What became of a trial."""

    fault: str
    store: str
    seed: str
    strikes: int
    seconds: float = 0.0
    events: int = 0
    executions: int = 0
    repeated: int = 0
    """Executions after an event's first: each with a cause, or there is a verdict."""
    unknown: int = 0
    """Calls whose outcome their caller never learnt."""
    back: float = 0.0
    """The longest, in seconds, that it took until everybody was at work again."""
    verdicts: tuple[Verdict, ...] = ()
    samples: "tuple[Sample, ...]" = ()
    """Of a soak: what was taken up, every few minutes."""

    @property
    def is_clean(self) -> bool:
        """Whether every promise was kept."""
        return not self.verdicts


def run(
    fault: Fault,
    store: str,
    seed: str,
    folder: Path,
    *,
    strikes: int = 1,
    struck: Callable[[int], None] = lambda _: None,
) -> tuple[Result, list[Entry]]:
    """Run one trial on a store of its own; the same seed strikes in the same way.

    What everybody wrote down stays in `folder`, and is returned.
    """
    began = time.monotonic()
    chance = random.Random(f"{seed} {fault.name} {store}")
    run_it = _run_apart if fault.apart is not None else _run_crew
    result, history = run_it(fault, Result(fault.name, store, seed, strikes), chance, folder, struck)
    return replace(result, seconds=time.monotonic() - began), history


def _run_apart(
    fault: Fault, result: Result, chance: random.Random, folder: Path, struck: Callable[[int], None]
) -> tuple[Result, list[Entry]]:
    if fault.apart is None:
        raise TypeError(f"{fault.name} strikes a crew")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    verdicts: list[Verdict] = []
    events = 0
    for number, (count, found) in enumerate(fault.apart(result.store, chance, folder, result.strikes), 1):
        events += count
        verdicts += found
        struck(number)
    return replace(result, events=events, verdicts=tuple(verdicts)), []


def _run_crew(
    fault: Fault, result: Result, chance: random.Random, folder: Path, struck: Callable[[int], None]
) -> tuple[Result, list[Entry]]:
    back = 0.0
    pace = {"pace": 0.15} if fault.lake else {}  # a driver takes its time, and has to catch up
    around = nullcontext[dict[str, Any]]({}) if fault.around is None else fault.around(result.store, folder)
    with (
        around as options,
        on_stage(result.store, result.seed, folder, http=fault.http, doors=fault.doors, **pace, **options) as (
            stage,
            doors,
        ),
    ):
        play = Play(stage, chance, doors)
        try:
            for number in range(result.strikes):
                fault.strike(play)
                back = max(back, stage.await_progress())
                struck(number + 1)
            stage.finish()
            if fault.lake:
                stage.drive("ingest", 100_000)
        except Late as late:
            play.found.append(Verdict("stuck", str(late)))
            stage.close()
        history = stage.entries()
        database = read(stage.store)
        if fault.lake:
            database, mismatches = checker.with_lake(database, folder / "lake")
            play.found += mismatches
        verdicts = (*play.found, *check(history, database))
    return replace(_counted(result, history, database), back=back, verdicts=verdicts), history


def _counted(result: Result, history: list[Entry], database: Database) -> Result:
    executions = checker.executions(history)
    return replace(
        result,
        events=len(database.events),
        executions=len(executions),
        repeated=len(executions) - len({(each.event_id, each.subscription) for each in executions}),
        unknown=sum(each.kind == UNKNOWN for each in answers(history)),
    )


def soak(
    store: str, seed: str, folder: Path, seconds: float, told: Callable[[str], None] = lambda _: None
) -> tuple[Result, list[Entry]]:
    """Strike now here, now there, for hours; the log is brought into a lake and pruned meanwhile.

    Beside what every trial is checked for, memory and the tables must not grow: see `Sample`.
    """
    began = time.monotonic()
    chance = random.Random(f"{seed} soak {store}")
    faults = [each for each in FAULTS.values() if each.fits(store)]
    samples: list[Sample] = []
    strikes, back = 0, 0.0
    every = min(ARCHIVE_EVERY, max(SHORTEST, seconds / (FEWEST + 2)))
    with on_stage(store, seed, folder, http=True, pace=0.5) as (stage, doors):
        play = Play(stage, chance, doors)
        archive_at = began + every
        try:
            while (left := began + seconds - time.monotonic()) > 0:
                time.sleep(min(left, chance.uniform(5, 40)))
                fault = chance.choice(faults)
                fault.strike(play)
                strikes, back = strikes + 1, max(back, stage.await_progress())
                if time.monotonic() > archive_at:
                    archive(stage)
                    samples.append(sample(stage))
                    since, (memory, tables) = time.monotonic() - began, samples[-1]
                    told(f"{since:,.0f} s, {strikes} strikes: memory {memory:,} bytes, tables {tables:,}")
                    archive_at += every
            stage.finish()
            archive(stage)
        except Late as late:
            play.found.append(Verdict("stuck", str(late)))
            stage.close()
        history = stage.entries()
        database, mismatches = checker.with_lake(read(stage.store), folder / "lake")
        play.found += [*mismatches, *grown(samples)]
        verdicts = (*play.found, *check(history, database))
    result = Result("soak", store, seed, strikes, time.monotonic() - began, back=back, verdicts=verdicts)
    return replace(_counted(result, history, database), samples=tuple(samples)), history


class Sample(NamedTuple):
    """How much memory the crew takes at a moment, and how much room the tables, right after the log was pruned."""

    memory: int
    tables: int


def sample(stage: Stage) -> Sample:
    """Take one."""
    pages = 0
    for each in stage.crew.values():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            pages += int(Path(f"/proc/{each.pid}/statm").read_text().split()[1])
    return Sample(pages * resource.getpagesize(), stage.store.size())


def grown(samples: Sequence[Sample]) -> Iterator[Verdict]:
    """Yield what takes a quarter more at the end than it did near the beginning."""
    for name, *taken in zip(Sample._fields, *samples, strict=True):
        if len(taken) >= FEWEST and min(taken[-2:]) > 1.25 * max(taken[:2]):
            yield Verdict("grown", f"{name}: {max(taken[:2]):,} bytes at first, {min(taken[-2:]):,} at the end")


def archive(stage: Stage) -> None:
    """Purge dead letters, bring the log into the lake, and prune it."""
    bus = EventBus(stage.store.url, auto_migrate=False)
    bus.dlq.purge(0)
    bus.shutdown()
    stage.drive("archive", 100_000)


def read(store: Store) -> Database:
    """Return what the bus's tables hold, and the trial's own."""
    effects: dict[str, list[int]] = defaultdict(list)
    for name, event_id in store.rows("SELECT subscription, event_id FROM effects ORDER BY n"):
        effects[name].append(event_id)
    return replace(
        checker.read_database(store.url),
        own=frozenset(uid for (uid,) in store.rows("SELECT uid FROM own")),
        effects={name: tuple(ids) for name, ids in effects.items()},
    )


def check(history: Sequence[Entry], database: Database) -> Iterator[Verdict]:
    """Yield every promise that a history breaks."""
    yield from checker.check(checker.journal(history), checker.executions(history), database, subscriptions=QUEUES)
    yield from checker.check_effects(database, QUEUES[1])
    yield from checker.check_follower(checker.sights(history, READER), database)
    yield from checker.check_projection(database, PROJECTION)
    yield from checker.check_settled(history, database)
