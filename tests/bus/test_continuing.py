"""An aborted generation joined with its continuation equals an undisturbed generation."""

import asyncio
import contextlib
from dataclasses import replace as replace_result

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus import FinishReason, GenerateRequest, Generation, InvalidRequest, SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, check_generation

SLOW = SyntheticConfig(step_s=0.001, max_model_len=10_000_000, sampling_mask=False)
SAMPLING = SamplingParams(max_tokens=400, min_tokens=350, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=1)


async def stopped(rb: rollbus.Client, request: GenerateRequest) -> Generation:
    """Return the partial result of a request that is aborted after some tokens."""
    async with asyncio.TaskGroup() as tasks:
        completing = tasks.create_task(rb.complete(request))
        # The other request shares the engine steps, so its tokens show that this request has tokens too.
        beside = replace(request, request_id="beside", sampling=SamplingParams(max_tokens=400, ignore_eos=True))
        async with contextlib.aclosing(rb.generate(beside)) as stream:
            num_tokens = 0
            while num_tokens < 150:
                num_tokens += (await anext(stream)).num_tokens
        await rb.abort([request.request_id])
    return completing.result()


@pytest.mark.parametrize("start", [0, 5])
async def test_a_joined_generation_equals_an_undisturbed_generation(one_worker: StartServed, start: int) -> None:
    """A generation that was aborted twice and joined equals an undisturbed one in all of its arrays.

    Tokens, logprobs, alternatives, prompt logprobs, weight versions and rows are equal.
    """
    request = GenerateRequest(prompt_token_ids=range(5), sampling=SAMPLING, routed_experts_prompt_start=start)
    async with one_worker(config=SLOW, weight_version=3) as (rb, *_):
        first = await stopped(rb, request)
        assert 0 < len(first.token_ids) < 400
        rest = request.continuing(first)
        assert rest.request_id != request.request_id
        assert rest.sampling.max_tokens == 400 - len(first.token_ids)
        assert rest.sampling.prompt_logprobs is None
        # The continuation delivers the boundary row.
        assert rest.routed_experts_prompt_start == 5 + len(first.token_ids) - 1
        second = await rb.complete(replace(rest, sampling=replace(rest.sampling, max_tokens=20, min_tokens=0)))
        # Treat the second part as if it had been aborted here.
        both = first.joined(replace_result(second, finish_reason=FinishReason.ABORT))
        joined = both.joined(await rb.complete(request.continuing(both)))
        expected = await rb.complete(request)

    check_generation(joined, request)
    for name in (
        "token_ids",
        "logprobs",
        "top_token_ids",
        "top_logprobs",
        "prompt_logprobs",
        "prompt_top_token_ids",
        "prompt_top_logprobs",
        "weight_versions",
        "routed_experts",
        "kv_mixed",
    ):
        np.testing.assert_array_equal(getattr(joined, name), getattr(expected, name), name)
    for name in ("request_id", "child", "prompt_len", "start", "finish_reason", "exact", "kv_version_spans"):
        assert getattr(joined, name) == getattr(expected, name), name
    assert joined.request is request
    assert (joined.parts, joined.attempts, len(joined.worker_ids)) == (3, 3, 3)


def ended(request: GenerateRequest, *token_ids: int, reason: FinishReason = FinishReason.ABORT) -> Generation:
    """Return a generation of the request with these tokens, without routed experts."""
    return Generation(
        request=request,
        request_id=request.request_id,
        child=0,
        prompt_len=request.prompt_len,
        token_ids=np.array(token_ids, "i4"),
        logprobs=None,
        weight_versions=np.zeros(len(token_ids), "i4"),
        routed_experts=None,
        start=request.routed_experts_prompt_start,
        finish_reason=reason,
    )


