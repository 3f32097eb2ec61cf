"""Sampling masks from the engine to the caller on a real server: whole, streamed, after a loss, and rejected."""

import asyncio
import contextlib

import numpy as np
import pytest
from msgspec import structs

import rollbus
from rollbus import ErrorCode, GenerateRequest, RequestRejected, SamplingParams, TokenMasks
from rollbus.schemas.errors import EngineDead
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import SyntheticModel
from rollbus.workers.worker import Worker
from tests.support.fleet import StartServed, check_generation
from tests.support.waits import UNHURRIED_LEASE_S, until_true

TOP_K = 40
MASKING = SyntheticConfig(sampling_mask=True)
MODEL = SyntheticModel(MASKING, None)


def request(max_tokens: int = 20, *, top_k: int = TOP_K, n: int = 1, **fields: object) -> GenerateRequest:
    """Return a request that an engine with masks accepts."""
    sampling = SamplingParams(max_tokens=max_tokens, top_k=top_k, ignore_eos=True, n=n)
    return GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling, **fields)  # type: ignore[arg-type]


def check_masks(masks: TokenMasks | None, token_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
    """Check that the masks are those that the engine produces for these tokens."""
    expected = [MODEL.sampling_mask(int(token), TOP_K).token_ids.tolist() for token in token_ids]
    assert [ids.tolist() for ids in masks.split()] == expected


async def test_each_token_has_its_mask(one_worker: StartServed) -> None:
    """All samples of a whole result have masks. A request that declines masks gets none."""
    async with one_worker(config=MASKING) as (rb, *_):
        generation = await rb.complete(request(n=3, return_sampling_mask=True))
        declined = await rb.complete(request(return_sampling_mask=False))

    for sample in (generation, *generation.siblings):
        check_masks(sample.sampling_mask, sample.token_ids)
    assert declined.sampling_mask is None


async def test_every_token_has_its_mask_once_after_the_loss_of_a_worker(nats_url: str, fleet: str) -> None:
    """Every token has its mask once, also if a second worker continues after the death of the first."""
    # Each worker runs at least three of eight samples, so the stream's worker has some when it dies. Until then steps
    # are slow, so that also on a busy machine none of them has ended.
    config = structs.replace(MASKING, max_num_seqs=5, step_s=0.2)
    engines = {name: SyntheticEngine(config) for name in ("a", "b")}
    workers = [
        Worker(
            WorkerConfig(
                nats_url=nats_url, fleet=fleet, model="m", worker_id=name, lease_s=UNHURRIED_LEASE_S, listen_s=0.0
            ),
            engine,
        )
        for name, engine in engines.items()
    ]

    async def run(worker: Worker) -> None:
        with contextlib.suppress(EngineDead):
            await worker.run()

    async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(run(worker))
        await rb.fleet.wait_for_workers(2)
        wholes = [request(500, n=2) for _ in range(4)]
        completing = [tasks.create_task(rb.complete(whole)) for whole in wholes]
        await until_true(lambda: sum(engine.stats.running or 0 for engine in engines.values()) == 8)
        chunks: list[rollbus.Chunk] = []
        async for chunk in rb.generate(request(300)):
            chunks.append(chunk)
            if len(chunks) == 5:
                engines[str(chunk.worker_id)].kill()
                for engine in engines.values():
                    engine._config = MASKING
        generations = [await task for task in completing]
        for worker in workers:
            worker.stop()

    assert {chunk.worker_id for chunk in chunks if chunk.num_tokens} == {"a", "b"}
    assert sum(chunk.num_tokens for chunk in chunks) == 300
    for chunk in chunks:
        if chunk.num_tokens:
            check_masks(TokenMasks.joined([chunk.sampling_mask]), chunk.token_ids)
    assert any(sample.attempts > 1 for whole in generations for sample in (whole, *whole.siblings))
    for whole, generation in zip(wholes, generations, strict=True):
        for sample in (generation, *generation.siblings):
            check_generation(sample, whole)
            check_masks(sample.sampling_mask, sample.token_ids)


async def test_a_worker_without_masks_rejects_a_request_that_requires_masks(one_worker: StartServed) -> None:
    """A worker without masks rejects a request that requires them before the engine receives it.

    The error names the field.
    """
    async with one_worker() as (rb, *_):
        assert (await rb.complete(request())).sampling_mask is None
        with pytest.raises(RequestRejected, match=r"return_sampling_mask is true, and .* no sampling masks") as caught:
            await rb.complete(request(return_sampling_mask=True))

    assert caught.value.code is ErrorCode.UNSUPPORTED


async def test_masks_that_fit_no_message_are_refused(one_worker: StartServed) -> None:
    """A request fails if the masks of its `top_k` fit no message. Without masks, it is served."""
    config = SyntheticConfig(sampling_mask=True, vocab_size=150_000)
    async with one_worker(config=config) as (rb, *_):
        with pytest.raises(RequestRejected, match=r"set sampling\.top_k to at most 65536") as caught:
            await rb.complete(request(top_k=100_000))
        await rb.complete(request(top_k=100_000, return_sampling_mask=False))
        generation = await rb.complete(request(200, top_k=65_536))

    assert caught.value.code is ErrorCode.TOO_LARGE
    assert len(generation.sampling_mask) == 200
