"""The `/metrics` text of a service with synthetic workers, and the labels of each metric."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.http.metrics_doc import rows
from tests.http.support import Http
from tests.observe.promql import TARGET_LABELS, Catalogue

SUFFIXES = {"histogram": {"_bucket": frozenset({"le"}), "_sum": frozenset(), "_count": frozenset()}}
SUFFIXES |= {"summary": {"_sum": frozenset(), "_count": frozenset()}}
OWN = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate", "severity", "model", "worker"})}
"""Metrics that Prometheus adds."""


async def worked_metrics(http: Http) -> str:
    """Return the exposition after requests that succeeded, failed, and were sent twice."""
    prompt: dict[str, Any] = {"model": "synthetic", "token_ids": [*range(3, 103)], "sampling_params": {"max_tokens": 3}}
    for _ in range(2):
        (await http.client.post("/inference/v1/generate", json=prompt)).raise_for_status()
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
