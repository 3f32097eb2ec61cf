"""The counters of a worker, and their announcement."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

import rollbus
from rollbus.bus.nats.connection import ConnectionStats
from rollbus.bus.queue.puller import PullerStats
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES
from rollbus.schemas.presence import WorkerCounters, WorkerPresence
from rollbus.workers.control.staging import StagerStats
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.requests.intake import IntakeStats
from rollbus.workers.requests.steps import WorkerLinkStats
from rollbus.workers.worker import WorkerStats
from tests.support.fleet import synthetic_worker
from tests.support.patience import SOON_S
from tests.workers.links_support import LATE, MAX_PAYLOAD, NOW, ROW_BYTES, Ear, make_links, step

PROMPT_LEN = 3


def test_a_worker_counts_the_tokens_and_rows_of_its_requests() -> None:
    """A worker counts the tokens and rows of its requests. Steps of other requests count as late."""
    links = make_links()
    ear = Ear(links)
    name, _ = ear.offer("r", prompt_len=PROMPT_LEN, routing=True)
    links.add_steps(
        [step(name, 1, rows=(0, PROMPT_LEN)), step(name, 2, rows=(PROMPT_LEN, PROMPT_LEN + 2), end=True)], NOW
    )
    links.add_steps([step(name, 5)], NOW)

    stats = links.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.routing_bytes) == (PROMPT_LEN, 3, 5 * ROW_BYTES)
    assert stats.late_steps == 1


def test_the_seconds_of_weights_are_rounded_to_milliseconds() -> None:
    """Presence has the seconds of staging and of paused updates with three digits, and those of tokens with six."""
    stats = WorkerStats(
        intake=IntakeStats(), links=WorkerLinkStats(first_tokens_s=1.2345678), puller=PullerStats(), frames=0,
        frames_lost=0, bad_messages=0, bad_commands=0, times_fenced=0, connection=ConnectionStats(), credit_stalls=0,
        stagings=StagerStats(weights_staging_s=2.3456789, weights_paused_s=3.4567891),
    )  # fmt: skip
    counters = stats.counters()
    assert (counters.first_tokens_s, counters.weights_staging_s, counters.weights_paused_s) == (1.234568, 2.346, 3.457)


def test_times_of_tokens_are_added_up() -> None:
    """The time of a first token counts from the offer.

    The time of a later step counts once for each of its tokens, and steps without tokens count nothing.
    """
    links = make_links()
    ear = Ear(links)
    (first, _), (second, _) = ear.offer("a"), ear.offer("b")
    links.add_steps([step(first, 0)], NOW + 1)
    links.add_steps([step(first, 2)], NOW + 3)
    links.add_steps([step(first, 4), step(second, 1)], NOW + 5)
    links.add_steps([step(first, 1, end=True)], NOW + 5.5)

    stats = links.stats
    assert (stats.first_tokens, stats.first_tokens_s) == (2, 3 + 5)
    assert (stats.next_tokens, stats.next_tokens_s) == (5, 2 + 0.5)
    assert stats.first_tokens + stats.next_tokens == stats.generated_tokens - 1


def test_stalls_of_removed_links_still_count() -> None:
    """A counter never falls: neither when a client is removed, nor when the worker has lost its lease."""
    links = make_links()
    seen = [links.outbound.credit_stalls]
    for client in ("alice", "bob"):
        ear = Ear(links, client=client)
        name, _ = ear.offer("r")
        for _ in range(3):
            links.add_steps([step(name, INITIAL_CREDIT_BYTES // 4)], NOW)
            ear.hear()
        seen.append(links.outbound.credit_stalls)
        links.expire(LATE)
        links.expire(LATE + 1000)
        seen.append(links.outbound.credit_stalls)
    ear = Ear(links, client="carol")
    name, _ = ear.offer("r")
    for _ in range(3):
        links.add_steps([step(name, INITIAL_CREDIT_BYTES // 4)], NOW)
        ear.hear()
    links.fence("w2", NOW, max_payload=MAX_PAYLOAD)

    assert seen == [0, 1, 1, 2, 2]
    assert links.outbound.credit_stalls == 3


async def test_a_worker_publishes_its_counters_and_counts_each_result_once(nats_url: str, fleet: str) -> None:
    """Each request is counted in one counter by its result. Another process of that name begins at 0."""
    config = SyntheticConfig(step_s=0.002)
    sampling = rollbus.SamplingParams(max_tokens=5, ignore_eos=True)
    prompt = [1] * PROMPT_LEN
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        async with synthetic_worker(nats_url, fleet, config=config, worker_id="w"):
            await rb.fleet.wait_for_workers()
            done = await rb.complete(rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling))
            long = rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=rollbus.SamplingParams(max_tokens=60_000))
            async with aclosing(rb.generate(long)) as chunks:
                await anext(chunks)
            with pytest.raises(rollbus.RequestRejected):
                await rb.complete(rollbus.GenerateRequest(prompt_token_ids=prompt, sampling=sampling, lora="none"))
            first = await until_announced(rb, lambda worker: worker.counters is not None and worker.counters.aborted)
        async with synthetic_worker(nats_url, fleet, config=config, worker_id="w"):
            again = await until_announced(rb, lambda worker: worker.incarnation != first.incarnation)

    counters = first.counters
    assert (counters.requests, counters.ended, counters.aborted, counters.rejected) == (2, 1, 1, 1)
    assert counters.prompt_tokens == 2 * PROMPT_LEN
    assert counters.generated_tokens > 5
    assert counters.routing_bytes > done.routed_experts.nbytes
    assert counters.frames > 3
    assert (counters.first_tokens, counters.first_tokens + counters.next_tokens) == (2, counters.generated_tokens)
    assert min(counters.first_tokens_s, counters.next_tokens_s) > 0
    assert again.counters == WorkerCounters()


async def until_announced(rb: rollbus.Client, is_met: Callable[[WorkerPresence], object]) -> WorkerPresence:
    """Return the first presence of a worker for which `is_met` holds."""
    async with asyncio.timeout(SOON_S):
        while True:
            for worker in (await rb.fleet.state()).workers:
                if is_met(worker):
                    return worker
