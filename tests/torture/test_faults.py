"""Every fault of the matrix, struck for real: no promise is broken. More of each: `make prove`, `postbus torture`."""

from pathlib import Path

import pytest

from postbus.torture.nemesis import FAULTS
from postbus.torture.trial import run

CASES = [(fault.name, store) for fault in FAULTS.values() if not fault.lake for store in fault.stores]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "store"), CASES)
def test_a_fault_breaks_no_promise(name: str, store: str, trials: int, tmp_path: Path):
    """Lost 0, duplicates without a cause 0, reordered 0, stuck 0, whatever is done (I1 to I16)."""
    fault = FAULTS[name]
    if why := fault.missing():
        pytest.skip(why)
    result, _ = run(fault, store, "tests", tmp_path / "stage", strikes=trials)
    assert result.verdicts == ()
    assert result.events > 0
