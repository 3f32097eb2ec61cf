"""Workers on the synthetic engine inside the test's own process, and the invariants that hold after every test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

import bus
from bus.client.generation import Generation
from schemas.request import GenerateRequest
from schemas.rows import expected_rows
from schemas.sampling import SamplingParams
from workers.config import WorkerConfig
from workers.engines.synthetic import SyntheticConfig, SyntheticEngine
from workers.worker import Worker


@contextlib.asynccontextmanager
async def synthetic_worker(
    nats_url: str, fleet: str, *, config: SyntheticConfig | None = None, model: str = "synthetic", **fields: object
) -> AsyncIterator[tuple[Worker, SyntheticEngine]]:
    """Run a worker until the block ends; afterwards its engine holds no request (I7).

    Args:
        fields: of its configuration; with `model_path` the engine has the weights of that checkpoint.
    """
    folder = fields.get("model_path")
    engine = SyntheticEngine(config, None if folder is None else Path(str(folder)))
    worker = Worker(WorkerConfig(nats_url=nats_url, fleet=fleet, model=model, **fields), engine)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run(), name="worker")
        try:
            yield worker, engine
        finally:
            worker.stop()
            await running
    assert is_idle(engine)


def is_idle(engine: SyntheticEngine) -> bool:
    """The engine holds no request."""
    return "running=0 waiting=0" in repr(engine)


async def until_idle(engine: SyntheticEngine, rb: bus.Client) -> None:
    """Wait until the engine holds no request; each answer of its worker comes after one more of its steps."""
    while not is_idle(engine):
        await rb.complete(GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1)))


def check_generation(generation: Generation, request: GenerateRequest, *, routing: bool = True) -> None:
    """The row rule and the lengths of all arrays (I2, I3)."""
    num_tokens = len(generation.token_ids)
    assert generation.error is None
    assert len(generation.weight_versions) == num_tokens
    if request.sampling.logprobs is not None:
        assert generation.logprobs is not None
        assert len(generation.logprobs) == num_tokens
        assert not np.isnan(generation.logprobs).any()
    if routing:
        assert generation.routed_experts is not None
        start = request.routed_experts_prompt_start
        assert generation.start == start
        assert len(generation.routed_experts) == expected_rows(request.prompt_len, start, num_tokens)
    else:
        assert generation.routed_experts is None
