"""The `/metrics` text of a service with synthetic workers, and the names that a query may use.

promtool and Prometheus check the rest of the queries: they evaluate the rules in alerts_test.yml, and the dashboard.
"""

import re
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.http.metrics_doc import rows
from tests.http.support import Http

SUFFIXES = {"histogram": {"_bucket": frozenset({"le"}), "_sum": frozenset(), "_count": frozenset()}}
SUFFIXES |= {"summary": {"_sum": frozenset(), "_count": frozenset()}}
OWN = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate", "severity", "model", "worker"})}
"""Metrics that Prometheus adds."""
TARGET_LABELS = frozenset({"fleet", "job", "instance"})
"""Labels that Prometheus adds to every target, see deploy/prometheus/prometheus.yml."""
Catalogue = Mapping[str, frozenset[str]]
"""The labels of each metric, including those of the target."""
GROUPING = re.compile(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
METRIC = re.compile(r"(?<![\w.$])(?!(?:and|or|unless|bool|offset)\b)([a-zA-Z_:][\w:]*+)(?!\s*\()(?:\{([^}]*)\})?")


async def worked_metrics(http: Http) -> str:
    """Return the exposition after a request that failed, and one that was sent twice, the second time as a stream."""
    prompt: dict[str, Any] = {"model": "synthetic", "token_ids": [*range(3, 103)], "sampling_params": {"max_tokens": 3}}
    for stream in (False, True):
        (await http.client.post("/inference/v1/generate", json={**prompt, "stream": stream})).raise_for_status()
    await http.client.get("/nowhere")
    while "vllm:prefix_cache_hits_total{" not in (text := (await http.client.get("/metrics")).text):
        pass
    return text


def catalogue(text: str) -> Catalogue:
    """Return the labels of each metric: those of its samples, or those in docs/metrics.md if it has no samples."""
    written = {name: frozenset(labels.replace("`", "").split(", ")) - {""} for name, _, labels, *_ in rows()}
    found: dict[str, frozenset[str]] = dict(OWN)
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for suffix, more in SUFFIXES.get(family.type, {"": frozenset()}).items():
            found[name + suffix] = written[name] | more
        for sample in family.samples:
            found[sample.name] = frozenset(sample.labels)
    return {name: labels | TARGET_LABELS for name, labels in found.items()}


def labels_read(query: str, known: Catalogue) -> frozenset[str]:
    """Return the labels of all metrics that a query reads.

    Raises:
        KeyError: the query names a metric that does not exist, or a label that none of its metrics has.
    """
    text = re.sub(r'"[^"]*"', "", query)
    labels = frozenset[str]()
    for name, matchers in METRIC.findall(GROUPING.sub("", text)):
        if unknown := set(re.findall(r"\w+", matchers)) - known[name]:
            raise KeyError(f"{name} has no label {unknown}")
        labels |= known[name]
    if unknown := set(re.findall(r"\w+", " ".join(GROUPING.findall(text)))) - labels:
        raise KeyError(f"no metric of {query} has the label {unknown}")
    return labels
