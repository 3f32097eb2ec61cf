"""The files in deploy/ for Prometheus and Grafana, and their queries."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
PROMETHEUS: Final = DEPLOY / "prometheus" / "prometheus.yml"
ALERTS: Final = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD: Final = DEPLOY / "grafana" / "fleet.json"
PROVISIONING: Final = DEPLOY / "grafana" / "provisioning"
LEGEND: Final = re.compile(r"\{\{(\w+)\}\}")
VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")


def rules() -> list[dict[str, Any]]:
    """Return all rules in the order in which Prometheus evaluates a group."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the decoded dashboard."""
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels, including rows."""
    return [*dashboard()["panels"]]


def variables() -> dict[str, dict[str, Any]]:
    """Return the dashboard's variables by name."""
    return {variable["name"]: variable for variable in dashboard()["templating"]["list"]}


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield the place of each query, the query for all of the fleet `default`, and the legend."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", _filled(target["expr"]), target.get("legendFormat", "")
    for annotation in dashboard()["annotations"]["list"]:
        if "expr" in annotation:
            yield f"annotation {annotation['name']}", _filled(annotation["expr"]), annotation["textFormat"]
    for variable in variables().values():
        if variable["type"] != "query":
            continue
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        if asked is not None:
            yield f"variable {variable['name']}", _filled(f"count by ({asked[2]}) ({asked[1]})"), ""


def _filled(query: str) -> str:
    values = {"fleet": "default", "model": ".*", "worker": ".*", "__rate_interval": "1m"}
    return VARIABLE.sub(lambda found: values[found[1]], query)
