"""What a measure is: subjects that do the same work, and bars that hold their figures against each other."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

__all__ = ["Bar", "Call", "Line", "Measure", "Result", "Round", "Spread", "Verdict", "judge", "quotient"]

Figures = Mapping[str, float]
"""What one sample yields, by name: a rate, a time in seconds, or an amount for each event."""
Round = Mapping[str, Figures]
"""One sample of every subject, all taken within the same few seconds."""
Unit = Literal["/s", "ms", "each"]
Store = Literal["sqlite", "postgres"]


@dataclass(frozen=True, slots=True)
class Call:
    """A function to be run in a fresh process: `module:function`, and its keyword arguments."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Bar:
    """A claim about one round's figures. Where `unless` returns a reason, the claim is shown and not judged."""

    claim: str
    value: Callable[[Round], float]
    limit: float | None
    at_least: bool = False
    unit: Literal["x", "ms", "s"] = "x"
    unless: Callable[[Mapping[str, Any]], str | None] = lambda _: None

    @property
    def wording(self) -> str:
        """The limit as it is shown."""
        if self.limit is None:
            return "shown only"
        sign = "≥" if self.at_least else "≤" if self.unit == "x" else "<"
        return f"{sign} {self.limit:g}{' x' if self.unit == 'x' else ' ' + self.unit}"


@dataclass(frozen=True, slots=True)
class Measure:
    """Subjects by name, what is prepared once for all of them, and the bars."""

    name: str
    title: str
    unit: Unit
    subjects: Mapping[str, Call]
    bars: Sequence[Bar]
    prepare: Sequence[Call] = ()
    peers: Sequence[str] = ()
    """The subjects that users could pick instead of `postbus`: where one is ahead, the docs say so first."""
    most_rounds: int = 100
    store: Store = "sqlite"


class Verdict(StrEnum):
    """What became of a bar."""

    OK = "ok"
    MISSED = "MISSED"
    SHOWN = "not judged"


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some samples, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Line:
    """A bar after the run."""

    bar: Bar
    spread: Spread
    verdict: Verdict
    reason: str | None


@dataclass(frozen=True, slots=True)
class Result:
    """A measure after the run."""

    measure: Measure
    rounds: Sequence[Round]
    lines: Sequence[Line]
    seconds: float

    def figures(self) -> dict[tuple[str, str], Spread]:
        """Return the spread of every figure by (subject, name)."""
        return {
            (subject, name): Spread.of([each[subject][name] for each in self.rounds])
            for subject in self.measure.subjects
            for name in self.rounds[0][subject]
        }


def judge(bar: Bar, rounds: Sequence[Round], machine: Mapping[str, Any]) -> Line:
    """Hold the median over the rounds against the bar."""
    spread = Spread.of([bar.value(each) for each in rounds])
    reason = bar.unless(machine)
    if bar.limit is None or reason is not None:
        return Line(bar, spread, Verdict.SHOWN, reason)
    held = spread.median >= bar.limit if bar.at_least else spread.median <= bar.limit
    return Line(bar, spread, Verdict.OK if held else Verdict.MISSED, None)


def quotient(ours: str, *others: str, figure: str, best: Callable[..., float] = max) -> Callable[[Round], float]:
    """Return what divides one subject's figure by another's, or by the best of several."""

    def value(each: Round) -> float:
        return each[ours][figure] / best([each[other][figure] for other in others])

    return value
