"""The checks of engine outputs, without an engine."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import SamplingMaskLists

from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from rollbus.bus.protocol.stream.result_arrays import TokenMasks
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import KvTransfer
from rollbus.schemas.presence import Capabilities, RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.control.canary import own_request
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.vllm.engine import warm_up_rounds
from rollbus.workers.engines.vllm.feed import _output
from rollbus.workers.engines.vllm.loads import LoadSerials
from rollbus.workers.engines.vllm.outputs import LogprobTable, OpenRequests, StepOutput

pytestmark = pytest.mark.vllm

ROUTING = RoutedExpertsInfo(num_layers=2, top_k=2, num_experts=16, dtype="u1")


def opened(*, start: int = 1, **sampling: Any) -> tuple[OpenRequests, str]:
    """Open one request with a prompt of 4 tokens, and return the open requests and its engine id."""
    requests = OpenRequests(ROUTING)
    request = GenerateRequest(
        prompt_token_ids=[1, 2, 3, 4],
        routed_experts_prompt_start=start,
        sampling=SamplingParams(**{"logprobs": None, **sampling}),
    )
    return requests, requests.add("key", request)


def rows(count: int) -> Any:
    """Return `count` rows."""
    return np.ones((count, 2, 2), np.uint8)


def only(requests: OpenRequests, output: StepOutput) -> RequestStep:
    """Return the only step of `output`."""
    [step] = split(requests.read([output])[0])
    return step


def apart(requests: OpenRequests, *outputs: StepOutput) -> tuple[list[RequestStep], list[str]]:
    """Return the steps of `outputs`, with batches split, and the engine ids of the requests to abort."""
    steps, broken = requests.read(outputs)
    return split(steps), broken


@pytest.mark.proves("P14")
def test_rows_are_counted_from_the_start() -> None:
    """The first step has the prompt's rows from `start` on, and each later step has those of its tokens."""
    requests, engine_id = opened(start=1)
    first = only(requests, StepOutput(engine_id=engine_id, token_ids=[7], routed_experts=rows(3)))
    second = only(requests, StepOutput(engine_id=engine_id, token_ids=[8, 9], routed_experts=rows(2)))

    assert (first.routed_experts_start, second.routed_experts_start) == (1, 4)
    assert len(requests) == 1


@pytest.mark.proves("P14")
@pytest.mark.parametrize("count", [2, 4])
def test_wrong_number_of_rows_ends_the_request(count: int) -> None:
    """Too few or too many rows never leave the worker: the request fails, and the engine is told to abort it."""
    requests, engine_id = opened(start=1)

    steps, broken = apart(requests, StepOutput(engine_id=engine_id, token_ids=[7], routed_experts=rows(count)))

    assert broken == [engine_id]
    assert steps[0].finish_reason is FinishReason.ERROR
    assert steps[0].error is not None
    assert f"{count} rows" in steps[0].error
    assert len(requests) == 0


def test_expert_ids_that_do_not_fit_end_the_request() -> None:
    """Expert ids that do not fit end the request, because they are never narrowed."""
    requests, engine_id = opened(start=1)
    step = only(requests, StepOutput(engine_id=engine_id, token_ids=[7], routed_experts=rows(3).astype(np.int32) * 300))

    assert step.finish_reason is FinishReason.ERROR


def test_a_logprob_of_nan_ends_the_request_and_minus_infinity_is_valid() -> None:
    """A log probability of NaN ends the request. The value -inf, for a token that was cut off, is valid."""
    requests, engine_id = opened(logprobs=1)
    table = LogprobTable(np.array([[7, 8]], np.int32), np.array([[-0.0, -np.inf]], np.float32))
    fine = only(requests, StepOutput(engine_id=engine_id, token_ids=[7], logprobs=table, routed_experts=rows(3)))
    broken = LogprobTable(table.token_ids, np.array([[-1.0, np.nan]], np.float32))
    failed = only(requests, StepOutput(engine_id=engine_id, token_ids=[7], logprobs=broken, routed_experts=rows(1)))

    assert fine.top_logprobs.logprobs.tolist() == [[-np.inf]]
    assert "NaN" in failed.error
    assert len(failed.token_ids) == 0


