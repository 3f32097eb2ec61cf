"""Prefill and decode phases on a worker: the phases that it accepts, and the KV that its engine may use."""

import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep, TokenBatch, split
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode, InvalidRequest
from rollbus.schemas.messages import KvTransfer, Sibling
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import SyntheticKv
from rollbus.workers.worker import Worker
from tests.support.disagg import long
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import HandClient
from tests.workers.support import StartHeard

PREFILL = SyntheticConfig(role="prefill")
DECODE = SyntheticConfig(role="decode")


async def answer_to(client: HandClient, request: GenerateRequest, worker: str, kv: KvTransfer | None) -> str | None:
    """Send a request directly to a worker, and return the error code with which it ended."""
    await client.hand_over(request, worker, kv=kv)
    await client.until_ended(request.request_id)
    return client.error_of(request.request_id)


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
async def test_a_worker_accepts_only_the_phases_of_its_role(heard_worker: StartHeard, role: str) -> None:
    """Prefill workers accept only prefill phases, and other workers accept all other requests.

    Each rejection names the worker's role.
    """
    config = SyntheticConfig.from_args({"role": role})
    async with heard_worker(config=config) as (client, *_):
        leg = await answer_to(client, long("leg", max_tokens=1), "w", KvTransfer())
        whole = await answer_to(client, long("whole", max_tokens=1), "w", None)

        refused, taken = ("whole", "leg") if role == "prefill" else ("leg", "whole")
        assert {"leg": leg, "whole": whole} == {refused: ErrorCode.UNSUPPORTED, taken: None}
        error = client.chunks[refused][-1].error
        assert f"this worker's role is {role}" in error.message


async def test_a_prefill_phase_with_more_than_one_token_is_rejected(heard_worker: StartHeard) -> None:
    """A prefill phase with more than one token is rejected by name.

    The last chunk of an accepted prefill phase has the KV transfer parameters.
    """
    async with heard_worker(config=PREFILL, worker_id="p") as (client, *_):
        assert await answer_to(client, long("two", max_tokens=2), "p", KvTransfer()) == ErrorCode.INVALID_REQUEST
        error = client.chunks["two"][-1].error
        assert error.field == "sampling.max_tokens"

        assert await answer_to(client, long("one", max_tokens=1), "p", KvTransfer()) is None
        end = client.chunks["one"][-1].end
        assert end.kv_params is not None
        assert SyntheticKv.decode(end.kv_params).num_tokens == 100


async def test_each_sample_of_a_prefill_message_has_its_own_kv(heard_worker: StartHeard) -> None:
    """KV can be read only once, so three samples of one message are three prefill phases.

    Their prompt is computed once.
    """
    config = SyntheticConfig(role="prefill", prefix_cache=True)
    async with heard_worker(config=config, worker_id="p") as (client, worker, _):
        await client.hand_over(
            long("leg", max_tokens=1), "p", kv=KvTransfer(), siblings=[Sibling(child) for child in (1, 2)]
        )
        await client.until(lambda: sum(chunk.is_terminal for chunk in client.chunks["leg"]) == 3)

        ends = {chunk.child: chunk.end for chunk in client.chunks["leg"] if chunk.end is not None}
        assert [end.kv_params is not None for end in ends.values()] == [True] * 3
        assert sorted(ends) == [0, 1, 2]
        counters = worker.presence().counters
        # Six blocks of 16 of the 100 tokens are cached for two of the three samples.
        assert (counters.placed, counters.prompt_tokens) == (3, 300)
        assert (counters.cached_prompt_tokens, counters.recomputed_prompt_tokens) == (2 * 96, 100 + 2 * 4)


async def test_a_prefill_worker_does_not_pull_from_the_queue(
    nats_url: str, fleet: str, heard_worker: StartHeard
) -> None:
    """A prefill worker does not pull from the queue: a decode worker that starts later serves the request."""
    async with heard_worker(config=PREFILL, worker_id="p") as (client, *_):
        await client.enqueue(long("r", max_tokens=1))
        # This request makes a round trip through the worker after the queued request.
        await answer_to(client, long("leg", max_tokens=1), "p", KvTransfer())
        await client.until_left(1)
        assert client.presences["p"].free_slots == 256
        async with synthetic_worker(nats_url, fleet, config=DECODE, worker_id="d"):
            await client.until_ended("r")
        assert {worker for worker, key in client.offers if key.request_id == "r"} == {"d"}


