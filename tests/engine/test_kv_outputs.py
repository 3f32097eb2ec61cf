from typing import Any

import msgspec
import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.loads import LoadSerials
from rollbus.workers.engines.vllm.outputs import OpenRequests, StepOutput

ROUTING = RoutedExpertsInfo(num_layers=2, top_k=2, num_experts=16, dtype="u1")
SAID = {"do_remote_prefill": True, "kv_id": "0" * 32, "num_tokens": 32}
DECODE_LEG = KvTransfer(params=msgspec.msgpack.encode(SAID))
PROMPT_LEN = 41


def step_of(kv: KvTransfer | None, start: int, **output: Any) -> tuple[RequestStep, list[str]]:
    """Return the step of the first output of a request with a prompt of 41 tokens, and the broken requests."""
    requests = OpenRequests(ROUTING)
    request = GenerateRequest(
        prompt_token_ids=[5] * PROMPT_LEN,
        sampling=SamplingParams(logprobs=None),
        routed_experts_prompt_start=start,
    )
    engine_id = requests.add("key", request, kv)
    rows = np.zeros((PROMPT_LEN - start, 2, 2), np.uint8)
    fields = {"token_ids": [7], "routed_experts": rows, "cached_tokens": 0, **output}
    steps, broken = requests.read([StepOutput(engine_id=engine_id, **fields)])
    [step] = split(steps)
    return step, broken


def test_only_the_last_step_of_a_prefill_phase_has_the_kv_parameters() -> None:
    """Only the last step of a prefill phase carries the connector's parameters.

    Steps of other requests never do.
    """
    step, _ = step_of(KvTransfer(), 0, finish_reason=FinishReason.LENGTH, kv_params=SAID)
    assert step.kv_params is not None
    assert msgspec.msgpack.decode(step.kv_params) == SAID

    assert step_of(KvTransfer(), 0)[0].kv_params is None
    assert step_of(KvTransfer(), 0, finish_reason=FinishReason.LENGTH)[0].kv_params is None
    # A decode worker's connector may offer its KV too.
    assert step_of(None, 0, finish_reason=FinishReason.LENGTH, kv_params=SAID)[0].kv_params is None
    assert step_of(DECODE_LEG, 40, finish_reason=FinishReason.LENGTH, kv_params=SAID)[0].kv_params is None


def test_transferred_tokens_count_as_cached() -> None:
    """A decode phase has one row of its prompt, and all transferred tokens count as cached."""
    step, broken = step_of(DECODE_LEG, 40, cached_tokens=32, num_external=32)

    assert (step.error, step.cached_tokens, step.routed_experts_start, broken) == (None, 32, 40, [])


@pytest.mark.parametrize(
    ("kv", "code"),
    [
        (DECODE_LEG, ErrorCode.KV_TRANSFER_FAILED),
        (KvTransfer(), ErrorCode.ENGINE_ERROR),
        (None, ErrorCode.ENGINE_ERROR),
    ],
)
def test_a_decode_phase_that_fails_before_its_first_token_can_be_retried(
    kv: KvTransfer | None, code: ErrorCode
) -> None:
    """A decode phase that fails before its first token gets `kv_transfer_failed`, so it can be retried without KV.

    Other failures are `engine_error`.
    """
    step, _ = step_of(kv, 40, token_ids=[], routed_experts=None, finish_reason=FinishReason.ERROR)

    assert (step.finish_reason, step.error_code) == (FinishReason.ERROR, code)


def test_a_request_with_kv_that_was_not_requested_fails() -> None:
    """If a connector loads KV that the request did not ask for, the request fails, because its rows are of others."""
    step, broken = step_of(None, 0, cached_tokens=32, num_external=32)

    assert step.error is not None
    assert "loaded 32 prompt tokens without a request for them" in step.error
    assert len(broken) == 1
    # A request without these rows is not affected.
    assert step_of(None, 40, cached_tokens=32, num_external=32)[0].error is None


def test_only_decode_phases_share_cached_blocks_of_decode_phases() -> None:
    """Only decode phases share the prefix-cache blocks of decode phases, with any salt that users choose."""
    loaded = LoadSerials()
    salts = [
        loaded.salt_of(GenerateRequest(prompt_token_ids=[1], cache_salt=salt), takes_kv=takes_kv)
        for salt in (None, "kv", "0.kv:", ".kv")
        for takes_kv in (False, True)
    ]

    assert len(set(salts)) == len(salts)
