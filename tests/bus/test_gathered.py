"""Results that are not streamed arrive in fewer, larger chunks with the same content."""

import asyncio
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.bus.client.client import runtime_of
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed
from tests.support.invariants import observing
from tests.support.requests import all_of, endless
from tests.support.waits import until_true

WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "other prompt": {"prompt_token_ids": [9, 8, 7]},
    "no logprobs": {"logprobs": None},
    "top logprobs": {"logprobs": 2},
    "no routing": {"return_routed_experts": False},
    "neither": {"logprobs": None, "return_routed_experts": False},
    "rows from within": {"prompt_token_ids": [1, 2, 3, 4], "routed_experts_prompt_start": 3},
    "seeded": {"temperature": 1.0, "seed": 3},
    "short": {"max_tokens": 3},
    "long": {"max_tokens": 400},
}


def request_of(wish: str) -> GenerateRequest:
    """Return a request of this kind."""
    fields: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], **WISHES[wish]}
    sampling: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    sampling |= {name: fields.pop(name) for name in list(fields) if name in {*sampling, "seed"}}
    return GenerateRequest(sampling=SamplingParams(**sampling), **fields)


def check_same(wish: str, whole: Generation, chunks: list[rollbus.Chunk]) -> None:
    """Check that the result equals its streamed chunks."""
    np.testing.assert_array_equal(whole.token_ids, np.concatenate([chunk.token_ids for chunk in chunks]), wish)
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    rows = [chunk.routed_experts.numpy() for chunk in chunks if chunk.routed_experts is not None]
    assert (whole.logprobs is None) == (not logprobs)
    assert (whole.routed_experts is None) == (not rows)
    if whole.logprobs is not None:
        np.testing.assert_array_equal(whole.logprobs, np.concatenate(logprobs), wish)
    if whole.routed_experts is not None:
        np.testing.assert_array_equal(whole.routed_experts, np.concatenate(rows), wish)


@pytest.mark.proves("P62")
async def test_whole_results_equal_streams_in_fewer_frames(nats_url: str, fleet: str, one_worker: StartServed) -> None:
    """Requests of every kind return the same whole and streamed, while both share the engine's steps.

    Whole results need fewer frames.
    """
    async with observing(nats_url, fleet) as observer, one_worker(config=SyntheticConfig(step_s=0.002)) as (rb, *_):
        async with asyncio.TaskGroup() as tasks:
            whole = {wish: tasks.create_task(rb.complete(request_of(wish))) for wish in WISHES}
            streams = {wish: tasks.create_task(all_of(rb.generate(request_of(wish)))) for wish in WISHES}
        for wish in WISHES:
            check_same(wish, whole[wish].result(), streams[wish].result())
        assert len(streams["long"].result()) > 100
        before = rb.stats().frames
        await rb.complete(request_of("long"))
        assert rb.stats().frames - before < 100
        await observer.check_at_rest()


@pytest.mark.proves("P62")
async def test_a_pause_flushes_the_token_batches(one_worker: StartServed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause flushes the token batches: all tokens from before the pause are delivered while the engine is paused."""
    monkeypatch.setattr("rollbus.workers.requests.in_flight.GATHER_S", 1000.0)
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with one_worker(config=config) as (rb, worker, _), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(rb.complete(endless("r")))
        await until_true(lambda: worker.stats().links.generated_tokens > 10)
        await rb.fleet.pause(mode="keep")
        made = worker.stats().links.generated_tokens
        await until_true(lambda: runtime_of(rb).coordinator.num_tokens == made)
        await rb.abort(["r"])

    assert len(running.result().token_ids) == made
