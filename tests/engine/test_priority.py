"""A request's priority reaches vLLM's scheduler only if its policy uses priorities."""

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.vllm.feed import RequestMaker
from rollbus.workers.engines.vllm.loads import LoadSerials

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.vllm

REQUEST = GenerateRequest(prompt_token_ids=[1, 2], priority=-7)


class Processor:
    """A stand-in for vLLM's input processor that records its arguments."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def process_inputs(self, *_args: object, **given: Any) -> None:
        """Record the arguments."""
        self.given = given


@pytest.mark.parametrize(("policy", "priority"), [("priority", -7), ("fcfs", 0)])
def test_only_a_scheduler_with_priorities_gets_the_requests_priority(policy: str, priority: int) -> None:
    """Under the policy `priority`, vLLM gets the request's priority. Other policies get 0, as vLLM rejects others."""
    processor = Processor()
    config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
    maker = RequestMaker(
        cast("AsyncLLM", SimpleNamespace(vllm_config=config, input_processor=processor)), LoadSerials(), ["generate"]
    )
    maker.make("id", REQUEST, cast("VllmSamplingParams", None))

    assert processor.given["priority"] == priority
    assert maker.options(REQUEST)["priority"] == priority


def test_both_entry_points_of_vllm_have_a_priority_parameter() -> None:
    """The two entry points of vLLM have the parameter that the adapter sets."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    assert "priority" in inspect.signature(InputProcessor.process_inputs).parameters
    assert "priority" in inspect.signature(AsyncLLM.add_request).parameters