def test_a_request_that_allows_no_token_is_at_fault_itself() -> None:
    """NaN after an allow-list with bad words or `min_tokens` is an error of the request, and else one of the engine."""
    broken = LogprobTable(np.array([[7]], np.int32), np.array([[np.nan]], np.float32))
    for sampling, code in (
        ({"allowed_token_ids": [7], "bad_words_token_ids": [[7, 7]]}, ErrorCode.INVALID_REQUEST),
        ({"allowed_token_ids": [7], "min_tokens": 1}, ErrorCode.INVALID_REQUEST),
        ({"allowed_token_ids": [7]}, ErrorCode.ENGINE_ERROR),
        ({"min_tokens": 1}, ErrorCode.ENGINE_ERROR),
    ):
        requests, engine_id = opened(logprobs=0, **sampling)
        step = only(requests, StepOutput(engine_id=engine_id, token_ids=[7], logprobs=broken, routed_experts=rows(2)))
        assert (step.finish_reason, step.error_code) == (FinishReason.ERROR, code)
        assert requests.has_seen_nan


def test_columns_of_other_requests_in_the_batch_are_cut_off() -> None:
    """A table is as wide as the batch's widest request, and each request gets only the columns that it needs."""
    wide = LogprobTable(np.array([[7, 5, 6, 4]], np.int32), np.array([[-3.0, -0.5, -1.0, np.nan]], np.float32))
    requests, engine_id = opened(logprobs=2)
    two = only(requests, StepOutput(engine_id=engine_id, token_ids=[7], logprobs=wide, routed_experts=rows(3)))
    requests, engine_id = opened(logprobs=0)
    none = only(requests, StepOutput(engine_id=engine_id, token_ids=[7], logprobs=wide, routed_experts=rows(3)))

    assert two.logprobs.tolist() == [-3.0]
    assert two.top_logprobs.token_ids.tolist() == [[5, 6]]
    assert none.top_logprobs is None


def test_missing_logprobs_end_the_request() -> None:
    """Tokens without the requested log probabilities never leave the worker."""
    requests, engine_id = opened(logprobs=0)

    assert only(requests, StepOutput(engine_id=engine_id, token_ids=[7], routed_experts=rows(3))).error is not None


def test_only_the_requests_own_stop_tokens_are_stop_reasons() -> None:
    """Only the request's own stop tokens are stop reasons, not the model's end of sequence or a text."""
    for given, expected in ((9, 9), (2, None), ("repetition_detected", None)):
        requests, engine_id = opened(stop_token_ids=[9])
        output = StepOutput(
            engine_id=engine_id,
            token_ids=[9],
            routed_experts=rows(3),
            finish_reason=FinishReason.STOP,
            stop_reason=given,
        )

        assert only(requests, output).stop_reason == expected


def test_late_outputs_do_not_reach_a_key_that_is_in_use_again() -> None:
    """Outputs that arrive after a request's end are ignored, also if its key is in use again."""
    requests, engine_id = opened()
    only(requests, StepOutput(engine_id=engine_id, finish_reason=FinishReason.ABORT))
    again = requests.add("key", GenerateRequest(prompt_token_ids=[1]))

    assert again != engine_id
    assert requests.read([StepOutput(engine_id=engine_id, token_ids=[5])]) == ([], [])
    assert requests.engine_ids(["key", "unknown"]) == [again]


def test_error_of_the_engine_ends_one_request() -> None:
    """A request that the engine itself failed needs no abort, and the step has the engine's reason."""
    requests, engine_id = opened()

    steps, broken = apart(requests, StepOutput(engine_id=engine_id, finish_reason=FinishReason.ERROR, error="odd"))

    assert (steps[0].error, broken) == ("odd", [])


