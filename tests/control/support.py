"""Small checkpoints, workers that serve them on the synthetic engine, and helpers that compare results."""

import contextlib
import json
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.worker import Worker
from tests.support.fleet import synthetic_worker
from tests.support.invariants import observing
from tests.support.processes import worker_process

MODEL = "m"
SHAPE = (8, 4)
TENSORS = {
    "model-1.safetensors": "model.layers.0.self_attn.q_proj.weight",
    "model-2.safetensors": "model.layers.0.mlp.down_proj.weight",
}
"""The tensor in each file of a checkpoint."""


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]]) -> None:
    """Write a safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (len(data), len(data) + len(raw))}
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def write_checkpoint(folder: Path, *, seed: int, shape: tuple[int, int] = SHAPE) -> Path:
    """Write a checkpoint of two shards whose numbers depend on `seed`, and return its folder."""
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(seed)
    for file, name in TENSORS.items():
        write_safetensors(folder / file, {name: numbers.random(shape, np.float32)})
    index = {"weight_map": {name: file for file, name in TENSORS.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "synthetic"}))
    return folder


def write_adapter(folder: Path, *, module: str = "model.layers.0.self_attn.q_proj") -> Path:
    """Write a LoRA adapter for one module of the checkpoint above, and return its folder."""
    folder.mkdir(parents=True)
    tensors = {
        f"base_model.model.{module}.lora_A.weight": np.ones((2, SHAPE[1]), np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones((SHAPE[0], 2), np.float32),
    }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 2, "target_modules": [module.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def folders(root: Path) -> tuple[Path, Path]:
    """Write two checkpoints of the same model below `root`, and return their folders."""
    return write_checkpoint(root / "one", seed=1), write_checkpoint(root / "two", seed=2)


@contextlib.asynccontextmanager
async def start(
    nats_url: str, fleet: str, name: str, model: Path, *options: str, cwd: Path | None = None, **engine_args: Any
) -> AsyncIterator[Process]:
    """Run a worker process on the synthetic engine, with weights of version 1 and the parent of `model` as root.

    Args:
        cwd: directory of the process; None: that of the tests.

    When the block ends, the worker is stopped in order, unless it has exited before.
    """
    own = ("--worker-id", name, "--served-model-name", MODEL, "--weight-version", "1")
    source = ("--model", str(model), "--engine", "synthetic", "--weight-root", str(model.parent))
    cache = ("--cache-dir", str(model.parent.parent / "cache" / fleet))
    async with worker_process(
        nats_url, fleet, *source, *own, *cache, *options, engine_args=engine_args, cwd=cwd
    ) as process:
        yield process
        if process.returncode is None:
            process.terminate()
            await process.wait()


@contextlib.asynccontextmanager
async def serving(
    nats_url: str, fleet: str, model: Path, count: int, *, options: Sequence[str] = (), **engine_args: Any
) -> AsyncIterator[tuple[rollbus.Client, list[Process]]]:
    """Yield a client and the workers `w0`, `w1` ... that serve `model`, and check the invariants at the end."""
    async with observing(nats_url, fleet) as observer, contextlib.AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(start(nats_url, fleet, f"w{i}", model, *options, **engine_args))
            for i in range(count)
        ]
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet))
        await rb.fleet.wait_for_workers(count)
        yield rb, processes
        await observer.check_at_rest()


@contextlib.asynccontextmanager
async def start_here(
    nats_url: str, fleet: str, name: str, model: Path, *, fields: Mapping[str, object] | None = None, **engine_args: Any
) -> AsyncIterator[Worker]:
    """Run a worker as `start` does, but in the process of the test. `fields` replace fields of its configuration."""
    own = {"worker_id": name, "model_path": str(model), "weight_roots": (str(model.parent),), "weight_version": 1}
    own |= {"cache_dir": str(model.parent.parent / "cache" / fleet), **(fields or {})}
    config = msgspec.convert(engine_args, SyntheticConfig)
    async with synthetic_worker(nats_url, fleet, config=config, model=MODEL, **own) as (worker, _):
        yield worker


@contextlib.asynccontextmanager
async def serving_here(
    nats_url: str,
    fleet: str,
    model: Path,
    count: int,
    *,
    fields: Mapping[str, object] | None = None,
    **engine_args: Any,
) -> AsyncIterator[rollbus.Client]:
    """Yield a client of workers as in `serving`, which run in the process of the test."""
    async with observing(nats_url, fleet) as observer, contextlib.AsyncExitStack() as stack:
        for i in range(count):
            worker = start_here(nats_url, fleet, f"w{i}", model, fields=fields, **engine_args)
            await stack.enter_async_context(worker)
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet))
        await rb.fleet.wait_for_workers(count)
        yield rb
        await observer.check_at_rest()


def ask(*token_ids: int, max_tokens: int = 16, **fields: object) -> GenerateRequest:
    """Return a greedy request."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=list(token_ids) or [1, 2, 3], sampling=sampling, **fields)  # type: ignore[arg-type]


def assert_same(one: Generation, other: Generation) -> None:
    """Assert that both generations have the same tokens, log probabilities and routed experts."""
    assert one.token_ids.tolist() == other.token_ids.tolist()
    for a, b in ((one.logprobs, other.logprobs), (one.routed_experts, other.routed_experts)):
        assert a is not None
        assert b is not None
        np.testing.assert_array_equal(a, b)
