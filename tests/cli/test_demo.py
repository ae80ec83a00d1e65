"""`postbus demo`."""

import json
import subprocess

from .conftest import PROGRAM


def test_in_the_demo_completed_and_dead_are_what_was_published(folder):
    """Flaky handlers, poison, a handler that kills its process and a killed worker: no event is lost (S1.1, I9)."""
    arguments = [PROGRAM, "demo", "--events", "120", "-o", "json"]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    account = json.loads(done.stdout)
    assert account["completed"] + account["dead"] == account["published"] == 120
    assert account["dead"] == 5
    assert account["workers_killed"] == 2
    assert account["retries"] > 0
    assert set(account["reasons"]) == {"ValueError: the card number is too short", "Discard: unknown currency XXX"}
    assert "by its own handler" in done.stderr
    assert "by the demo" in done.stderr
    assert not list(folder.iterdir())
