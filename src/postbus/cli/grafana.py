"""`postbus grafana`: a dashboard and alert rules, made from the table of metrics that `/metrics` shows."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from postbus.cli.console import say
from postbus.figures import (
    BREAKER,
    DEPTH,
    HANDLER,
    LAG_EVENTS,
    LAG_SECONDS,
    OLDEST,
    PROCESSES,
    PUBLISHED,
    RECENT,
    RESTARTS,
    SETTLED,
    STOPPED,
    STORE_BYTES,
    UNHANDLED,
    UP,
    WAIT,
    WANTED,
    Metric,
)

__all__ = ["ALERTS", "EXAMPLES", "PANELS", "alerts", "dashboard", "grafana"]

EXAMPLES: Final = """\
Example: postbus grafana --output monitoring

Example: postbus grafana --what alerts > postbus-alerts.yml"""
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN: Final = 'subscription=~"$subscription"'
RATE: Final = "[$__rate_interval]"
WIDTH: Final = 12
HEIGHT: Final = 8


class What(StrEnum):
    """What can be made."""

    DASHBOARD = "dashboard"
    ALERTS = "alerts"

    @property
    def file(self) -> str:
        """What it is called in a folder."""
        return "postbus-dashboard.json" if self is What.DASHBOARD else "postbus-alerts.yml"


class Panel(NamedTuple):
    """A graph: queries by what their lines are called."""

    title: str
    unit: str
    queries: dict[str, str]
    help: str = ""


class Alert(NamedTuple):
    """A rule: what must be true, for how long, and what to do about it."""

    name: str
    expression: str
    lasting: str
    severity: str
    summary: str
    remedy: str


def _highest(metric: Metric, *, only: str = CHOSEN, by: str = "subscription") -> str:
    """Return what the store says: every server and worker says the same, so the highest will do."""
    return f"max by ({by}) ({metric.name}{{{only}}})"


def _rate(metric: Metric, by: str, only: str = CHOSEN) -> str:
    return f"sum by ({by}) (rate({metric.name}{{{only}}}{RATE}))"


def _percentiles(metric: Metric, by: str) -> dict[str, str]:
    base = f"sum by (le, {by}) (rate({metric.name}_bucket{{{CHOSEN}}}{RATE}))"
    return {f"{{{{{by}}}}} p{part}": f"histogram_quantile(0.{part}, {base})" for part in (50, 95, 99)}


PANELS: Final = (
    Panel(
        "Depth",
        "short",
        {"{{subscription}} {{state}}": _highest(DEPTH, by="subscription, state")},
        "Deliveries that wait, run or are dead. Pending includes scheduled.",
    ),
    Panel("Oldest due delivery", "s", {"{{subscription}}": _highest(OLDEST)}),
    Panel(
        "Throughput",
        "ops",
        {
            "published by servers and workers": f"sum(rate({PUBLISHED.name}{RATE}))",
            "{{subscription}} settled by workers": _rate(SETTLED, "subscription"),
            "whole bus: {{action}}": f"max by (action) ({RECENT.name} / 60)",
        },
    ),
    Panel(
        "Failures",
        "ops",
        {"{{subscription}} {{outcome}}": _rate(SETTLED, "subscription, outcome", f'{CHOSEN}, outcome!="completed"')},
    ),
    Panel("Wait until the first attempt", "s", _percentiles(WAIT, "subscription")),
    Panel("Handler time", "s", _percentiles(HANDLER, "handler")),
    Panel("Lag in events", "short", {"{{subscription}}": _highest(LAG_EVENTS)}, "Followers and Spark streams."),
    Panel("Lag in seconds", "s", {"{{subscription}}": _highest(LAG_SECONDS)}, "Followers and Spark streams."),
    Panel("Dead letters", "short", {"{{subscription}}": _highest(DEPTH, only=f'{CHOSEN}, state="dead"')}),
    Panel(
        "Worker processes",
        "short",
        {
            "{{instance}} running": PROCESSES.name,
            "{{instance}} wanted": WANTED.name,
            "{{instance}} restarts in 5 min": f"increase({RESTARTS.name}[5m])",
        },
    ),
    Panel("Breakers", "short", {"{{breaker}}": f"max by (breaker) ({BREAKER.name})"}, "0 closed, 1 half-open, 2 open."),
    Panel("Store", "bytes", {"size": f"max({STORE_BYTES.name})"}),
)
ALERTS: Final = (
    Alert(
        "PostbusQueueOld",
        f"max by (subscription) ({OLDEST.name}) > 300",
        "5m",
        "warning",
        "Due work of {{ $labels.subscription }} has waited for more than 5 minutes",
        "Look whether workers run and keep up: postbus stats, postbus doctor.",
    ),
    Alert(
        "PostbusDeadLettersGrow",
        f'max by (subscription) (delta({DEPTH.name}{{state="dead"}}[15m])) > 0 '
        f'or sum by (subscription) (increase({SETTLED.name}{{outcome="dead"}}[15m])) > 0',
        "0m",
        "warning",
        "{{ $labels.subscription }} has new dead letters",
        "See why: postbus dlq list. After the cause is mended: postbus dlq retry.",
    ),
    Alert(
        "PostbusFollowerLags",
        f"max by (subscription) ({LAG_SECONDS.name}) > 300 or max by (subscription) ({STOPPED.name}) > 0",
        "5m",
        "warning",
        "{{ $labels.subscription }} is more than 5 minutes behind the log, or has stopped",
        "See who reads it, and what holds it: postbus subscriptions list, postbus doctor.",
    ),
    Alert(
        "PostbusWorkerMissing",
        f"max by (instance) ({PROCESSES.name}) < max by (instance) ({WANTED.name}) "
        f"or max by (subscription) ({UNHANDLED.name}) > 0 and max by (subscription) ({OLDEST.name}) > 300",
        "5m",
        "warning",
        "Worker processes do not stay up, or events are left waiting that no running worker handles",
        "Read the worker's log; postbus doctor names the events that nobody handles.",
    ),
    Alert(
        "PostbusBreakerOpen",
        f"max by (breaker) ({BREAKER.name}) > 0",
        "5m",
        "warning",
        "The breaker of {{ $labels.breaker }} has been open for 5 minutes",
        "What the handler calls is down; its events wait, and no attempt is burnt.",
    ),
    Alert(
        "PostbusStoreDown",
        f"min by (instance) ({UP.name}) == 0",
        "1m",
        "critical",
        "{{ $labels.instance }} cannot reach its store",
        "Nothing is acknowledged meanwhile. Look at the database and the disk: postbus doctor.",
    ),
)


def grafana(
    *,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write both into this folder.")] = None,
    what: Annotated[What, typer.Option(help="Print this one.")] = What.DASHBOARD,
) -> None:
    """Make a Grafana dashboard, to be imported, and alert rules for Prometheus.

    They show what `postbus serve` tells at /metrics, and `postbus worker` with --metrics.
    """
    made = {What.DASHBOARD: json.dumps(dashboard(), indent=2) + "\n", What.ALERTS: alerts()}
    if output is None:
        typer.echo(made[what], nl=False)
        return
    output.mkdir(parents=True, exist_ok=True)
    for each, text in made.items():
        (output / each.file).write_text(text, encoding="utf-8")
        say(f"wrote {output / each.file}")


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it."""
    return {
        "title": "postbus",
        "uid": "postbus",
        "tags": ["postbus"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_variable("datasource"), _variable("subscription")]},
        "panels": [_panel(place, each) for place, each in enumerate(PANELS)],
    }


def _variable(name: str) -> dict[str, Any]:
    if name == "datasource":
        return {"name": name, "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    names = f'label_values({{__name__=~"{DEPTH.name}|{LAG_EVENTS.name}"}}, subscription)'
    every = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {"name": name, "type": "query", "datasource": SOURCE, "query": names, "refresh": 2, **every}


def _panel(place: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(place, 2)
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def alerts() -> str:
    """Return the rules as Prometheus reads them."""
    lines = ["groups:", "  - name: postbus", "    rules:"]
    for each in ALERTS:
        lines += [
            f"      - alert: {each.name}",
            f"        expr: {json.dumps(each.expression)}",
            f"        for: {each.lasting}",
            "        labels:",
            f"          severity: {each.severity}",
            "        annotations:",
            f"          summary: {json.dumps(each.summary)}",
            f"          description: {json.dumps(each.remedy)}",
        ]
    return "\n".join(lines) + "\n"
