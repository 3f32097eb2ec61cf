"""A trainer that blocks its event loop with a synchronous training step while results arrive."""

import asyncio
import time

import numpy as np
import pytest

import rollbus
from rollbus.bus.client.runtime import LEASE_S
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import check_generation
from tests.support.processes import worker_process
from tests.support.requests import Load, sized

ENGINE_ARGS = {"num_layers": 16, "top_k": 8, "max_num_seqs": 64}
STEP_S = 0.006
NUM_TOKENS = 1200
"""More tokens than the engine generates while the loop is blocked."""
BLOCKED_S = LEASE_S + 2.5
"""Longer than a lease and the margins of client and worker."""


@pytest.mark.proves("P6")
async def test_a_trainer_with_a_blocked_event_loop_loses_no_frame_or_worker(nats_url: str, fleet: str) -> None:
    """A trainer that blocks its loop for longer than a lease during results loses no attempt, frame or worker."""
    requests = [sized(200, NUM_TOKENS, request_id=f"r{i}") for i in range(20)]
    streamed = sized(200, NUM_TOKENS, request_id="stream")
    expected = (await Load.of([streamed], SyntheticConfig.from_args(ENGINE_ARGS))).expected["stream"]
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, engine_args={**ENGINE_ARGS, "step_s": STEP_S}),
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers()
        [before] = (await rb.fleet.state()).workers
        stream = rb.generate(streamed)
        chunks = [await anext(stream)]
        completing = [tasks.create_task(rb.complete(request)) for request in requests]
        await asyncio.sleep(0)
        frames = rb.stats().frames

        time.sleep(BLOCKED_S)  # noqa: ASYNC251 - what this test is about

        arrived = rb.stats()
        chunks += [chunk async for chunk in stream]
        generations = [await task for task in completing]
        [after] = (await rb.fleet.state()).workers
        stats = rb.stats()

    # The client received results while the loop was blocked and counted their memory.
    assert arrived.frames - frames > 100
    assert arrived.unread_bytes > 20 * 500 * 16 * 8
    assert (stats.attempts_lost, stats.missing_frames, stats.dropped_msgs, stats.republished) == (0, 0, 0, 0)
    assert stats.unread_bytes == 0
    assert (after.incarnation, after.state) == (before.incarnation, WorkerState.SERVING)
    assert [chunk.chunk_index for chunk in chunks] == list(range(len(chunks)))
    np.testing.assert_array_equal(np.concatenate([chunk.token_ids for chunk in chunks]), expected.token_ids)
    for generation, request in zip(generations, requests, strict=True):
        check_generation(generation, request)
        assert generation.attempts == 1
        np.testing.assert_array_equal(generation.routed_experts, expected.routed_experts)
