"""Busy workers on the synthetic engine, and announced workers with problems."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import rollbus
from rollbus.schemas.presence import EngineStats, WorkerPresence, WorkerState
from rollbus.schemas.weights import Staging
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.control.support import write_checkpoint
from tests.support.fleet import capabilities, presence, synthetic_worker
from tests.support.requests import endless

MODEL = "Qwen/Qwen3-30B-A3B"
LAYERS, EXPERTS, TOP_K = 48, 128, 8
SLOTS = 32
CONFIG = SyntheticConfig(
    step_s=0.1,
    max_num_seqs=SLOTS,
    num_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
    max_model_len=1_000_000,
    kv_cache_tokens=60_000,
    prefix_cache=True,
)


@contextlib.asynccontextmanager
async def busy_fleet(nats_url: str, fleet: str, folder: Path, count: int) -> AsyncIterator[tuple[Path, Path]]:
    """Run workers `gen-0`, `gen-1` ... of a model with many experts.

    Yield the folders of its first and next weights.
    """
    one, two = (write_checkpoint(folder / "weights" / name, seed=seed) for seed, name in enumerate(("one", "two")))
    async with contextlib.AsyncExitStack() as stack:
        for i in range(count):
            fields = {
                "worker_id": f"gen-{i}",
                "model_path": str(one),
                "weight_roots": (str(one.parent),),
                "weight_version": 11,
                "cache_dir": str(folder / "cache"),
            }
            await stack.enter_async_context(synthetic_worker(nats_url, fleet, config=CONFIG, model=MODEL, **fields))
        yield one, two


@contextlib.asynccontextmanager
async def under_load(rb: rollbus.Client, count: int) -> AsyncIterator[None]:
    """Keep `count` requests in flight while the block runs."""

    async def read(number: int) -> None:
        async for _ in rb.generate(endless(f"rollout-{number}")):
            pass

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(read(number)) for number in range(count)]
        yield
        for task in running:
            task.cancel()


def in_trouble(_: int) -> Iterator[WorkerPresence]:
    """Yield the presence of a worker that stages weights, one whose update failed, and one that starts."""
    able = capabilities(max_num_seqs=SLOTS)
    staging = Staging(
        source="objects:weights/13", stage="fetching", done_bytes=21_400_000_000, total_bytes=61_100_000_000
    )
    yield presence(
        worker="gen-90",
        model=MODEL,
        weight_version=12,
        target_version=13,
        in_flight=9,
        capabilities=able,
        staging=staging,
        engine_stats=EngineStats(kv_cache_use=0.31),
    )
    yield presence(
        worker="gen-91",
        model=MODEL,
        state=WorkerState.OUTDATED,
        weight_version=11,
        target_version=12,
        capabilities=able,
        last_error="storage: no space left on /var/cache/rollbus: 61.1 GB are needed, 12.4 GB are free",
    )
    yield presence(worker="gen-92", model=MODEL, state=WorkerState.STARTING, start_left_s=40.0)
