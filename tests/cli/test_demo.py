"""`postbus demo`."""

import json
import re
import subprocess

import httpx2

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


def test_the_demo_stays_open_and_a_button_kills_a_worker(command):
    """With --keep its dashboard is there; a worker that is killed by it is replaced, and SIGTERM is a good end."""
    demo = command("demo", "--events", "20", "--no-report", "--keep", "--port", "0")
    told, begun = iter(demo.stderr), ""
    while not ("/dashboard" in begun and "worker process started" in begun):  # whichever comes first
        begun += next(told)
    (url,) = re.findall(r"http://\S+/dashboard", begun)
    with httpx2.Client(trust_env=False, timeout=30) as client:
        assert "Kill a worker" in client.get(f"{url}/").text
        origin = url.removesuffix("/dashboard")
        assert client.post(f"{url}/demo/kill", headers={"origin": origin}).status_code == 303
    assert any("worker process ended" in line for line in told)
    assert any("worker process started" in line for line in told)
    demo.terminate()
    demo.communicate(timeout=60)
    assert demo.returncode == 0
