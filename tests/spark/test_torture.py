"""The faults of the matrix that strike Spark: drivers, their Python workers, checkpoints and archives."""

from dataclasses import replace
from pathlib import Path

import pytest

from postbus.torture.nemesis import FAULTS, Play
from postbus.torture.trial import run

LAKE = [fault for fault in FAULTS.values() if fault.lake]
QUICK = ("spark-driver", "archive-crash")


@pytest.mark.timeout(1200)
def test_two_faults_one_after_another_leave_the_lake_the_log(tmp_path: Path):
    """Each row once, none missing, whoever dies on the way; what is pruned is in the lake (I14, I15, P.3, P.5).

    On one stage, for a driver takes its time to start: `make prove` has all of them, apart and on both stores.
    """

    def strike(play: Play) -> None:
        for name in QUICK:
            FAULTS[name].strike(play)

    result, _ = run(replace(LAKE[0], strike=strike), "postgres", "tests", tmp_path / "stage")
    assert result.verdicts == ()
    assert result.events > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "store"), [(fault.name, store) for fault in LAKE for store in fault.stores])
def test_a_fault_leaves_the_lake_the_log(name: str, store: str, tmp_path: Path):
    """Twenty times each (I14, I15, P.3, P.5)."""
    result, _ = run(FAULTS[name], store, "tests", tmp_path / "stage", strikes=20)
    assert result.verdicts == ()
    assert result.events > 0
