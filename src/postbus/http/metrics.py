"""Figures for Prometheus: those of this process, and of the store, looked up at most every few seconds."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from postbus.bus import EventBus
from postbus.errors import InvalidRequest
from postbus.figures import BUCKETS, METRICS, REQUESTS, UP, Counted, Figures, Metric, Place, Samples, listen, of_stats
from postbus.observe import tell

__all__ = ["Exposed", "Looked", "Metrics", "serve_figures"]

REMEMBER: Final = 5.0
PATIENCE: Final = 3.0
LABELS: Final = (*map(str, BUCKETS), "+Inf")
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Looked:
    """What a store says of itself. One that fails, or takes too long, is not up: then nothing else is told of it."""

    def __init__(self, ask: Callable[[], Samples]) -> None:
        """Ask in a thread of its own, so that nobody waits for a store that hangs."""
        self._ask = ask
        self._known: Samples | None = None
        self._due = 0.0
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._answered.set()

    def samples(self) -> Samples:
        """Return what is known, not older than a few seconds; within a few seconds."""
        with self._lock:
            if self._answered.is_set() and time.monotonic() >= self._due:
                self._answered.clear()
                threading.Thread(target=self._look, name="postbus-metrics", daemon=True).start()
        known = self._known if self._answered.wait(PATIENCE) else None
        return {**(known or {}), (UP.name, ()): (float(known is not None),)}

    def _look(self) -> None:
        try:
            self._known = self._ask()
        except Exception as error:  # noqa: BLE001  told, and shown as what it is: a store that is not up
            self._known = None
            tell(logging.WARNING, "metrics_store_failed", reason=str(error))
        finally:
            self._due = time.monotonic() + REMEMBER
            self._answered.set()


class Exposed:
    """Figures as Prometheus reads them; `samples` is asked anew each time."""

    def __init__(self, where: Place, samples: Callable[[], Samples]) -> None:
        """Show the metrics that are told there."""
        self._where = where
        self._samples = samples
        self.registry = CollectorRegistry()
        self.registry.register(self)  # pyright: ignore[reportArgumentType]

    def describe(self) -> list[Family]:
        """Return nothing: what there is shows when it is asked for."""
        return []

    def collect(self) -> Iterator[Family]:
        """Return all figures."""
        samples = self._samples()
        for metric in METRICS:
            if metric.where in (self._where, "both"):
                yield _family(metric, samples)

    def written(self, accept: str) -> tuple[bytes, str]:
        """Return the figures in the format that is accepted, and its name."""
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # the client library compares whatever stands for a version there
            encode, kind = choose_encoder("")
        return encode(self.registry), kind


def _family(metric: Metric, samples: Samples) -> Family:
    made = [(list(labels), values) for (name, labels), values in samples.items() if name == metric.name]
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, (*counts, total) in made:
            histogram.add_metric(labels, list(zip(LABELS, accumulate(counts), strict=True)), total)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    if metric.kind == "counter" and not metric.labels:
        made = made or [([], (0.0,))]
    for labels, (value,) in made:
        family.add_metric(labels, value)
    return family


class Metrics(Exposed):
    """The figures of one app."""

    def __init__(self, bus: EventBus) -> None:
        """Tell of a bus; from now on this process counts."""
        self._store = Looked(Counted(lambda: of_stats(bus.stats()), lambda: bus.store.breaker("")).samples)
        self._own = Figures()
        shared = listen()
        super().__init__("server", lambda: {**shared.samples(), **self._own.samples(), **self._store.samples()})

    def count(self, scope: Any, status: int) -> None:
        """Count an answer; by the route's path, of which there are few, not by the request's."""
        path = getattr(scope.get("route"), "path", "other")
        self._own.count(REQUESTS, (scope["method"] if path != "other" else "other", path, str(status)))


def serve_figures(host: str, port: int, samples: Callable[[], Samples]) -> str:
    """Show a worker's figures at an address, until this process ends; return it. Raises InvalidRequest."""
    try:
        server, _ = start_http_server(port, host, Exposed("worker", samples).registry)
    except (OSError, OverflowError) as error:
        raise InvalidRequest(f"cannot serve metrics at {host}:{port}: {error}") from None
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{server.server_port}/metrics"
