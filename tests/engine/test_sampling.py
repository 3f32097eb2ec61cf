"""Every sampling parameter reaches vLLM, or is rejected with an error that names it."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm import corrections
from rollbus.workers.engines.vllm.corrections import MAX_COUNTED, MAX_DRAWN
from rollbus.workers.engines.vllm.params import to_vllm
from tests.engine.support import prompt, rows_here
from tests.support.vllm_engine import Result, RunningEngine

pytestmark = pytest.mark.vllm


EOS = 2
PROMPT = prompt(40, seed=20)


def run(engine: RunningEngine, **sampling: Any) -> Result:
    """Generate greedily with `sampling`, with at most 6 tokens by default."""
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling})
    return engine.generate(GenerateRequest(prompt_token_ids=PROMPT, sampling=params))[0]


@pytest.mark.usefixtures("engines")
def test_every_sampling_field_reaches_vllm_unchanged() -> None:
    """Each field of `SamplingParams` reaches vLLM unchanged, under vLLM's name for it."""
    values: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.1,
        "seed": 5,
        "stop_token_ids": [8, 9],
        "ignore_eos": True,
        "logprobs": 3,
        "prompt_logprobs": 4,
        "n": 1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {4: -2.5},
        "allowed_token_ids": [4, 5],
        "bad_words_token_ids": [[6], [7, 8]],
        "extra": {"skip_reading_prefix_cache": True},
    }
    request = GenerateRequest(prompt_token_ids=PROMPT, routed_experts_prompt_start=3, sampling=SamplingParams(**values))

    params = to_vllm(request, max_model_len=512, returns_rows=True)

    assert set(values) == set(SamplingParams.__struct_fields__)
    del values["extra"]
    assert {name: getattr(params, name) for name in values} == values
    assert params.skip_reading_prefix_cache is True
    assert params.routed_experts_prompt_start == 3
    assert params.detokenize is False
    assert to_vllm(request, max_model_len=512, returns_rows=False).routed_experts_prompt_start == len(PROMPT)


def test_bad_words_are_not_generated(moe: RunningEngine) -> None:
    """The next best token replaces a banned token. In a banned sequence, only its last token is replaced."""
    free = run(moe, logprobs=2)
    top = free.steps[0].top_logprobs
    first, second = (int(i) for i in top.token_ids[0])

    single = run(moe, bad_words_token_ids=[[first]], max_tokens=1)
    pair = run(moe, bad_words_token_ids=[free.token_ids[:2]])

    assert free.token_ids[0] == first
    assert single.token_ids == [second]
    assert pair.token_ids[0] == first
    assert pair.token_ids[1] != free.token_ids[1]


def test_bias_and_allowed_tokens_decide(moe: RunningEngine) -> None:
    """`logit_bias` can force a token, and `allowed_token_ids` allows only its own tokens."""
    allowed = [5, 50, 500]

    assert run(moe, logit_bias={77: 100.0}).token_ids == [77] * 6
    assert set(run(moe, allowed_token_ids=allowed, temperature=1.0, max_tokens=30).token_ids) <= set(allowed)


def test_stop_token_ends_the_request_and_is_delivered(moe: RunningEngine) -> None:
    """A stop token is the last token and the stop reason. `min_tokens` delays it."""
    free = run(moe).token_ids
    stop = free[2]

    stopped = run(moe, stop_token_ids=[stop])
    held = run(moe, stop_token_ids=[stop], min_tokens=5)

    assert stopped.token_ids == free[: free.index(stop) + 1]
    assert (stopped.last.finish_reason, stopped.last.stop_reason) == (FinishReason.STOP, stop)
    assert len(stopped.rows) == rows_here(len(PROMPT) + len(stopped.token_ids) - 1)
    assert stop not in held.token_ids[:5]


def test_end_of_sequence_ends_unless_ignored(moe: RunningEngine) -> None:
    """The model's end-of-sequence token ends a request without a stop reason. With `ignore_eos`, it continues."""
    ended = run(moe, logit_bias={EOS: 100.0})
    ignored = run(moe, logit_bias={EOS: 100.0}, ignore_eos=True)

    assert ended.token_ids == [EOS]
    assert (ended.last.finish_reason, ended.last.stop_reason) == (FinishReason.STOP, None)
    assert ignored.token_ids == [EOS] * 6
    assert ignored.last.finish_reason is FinishReason.LENGTH


