"""`postbus grafana`: what it makes can be read, and speaks of nothing that is not told."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from postbus.breaker import Breaker, BreakerState
from postbus.cli.app import app
from postbus.cli.grafana import ALERTS, PANELS
from postbus.cli.supervise import Supervisor
from postbus.figures import METRICS
from postbus.http.metrics import Exposed
from tests.http.serving import serving
from tests.observability.reading import Told, read

QUERIES = [query for panel in PANELS for query in panel.queries.values()] + [each.expression for each in ALERTS]


def run(*arguments: str) -> str:
    """Run the command."""
    ran = CliRunner().invoke(app, ["grafana", *arguments])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def used(query: str) -> set[str]:
    """Return the names of metrics in a query."""
    return set(re.findall(r"\bpostbus_\w+", query))


@pytest.fixture
def told(tmp_path: Path) -> dict[str, set[str]]:
    """Return what a real server and a supervisor expose, all at work: by name of sample, the names of labels."""
    pages: list[Told] = []
    with serving("sqlite", tmp_path) as served:
        bus = served.bus

        @bus.on("*", breaker=Breaker())
        def handle(event: Any) -> None:
            pass

        @bus.follow("sales")
        def sell(event: Any) -> None:
            pass

        bus.store.change_breaker(bus.handlers[0].breaker_name, lambda _: BreakerState(failures=1))
        served.publish(type="order.placed")
        bus.wait_idle(10)
        pages.append(read(served.url))
    supervisor = Supervisor("none:bus", 1, lambda _, __: None, figures=True)
    pages.append(Told(Exposed("worker", supervisor.samples).written("")[0].decode()))
    samples = [sample for page in pages for family in page.families.values() for sample in family.samples]
    return {each.name: set(each.labels) for each in samples}


def test_every_metric_that_is_used_is_exposed(told: dict[str, set[str]]):
    """A name in the dashboard or in a rule is a name that a real server or worker tells, with those labels."""
    for query in QUERIES:
        assert used(query), query
        assert used(query) <= told.keys(), query
        labels = set().union(*(told[name] for name in used(query))) | {"instance"}
        grouped = {each.strip() for inside in re.findall(r"by \(([^)]*)\)", query) for each in inside.split(",")}
        matched = set(re.findall(r"(\w+)(?:=~|!=|=)\"", query))
        assert grouped | matched <= labels, query


def test_every_metric_of_the_table_is_exposed(told: dict[str, set[str]]):
    """Each shows with the labels that the table says, once there is something to show."""
    for metric in METRICS:
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        assert told[name] == set(metric.labels), metric


def test_the_dashboard_can_be_imported():
    """It is JSON with a choice of data source, a place for each panel, and one line a query."""
    made = json.loads(run())
    assert [each["name"] for each in made["templating"]["list"]] == ["datasource", "subscription"]
    assert {panel["datasource"]["uid"] for panel in made["panels"]} == {"${datasource}"}
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]}
    assert len(places) == len(made["panels"]) == len(PANELS)
    wanted = {"Depth", "Oldest due delivery", "Throughput", "Failures", "Handler time", "Dead letters"}
    assert wanted <= {panel["title"] for panel in made["panels"]}
    assert used(json.dumps(made)) - {f"{each.name}_bucket" for each in METRICS} <= {each.name for each in METRICS}


def test_the_rules_are_yaml_that_prometheus_reads(tmp_path: Path):
    """A group of rules, each with its expression, how long it must hold, and what to do."""
    text = run("--what", "alerts")
    (group,) = yaml.safe_load(text)["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [each.name for each in ALERTS]
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"].keys() == {"summary", "description"}
    if (promtool := shutil.which("promtool")) is not None:
        (tmp_path / "rules.yml").write_text(text)
        subprocess.run([promtool, "check", "rules", tmp_path / "rules.yml"], check=True)


def test_both_are_written_into_a_folder(tmp_path: Path):
    """`--output` makes the folder, and two files that say what is printed."""
    run("--output", str(tmp_path / "a" / "b"))
    assert (tmp_path / "a/b/postbus-dashboard.json").read_text() == run()
    assert (tmp_path / "a/b/postbus-alerts.yml").read_text() == run("--what", "alerts")


def test_commands_that_rules_recommend_exist():
    """Whoever is woken at night types what there is."""
    known = get_command(app).commands.keys()  # pyright: ignore[reportAttributeAccessIssue]
    for alert in ALERTS:
        assert set(re.findall(r"postbus (\w+)", alert.remedy)) <= known, alert.name
