"""A vLLM worker process behind the bus, which several files of tests share; and requests to it."""

import asyncio
import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import bus
from bus import GenerateRequest, SamplingParams

__all__ = ["WEIGHT_VERSION", "greedy", "prompt", "running_fleet"]

ENGINE_ARGS = '{"dtype": "float32", "max_model_len": 8192, "max_num_seqs": 64}'
START_TIMEOUT_S = 240.0
WEIGHT_VERSION = 5


@contextlib.contextmanager
def running_fleet(nats_url: str, model: Path) -> Iterator[str]:
    """Start a worker and wait until it serves; yields its fleet, and ends it as an operator would."""
    fleet = f"real-{uuid.uuid4().hex[:8]}"
    arguments = ["--nats", nats_url, "--fleet", fleet, "--model", str(model), "--engine-args", ENGINE_ARGS]
    version = ["--weight-version", str(WEIGHT_VERSION)]
    process = subprocess.Popen([sys.executable, "-m", "workers", *arguments, *version])
    try:
        asyncio.run(_wait_for_worker(nats_url, fleet))
        yield fleet
    finally:
        process.terminate()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


async def _wait_for_worker(nats_url: str, fleet: str) -> None:
    async with bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers(timeout_s=START_TIMEOUT_S)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Token ids without meaning, away from the special ones."""
    return np.random.default_rng(seed).integers(10, 500, length)


def greedy(length: int, max_tokens: int, seed: int = 0, **fields: object) -> GenerateRequest:
    """A greedy request that does not end early."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt(length, seed), sampling=sampling, **fields)  # type: ignore[arg-type]