def test_no_max_tokens_fills_the_context(moe: RunningEngine) -> None:
    """`max_tokens=None` generates up to the model's last position. A request may name exactly that number."""
    ids = prompt(500, seed=21)
    results = moe.generate(
        *(
            GenerateRequest(prompt_token_ids=ids, sampling=SamplingParams(max_tokens=most, ignore_eos=True))
            for most in (None, 12)
        )
    )

    for result in results:
        assert len(result.token_ids) == 12
        assert len(result.rows) == rows_here(511)
        assert result.last.finish_reason is FinishReason.LENGTH


def test_seed_makes_sampling_repeatable(moe: RunningEngine) -> None:
    """Equal seeds give equal tokens, and different seeds give different tokens."""
    first, again, other = (run(moe, temperature=1.0, seed=seed, max_tokens=20).token_ids for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_each_request_gets_its_own_number_of_alternatives(moe: RunningEngine) -> None:
    """In one batch, every request gets its own number of alternatives, best first. Greedy sampling picks the first."""
    widths = (None, 0, 1, 5, 20)
    results = moe.generate(
        *(
            GenerateRequest(
                prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=4, temperature=0.0, logprobs=width)
            )
            for width in widths
        )
    )

    for width, result in zip(widths, results, strict=True):
        for step in result.steps:
            assert (step.logprobs is None) == (width is None)
            assert (step.top_logprobs is None) == (not width)
            if width:
                assert step.top_logprobs.logprobs.shape == (1, width)
                assert np.all(np.diff(step.top_logprobs.logprobs) <= 0)
                assert step.top_logprobs.logprobs[0, 0] == step.logprobs[0]
                assert step.top_logprobs.token_ids[0, 0] == step.token_ids[0]


def test_logprobs_are_those_of_the_sampler(moe: RunningEngine) -> None:
    """Log probabilities are those of the sampler: after temperature, and -inf for tokens that `top_k` cut off."""
    result = run(moe, temperature=0.5, top_k=3, logprobs=5, seed=3, max_tokens=8)
    for step in result.steps:
        top = step.top_logprobs.logprobs[0]
        assert np.isclose(np.exp(top[:3]).sum(), 1.0, atol=1e-5)
        assert np.all(top[3:] == -np.inf)


def test_prompt_logprobs_equal_hugging_face(moe: RunningEngine, models: dict[str, Path]) -> None:
    """Prompt log probabilities cover the positions 1 to Lp - 1, with the requested alternatives."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    ids = prompt(300, seed=22)
    with torch.no_grad():
        expected = model(torch.tensor([ids.tolist()])).logits[0].log_softmax(-1).numpy()
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)
    result = moe.generate(GenerateRequest(prompt_token_ids=ids, sampling=params))[0]
    first = result.steps[0].prompt_logprobs

    assert result.steps[1].prompt_logprobs is None
    assert first.start == 1
    assert np.abs(first.logprobs - expected[np.arange(299), ids[1:]]).max() < 1e-4
    assert np.array_equal(first.top.token_ids[:, 0], expected[:299].argmax(-1))
    assert first.top.logprobs.shape == (299, 3)


def test_prompt_of_one_token_has_no_prompt_logprobs(moe: RunningEngine) -> None:
    """A prompt of one token gets a normal result with an empty list of prompt log probabilities."""
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    result = moe.generate(GenerateRequest(prompt_token_ids=[7], sampling=params))[0]
    first = result.steps[0].prompt_logprobs

    assert len(result.rows) == rows_here(3)
    assert len(first.logprobs) == 0


def test_request_without_a_possible_token_fails_alone(moe: RunningEngine) -> None:
    """If every second token is forbidden, the sampler computes NaN: only that request fails."""
    impossible = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5, 5]], temperature=0.0)
    failed, fine = moe.generate(
        GenerateRequest(prompt_token_ids=PROMPT, sampling=impossible),
        GenerateRequest(prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=6, temperature=0.0)),
    )

    assert failed.last.finish_reason is FinishReason.ERROR
    assert "allowed_token_ids" in failed.last.error
    assert fine.token_ids == run(moe).token_ids


def test_extra_reaches_the_engine(moe: RunningEngine) -> None:
    """`sampling.extra` sets vLLM's own parameters, including nested ones."""
    detection = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}
    repeated = run(moe, logit_bias={77: 100.0}, extra={"repetition_detection": detection})
    numbers = run(moe, extra={"structured_outputs": {"regex": "[0-9]{3}"}}, ignore_eos=False)

    assert "repetition_detection" in moe.engine.capabilities.extra
    assert repeated.token_ids == [77] * 3
    assert (repeated.last.finish_reason, repeated.last.stop_reason) == (FinishReason.REPETITION, None)
    assert numbers.last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("sampling.temperature", {"temperature": 0.005}),
        ("sampling.max_tokens", {"max_tokens": 473}),
        ("sampling.min_tokens", {"max_tokens": None, "min_tokens": 473}),
        ("sampling.stop_token_ids", {"stop_token_ids": [512]}),
        ("sampling.allowed_token_ids", {"allowed_token_ids": [512]}),
        ("sampling.logit_bias", {"logit_bias": {512: 1.0}}),
        ("sampling.logprobs", {"logprobs": 21}),
        ("sampling.prompt_logprobs", {"prompt_logprobs": 21}),
        ("sampling.extra.thinking_token_budget", {"extra": {"thinking_token_budget": "many"}}),
        ("sampling.extra.structured_outputs", {"extra": {"structured_outputs": {}}}),
        ("sampling", {"extra": {"thinking_token_budget": 5}}),
        ("sampling.prompt_logprobs", {"prompt_logprobs": 1, "extra": {"skip_reading_prefix_cache": False}}),
        ("sampling.extra.structured_outputs", {"extra": {"structured_outputs": {"regex": "("}}}),
    ],
)
def test_a_value_that_vllm_rejects_is_rejected_with_its_field_name(
    moe: RunningEngine, field: str, change: dict[str, Any]
) -> None:
    """A value that vLLM rejects or would change is rejected with the field's name, and the engine continues."""
    with pytest.raises(InvalidRequest) as caught:
        run(moe, **change)

    assert caught.value.field == field
    assert run(moe, max_tokens=1).last.finish_reason is not None