def begun(**sampling: Any) -> tuple[OpenRequests, list[str]]:
    """Return the open requests with three requests of one prompt token, after their first tokens, and their ids."""
    requests = OpenRequests(ROUTING)
    asked = GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(**{"logprobs": 0, **sampling}))
    ids = [requests.add(f"key-{i}", asked) for i in range(3)]
    apart(requests, *(plain(engine_id, 5) for engine_id in ids))
    return requests, ids


def plain(engine_id: str, token: int, logprob: float = -1.0, num_rows: int = 1) -> StepOutput:
    """Return an output of one token with its log probability and rows."""
    table = LogprobTable(np.array([[token]]), np.array([[logprob]]))
    return StepOutput(engine_id=engine_id, token_ids=[token], logprobs=table, routed_experts=rows(num_rows))


def test_plain_tokens_are_one_batch() -> None:
    """One more token for each request, and nothing else, becomes a batch of arrays with each row's start."""
    requests, ids = begun()
    requests.read([plain(ids[1], 6)])
    [batch], broken = requests.read([plain(engine_id, 7 + i, -0.5 * i) for i, engine_id in enumerate(ids)])

    assert isinstance(batch, TokenBatch)
    assert (batch.keys, batch.token_ids.tolist(), broken) == (["key-0", "key-1", "key-2"], [7, 8, 9], [])
    assert batch.logprobs.tolist() == [0, -0.5, -1]
    assert batch.routed_experts.shape == (3, 2, 2)
    assert batch.routed_experts_starts.tolist() == [1, 2, 1]
    end = replace(plain(ids[1], 3), finish_reason=FinishReason.LENGTH)
    assert apart(requests, end)[0][0].routed_experts_start == 3


@pytest.mark.parametrize(
    "odd", [{"logprob": math.nan}, {"num_rows": 2}, {"num_rows": 0}], ids=["NaN", "two rows", "no row"]
)
def test_a_request_with_an_invalid_output_fails_alone_in_its_batch(odd: dict[str, Any]) -> None:
    """A request with an invalid output fails alone, and the other requests of its batch get their tokens."""
    requests, ids = begun()
    steps, broken = apart(requests, plain(ids[0], 6), plain(ids[1], 7, **odd), plain(ids[2], 8))

    assert broken == [ids[1]]
    assert [step.finish_reason for step in steps] == [None, FinishReason.ERROR, None]
    assert [step.token_ids.tolist() for step in steps] == [[6], [], [8]]
    again, _ = apart(requests, plain(ids[0], 6), plain(ids[2], 8))
    assert [step.routed_experts_start for step in again] == [2, 2]


def test_requests_with_and_without_logprobs_are_in_separate_batches() -> None:
    """Requests with log probabilities and requests without them are in separate batches."""
    requests = OpenRequests(ROUTING)
    wishes: list[dict[str, Any]] = [{"logprobs": 0}, {"logprobs": None}, {"logprobs": 0}, {"logprobs": None}]
    ids = [
        requests.add(f"key-{i}", GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(**wish)))
        for i, wish in enumerate(wishes)
    ]
    apart(requests, *(plain(engine_id, 5) for engine_id in ids))
    steps, _ = requests.read([plain(engine_id, 6) for engine_id in ids])

    assert [(list(step.keys), step.logprobs is None) for step in steps if isinstance(step, TokenBatch)] == [
        (["key-0", "key-2"], False),
        (["key-1", "key-3"], True),
    ]


# Sampling masks of vLLM's step outputs. Engines on a CPU make no masks, so the tests build outputs as of a GPU.


VOCAB_SIZE = 100
MASKING = SyntheticConfig(sampling_mask=True).capabilities


def opened_of_masks(**fields: Any) -> tuple[OpenRequests, str]:
    """Return the open requests of an engine that makes masks, with one request, and its engine id."""
    requests = OpenRequests(None, vocab_size=VOCAB_SIZE)
    request = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(logprobs=None, top_k=5), **fields)
    return requests, requests.add("key", request)


def read(requests: OpenRequests, engine_id: str, tokens: list[int], mask: SamplingMaskLists | None) -> RequestStep:
    """Return the step of one output."""
    output = EngineCoreOutput(engine_id, tokens, new_sampling_mask=mask)
    [step], _ = requests.read([_output(output)])
    assert isinstance(step, RequestStep)
    return step


