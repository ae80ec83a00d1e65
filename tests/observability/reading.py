"""What /metrics says, read back by Prometheus' own parser."""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx2
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from postbus import figures

__all__ = ["Told", "counting", "read"]

PROMTOOL: Final = shutil.which("promtool")


class Told:
    """A page of figures."""

    def __init__(self, text: str) -> None:
        """Read it; `promtool` must have nothing against it, where there is one."""
        self.text = text
        self.families: dict[str, Metric] = {each.name: each for each in text_string_to_metric_families(text)}
        self.names = {sample.name for each in self.families.values() for sample in each.samples}
        if PROMTOOL is not None:
            subprocess.run([PROMTOOL, "check", "metrics"], input=text, text=True, check=True)

    def value(self, name: str, **labels: str) -> float | None:
        """Return what one sample says; None if it is not there."""
        samples = [sample for each in self.families.values() for sample in each.samples]
        return next((each.value for each in samples if (each.name, each.labels) == (name, labels)), None)

    def settled(self, subscription: str = "default") -> dict[str, float]:
        """Return how many attempts of a subscription ended, by outcome."""
        family = self.families["postbus_deliveries_settled"]
        return {
            each.labels["outcome"]: each.value
            for each in family.samples
            if each.name.endswith("_total") and each.labels["subscription"] == subscription
        }


def read(url: str) -> Told:
    """Ask for /metrics."""
    answer = httpx2.get(f"{url}/metrics" if not url.endswith("/metrics") else url, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    return Told(answer.text)


def counting(work: Callable[[], Any]) -> Mapping[Any, Any]:
    """Return what this process counts while `work` is done."""
    before = figures.listen().samples()
    work()
    after = figures.listen().samples()
    zero = (0.0,)
    changed = {key: tuple(a - b for a, b in zip(values, before.get(key, zero * len(values)), strict=True))
               for key, values in after.items()}  # fmt: skip
    return {key: values[0] if len(values) == 1 else values for key, values in changed.items() if any(values)}
