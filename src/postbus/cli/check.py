"""`postbus check`: one figure against two bounds, for probes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from postbus.cli.console import Output, emit, line
from postbus.cli.options import Format, SubscriptionName, Url, existing_store, find, parse_seconds
from postbus.doctor import remains
from postbus.errors import InvalidRequest, PostbusError
from postbus.model import Stats
from postbus.telling import many

__all__ = ["EXAMPLES", "check"]

EXAMPLES: Final = """\
Example: postbus check depth --warn 1000 --crit 10000

Example: postbus check age --warn 5m --crit 1h --subscription default -o json

Example: postbus check dead --crit 1 --format nagios

Exit codes: 0 fine, 3 a bound is reached, 1 it could not look; of nagios: 0, 1, 2, 3."""
FINDINGS: Final = 3
NAGIOS: Final = {"OK": 0, "WARNING": 1, "CRITICAL": 2, "UNKNOWN": 3}


class What(StrEnum):
    """Which figure."""

    LAG = "lag"
    DEPTH = "depth"
    DEAD = "dead"
    AGE = "age"


class Style(StrEnum):
    """Whose words and exit codes are used."""

    POSTBUS = "postbus"
    NAGIOS = "nagios"


UNITS: Final = {What.LAG: "position", What.DEPTH: "event", What.DEAD: "dead letter", What.AGE: "second"}


def check(
    what: Annotated[What, typer.Argument(metavar="lag|depth|dead|age", help="Which figure.", show_default=False)],
    *,
    warn: Annotated[str | None, typer.Option(metavar="N", help="From here on it is a warning.")] = None,
    crit: Annotated[str | None, typer.Option(metavar="N", help="From here on it is critical.")] = None,
    subscription: SubscriptionName = None,
    style: Annotated[Style, typer.Option("--format", help="nagios: its line with perfdata, and its exit codes.")] = (
        Style.POSTBUS
    ),
    url: Url = None,
    output: Format = Output.TABLE,
) -> None:
    """Compare a figure with bounds; of all subscriptions, the worst one counts.

    lag: how many positions a follower or a Spark stream is behind.

    depth: how many events wait in a queue that are due.

    dead: how many dead letters there are.

    age: how long the first event has waited that is due and not begun, or not read; its bounds are such as 90s or 5m.
    """
    try:
        verdict = Verdict(what, _look(what, subscription, url), *_bounds(what, warn, crit))
    except PostbusError as error:
        if style is not Style.NAGIOS:
            raise
        typer.echo(f"POSTBUS UNKNOWN - {error}")
        raise typer.Exit(NAGIOS["UNKNOWN"]) from None
    emit(output, verdict.told, lambda: [line(verdict.nagios if style is Style.NAGIOS else verdict)])
    if verdict.state != "OK":
        raise typer.Exit(NAGIOS[verdict.state] if style is Style.NAGIOS else FINDINGS)


@dataclass(frozen=True)
class Verdict:
    """What was found, by subscription, and how that is."""

    what: What
    values: Mapping[str, float]
    warn: float | None
    crit: float | None

    @property
    def worst(self) -> tuple[float, str | None]:
        """The figure that counts, and whose it is."""
        return max(((value, name) for name, value in self.values.items()), default=(0, None))

    @property
    def state(self) -> str:
        """How that is."""
        for state, bound in (("CRITICAL", self.crit), ("WARNING", self.warn)):
            if bound is not None and self.worst[0] >= bound:
                return state
        return "OK"

    @property
    def told(self) -> dict[str, Any]:
        """All of it, for machines."""
        value, name = self.worst
        told = {"check": self.what, "state": self.state, "value": value, "unit": UNITS[self.what], "subscription": name}
        return told | {"warn": self.warn, "crit": self.crit, "values": self.values}

    def __str__(self) -> str:
        """Say it in a line."""
        value, name = self.worst
        figure = f"{value:,.1f} s" if self.what is What.AGE else many(int(value), UNITS[self.what])
        where = "" if name is None else f" in {name}"
        bounds = ", ".join(
            f"{each} {bound:,g}" for each in ("warn", "crit") if (bound := getattr(self, each)) is not None
        )
        return f"{self.state} {self.what}: {figure}{where} ({bounds})"

    @property
    def nagios(self) -> str:
        """The same as Nagios reads it, with 'label'=value;warn;crit;min for each subscription."""
        unit = "s" if self.what is What.AGE else ""
        bounds = ";".join("" if each is None else f"{each:g}" for each in (self.warn, self.crit))
        kept = (f"'{name.replace(chr(39), '')}'={value:g}{unit};{bounds};0" for name, value in self.values.items())
        return f"POSTBUS {self.state} - {str(self).partition(' ')[2]} | {' '.join(kept)}"


def _bounds(what: What, warn: str | None, crit: str | None) -> tuple[float | None, float | None]:
    least, most = (None if each is None else _bound(what, each) for each in (warn, crit))
    if least is None and most is None:
        raise InvalidRequest("say what to compare with: --warn, --crit or both")
    if least is not None and most is not None and most < least:
        raise InvalidRequest("--crit must not be below --warn")
    return least, most


def _bound(what: What, text: str) -> float:
    if what is What.AGE:
        return parse_seconds(text)
    if not text.isdecimal():
        raise InvalidRequest(f"the bounds of {what} are whole numbers, not {text!r}")
    return int(text)


def _look(what: What, subscription: str | None, url: str | None) -> Mapping[str, float]:
    with existing_store(url) as store:
        found = _figures(what, store.stats())
        mode = None if subscription is None else find(store, subscription).mode
    if subscription is None:
        return found
    if subscription not in found:
        raise InvalidRequest(f"{subscription!r} is of mode {mode}, which has no {what}")
    return {subscription: found[subscription]}


def _figures(what: What, found: Stats) -> Mapping[str, float]:
    """Return the figure of every subscription that has it."""
    match what:
        case What.LAG:
            return {each.subscription: each.lag for each in found.checkpoints}
        case What.DEPTH:
            return {each.name: each.pending - each.scheduled for each in found.subscriptions}
        case What.DEAD:
            return {name: dead for name, (dead, _) in remains(found).items()}
        case What.AGE:
            waits = {each.name: each.oldest_age for each in found.subscriptions}
            waits |= {each.subscription: each.waiting for each in found.checkpoints}
            return {name: 0 if wait is None else wait.total_seconds() for name, wait in waits.items()}
