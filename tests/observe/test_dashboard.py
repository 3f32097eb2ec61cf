"""The dashboard of deploy/grafana is complete and uses only existing metrics. These tests do not run Grafana."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.observe.exposed import catalogue, labels_read
from tests.observe.shipped import DASHBOARD, LEGEND, PROMETHEUS, PROVISIONING, dashboard, queries, variables

COMPOSE = yaml.safe_load((PROMETHEUS.parents[2] / "compose.yaml").read_text())
BUILT_IN = {"__rate_interval", "__interval", "__range"}
"""Variables that Grafana defines."""


def test_every_query_uses_existing_metrics_and_labels(exposition: str) -> None:
    """Queries of panels, variables and annotations, and legends, use existing metrics and labels."""
    known = catalogue(exposition)
    for where, text, legend in queries():
        assert set(re.findall(LEGEND, legend)) <= labels_read(text, known), where


@pytest.mark.parametrize(
    "query",
    [
        "rollbus_nothing",
        'rollbus_bus_up{worker="w"}',
        "sum by (lane) (rate(rollbus_worker_in_flight[1m]))",
        "rollbus_bus_up == 1 and on (fleet, worker) up",
    ],
)
def test_a_wrong_name_in_a_query_is_found(exposition: str, query: str) -> None:
    """The check rejects an unknown metric, and a label that no metric of the query has."""
    with pytest.raises(KeyError):
        labels_read(query, catalogue(exposition))


def test_every_variable_exists_and_is_used() -> None:
    """Each `$name` in a query is a variable of the dashboard or of Grafana, and each variable is used."""
    text = json.dumps([dashboard()["panels"], dashboard()["annotations"], [*variables().values()]])
    used = set(re.findall(r"\$\{?([a-z_]\w*)\}?", text)) - {"__all"}

    assert used - BUILT_IN == variables().keys()


def data_sources(value: Any) -> set[str]:
    """Return the uid of each data source in this value."""
    if isinstance(value, list):
        return set().union(*map(data_sources, value))
    if not isinstance(value, dict):
        return set()
    own = {value["datasource"]["uid"]} if "datasource" in value else set()
    return own.union(*map(data_sources, value.values()))


def test_the_dashboard_does_not_name_the_data_source_of_compose() -> None:
    """The dashboard does not name the data source of compose.yaml, so it can be loaded elsewhere."""
    assert data_sources(dashboard()) == {"${datasource}", "-- Grafana --"}
    assert (dashboard()["id"], dashboard()["uid"]) == (None, "rollbus-fleet")


def test_provisioning_agrees_with_compose() -> None:
    """Grafana finds Prometheus by the name and port of its service, and the dashboard at its mount in compose.yaml."""
    [source] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((PROVISIONING / "dashboards" / "fleet.yml").read_text())["providers"]
    grafana, scraped = COMPOSE["services"]["grafana"], yaml.safe_load(PROMETHEUS.read_text())
    mounted = dict(line.removesuffix(":ro").split(":") for line in grafana["volumes"])
    path = mounted[f"./deploy/grafana/{DASHBOARD.name}"]

    assert source["url"] == "http://prometheus:9090"
    assert COMPOSE["services"]["prometheus"]["ports"][0].endswith(":9090")
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert path == f"{provider['options']['path']}/{DASHBOARD.name}"
    assert path == grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"


def test_prometheus_scrapes_the_service_of_compose() -> None:
    """The target is the HTTP service. The token's file has the service's own setting, also if it is not set."""
    [job] = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    [mounted] = COMPOSE["services"]["prometheus"]["configs"]
    token = COMPOSE["services"]["frontend"]["environment"]["ROLLBUS_HTTP_TOKEN"]

    assert [target for config in job["static_configs"] for target in config["targets"]] == ["frontend:8080"]
    assert job["authorization"] == {"credentials_file": mounted["target"]}
    assert COMPOSE["configs"][mounted["source"]] == {"content": token.replace(":-}", ":-none}")}


def test_in_grafana_every_user_can_read_and_no_user_can_log_in() -> None:
    """Every user can read and no user can log in, so no default password remains."""
    settings = COMPOSE["services"]["grafana"]["environment"]

    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
