"""Replay of a vLLM worker's results in float32 with the worker's own weights, as in a trainer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rollbus
from rollbus import GenerateRequest
from rollbus.trainer import PADDING, MicroBatch, Sample, Stitcher, pack, replay
from tests.support.fleet import check_generation
from tests.support.real_fleet import greedy, prompt
from tests.support.requests import TOLERANCE

pytestmark = pytest.mark.vllm

NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 16, 4


async def talk(rb: rollbus.Client, seed: int) -> Sample:
    """Run a conversation of two turns, in which the second turn requests only the missing rows; return its sample."""
    stitcher = Stitcher()
    first = greedy(5 + 13 * seed, 7 + seed, seed)
    answer = await rb.complete(first)
    check_generation(answer, first)
    stitcher.add(first.prompt_token_ids, answer)
    said = [*first.prompt_token_ids, *answer.token_ids, *prompt(9, seed + 100)]
    second = GenerateRequest(
        prompt_token_ids=said, sampling=first.sampling, routed_experts_prompt_start=stitcher.next_start
    )
    answer = await rb.complete(second)
    check_generation(answer, second)
    stitcher.add(said, answer)
    return stitcher.sample()


def logprobs_of(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return the logprob of each target, f32[1, T]."""
    with torch.no_grad():
        logits = model(**batch.model_inputs()).logits
    chosen: torch.Tensor = logits.log_softmax(-1).gather(-1, batch.target_ids[..., None])[..., 0]
    return chosen


@pytest.mark.proves("P23")
async def test_replay_with_the_workers_weights_changes_nothing(
    nats_url: str, real_fleet: str, tiny_moe_float32: Path
) -> None:
    """Logprobs with and without replay agree to 1e-5, and both agree with the worker's within the tolerance."""
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        samples = [await talk(rb, seed) for seed in range(5)]
    (batch,) = pack(samples, max_tokens=1024, pad_to_multiple_of=64)
    assert batch.routed_experts is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_float32, dtype=torch.float32).eval()

    free = logprobs_of(model, batch)
    with replay(model, batch.routed_experts):
        replayed = logprobs_of(model, batch)

    taken = batch.sample_indices != PADDING
    torch.testing.assert_close(replayed[taken], free[taken], atol=1e-5, rtol=0)
    mask = batch.loss_mask
    assert int(mask.sum()) == sum(2 * (7 + seed) for seed in range(5))
    torch.testing.assert_close(replayed[mask], batch.sampler_logprobs[mask], atol=TOLERANCE, rtol=0)


async def test_replay_uses_other_experts_than_those_of_the_worker(
    nats_url: str, real_fleet: str, tiny_moe_float32: Path
) -> None:
    """Replay also uses other experts than the worker's: shifted expert ids compute and change the logprobs."""
    async with rollbus.connect(nats_url, fleet=real_fleet) as rb:
        (batch,) = pack([await talk(rb, 0)], max_tokens=1024)
    perturbed = (batch.routed_experts.long() + 1) % NUM_EXPERTS
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_float32, dtype=torch.float32).eval()
    used: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _module, args: used.append(args[1]))

    with replay(model, batch.routed_experts):
        same = logprobs_of(model, batch)
    used.clear()
    with replay(model, perturbed):
        others = logprobs_of(model, batch)

    num_positions = batch.input_ids.shape[1]
    assert [ids.shape for ids in used] == [(num_positions, TOP_K)] * NUM_LAYERS
    np.testing.assert_array_equal(torch.stack(used, 1).sort(-1)[0], perturbed[0].sort(-1)[0])
    assert float((others - same).abs().mean()) > 0.1
