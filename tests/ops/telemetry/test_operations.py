"""The dashboard and the alerts use metrics that exist: a real Prometheus evaluates each expression."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from probemon.adapters.routing.routing_metrics import FAMILIES as OF_ROUTING
from probemon.ops.telemetry.metric_families import FAMILIES as OF_RUNS
from scraped_run import scraped_run

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/operations"
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
FAMILIES = {**OF_RUNS, **OF_ROUTING}
NOT_SHOWN = {
    "probemon_routing_unjudged": "how many tokens rules wait for says something in the first minutes alone",
    "probemon_recurrent": "its metrics are by layer: docs/memory-and-routing.md says which to look at",
}
needs_prometheus = pytest.mark.skipif(shutil.which("promtool") is None, reason="prometheus is not installed")


def board():
    return json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))


def panels_of(part):
    for panel in part.get("panels", ()):
        yield panel
        yield from panels_of(panel)


def expressions():
    return [target["expr"] for panel in panels_of(board()) for target in panel.get("targets", ())]


def names_in(text):
    return set(re.findall(r"\bprobemon_\w+", text))


def family_of(name):
    return name if name in FAMILIES else re.sub(r"_(bucket|sum|count)$", "", name)


def test_dashboard_names_no_particular_installation():
    said = board()
    variables = {one["name"]: one["type"] for one in said["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query", "instance": "query"}
    assert said["uid"] == "probemon-operations" and "probemon" in said["tags"]
    sources = [panel["datasource"]["uid"] for panel in panels_of(said) if panel["type"] != "row"]
    assert set(sources) == {"${datasource}"} and said["time"]["from"] == "now-6h"
    numbers = [panel["id"] for panel in panels_of(said)]
    assert len(set(numbers)) == len(numbers) and "id" not in said
    assert all(panel["options"] for panel in panels_of(said) if panel["type"] != "row")
    places = [
        {(panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y) for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])} for panel in panels_of(said)
    ]  # fmt: skip
    assert sum(map(len, places)) == len(set().union(*places))  # no panel lies over another
    assert all(place["gridPos"]["x"] + place["gridPos"]["w"] <= 24 for place in panels_of(said))


def test_every_metric_family_is_on_the_dashboard_or_listed_as_not_shown():
    shown = {family_of(name) for text in expressions() for name in names_in(text)}
    assert FAMILIES.keys() == shown | NOT_SHOWN.keys()
    assert not NOT_SHOWN.keys() & shown
    assert {family_of(name) for rule in RULES for name in names_in(rule["expr"])} <= FAMILIES.keys()


@needs_prometheus
def test_every_alert_fires_when_it_should_and_only_then():
    for command in ("check", "test"):
        file = "alerts.yml" if command == "check" else "alerts_test.yml"
        done = subprocess.run(["promtool", command, "rules", file], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    tested = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    cases = [(one["alertname"], bool(one["exp_alerts"])) for test in tested for one in test["alert_rule_test"]]
    assert set(cases) == {(rule["alert"], fires) for rule in RULES for fires in (True, False)}


def test_every_alert_has_a_runbook_entry():
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/operations.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in RULES)
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["for"] and rule["annotations"]["summary"]


@needs_prometheus
def test_every_expression_has_data_from_a_real_run(tmp_path):
    texts = expressions()
    assert len(texts) > 40
    with scraped_run(tmp_path) as prometheus:
        for text in texts:
            text = text.replace("$__rate_interval", "10s").replace("[1h]", "[10s]")
            assert prometheus.vector(text.replace("$job", "probemon").replace("$instance", ".*"), seconds=20)
        for rule in RULES:  # no error, and no alert, but of the hooks, which take longer than so small a model
            seconds = 0 if rule["alert"] == "ProbemonOverBudget" else 20
            assert prometheus.is_empty(rule["expr"], seconds) or not seconds, rule["alert"]
