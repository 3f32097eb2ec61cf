"""The worker and the trace that the caller of a stream sees in each chunk."""

import asyncio

from msgspec.structs import replace

from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import WorkerState
from tests.support.hand_worker import chunk, hand_worker, request, worker_by_hand
from tests.support.streams import all_of

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_chunks_name_the_worker_of_their_attempt(nats_url: str, fleet: str) -> None:
    """Each chunk of a resumed stream names the worker that sent it, not the worker that the chunk claims.

    The client sends the trace with each attempt. The caller receives the trace that a chunk contains.
    """
    async with (
        hand_worker(nats_url, fleet) as (first, rb),
        worker_by_hand(nats_url, fleet, "other", pulls=False) as second,
        asyncio.TaskGroup() as tasks,
    ):
        reading = tasks.create_task(all_of(rb.generate(request(3, traceparent=TRACE))))
        taken = await first.take()
        assert taken.request.traceparent == TRACE
        made = replace(chunk(taken.key, 0, 7), worker_id="impostor", traceparent=TRACE)
        await first.frame(0, made, admitted=(taken.key,))
        await first.acked(1)
        await first.announce(WorkerState.STOPPED)
        await second.announce()
        again = await first.take()
        assert (again.key.attempt, again.request.traceparent) == (1, TRACE)
        second.client_incarnation = first.client_incarnation
        made = replace(chunk(again.key, 0, 8), traceparent=TRACE)
        await second.frame(0, made, chunk(again.key, 1, 9, total=2), admitted=(again.key,))
        chunks = await reading

    assert [(c.token_ids.tolist(), c.worker_id, c.traceparent) for c in chunks] == [
        ([7], "hand", TRACE),
        ([8], "other", TRACE),
        ([9], "other", None),
    ]


async def test_a_terminal_chunk_that_the_client_wrote_names_no_worker(nats_url: str, fleet: str) -> None:
    """An aborted stream ends with a chunk that names no worker, because the client wrote it."""
    async with hand_worker(nats_url, fleet) as (worker, rb), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(all_of(rb.generate(request(3, request_id="r"))))
        key: RequestKey = await worker.next_key()
        await worker.frame(0, chunk(key, 0, 7), admitted=(key,))
        await worker.acked(1)
        await rb.abort(["r"])
        chunks = await reading

    assert [(c.finish_reason, c.worker_id) for c in chunks] == [(None, "hand"), ("abort", None)]
