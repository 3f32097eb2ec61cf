"""The trace headers of a request that vLLM receives."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.vllm.feed import RequestMaker
from rollbus.workers.engines.vllm.loads import LoadSerials

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"traceparent": TRACE}, {"traceparent": TRACE}),
        ({"traceparent": TRACE, "tracestate": "a=1,b=2"}, {"traceparent": TRACE, "tracestate": "a=1,b=2"}),
        # A trace state is valid only with a trace.
        ({"tracestate": "a=1"}, None),
    ],
)
def test_the_headers_of_a_trace_go_to_the_engine(given: dict[str, str], expected: dict[str, str] | None) -> None:
    """The engine gets both trace headers under their W3C names, or none if the request has no trace."""
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs"))
    maker = RequestMaker(cast("Any", SimpleNamespace(vllm_config=scheduler)), LoadSerials(), ["generate"])

    options = maker.options(GenerateRequest(prompt_token_ids=[1], **cast("Any", given)))

    assert options["trace_headers"] == expected
