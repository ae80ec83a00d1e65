"""Runs measures: everything interleaved, each sample in a fresh process and a fresh folder."""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench import child, postgres
from bench.measure import Call, Measure, Result, Round, judge

__all__ = ["run"]

PREPARING_AT_ONCE: Final = 2


def run(
    measure: Measure,
    folder: Path,
    rounds: int,
    machine: Mapping[str, Any],
    tell: Callable[[str], None],
    *,
    server: str | None,
) -> Result:
    """Take `rounds` samples of every subject, in an order shuffled anew for each round, and judge the bars.

    What happens to the machine meanwhile then happens to all subjects alike. The order is seeded. `server` is the URL
    of the PostgreSQL in which measures of that store get a fresh database for every sample.
    """
    began = time.monotonic()
    chance = random.Random(measure.name)
    with tempfile.TemporaryDirectory(dir=folder) as shared:
        if measure.prepare:
            tell(f"{measure.name}: preparing")
            _prepare(measure, Path(shared))
        taken: list[Round] = []
        for number in range(min(rounds, measure.most_rounds)):
            order = chance.sample(list(measure.subjects), len(measure.subjects))
            tell(f"{measure.name}: round {number + 1}, {', '.join(order)}")
            samples = {name: _sample(measure, name, Path(shared), server) for name in order}
            taken.append({name: samples[name] for name in measure.subjects})
    lines = [judge(bar, taken, machine) for bar in measure.bars]
    return Result(measure, taken, lines, time.monotonic() - began)


def _prepare(measure: Measure, shared: Path) -> None:
    with ThreadPoolExecutor(PREPARING_AT_ONCE) as pool:
        for done in [pool.submit(child.run, _placed(call, shared), shared) for call in measure.prepare]:
            done.result()


def _sample(measure: Measure, subject: str, shared: Path, server: str | None) -> dict[str, float]:
    call = _placed(measure.subjects[subject], shared)
    folder = Path(tempfile.mkdtemp(dir=shared))
    try:
        if measure.store == "sqlite":
            return child.run(call, folder)
        if server is None:
            raise ValueError(f"{measure.name} needs a PostgreSQL")
        with postgres.database(server) as url:
            return child.run(call, folder, {postgres.URL: url})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _placed(call: Call, shared: Path) -> Call:
    """Return the call with its `path`, if it has one, in the folder that all samples share."""
    if "path" not in call.arguments:
        return call
    return replace(call, arguments={**call.arguments, "path": str(shared / call.arguments["path"])})
