"""Records what servers and workers tell Prometheus: the metrics, their types and the names of their labels."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from postbus import Breaker, EventBus, figures
from postbus.cli.supervise import Supervisor
from postbus.http.metrics import Exposed, Metrics
from tests.contract.stores import Site

__all__ = ["record_metrics"]

OURS: Final = frozenset({"le", "state"})
"""Labels whose values do not depend on what has happened."""
LOOKS: Final = 20
"""How often figures are asked for anew, where counting them takes longer than an answer may."""


def record_metrics(site: Site, served: str) -> dict[str, Any]:
    """Return the metrics of a server, of which `served` is what it told, and of a worker on the same store."""
    bus = EventBus(site.url, worker_id="shop:3", clock=site.clock)

    @bus.on("metric.*", breaker=Breaker(failures=1), retry={"max_retries": 0})
    def refuse(event: object) -> None:
        raise ValueError("no")

    with bus:  # only a worker that runs tells of its breakers
        bus.publish("metric.made")
        bus.wait_idle(timeout=60)
        listener = figures.listen()
        listener.runs(bus.store.url)
        stored = _figures_of(bus)
        supervised = Supervisor("shop:bus", 1, lambda *_: None).samples()
        told = Exposed("worker", lambda: {**figures.of_stats(bus.stats()), **listener.samples(), **supervised})
        worker = told.written("")[0].decode()
    return {"server": _families(served, stored), "worker": _families(worker)}


def _figures_of(bus: EventBus) -> str:
    """Return the figures of this process and of the store, once those of the store have been counted."""
    for _ in range(LOOKS):
        text = Metrics(bus).written("")[0].decode()
        if "postbus_lag_events{" in text:
            return text
    raise AssertionError("the store's figures are never counted")


def _families(*expositions: str) -> dict[str, Any]:
    told: dict[str, dict[str, Any]] = {}
    for family in (each for text in expositions for each in text_string_to_metric_families(text)):
        known = told.setdefault(family.name, {"type": family.type, "labels": {}})
        for label, value in (pair for sample in family.samples for pair in sample.labels.items()):
            known["labels"].setdefault(label, set()).add(value)
    return {name: {**known, "labels": _labels(known["labels"])} for name, known in told.items()}


def _labels(found: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the labels, and what the values are of those whose values are ours."""
    return {
        label: " ".join(sorted(values, key=float if label == "le" else str)) if label in OURS else "…"
        for label, values in found.items()
    }
