"""Samples in one message: each is served or rejected as if it were alone, and they enter the engine together."""

import asyncio

import msgspec
import pytest

from rollbus.bus.nats.connection import publish
from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import RequestKey, Sibling
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.engine import EngineRunner
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.support.hand_client import HandClient, hand_client
from tests.support.hand_worker import GatedEngine, running
from tests.support.requests import endless, short
from tests.support.waits import SOON_S, until_true
from tests.workers.support import StartHeard

pytestmark = pytest.mark.slow

FOUR_SLOTS = SyntheticConfig(step_s=0.01, max_num_seqs=4, max_model_len=10_000_000)
SIBLINGS = (Sibling(2, 7), Sibling(0, 5), Sibling(9))


def sampled(request_id: str, seed: int | None) -> GenerateRequest:
    """Return a request whose tokens depend on its seed."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, seed=seed)
    return GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling, request_id=request_id)


def tokens_of(client: HandClient, request_id: str, child: int) -> bytes:
    """Return the tokens of a sample."""
    return b"".join(chunk.token_ids_data for chunk in client.chunks[request_id] if chunk.child == child)


def errors_of(client: HandClient, request_id: str) -> dict[int, str | None]:
    """Return the error code, or None, of each sample that has ended, by child."""
    ended = [chunk for chunk in client.chunks[request_id] if chunk.is_terminal]
    return {chunk.child: None if chunk.error is None else chunk.error.code for chunk in ended}


async def test_each_sample_of_a_message_gets_the_tokens_of_a_separate_message(heard_worker: StartHeard) -> None:
    """Four samples of one message get the same tokens as in four messages, each with its own seed."""
    async with heard_worker(config=FOUR_SLOTS) as (client, worker, _):
        await until_true(lambda: worker.debug_state()["lanes_waiting"] == "")
        await client.hand_over(sampled("r", 6), "w", child=1, siblings=SIBLINGS)
        await client.until(lambda: len(errors_of(client, "r")) == 4)
        for child, seed in {1: 6, 2: 7, 0: 5, 9: None}.items():
            await client.enqueue(sampled(f"alone{child}", seed), child=child)
            await client.until_ended(f"alone{child}")

        assert [key.child for _, key in client.offers[:4]] == [1, 2, 0, 9]
        assert errors_of(client, "r") == dict.fromkeys((1, 2, 0, 9))
        for child in (1, 2, 0):
            assert tokens_of(client, "r", child) == tokens_of(client, f"alone{child}", child)
        assert len({tokens_of(client, "r", child) for child in (1, 2, 0, 9)}) == 4
        counters = worker.presence().counters
        assert (counters.requests, counters.placed, counters.placements_refused) == (8, 4, 0)
        # The client of this test gives no reason for its placement.
        assert (counters.placed_prefix, counters.placed_group) == (0, 0)
        assert client.presences["w"].capabilities.request_groups


async def test_samples_above_the_number_of_free_slots_are_rejected(heard_worker: StartHeard) -> None:
    """If a message has more samples than free slots, the first samples run.

    The other samples are rejected for the queue.
    """
    async with heard_worker(config=FOUR_SLOTS) as (client, worker, _):
        await until_true(lambda: worker.debug_state()["lanes_waiting"] == "")
        await client.hand_over(endless("r"), "w", siblings=[Sibling(child) for child in range(1, 7)])
        await client.until(lambda: len(errors_of(client, "r")) == 3 and len(client.offers) == 4)

        assert [key.child for _, key in client.offers] == [0, 1, 2, 3]
        assert errors_of(client, "r") == dict.fromkeys((4, 5, 6), ErrorCode.QUEUE_FULL)
        counters = worker.presence().counters
        assert (counters.placed, counters.placements_refused, counters.rejected) == (4, 3, 3)
        # A sample that already runs is neither rejected nor run again.
        await client.hand_over(endless("r"), "w", child=2)
        await until_true(lambda: worker.stats().links.repeated == 1)
        await client.abort("w", *(RequestKey("r", 0, child) for child in range(4)))
        await client.until(lambda: len(errors_of(client, "r")) == 7)
        assert len(client.offers) == 4


async def test_a_sample_aborted_before_the_engine_add_ends_after_the_add() -> None:
    """A sample that is aborted before the engine has it ends as soon as the engine has it."""
    runner = EngineRunner(SyntheticEngine(FOUR_SLOTS), timeout_s=SOON_S)
    await runner.start()
    steps: list[RequestStep | TokenBatch] = []
    async with asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(runner.run_aborts()), tasks.create_task(runner.run(steps.extend))]
        runner.reserve(["a", "b"])
        assert runner.num_free == 2
        runner.abort(["b"])
        await asyncio.sleep(0)
        await runner.add("a", short("a"))
        await runner.add("b", endless("b"))
        await until_true(lambda: not runner.num_inside)
        for task in working:
            task.cancel()

    ends = {step.key: step.finish_reason for step in steps if isinstance(step, RequestStep) and step.finish_reason}
    assert ends == {"a": FinishReason.LENGTH, "b": FinishReason.ABORT}


async def test_a_queue_message_with_several_samples_is_rejected(heard_worker: StartHeard) -> None:
    """A queue message must have one sample: otherwise each of its samples is rejected, and the message leaves."""
    async with heard_worker(config=FOUR_SLOTS) as (client, worker, engine):
        await client.enqueue(short("r"), child=1, siblings=SIBLINGS)
        await client.until(lambda: len(errors_of(client, "r")) == 4)
        await client.until_left(0)

        assert errors_of(client, "r") == dict.fromkeys((1, 2, 0, 9), ErrorCode.INVALID_REQUEST)
        [error] = {chunk.error for chunk in client.chunks["r"] if chunk.error is not None}
        assert (error.field, error.problem, error.allowed) == ("siblings", "has 3 entries", "none in the queue")
        assert worker.presence().in_flight == 0
        assert "running=0" in repr(engine)


async def test_samples_without_an_offer_are_rejected_when_the_intake_stops(nats_url: str, fleet: str) -> None:
    """When the intake stops, admitted samples without an offer are rejected for the queue.

    Offered samples continue.
    """
    engine = GatedEngine("add", config=FOUR_SLOTS)
    async with hand_client(nats_url, fleet) as client, running(nats_url, fleet, engine) as (worker, _):
        engine.gates["add"].set()
        await client.until_serving("w")
        await until_true(lambda: worker.debug_state()["lanes_waiting"] == "")
        engine.gates["add"].clear()
        await client.hand_over(short("first"), "w", siblings=[Sibling(1)])
        await client.until(lambda: len(client.offers) == 2)
        await client.hand_over(short("second"), "w", siblings=[Sibling(1)])
        await until_true(lambda: worker.presence().queued == 2)
        assert worker.presence().free_slots == 0
        worker._in_flight.stop_intake()
        await client.until(lambda: len(errors_of(client, "second")) == 2)
        engine.gates["add"].set()
        await client.until(lambda: len(errors_of(client, "first")) == 2)

        assert errors_of(client, "second") == dict.fromkeys((0, 1), ErrorCode.QUEUE_FULL)
        assert errors_of(client, "first") == dict.fromkeys((0, 1))


@pytest.mark.parametrize("siblings", [[[0]], [[1], [2], [1]], [[child] for child in range(1, 257)]])
async def test_a_message_with_duplicate_or_too_many_children_is_bad(
    heard_worker: StartHeard, siblings: list[list[int]]
) -> None:
    """A message with duplicate children or too many of them is counted as bad and ignored."""
    async with heard_worker(config=FOUR_SLOTS) as (client, worker, _):
        message = msgspec.msgpack.decode(client.message(short("r"))) | {"siblings": siblings}
        subject = client.subjects.direct(client.name, "w")
        await publish(client.nats, subject, msgspec.msgpack.encode(message))
        await client.complete(short("s"))

        assert worker.stats().intake.bad == 1
        assert [key.request_id for _, key in client.offers] == ["s"]
