"""Hostile workers and clients on a real server get errors, and other peers are not affected."""

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest

from rollbus import RequestFailed
from rollbus.bus.nats.connection import publish
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import Chunk, RoutedExperts
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import RequestKey
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.worker import Worker
from tests.chaos.workload import VOCAB_SIZE
from tests.golden.test_golden import golden_bytes
from tests.support.fleet import StartServed
from tests.support.hand_worker import chunk, hand_worker, request, worker_by_hand
from tests.support.invariants import observing
from tests.support.nats_server import opened
from tests.support.requests import Load, error_of
from tests.support.waits import until

CONFIG = SyntheticConfig(step_s=0.002, max_num_seqs=16, vocab_size=VOCAB_SIZE)
NUM_BAD = 400
"""Number of broken messages of each kind: fewer than a worker reads as a flood (`MAX_FROM_ONE`), even in one second."""


def token(key: RequestKey, index: int) -> Chunk:
    """Return a chunk with one token and no end."""
    return chunk(key, index, 7)


def row(key: RequestKey, index: int) -> Chunk:
    """Return a chunk with one row of the largest shape, before all tokens."""
    routed = RoutedExperts.from_rows(np.zeros((1, 1024, 256), "u1"), index)
    return Chunk(
        request_id=key.request_id, attempt=0, child=0, chunk_index=index, weight_version=0, routed_experts=routed
    )


@pytest.mark.proves("P11")
@pytest.mark.parametrize("part", [token, row, chunk])
async def test_endless_output_of_a_worker_ends_the_request(
    nats_url: str, fleet: str, part: Callable[[RequestKey, int], Chunk]
) -> None:
    """More tokens or rows than requested, or empty chunks, end the request, and the worker receives an abort."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(error_of(rb.complete(request()), RequestFailed))
        key = await worker.next_key()
        await worker.frame(0, part(key, 0), admitted=(key,))
        for index in range(1, 8):
            await worker.frame(index, part(key, index))
        error = await failing

        assert error.code is ErrorCode.PROTOCOL_ERROR
        assert f"worker {worker.name}: " in error.message
        assert await worker.aborted() == [key]


async def test_chunks_for_the_request_of_another_worker_are_ignored(nats_url: str, fleet: str) -> None:
    """If a worker sends chunks and an end of another worker's request, the client ignores them and sends an abort."""
    async with (
        hand_worker(nats_url, fleet) as (worker, rb),
        worker_by_hand(nats_url, fleet, "liar", pulls=False) as liar,
        asyncio.TaskGroup() as tasks,
    ):
        completing = tasks.create_task(rb.complete(request()))
        key = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.acked(1)
        liar.client_incarnation = worker.client_incarnation
        await liar.frame(0, chunk(key, 1, 666), admitted=(key,))
        assert await liar.aborted() == [key]
        await liar.frame(1, chunk(key, 1, 666, total=2))
        await liar.acked(2)
        await worker.frame(1, chunk(key, 1, 8, 9, total=3))
        result = await completing

    assert (list(result.token_ids), result.attempts) == ([7, 8, 9], 1)


def broken(data: bytes, rng: random.Random) -> bytes:
    """Return the beginning of a message with a byte that is invalid in msgpack and JSON."""
    return data[: rng.randrange(len(data) - 1)] + b"\xc1"


async def bad_of(worker: Worker) -> tuple[int, int, int]:
    """Return the numbers of requests, messages and commands that the worker could not decode."""
    stats = worker.stats()
    return stats.intake.bad, stats.bad_messages, stats.bad_commands


@pytest.mark.proves("P11")
async def test_a_worker_counts_broken_messages_and_serves_other_clients(
    nats_url: str, fleet: str, one_worker: StartServed
) -> None:
    """A worker counts hundreds of broken requests, link messages, presences and commands, and serves other clients."""
    rng = random.Random(1)
    load = await Load.mixed(40, CONFIG)
    async with (
        observing(nats_url, fleet) as observer,
        one_worker(config=CONFIG, worker_id="w", options={"client": "good"}) as (rb, worker, _),
        opened(nats_url) as nats,
    ):
        subjects = Subjects(fleet)
        targets = {
            subjects.direct("bad", "w"): "request_minimal",
            subjects.link("bad", "w"): "link_acks",
            subjects.client("bad"): "presence_client",
            subjects.control("bad"): "command_pause",
        }
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(load.run(rb))
            for number in range(NUM_BAD):
                for subject, name in targets.items():
                    await publish(nats, subject, broken(golden_bytes(name), rng))
                if number % 50 == 0:
                    await nats.flush()
            results = await running
        await until(lambda: bad_of(worker), (NUM_BAD, 2 * NUM_BAD, NUM_BAD))

        assert {generation.attempts for generation in results} == {1}
        await observer.check_at_rest()