def lists(step: RequestStep) -> list[list[int]]:
    """Return the mask's token ids of each token."""
    assert step.sampling_mask is not None, step.error
    return [ids.tolist() for ids in TokenMasks.joined([step.sampling_mask]).split()]


def test_a_mask_of_one_token_may_have_ids_without_offsets() -> None:
    """The scheduler may cut a mask of one token out of a batch: such a mask has ids without offsets."""
    requests, engine_id = opened_of_masks()
    batch = SamplingMaskLists(np.array([7, 3, 8, 9], np.int32), np.array([0, 1, 4]))

    assert lists(read(requests, engine_id, [7], batch.slice_request(0, 1))) == [[7]]
    assert lists(read(requests, engine_id, [8], batch.slice_request(1, 1))) == [[3, 8, 9]]


def test_the_offsets_of_a_mask_need_not_begin_at_0() -> None:
    """A mask of several tokens has offsets, which need not begin at 0."""
    requests, engine_id = opened_of_masks()
    mask = SamplingMaskLists(np.array([1, 7, 3, 8], np.int32), np.array([1, 2, 4]))

    assert lists(read(requests, engine_id, [7, 8], mask)) == [[7], [3, 8]]


def test_a_step_without_tokens_has_no_mask() -> None:
    """A step without tokens needs no mask, because it may be the last one."""
    requests, engine_id = opened_of_masks()
    output = EngineCoreOutput(engine_id, [])
    output.finish_reason = None
    [step], _ = requests.read([_output(output)])

    assert isinstance(step, RequestStep)
    assert (step.sampling_mask, step.error) == (None, None)


def test_a_request_that_declined_masks_gets_no_masks() -> None:
    """A request that declined masks gets none, and its tokens come in batches as from engines without masks."""
    requests, engine_id = opened_of_masks(return_sampling_mask=False)
    mask = SamplingMaskLists(np.array([7], np.int32))
    first = read(requests, engine_id, [7], mask)
    [batch], _ = requests.read([_output(EngineCoreOutput(engine_id, [7], new_sampling_mask=mask))])

    assert first.sampling_mask is None
    assert not isinstance(batch, RequestStep)


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (None, "no mask for 1 tokens"),
        (SamplingMaskLists(np.array([7, 7]), np.array([0, 1, 2])), "mask of 2 tokens with 2 ids, for 1 tokens"),
        (SamplingMaskLists(np.array([7]), np.array([0, 5])), "mask of 1 tokens with 1 ids"),
        (SamplingMaskLists(np.array([7, VOCAB_SIZE])), "ids from 7 to 100; allowed: 0 to below 100"),
        (SamplingMaskLists(np.array([-1, 7])), "ids from -1 to 7"),
        (SamplingMaskLists(np.array([], np.int32)), "tokens with 0 to 0 ids"),
        (SamplingMaskLists(np.array([6, 8])), "token 7 is not among the 2 ids of its mask"),
    ],
)
def test_an_invalid_mask_ends_its_request(mask: SamplingMaskLists | None, why: str) -> None:
    """An invalid mask ends its request, so that no trainer receives it."""
    requests, engine_id = opened_of_masks()
    step = read(requests, engine_id, [7], mask)

    assert step.finish_reason is FinishReason.ERROR
    assert why in step.error


@pytest.mark.parametrize("capabilities", [MASKING])
def test_an_engine_with_masks_accepts_the_workers_own_requests(capabilities: Capabilities) -> None:
    """The worker's own requests have a temperature above 0 and a `top_k`.

    vLLM with masks rejects other requests. With a `top_k` of 1, the requests are as good as greedy.
    """
    own = [own_request(capabilities)]
    warming = [one for together in warm_up_rounds(capabilities, has_prompt_logprobs=True) for one in together]
    for request in own + warming:
        assert request.sampling.temperature > 0
        assert request.sampling.top_k > 0
    assert own[0].sampling.top_k == 1


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
