"""The checks of engine outputs, without an engine."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.outputs import LogprobTable, OpenRequests, StepOutput

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
    assert failed.error is not None
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
