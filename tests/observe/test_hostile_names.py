"""A model name with any characters is one label of one series for every reader of the format."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import rollbus
from rollbus.bus.worker_metrics import exposition
from rollbus.frontend.http.metrics import FleetCollector
from rollbus.schemas.errors import RollbusError
from tests.http.metrics_doc import NoClient
from tests.observe.promtool import needs_promtool, promtool_check_metrics
from tests.support.fleet import presence

NAMES = (
    'm"} 1', "m\\", "\\n", '\\"', 'm",worker="other', "#", "# TYPE m counter", "{}", " ", "<script>", "é\u2028x",
    "\u2029", "\u202eevil", "\ufeff", "😀" * 50, "x" * 256,
)  # fmt: skip
WORKERS = tuple(presence(worker=f"w{number}", model=name) for number, name in enumerate(NAMES))


def by_service() -> str:
    """Return the exposition of a service of a fleet with these workers."""
    collector = FleetCollector(NoClient())  # type: ignore[arg-type]
    collector.latest = rollbus.FleetState(fleet="f", workers=WORKERS)
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def by_probe() -> str:
    """Return the exposition of these workers from the writer of the workers' probes."""
    return exposition(WORKERS)


@pytest.mark.parametrize("write", [by_service, by_probe])
def test_special_characters_in_a_name_stay_inside_the_label(write: Callable[[], str]) -> None:
    """Quotes, backslashes and text that looks like a line of the format stay inside the label."""
    samples = [sample for family in text_string_to_metric_families(write()) for sample in family.samples]
    flying = [sample for sample in samples if sample.name == "rollbus_worker_in_flight"]

    assert {sample.labels["worker"]: sample.labels["model"] for sample in flying} == {
        worker.worker: worker.model for worker in WORKERS
    }
    assert len(flying) == len(WORKERS)
    assert {sample.labels.get("worker", "") for sample in samples} <= {"", *(worker.worker for worker in WORKERS)}


@needs_promtool
@pytest.mark.parametrize("write", [by_service, by_probe])
def test_prometheus_accepts_the_exposition_of_hostile_names(write: Callable[[], str]) -> None:
    """Prometheus's own parser accepts the text and reports only the colon in vLLM's names."""
    assert promtool_check_metrics(write()) == []


@pytest.mark.parametrize("name", ["m\n", "m\rx", "\0", "\x85", "\x7f", "", "x" * 257])
def test_a_model_name_with_control_characters_is_refused(name: str) -> None:
    """A presence whose model name is empty, too long or has control characters is rejected."""
    with pytest.raises(RollbusError):
        presence(model=name)
