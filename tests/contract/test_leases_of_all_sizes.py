"""The suite again, with leases of every size, and with everything claimed from rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CURSOR = (
    "order_is_priority or taken_out_of_turn or unfinished_deliveries or publishing_writes or a_queue_goes_back or "
    "a_queues_rewind or deleting_a_queue or leased_is_due_at_once or more_leases_than_fit"
)
"""What tells where a cursor stands, or what is a row already; and what is due at one moment, by a clock that stands."""


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("leases", "suites"),
    [
        ("blocks of 2", ["tests/contract"]),
        ("blocks of 1024", ["tests/contract", "tests/machine"]),
        ("rows", ["tests/contract", "-k", f"not ({CURSOR})"]),
    ],
)
def test_the_contract_holds_however_deliveries_are_leased(leases: str, suites: list[str]):
    """Alone in their blocks, two by two, as many as fit, or from rows: nobody can tell (I18)."""
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", *suites],
        cwd=ROOT, env={**os.environ, "POSTBUS_TEST_LEASES": leases}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout[-4_000:]