def test_a_choice_with_a_line_break_is_rejected_or_served(moe: RunningEngine) -> None:
    """A choice that the grammar backend cannot read before vLLM 0.32 is rejected by name, and served from there on."""
    try:
        result = run(moe, extra={"structured_outputs": {"choice": ["a\nb"]}}, ignore_eos=False)
    except InvalidRequest as error:
        assert error.field == "sampling.extra.structured_outputs"
    else:
        assert result.last.finish_reason is not None
    assert run(moe, max_tokens=1).last.finish_reason is not None


def test_prompt_that_fills_the_context_is_refused(moe: RunningEngine) -> None:
    """A prompt that leaves no position to generate is rejected."""
    with pytest.raises(InvalidRequest):
        moe.generate(GenerateRequest(prompt_token_ids=prompt(512, seed=1), sampling=SamplingParams(max_tokens=None)))


def test_priority_trace_and_session_are_accepted(moe: RunningEngine) -> None:
    """Fields that do not concern sampling do not change the tokens."""
    request = GenerateRequest(
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=6, temperature=0.0),
        priority=-3,
        session_id="turn",
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        tracestate="vendor=1",
    )

    assert moe.generate(request)[0].token_ids == moe.generate(replace(request, traceparent=None))[0].token_ids


# Seeded requests give the same tokens however their prompts are split over the engine's steps.


LENGTHS = (1, 2, 31, 32, 33, 64, 100, 255, 256, 257, 300, 400, 480)
"""Prompt lengths around the sizes of a block and of a step, and of up to two steps."""


def seeded(length: int, seed: int, max_tokens: int = 16, **sampling: float) -> GenerateRequest:
    """Return a seeded request with a unique prompt."""
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return GenerateRequest(prompt_token_ids=prompt(length, seed=1000 + seed), sampling=params)


def companions(lengths: Sequence[int]) -> list[GenerateRequest]:
    """Return requests without a seed, alternately random and greedy."""
    return [
        GenerateRequest(
            prompt_token_ids=prompt(length, seed=2000 + number),
            sampling=SamplingParams(max_tokens=12, temperature=float(number % 2), ignore_eos=True),
        )
        for number, length in enumerate(lengths)
    ]


