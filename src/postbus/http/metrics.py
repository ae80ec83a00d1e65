"""Figures for Prometheus: the bus's, looked up at most every few seconds, and the server's own."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from postbus.model import Stats

__all__ = ["Metrics"]

REMEMBER: Final = 5.0


class Metrics:
    """The figures of one app."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        """Tell of a bus."""
        self._stats = stats
        self._known: Stats | None = None
        self._looked = 0.0
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "postbus_http_requests", "Requests answered.", ["method", "path", "status"], registry=self._registry
        )
        self._registry.register(self)  # pyright: ignore[reportArgumentType]

    def count(self, scope: Any, status: int) -> None:
        """Count an answer; by the route's path, of which there are few, not by the request's."""
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._requests.labels(scope["method"] if path != "other" else "other", path, str(status)).inc()

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing: what there is shows when it is asked for."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the bus in figures."""
        if self._known is None or time.monotonic() - self._looked > REMEMBER:
            self._known, self._looked = self._stats(), time.monotonic()
        stats = self._known
        yield GaugeMetricFamily("postbus_events", "Events in the log.", value=stats.events)
        yield GaugeMetricFamily("postbus_head", "The last position of the log.", value=stats.head)
        yield GaugeMetricFamily("postbus_store_bytes", "What the store takes.", value=stats.store_bytes)
        depth = GaugeMetricFamily("postbus_deliveries", "Deliveries.", labels=["subscription", "state"])
        oldest = GaugeMetricFamily(
            "postbus_oldest_seconds", "How long the oldest due one waits.", labels=["subscription"]
        )
        for each in stats.subscriptions:
            for state in ("pending", "scheduled", "processing", "dead"):
                depth.add_metric([each.name, state], getattr(each, state))
            oldest.add_metric([each.name], each.oldest_age.total_seconds() if each.oldest_age else 0.0)
        yield depth
        yield oldest
        lag = GaugeMetricFamily("postbus_lag_events", "How far a follower is behind.", labels=["subscription"])
        late = GaugeMetricFamily("postbus_lag_seconds", "How long its next event waits.", labels=["subscription"])
        for each in stats.checkpoints:
            lag.add_metric([each.subscription], each.lag)
            late.add_metric([each.subscription], each.waiting.total_seconds() if each.waiting else 0.0)
        yield lag
        yield late
        rate = GaugeMetricFamily("postbus_rate", "What happened in the last minute, a second.", labels=["action"])
        for action, value in stats.rates.items():
            rate.add_metric([action], value)
        yield rate

    def written(self, accept: str) -> tuple[bytes, str]:
        """Return the figures in the format that is accepted, and its name."""
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):  # the client library compares whatever stands for a version there
            encode, kind = choose_encoder("")
        return encode(self._registry), kind
