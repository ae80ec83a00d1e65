"""`postbus top`: at a terminal that changes its size, before a store that goes away."""

import json
import re
import subprocess
import sys
import time

import pytest

from postbus import EventBus
from postbus.cli.top import _Viewer

from .conftest import PROGRAM, URL

CRASH = """
import os
from postbus import EventBus
bus = EventBus()
bus.subscribe("order.*", print)
bus.start()
os._exit(1)
"""


def port_of(server: subprocess.Popen[str]) -> str:
    """Return the port that a server says it listens on."""
    for said in server.stderr or ():
        if found := re.search(r"at http://127\.0\.0\.1:(\d+)", said):
            return found[1]
    pytest.fail("the server did not start")


def test_one_frame_tells_all_of_it(three_dead, cli, data):
    """Where there is no terminal, one look: depth, followers, workers, and what needs somebody with its remedy."""
    bus = EventBus(URL)
    bus.follow("sales", start="beginning")(print)
    assert bus.followers  # the first use makes the subscription
    told = cli("top").stdout
    bus.shutdown()
    assert "3 in subscription default" in told
    assert "mend it: postbus dlq list" in told
    assert re.search(r"default +0 +0 +0 +3", told)
    assert re.search(r"sales +0 +3 .*nobody", told)
    found = json.loads(cli("top", "--once", "-o", "json").stdout)
    assert found["stats"]["subscriptions"][0]["dead"] == 3
    assert [each["check"] for each in found["attention"]] == ["dead letters"]


def test_rates_are_taken_from_look_to_look(cli):
    """What was published and done between two looks, by the time that passed; none is negative."""
    bus = EventBus(URL)
    bus.subscribe("*", lambda _: None)
    viewer = _Viewer(bus.store, None)
    viewer.look()
    bus.publish_many([{"type": "a"}] * 10)
    bus.run_due()
    begun = time.monotonic()
    viewer.look()
    found = viewer.look()
    bus.shutdown()
    assert len(found.rates["published"]) == 3
    assert found.rates["published"][1] > 0 == found.rates["published"][2]
    assert found.rates["default"][0] > 0
    assert time.monotonic() - begun < 10


def test_workers_are_alive_until_they_are_gone(cli):
    """A process that has handlers is listed; one known to be dead is SILENT."""
    bus = EventBus(URL)
    bus.subscribe("order.*", print)
    bus.start()
    assert "alive" in cli("top", "--once").stdout
    bus.shutdown()
    subprocess.run([sys.executable, "-c", CRASH], check=False, timeout=60)
    assert "SILENT" in cli("top", "--once").stdout


def _fits(frame: str, columns: int) -> bool:
    """Return whether a frame that shows a finding is no wider than this."""
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", frame)
    return "mend it" in drawn and max(len(each.strip("\r")) for each in drawn.split("\n")) <= columns


def test_it_goes_on_after_a_resize_and_ends_with_q(three_dead, terminal, cli):
    """Drawn anew in the new size and from look to look; the terminal is left as it was found."""
    screen = terminal("top", "--interval", "30")
    assert "! 3 in subscription default" in screen.until("q ends")
    assert not screen.is_as_found
    screen.resize(12, 44)
    text = ""
    while not any(_fits(each, 44) for each in text.split("\x1b[H")[1:]):  # the old size may be drawn once more
        text += screen.until("mend it")
    screen.press("q")
    assert screen.end()[0] == 0
    assert screen.is_as_found


def test_new_events_are_seen_and_ctrl_c_is_a_good_end(terminal, cli):
    """Each look is a fresh one; Ctrl-C is exit 0 without a traceback."""
    cli("migrate")
    screen = terminal("top", "--interval", "0.1")
    screen.until("0 events")
    cli("publish", "order.placed")
    screen.until("1 event nobody handles")
    screen.press("\x03")
    code, rest = screen.end()
    assert code == 0
    assert "Traceback" not in rest
    assert screen.is_as_found


def test_a_store_that_is_away_is_waited_for(command, terminal, cli):
    """While a server is gone the last figures stay, marked so; when it is back, it goes on."""
    cli("publish", "order.placed")
    server = command("serve", "--port", "0")
    port = port_of(server)
    screen = terminal("top", "--interval", "0.1", "--url", f"http://127.0.0.1:{port}")
    screen.until("1 event nobody handles")
    server.kill()
    server.wait()
    assert "AWAY" in screen.until("1 event nobody handles" if "AWAY" in screen.shown else "AWAY")
    cli("publish", "user.new")
    port_of(command("serve", "--port", port))
    screen.until("2 events")
    screen.press("q")
    assert screen.end()[0] == 0


def test_a_store_that_is_not_there_is_exit_1():
    """There is nothing to watch where there never was a bus."""
    done = subprocess.run([PROGRAM, "top"], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no bus" in done.stderr