def alone(engine: RunningEngine, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    """Return the tokens of each request alone, computed without a shared prefix cache."""
    return [engine.generate(replace(request, cache_salt="alone"))[0].token_ids for request in requests]


def test_seeded_requests_give_the_same_tokens_in_steps_smaller_than_the_prompt(moe: RunningEngine) -> None:
    """With steps smaller than prompts, each seeded request gets the same tokens among others as alone."""
    requests = [seeded(length, seed) for seed, length in enumerate(LENGTHS)]
    requests += [seeded(length, 50 + length, top_p=0.9, top_k=40) for length in (33, 257, 480)]
    others = companions((450, 3, 260, 90, 130, 470))
    mixed = [request for pair in zip(requests, (others * 3)[: len(requests)], strict=True) for request in pair]

    together = moe.generate(*mixed)

    assert all(result.last.finish_reason is FinishReason.LENGTH for result in together)
    assert [result.token_ids for result in together[::2]] == alone(moe, requests)


def test_seeded_requests_give_the_same_tokens_if_a_long_step_splits_prompts(reloaded: RunningEngine) -> None:
    """If one step of 256 tokens cannot hold all prompts, the prompts that it splits get the same tokens as alone."""
    lengths = np.random.default_rng(7).integers(200, 1200, 24)
    requests = [seeded(int(length), 100 + number) for number, length in enumerate(lengths)]

    together = reloaded.generate(*requests, *companions((900, 40, 700, 300)))

    assert [result.token_ids for result in together[: len(requests)]] == alone(reloaded, requests)


def test_a_preempted_request_continues_with_the_next_numbers_of_its_seed(
    moe: RunningEngine, preemptions: list[str]
) -> None:
    """A request that lost its KV cache continues with the next random numbers of its seed."""
    requests = [seeded(90, 200 + number, max_tokens=200) for number in range(12)]

    together = moe.generate(*requests)

    assert len(set(preemptions)) >= 3
    # The last requests are the first to be preempted.
    assert [result.token_ids for result in together[-5:]] == alone(moe, requests[-5:])


def test_replicas_draw_different_tokens() -> None:
    """Without a seed in requests, the replicas of an engine draw different tokens, although vLLM seeds all alike."""
    torch = pytest.importorskip("torch")
    draws = []
    for number in range(2):
        torch.manual_seed(5)
        corrections._generator.cache_clear()
        parts = SimpleNamespace(data_parallel_index=number), SimpleNamespace(seed=5)
        corrections.separate_replicas(SimpleNamespace(parallel_config=parts[0], model_config=parts[1]))
        draws.append(corrections._draw(torch.zeros(8, 1000)).tolist())

    assert draws[0] != draws[1]


def test_tokens_of_small_steps_are_ranked_and_drawn_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks equal those of vLLM, with ties. Draws have the frequencies of the probabilities, by torch's seed.

    A large step goes to vLLM's compiled functions.
    """
    torch = pytest.importorskip("torch")
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    compiled = sampler.batched_count_greater_than
    is_compiled: list[str] = []
    for module, name in ((sampler, "batched_count_greater_than"), (topk_topp_sampler, "compiled_random_sample")):
        monkeypatch.setattr(module, name, lambda *_, name=name: is_compiled.append(name))
    monkeypatch.setattr(torch, "initial_seed", lambda: 5)
    corrections.avoid_compiler()
    draw = topk_topp_sampler.compiled_random_sample
    logprobs = torch.randn(5, 40).round(decimals=1)
    chosen = logprobs[:, 7:8]
    draws = []
    for _ in range(2):
        corrections._generator.cache_clear()
        draws.append(draw(torch.tensor([[-torch.inf, 1.0, 0.0]]).expand(50_000, 3)))
    counts = torch.bincount(draws[0], minlength=3) / 50_000
    corrections._generator.cache_clear()
    monkeypatch.setattr(corrections, "_generator", lambda: SimpleNamespace(standard_exponential=np.zeros))

    expected = compiled._torchdynamo_orig_callable(logprobs, chosen)
    ranks = sampler.batched_count_greater_than(logprobs, chosen)
    assert torch.equal(ranks, expected)
    assert (ranks.dtype, draws[0].dtype) == (expected.dtype, torch.int64)
    assert torch.equal(*draws)
    assert counts[0] == 0
    assert abs(counts[1] - 0.731) < 0.01
    # One draw of the noise of eight million is 0: it lets no token win that has the probability 0.
    assert draw(torch.tensor([[-torch.inf, 0.0, -torch.inf]])).tolist() == [1]
    assert not is_compiled
    sampler.batched_count_greater_than(torch.zeros(2, MAX_COUNTED), torch.zeros(2, 1))
    draw(torch.zeros(2, MAX_DRAWN))
    assert is_compiled == ["batched_count_greater_than", "compiled_random_sample"]
