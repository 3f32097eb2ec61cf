"""The processes of an engine also import rollbus's modules as parts of `rollbus`."""

import pytest

from tests.support.vllm_engine import RunningEngine

pytestmark = pytest.mark.vllm


def test_an_engine_imports_nothing_under_a_second_name(reloaded: RunningEngine) -> None:
    """Each rollbus module in the process with the model has a name that begins with `rollbus.`."""
    found = reloaded.call(reloaded.engine._launch.llm.collective_rpc("modules_of_ours"))

    [(rightly, wrongly)] = found
    assert wrongly == []
    assert {"rollbus.workers.engines.vllm.extension", "rollbus.workers.engines.vllm.processes"} <= set(rightly)
