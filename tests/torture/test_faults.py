"""Every fault of the matrix, struck for real: no promise is broken. More of each: `make prove`, `postbus torture`."""

from pathlib import Path

import pytest

from postbus.torture.nemesis import FAULTS
from postbus.torture.trial import run

STRUCK = [fault for fault in FAULTS.values() if not fault.lake]
QUICK = [(fault.name, fault.stores[place % len(fault.stores)], 1) for place, fault in enumerate(STRUCK)]
"""One trial of each, now on this store, now on that."""
SLOW = [(fault.name, store, 20) for fault in STRUCK for store in fault.stores]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "store", "trials"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_fault_breaks_no_promise(name: str, store: str, trials: int, tmp_path: Path):
    """Lost 0, duplicates without a cause 0, reordered 0, stuck 0, whatever is done (I1 to I16)."""
    fault = FAULTS[name]
    if why := fault.missing():
        pytest.skip(why)
    result, _ = run(fault, store, "tests", tmp_path / "stage", strikes=trials)
    assert result.verdicts == ()
    assert result.events > 0
