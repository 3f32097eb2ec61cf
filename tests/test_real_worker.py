"""A vLLM worker process behind the bus returns what the model computes, for single and for parallel requests."""

from pathlib import Path

import numpy as np
import pytest

import rollbus
from rollbus import GenerateRequest, InvalidRequest, RequestRejected, SamplingParams
from tests.support.fleet import check_generation
from tests.support.fleet_states import until_state
from tests.support.real_fleet import WEIGHT_VERSION, greedy, prompt
from tests.support.results import TOLERANCE, assert_same, expert_sets

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.proves("P15")
async def test_routing_and_logprobs_equal_hugging_face(nats_url: str, real_fleet: str, tiny_moe_float32: Path) -> None:
    """The routed experts and logprobs of 200 prompt and 100 sampled tokens equal those of Hugging Face."""
    request = GenerateRequest(
        prompt_token_ids=prompt(200), sampling=SamplingParams(max_tokens=100, seed=11, ignore_eos=True)
    )
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        generation = await rb.complete(request)
    check_generation(generation, request)
    sequence = [*request.prompt_token_ids, *generation.token_ids]
    experts, logprobs = hugging_face(tiny_moe_float32, [int(token) for token in sequence])

    assert generation.routed_experts is not None
    assert generation.routed_experts.shape == (299, 4, 4)
    assert generation.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(expert_sets(generation.routed_experts), np.sort(experts[:299], axis=-1))
    assert generation.logprobs is not None
    np.testing.assert_allclose(generation.logprobs, logprobs[199:], atol=TOLERANCE)


def hugging_face(model_path: Path, sequence: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Run `sequence` through the transformers implementation in float32.

    Returns:
        The experts of each position, [n, num_layers, top_k], and the log probability of each next token, f4[n - 1].
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _input, output: chosen.append(output[-1]))
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0]
    logprobs = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
    return torch.stack(chosen, 1).numpy(), logprobs.numpy()


async def test_64_parallel_requests_equal_each_request_alone(nats_url: str, real_fleet: str) -> None:
    """64 parallel requests of mixed lengths have all rows, and each equals the same request alone."""
    requests = [
        greedy(5 + 7 * i % 200, 1 + 5 * i % 60, seed=i, request_id=f"r{i}", routed_experts_prompt_start=i % 6)
        for i in range(64)
    ]
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        together = {g.request_id: g async for g in rb.complete_many(requests, max_in_flight=64)}
        for request in requests:
            check_generation(together[request.request_id], request)
            assert_same(together[request.request_id], await rb.complete(request))
            assert set(together[request.request_id].weight_versions) == {WEIGHT_VERSION}


@pytest.mark.proves("P14")
async def test_rows_come_with_their_tokens(nats_url: str, real_fleet: str) -> None:
    """Each streamed chunk has the rows of its engine steps: first those of the prompt, then one for each token."""
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        chunks = [chunk async for chunk in rb.generate(greedy(40, 12))]

    # The last token has no row yet. A slow worker sends the tokens of several steps together.
    num_rows, num_tokens = 0, 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        if chunk.num_tokens:
            assert chunk.routed_experts is not None
            assert chunk.routed_experts.start == num_rows
            num_rows += chunk.routed_experts.shape[0]
            assert num_rows == 40 + num_tokens - 1
    assert num_tokens == 12
    assert len(chunks) > 1


@pytest.mark.proves("P36")
async def test_samples_of_a_prompt_equal_requests_with_consecutive_seeds(nats_url: str, real_fleet: str) -> None:
    """n=3 returns three samples with routed experts, and child request i equals a request with seed + i."""
    sampling = SamplingParams(max_tokens=20, seed=3, n=3, ignore_eos=True)
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        first = await rb.complete(GenerateRequest(prompt_token_ids=prompt(30), sampling=sampling))
        alone = await rb.complete(
            GenerateRequest(
                prompt_token_ids=prompt(30), sampling=SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
            )
        )

    assert len(first.siblings) == 2
    assert_same(first.siblings[1], alone)
    assert not np.array_equal(first.token_ids, alone.token_ids)


async def test_a_prompt_of_5000_tokens_has_all_its_rows(nats_url: str, real_fleet: str) -> None:
    """A prompt of 5000 tokens has all its rows."""
    request = greedy(5000, 3)
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        check_generation(await rb.complete(request), request)


@pytest.mark.proves("P27")
async def test_refused_requests_do_not_affect_parallel_requests(nats_url: str, real_fleet: str) -> None:
    """A request that the model cannot serve fails with the allowed values, while parallel requests complete."""
    too_long = greedy(8192, 1, request_id="long")
    no_token = GenerateRequest(prompt_token_ids=[600], request_id="vocabulary")
    good = [greedy(10, 30, seed=i, request_id=f"good{i}") for i in range(8)]
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        results = {g.request_id: g async for g in rb.complete_many([*good[:4], too_long, no_token, *good[4:]])}
        with pytest.raises(InvalidRequest, match=r"prompt_token_ids has 8192 tokens; allowed: 1 to 8191"):
            await rb.complete(too_long)
        with pytest.raises(InvalidRequest, match=r"prompt_token_ids\[0\] is 600; allowed: token ids from 0 to 511"):
            await rb.complete(no_token)
        with pytest.raises(RequestRejected, match="is unknown to vllm"):
            await rb.complete(GenerateRequest(prompt_token_ids=[5], sampling=SamplingParams(extra={"nonsense": 1})))

    assert {name for name, generation in results.items() if generation.error} == {"long", "vocabulary"}
    for request in good:
        check_generation(results[request.request_id], request)


async def test_clients_can_read_the_load_of_the_engine(nats_url: str, real_fleet: str) -> None:
    """Clients can read the counters of vLLM's scheduler: prefix cache hits, an idle cache and two rates."""
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        first = await rb.complete(greedy(1000, 4, seed=77))
        before = (await until_state(rb, lambda state: hits(state) >= 0)).workers[0].engine_stats
        again = await rb.complete(greedy(1000, 4, seed=77))
        assert before is not None
        assert again.cached_tokens
        found = before.prefix_cache_hits or 0
        state = await until_state(rb, lambda state: hits(state) > found and state.workers[0].in_flight == 0)
    stats = state.workers[0].engine_stats

    assert first.cached_tokens == 0
    assert stats is not None
    assert stats.prefix_cache_hits == found + again.cached_tokens
    assert (stats.running, stats.waiting, stats.preemptions, stats.kv_cache_use) == (0, 0, 0, 0.0)
    assert stats.prefix_cache_queries is not None
    assert stats.prefix_cache_queries >= 2000
    assert stats.prefill_tokens_per_s
    assert stats.decode_tokens_per_s


def hits(state: rollbus.FleetState) -> int:
    """Return the prefix cache hits of the fleet's only worker, or -1 if its presence has none yet."""
    stats = state.workers[0].engine_stats if state.workers else None
    return -1 if stats is None or stats.prefix_cache_hits is None else stats.prefix_cache_hits
