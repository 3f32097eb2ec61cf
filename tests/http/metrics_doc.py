"""Write the list of docs/metrics.md from the metrics of the service: `python -m tests.http.metrics_doc`."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import rollbus
from rollbus.bus.worker_metrics import worker_families
from rollbus.frontend.http.metrics import Metrics

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
TABLE = re.compile(r"<!-- table -->\n.*?<!-- end -->", re.DOTALL)
EXPORTED = {"counter": "_total"}
"""Suffixes that the Prometheus format appends to the names of a kind."""

COMMON_LABELS = {
    "rollbus_worker_": {"`worker`", "`model`"},
    "rollbus_weights_": {"`worker`", "`model`"},
    "vllm:": {"`model_name`", "`engine`", "`worker`"},
}
"""Labels of all metrics with a prefix, which the page states once."""


class NoClient:
    """A client without any activity."""

    def stats(self) -> rollbus.ClientStats:
        """Return stats with zeros and empty tables."""
        empty: dict[str, Any] = {field.name: 0 if field.type is int else {} for field in fields(rollbus.ClientStats)}
        return rollbus.ClientStats(**empty)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, kind, labels and meaning of each metric."""
    registry = Metrics(NoClient())._registry  # type: ignore[arg-type]
    of_workers = {family.name: family.label_names for family in worker_families(())}
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            labels: tuple[str, ...] = (
                getattr(collector, "_labelnames", ())
                or getattr(family, "_labelnames", ())
                or of_workers.get(family.name, ())
            )
            name = family.name + EXPORTED.get(family.type, "")
            yield (name, family.type, ", ".join(f"`{label}`" for label in labels), family.documentation)


def with_table(text: str) -> str:
    """Return the page with the current list."""
    items = "".join(
        f"- `{name}`{shown(name, kind, labels)}: {meaning}\n" for name, kind, labels, meaning in sorted(rows())
    )
    return TABLE.sub(lambda _: f"<!-- table -->\n{items}<!-- end -->", text)


def shown(name: str, kind: str, labels: str) -> str:
    """Return the kind and labels of a metric in brackets, without those that the page states once for many metrics."""
    common = next((common for prefix, common in COMMON_LABELS.items() if name.startswith(prefix)), set())
    parts = [*([kind] if kind not in {"counter", "gauge"} else []), *labels.split(", ")]
    return f" ({rest})" if (rest := ", ".join(part for part in parts if part and part not in common)) else ""


if __name__ == "__main__":
    DOC.write_text(with_table(DOC.read_text()))
