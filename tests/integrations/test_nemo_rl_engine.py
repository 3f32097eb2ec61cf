"""`rollbus.integrations.nemo` on a real worker: values are those of Hugging Face, also after a refit."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollbus.integrations.nemo import RollbusGeneration, RollbusWeights
from rollbus.schemas.errors import InvalidRequest
from tests.integrations.test_nemo_rl import CONFIG, Batch, Monitor, batch
from tests.support.real_fleet import RealWorkers
from tests.support.waits import in_trainers_run

pytestmark = [pytest.mark.vllm, pytest.mark.routing, in_trainers_run]

TOLERANCE = 1e-3
"""Maximum difference between the log probabilities of vLLM and Hugging Face in float32."""
PROMPTS = [[17, 42, 99, 7, 230], [64, 5], [300, 301, 302]]


def check_with_transformers(checkpoint: Path, output: Batch, prompts: list[list[int]]) -> None:
    """Assert that Hugging Face computes equal log probabilities, and the rows are the choices of its routers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for number, prompt in enumerate(prompts):
        end = int(output["unpadded_sequence_lengths"][number])
        ids = output["output_ids"][number, :end]
        with torch.no_grad():
            result = model(ids[None], output_router_logits=True)
        scores = result.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sampled = slice(len(prompt), end)
        difference = scores[sampled.start - 1 :] - output["logprobs"][number, sampled]
        assert float(difference.abs().max()) < TOLERANCE
        top_k = output["routed_experts"].shape[-1]
        chosen = torch.stack([logits[: end - 1].topk(top_k, -1).indices for logits in result.router_logits], 1)
        rows = output["routed_experts"][number, : end - 1]
        assert rows.dtype == torch.int8
        assert np.array_equal(np.sort(chosen.numpy()), np.sort(rows.numpy()))


async def test_batches_and_refits_are_those_of_hugging_face_despite_a_killed_worker(
    nats_url: str, callers: tuple[Path, Path], updated_workers: RealWorkers
) -> None:
    """A killed worker loses no sample; after a refit all tokens have the new version and the new weights' values."""
    workers = await updated_workers.have(2)
    monitor = Monitor()
    generation = RollbusGeneration(
        {**CONFIG, "max_new_tokens": 300}, nats_url, fleet=updated_workers.fleet, checkpoint=callers[0]
    )
    tensors = load_file(callers[1] / "model.safetensors")
    generation.weight_synchronizer = RollbusWeights(generation, lambda: iter(tensors.items()))
    generation.attach_fleet_health(monitor, None)
    try:
        assert await asyncio.to_thread(generation.prepare_for_generation)
        info = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        await asyncio.to_thread(generation.prepare_refit_info, info)
        changed = {name: value for name, value in info.items() if "embed_tokens" not in name}
        with pytest.raises(InvalidRequest, match="embed_tokens"):
            await asyncio.to_thread(generation.prepare_refit_info, changed)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(asyncio.to_thread(generation.generate, batch(*PROMPTS), False))
            await asyncio.sleep(0.5)
            next(iter(workers.values())).kill()
        before = running.result()
        await asyncio.to_thread(check_with_transformers, callers[0], before, PROMPTS)
        assert generation.weight_synchronizer.is_stale
        metrics = await asyncio.to_thread(generation.weight_synchronizer.sync_weights)
        version = generation.weight_synchronizer.version
        assert metrics == {"rollbus/weight_version": version}
        after = await asyncio.to_thread(generation.generate, batch(*PROMPTS), True)
        await asyncio.to_thread(check_with_transformers, callers[1], after, PROMPTS)
        assert set(after["weight_versions"].unique().tolist()) == {-1, version}
        assert await asyncio.to_thread(generation.invalidate_kv_cache)
        assert monitor.seen == [("success", 0), ("refit", 0, version), ("success", 0)]
    finally:
        await asyncio.to_thread(generation.shutdown)