async def kv_of_engine(
    worker: Worker, engine: SyntheticEngine, client: HandClient, kv: KvTransfer
) -> KvTransfer | None:
    """Send a decode phase directly to the worker, and return the KV parameters that its engine received."""
    seen: list[KvTransfer | None] = []
    add = engine.add

    async def noting(key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        seen.append(kv)
        await add(key, request, None)

    engine.add = noting  # type: ignore[method-assign]
    assert await answer_to(client, long("r"), "d", kv) is None
    assert worker.stats().intake.kv_unused == (seen[0] is None)
    return seen[0]


@pytest.mark.proves("P24")
@pytest.mark.parametrize(
    ("handover", "is_used"),
    [
        ({}, True),
        ({"connector": "another"}, False),
        ({"connector": None}, False),
        ({"weight_version": 3}, False),
        ({"weight_version": None}, False),
        ({"lora_version": 1}, False),
    ],
)
async def test_only_kv_of_the_same_weights_and_connector_is_used(
    heard_worker: StartHeard, handover: dict[str, object], is_used: bool
) -> None:
    """KV of other weights or of another connector is computed again and counted. The request ends normally."""
    kv = KvTransfer(**{"params": b"x", "connector": "synthetic", "weight_version": 4, **handover})  # type: ignore[arg-type]
    async with heard_worker(config=DECODE, worker_id="d", weight_version=4) as (client, worker, engine):
        assert (await kv_of_engine(worker, engine, client, kv) is not None) == is_used


async def test_a_request_that_the_engine_rejects_with_kv_ends_as_kv_transfer_failed(heard_worker: StartHeard) -> None:
    """If the engine rejects a request with KV, it ends as `kv_transfer_failed`, which clients retry.

    Without KV, the request ends with the engine's error.
    """
    kv = KvTransfer(params=b"x", connector="synthetic", weight_version=0)
    async with heard_worker(config=DECODE, worker_id="d") as (client, _, engine):

        async def refuse(key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
            raise InvalidRequest(field="kv.params", problem="cannot be read", allowed="a msgpack map")

        engine.add = refuse  # type: ignore[method-assign]
        assert await answer_to(client, long("with"), "d", kv) == ErrorCode.KV_TRANSFER_FAILED
        assert await answer_to(client, long("without"), "d", None) == ErrorCode.INVALID_REQUEST


async def test_a_worker_of_both_roles_computes_the_kv_again(heard_worker: StartHeard) -> None:
    """A worker of both roles has no connector, so it computes the KV again: slower, but correct."""
    kv = KvTransfer(params=b"x", connector="synthetic", weight_version=0)
    async with heard_worker(worker_id="d") as (client, worker, engine):
        assert await kv_of_engine(worker, engine, client, kv) is None


async def test_kv_parameters_that_fit_into_no_frame_are_omitted(heard_worker: StartHeard) -> None:
    """KV parameters that fit into no frame are omitted without harm to the link.

    The decode phase then computes the prompt again.
    """
    async with heard_worker(config=PREFILL, worker_id="p") as (client, worker, engine):
        step = engine._step

        def large() -> list[RequestStep | TokenBatch]:
            steps = split(step())
            for made in steps:
                made.kv_params = b"x" * 200_000 if made.finish_reason is FinishReason.LENGTH else None
            return [*steps]

        engine._step = large  # type: ignore[method-assign]
        assert await answer_to(client, long("r", max_tokens=1), "p", KvTransfer()) is None
        end = client.chunks["r"][-1].end
        assert end.kv_params is None
        assert worker.stats().links.kv_too_large == 1
        np.testing.assert_array_equal([end.num_tokens, end.num_rows], [1, 100])
