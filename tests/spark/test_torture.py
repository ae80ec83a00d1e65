"""The faults of the matrix that strike Spark: drivers, their Python workers, checkpoints and archives."""

from pathlib import Path

import pytest

from postbus.torture.nemesis import FAULTS
from postbus.torture.trial import run

QUICK = {
    "spark-driver": "postgres",
    "spark-worker": "sqlite",
    "spark-checkpoint": "postgres",
    "archive-crash": "sqlite",
}
"""One store each: a driver takes its time to start. `make prove` has all."""
CASES = [
    *((name, store, 1) for name, store in QUICK.items()),
    *(
        pytest.param(fault.name, store, 20, marks=pytest.mark.slow)
        for fault in FAULTS.values()
        if fault.lake
        for store in fault.stores
    ),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "store", "trials"), CASES)
def test_a_fault_leaves_the_lake_the_log(name: str, store: str, trials: int, tmp_path: Path):
    """Each row once, none missing, whoever dies on the way; what is pruned is in the lake (I14, I15, P.3, P.5)."""
    result, _ = run(FAULTS[name], store, "tests", tmp_path / "stage", strikes=trials)
    assert result.verdicts == ()
    assert result.events > 0
