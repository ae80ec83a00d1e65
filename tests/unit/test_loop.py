"""What waits, and who may end the waiting."""

import subprocess
import sys
import threading

from postbus.loop import Bell

STORM = """
import random, signal
from postbus.loop import Bell

chance = random.Random(7)
for _ in range(20_000):
    bell = Bell()
    signal.signal(signal.SIGALRM, lambda *_: bell.ring())
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 4e-5))  # one signal, somewhere in what follows
    while not bell.wait(1e-6):
        pass
print("came through")
"""


def test_a_signal_in_the_midst_of_waiting_is_no_deadlock():
    """A handler runs in the thread that waits, within the waiting: there an Event's lock is held already (S1.14)."""
    done = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "came through\n", done.stderr


def test_a_bell_wakes_whoever_waits_and_stays_rung():
    """Another thread may ring it, too; who comes later does not wait."""
    bell = Bell()
    assert not bell.wait(0)
    threading.Timer(0.01, bell.ring).start()
    assert bell.wait(60)
    assert bell.wait(60)
