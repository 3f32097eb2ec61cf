"""Each alert of deploy/prometheus fires under its condition only; the tests use `promtool` if it is installed."""

import re
import shutil
from pathlib import Path

import yaml

from rollbus.schemas.presence import WorkerState
from tests.observe.exposed import catalogue, labels_read
from tests.observe.promtool import needs_promtool, promtool, promtool_check_metrics
from tests.observe.shipped import ALERTS, PROMETHEUS, rules

UNIT_TESTS = Path(__file__).parent / "alerts_test.yml"
PAGE = Path(__file__).parents[2] / "docs" / "operate" / "observe.md"
NAMES = [rule["alert"] for rule in rules() if "alert" in rule]
BLOCKS = {block["name"]: block for block in yaml.safe_load(UNIT_TESTS.read_text())["tests"]}
"""The unit test of each alert."""


@needs_promtool
def test_promtool_accepts_the_configuration_and_rules(tmp_path: Path) -> None:
    """The configuration and rules pass promtool's check, so Prometheus starts with them.

    Only the path of the token's file differs from the container's.
    """
    (tmp_path / "token").write_text("data")
    (tmp_path / "prometheus.yml").write_text(PROMETHEUS.read_text().replace("/run/secrets/http-token", "token"))
    shutil.copy(ALERTS, tmp_path)

    assert f"SUCCESS: {len(rules())} rules found" in promtool("check", "config", tmp_path / "prometheus.yml")
    assert f"SUCCESS: {len(rules())} rules found" in promtool("check", "rules", "--lint-fatal", ALERTS)


@needs_promtool
def test_promtool_reports_only_the_colon_in_the_names_of_vllm(exposition: str) -> None:
    """The check of the metrics reports only the colon in vLLM's own names, which programs read.

    All other names and texts follow Prometheus's advice.
    """
    assert promtool_check_metrics(exposition) == []


@needs_promtool
def test_each_alert_fires_and_stays_silent(tmp_path: Path) -> None:
    """In alerts_test.yml, no alert fires before the wait of an alert, and only that alert fires after it."""
    shutil.copy(UNIT_TESTS, tmp_path)
    shutil.copy(ALERTS, tmp_path)

    assert "SUCCESS" in promtool("test", "rules", tmp_path / UNIT_TESTS.name)


def test_each_alert_has_a_unit_test() -> None:
    """Each alert has a test with a time at which no alert fires, and a time at which this alert fires."""
    assert list(BLOCKS) == NAMES
    for name, block in BLOCKS.items():
        expected = [check["exp_samples"] for check in block["promql_expr_test"] if "ALERTS" in check["expr"]]
        assert [] in expected, name
        assert any(f'alertname="{name}"' in sample["labels"] for samples in expected for sample in samples), name


def test_each_alert_has_a_summary_an_action_and_a_severity() -> None:
    """Each alert has a summary, an action, a page, a severity and a wait.

    The table of the page lists all alerts with severity and wait.
    """
    written = re.findall(r"^\| `(Rollbus\w+)` \| (\w+), (\w+) \|", PAGE.read_text(), re.M)
    alerts = [rule for rule in rules() if "alert" in rule]

    assert written == [(rule["alert"], rule["labels"]["severity"], rule["for"]) for rule in alerts]
    for rule in alerts:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "action", "runbook"}
        assert rule["annotations"]["runbook"] == "docs/operate/observe.md#alerts"
    assert len({rule["annotations"]["summary"] for rule in alerts}) == len(alerts)
    assert len({rule["annotations"]["action"] for rule in alerts}) == len(alerts)


def test_rules_use_existing_metrics_and_labels(exposition: str) -> None:
    """Each metric and label of a rule and of its unit test is in the exposition.

    The alert's texts use labels with which it fires in its unit test.
    """
    known = dict(catalogue(exposition))
    states: set[str] = set()
    for rule in rules():
        labels = labels_read(rule["expr"], known)
        states.update(*(found.split("|") for found in re.findall(r'state=~?"([^"]*)"', rule["expr"])))
        if "record" in rule:
            known[rule["record"]] = labels
            continue
        block = BLOCKS[rule["alert"]]
        for given in block["input_series"]:
            labels_read(given["series"], known)
        fired = [each["labels"] for check in block["promql_expr_test"] for each in check["exp_samples"]]
        texts = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= {*re.findall(r"(\w+)=", " ".join(fired))}, rule["alert"]
    assert states <= {*WorkerState}
