"""`postbus worker`: real processes, really signalled."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

SHOP = """
import os, threading, time
from pathlib import Path
from postbus import AsyncEventBus, EventBus

bus = EventBus(poll_interval=0.1)

@bus.on("note")
def note(event):
    with open("notes", "a") as file:
        file.write(f"{event.id} {os.getpid()}\\n")

@bus.on("slow")
def slow(event):
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    Path("done").touch()

def opened():
    return bus

asynchronous = AsyncEventBus(poll_interval=0.1)

@asynchronous.on("async.note")
async def anote(event):
    note(event)

placed = EventBus("sqlite:///own.db")
number = 7
"""


@pytest.fixture(autouse=True)
def shop(folder: Path) -> None:
    """Put a module with handlers into the working directory."""
    (folder / "shop.py").write_text(SHOP)


def notes() -> list[tuple[int, int]]:
    """Return which event was noted by which process."""
    lines = Path("notes").read_text().splitlines() if Path("notes").exists() else []
    return [(int(event), int(pid)) for event, pid in map(str.split, lines)]


def entries(process: subprocess.Popen[str], name: str) -> Iterator[dict]:
    """Go through the log entries of one name as they come."""
    for line in process.stderr or ():
        entry = json.loads(line)
        if entry["event"] == name:
            yield entry


def is_alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("target", ["shop:bus", "shop:opened"])
def test_a_worker_handles_events_of_other_processes(target, command, cli, data, eventually):
    """What is published anywhere is routed to the handlers of the worker (S0.7)."""
    command("worker", target)
    cli("publish", "note")
    eventually(lambda: data("events", "show", "1")["status"] == "COMPLETED")
    assert len(notes()) == 1


def test_an_async_bus_is_run_too(command, cli, data, eventually):
    """MODULE:BUS may be an AsyncEventBus; it drains on SIGTERM as well (S1.14)."""
    process = command("worker", "shop:asynchronous")
    cli("publish", "async.note")
    eventually(lambda: data("events", "show", "1")["status"] == "COMPLETED")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_work_end(number, command, cli, data, eventually):
    """On SIGTERM or SIGINT the worker finishes what it began and exits with 0 (S1.14)."""
    process = command("worker", "shop:bus")
    cli("publish", "slow")
    eventually(Path("begun").exists)
    process.send_signal(number)
    assert next(entries(process, "worker_stopping"))["at_once"] is False
    Path("go").touch()
    assert process.wait(30) == 0
    assert Path("done").exists()
    event = data("events", "show", "1")
    assert (event["status"], event["retry_count"]) == ("COMPLETED", 0)


def test_a_second_signal_ends_at_once_and_loses_nothing(command, cli, data, eventually):
    """Killed in the middle of a handler, the event is claimed again by the next worker (S1.15, I10)."""
    process = command("worker", "shop:bus")
    cli("publish", "slow")
    eventually(Path("begun").exists)
    process.send_signal(signal.SIGTERM)
    next(entries(process, "worker_stopping"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert not Path("done").exists()
    Path("go").touch()
    command("worker", "shop:bus")
    eventually(lambda: data("events", "show", "1")["status"] == "COMPLETED")
    actions = [each["action"] for each in data("events", "show", "1")["logs"]]
    assert actions == ["PICKED", "EXPIRED", "PICKED", "COMPLETED"]


def test_a_killed_process_is_replaced(command, cli, eventually):
    """A worker process that is killed is started anew, and the work goes on (S1.15)."""
    process = command("worker", "shop:bus")
    first = next(entries(process, "worker_process_started"))["pid"]
    next(entries(process, "worker_ready"))
    os.kill(first, signal.SIGKILL)
    ended = next(entries(process, "worker_process_ended"))
    assert (ended["pid"], ended["how"]) == (first, "SIGKILL")
    second = next(entries(process, "worker_process_started"))["pid"]
    cli("publish", "note")
    eventually(notes)
    assert notes() == [(1, second)]


def test_several_processes_share_the_work(command, cli, data, eventually):
    """Each event is handled by exactly one of the processes (S0.4)."""
    process = command("worker", "shop:bus", "--processes", "3")
    ready = [entry["worker_id"] for entry in islice(entries(process, "worker_ready"), 3)]
    assert len(set(ready)) == 3
    cli("publish", "note", "-", stdin="1\n" * 300)
    eventually(lambda: data("stats")["subscriptions"][0]["completed"] == 300)
    assert sorted(event for event, _ in notes()) == list(range(1, 301))


def test_processes_do_not_outlive_a_killed_supervisor(command, eventually):
    """However the supervisor ends, its worker processes stop as well."""
    process = command("worker", "shop:bus")
    pid = next(entries(process, "worker_process_started"))["pid"]
    next(entries(process, "worker_ready"))
    process.kill()
    eventually(lambda: not is_alive(pid))


def test_a_process_that_fails_at_its_start_is_tried_again_ever_more_slowly(command, folder):
    """Restarts back off, so that a broken module does not spin."""
    (folder / "broken.py").write_text("import os\nos._exit(1)\n")
    process = command("worker", "broken:bus")
    pauses = [entry["restart_in"] for entry in islice(entries(process, "worker_process_ended"), 3)]
    assert pauses == [0.1, 0.2, 0.4]


def test_flags_win_over_the_code(command):
    """What the operator types holds, whatever the module says."""
    process = command("worker", "shop:bus", "--concurrency", "3")
    assert next(entries(process, "worker_ready"))["concurrency"] == 3


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("shop", "MODULE:BUS"),
        ("shap:bus", "No module named 'shap'"),
        ("shop:bas", "has no attribute 'bas'"),
        ("shop:number", "shop:number is a int, not an EventBus"),
        ("silent:bus", "silent:bus has no handlers"),
        ("faulty:bus", "ZeroDivisionError"),
    ],
)
def test_a_target_that_cannot_run_is_exit_2(target, told, command, folder):
    """A wrong MODULE:BUS is said once, in a sentence, and not tried again."""
    (folder / "faulty.py").write_text("1 / 0\n")
    (folder / "silent.py").write_text("from postbus import EventBus\nbus = EventBus()\n")
    process = command("worker", target)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert told in stderr
    assert "worker_process_ended" not in stderr


def test_a_bus_of_followers_alone_is_worked_on(command, folder):
    """A follower is work enough (S4.3)."""
    (folder / "projection.py").write_text(
        "from postbus import EventBus\nbus = EventBus()\n@bus.follow('sales')\ndef sell(event):\n    pass\n"
    )
    process = command("worker", "projection:bus")
    assert next(entries(process, "worker_ready"))["followers"] == 1


def test_a_url_that_the_code_overrules_is_refused(command):
    """`--url` never silently does nothing: exit 2."""
    process = command("worker", "shop:placed", "--url", "sqlite:///other.db")
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "names its own URL" in stderr
