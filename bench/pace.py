"""When it is published, and how long that takes: the same pace and the same arithmetic for everybody."""

import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count as counting
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import Final, Self

from bench.child import start
from bench.measure import Call

__all__ = ["Feed", "pauses", "quantiles", "wanted"]

RATE: Final = 50
"""Events a second of the light, steady load."""
PORTION: Final = 200
WINDOW: Final = 20 * PORTION
SETTLE_IN: Final = 1.0


def pauses(count: int) -> Iterator[float]:
    """Yield the seconds before each event of the light load.

    They are random, or they would fall into step with whatever a worker does periodically.
    """
    chance = random.Random(count)
    for _ in range(count):
        yield chance.uniform(0.5, 1.5) / RATE


def quantiles(took: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the worst."""
    ordered = sorted(took)
    return {"p50": statistics.median(ordered), "p99": ordered[int(len(ordered) * 0.99)], "max": ordered[-1]}


class Feed:
    """Another process that publishes exactly as fast as events are handled, so that the queue neither grows nor ends.

    It publishes `WINDOW` events at first, and then a portion for each portion handled. Its call reads `wanted`.
    """

    def __init__(self, call: Call) -> None:
        """Start the process; it publishes once the feed is entered."""
        self._publisher = start(call, Path(), stdin=PIPE)
        self._numbers = counting(1)
        self._count = 0

    def __enter__(self) -> Self:
        """Ask for the first events."""
        for _ in range(WINDOW // PORTION):
            self._want_more()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """End the process, whatever it is doing."""
        if self._publisher.poll() is None:
            self._publisher.kill()
        self._publisher.communicate()

    def handled(self) -> None:
        """Note that one more event was handled; any thread may say so."""
        self._count = number = next(self._numbers)
        if number % PORTION == 0:
            self._want_more()

    def rate(self, seconds: float) -> float:
        """Wait for the first portions to pass, then return the events handled a second from then on."""
        while self._count < WINDOW:
            time.sleep(0.01)
            if self._publisher.poll() is not None:
                raise RuntimeError("the publisher ended")
        time.sleep(SETTLE_IN)
        began, first = time.perf_counter(), self._count
        time.sleep(seconds)
        return (self._count - first) / (time.perf_counter() - began)

    def _want_more(self) -> None:
        if self._publisher.stdin:
            self._publisher.stdin.write(f"{PORTION}\n")
            self._publisher.stdin.flush()


def wanted() -> Iterator[int]:
    """Yield how many events to publish next, until the feed is closed."""
    for line in sys.stdin:
        yield int(line)