def request(**sampling: object) -> GenerateRequest:
    """Return a request for nine tokens."""
    return GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=9, **sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"bad_words_token_ids": [[1]]}, "bad_words_token_ids"),
        ({"extra": {"structured_outputs": {"regex": "a"}}}, "extra"),
    ],
)
def test_an_inexact_continuation_is_refused_unless_the_caller_chooses(sampling: dict[str, object], field: str) -> None:
    """If a request cannot continue exactly, the error names the field.

    With `inexact="continue"`, the joined result is not exact.
    """
    asked = request(**sampling)
    first = ended(asked, 5, 6)
    with pytest.raises(InvalidRequest, match=rf"sampling\.{field} gives the sampler a state that is lost"):
        asked.continuing(first)
    rest = asked.continuing(first, inexact="continue")
    assert rest.prompt_token_ids.tolist() == [1, 2, 5, 6]  # type: ignore[union-attr]
    assert not first.joined(ended(rest, 7, reason=FinishReason.LENGTH)).exact
    if asked.sampling.seed is not None:
        assert rest.sampling.seed not in (None, asked.sampling.seed)
    # A generation without tokens starts again with the same seed and is exact.
    anew = asked.continuing(ended(asked))
    assert anew.sampling == asked.sampling
    assert ended(asked).joined(ended(anew, 7)).exact


def test_a_seed_with_temperature_zero_allows_a_continuation() -> None:
    """With a temperature of 0, a seed does not prevent a continuation."""
    asked = request(seed=1, temperature=0)
    assert asked.continuing(ended(asked, 5)).sampling.max_tokens == 8


def test_a_sample_of_several_continues_with_its_own_seed() -> None:
    """Sample i of n continues as one request with seed + i."""
    asked = request(seed=4, n=3)
    third = replace_result(ended(asked), child=2)
    assert (asked.continuing(third).sampling.seed, asked.continuing(third).sampling.n) == (6, 1)
    with pytest.raises(InvalidRequest, match="generation is of sample 3; allowed: samples 0 to 2"):
        asked.continuing(replace_result(third, child=3))


def test_an_ended_or_mismatching_generation_cannot_be_continued() -> None:
    """`continuing` rejects a generation of another request and a generation that ended normally.

    It also rejects a generation of which only the tokens show that it ended normally.
    """
    asked = request(stop_token_ids=[7])
    for generation in (ended(asked, 5, reason=FinishReason.STOP), ended(asked, *range(9)), ended(asked, 5, 7)):
        with pytest.raises(InvalidRequest, match="generation ended normally"):
            asked.continuing(generation)
    with pytest.raises(
        InvalidRequest, match="generation has a prompt of 2 tokens and rows from 0 on; allowed: a generation of"
    ):
        GenerateRequest(prompt_token_ids=[1]).continuing(ended(asked, 5))
    failed = ended(asked, 5, reason=FinishReason.ERROR)
    assert asked.continuing(failed).prompt_len == 3


def test_joined_rejects_parts_that_do_not_match() -> None:
    """`joined` rejects a part with another prompt, another first row position, or rows of another shape."""
    asked = request()
    first = ended(asked, 5)
    rest = asked.continuing(first)
    with pytest.raises(
        InvalidRequest, match=r"rest has another prompt, of 2 tokens; allowed: the 3 tokens of this part"
    ):
        first.joined(ended(asked, 6))
    with pytest.raises(InvalidRequest, match=r"rest has routed experts from position 2 on; allowed: position 0"):
        first.joined(ended(replace(rest, routed_experts_prompt_start=2), 6))
    rows = np.zeros((2, 4, 2), "u1")
    with_rows = replace_result(first, routed_experts=rows)
    after = replace_result(ended(asked.continuing(with_rows), 6), routed_experts=np.zeros((1, 4, 3), "u1"))
    with pytest.raises(InvalidRequest, match=r"routed experts of shape \(1, 4, 3\)"):
        with_rows.joined(after)


def test_rows_of_both_parts_are_kept_and_never_narrowed() -> None:
    """If rows arrived before their tokens, the continuation delivers them again.

    Joined ids of two bytes stay two bytes.
    """
    asked = request()
    ahead = replace_result(ended(asked, 5), routed_experts=np.full((4, 1, 1), 1, "u1"))
    rest = asked.continuing(ahead)
    assert rest.routed_experts_prompt_start == 2
    joined = ahead.joined(replace_result(ended(rest, 6), routed_experts=np.full((1, 1, 1), 300, "<u2")))
    assert joined.routed_experts.dtype == np.dtype("<u2")
    assert joined.routed_experts[:, 0, 0].tolist() == [1, 1, 300]
