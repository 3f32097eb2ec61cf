"""A request's priority reaches vLLM's scheduler where that honours it, and is kept from one that does not."""

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.vllm.feeds import RequestMaker
from rollbus.workers.engines.vllm.loaded import LoadSerials

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

REQUEST = GenerateRequest(prompt_token_ids=[1, 2], priority=-7)


class Processor:
    """In the place of vLLM's input processor: remembers what it was given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def process_inputs(self, *_args: object, **given: Any) -> None:
        """Remember."""
        self.given = given


@pytest.mark.parametrize(("policy", "priority"), [("priority", -7), ("fcfs", 0)])
def test_priority_goes_to_a_scheduler_that_honours_it(policy: str, priority: int) -> None:
    """Under the policy `priority` vLLM is given the request's own; under another it would refuse all but 0."""
    processor = Processor()
    config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
    maker = RequestMaker(
        cast("AsyncLLM", SimpleNamespace(vllm_config=config, input_processor=processor)), LoadSerials(), ["generate"]
    )
    maker.make("id", REQUEST, cast("VllmSamplingParams", None))

    assert processor.given["priority"] == priority
    assert maker.options(REQUEST)["priority"] == priority


def test_vllm_takes_a_priority_both_ways() -> None:
    """The two ways into vLLM have the parameter that the adapter fills in."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    assert "priority" in inspect.signature(InputProcessor.process_inputs).parameters
    assert "priority" in inspect.signature(AsyncLLM.add_request).parameters
