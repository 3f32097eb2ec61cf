"""Placed requests at workers that are killed: each completes once, elsewhere."""

import asyncio
import random

import rollbus
from rollbus import GenerateRequest, Generation, SamplingParams
from rollbus.bus.protocol.queue.load import PIECE_TOKENS
from rollbus.bus.protocol.queue.placement import PlacementReason
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.workload import VOCAB_SIZE
from tests.support.invariants import observing
from tests.support.processes import LASTING, worker_process
from tests.support.requests import Load, endless
from tests.support.waits import until_true

ENGINE_ARGS = {"step_s": 0.003, "max_num_seqs": 16, "vocab_size": VOCAB_SIZE, "prefix_cache": True}
CONFIG = SyntheticConfig.from_args(ENGINE_ARGS)
LEASE = ("--lease-s", "2")
SAMPLES = 4
PROMPT_LEN = 3 * PIECE_TOKENS


def prompt(seed: int) -> list[int]:
    """Return a prompt of three blocks."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)]


def group(seed: int, n: int = SAMPLES) -> GenerateRequest:
    """Return a request for samples of one prompt, with a seed that determines all tokens."""
    sampling = SamplingParams(n=n, max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
    return GenerateRequest(request_id=f"g{seed}", prompt_token_ids=prompt(seed), sampling=sampling, timeout_s=600.0)


def samples(generation: Generation) -> tuple[Generation, ...]:
    """Return all samples of a request."""
    return generation, *generation.siblings


async def test_groups_placed_at_a_killed_worker_complete_once(nats_url: str, fleet: str) -> None:
    """If a worker is killed with placed groups, each sample completes once and equals the undisturbed one.

    Some groups are in its engine, some are on their way to it, and some follow a leader there.
    """
    load = await Load.of([group(seed) for seed in range(30)], CONFIG)
    # A group takes 20 s there, so the kill hits some, also if the client knows late of the ends of others.
    slow = {**ENGINE_ARGS, "step_s": 1.0}
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=slow) as doomed,
        worker_process(nats_url, fleet, *LASTING, "--worker-id", "b", engine_args=ENGINE_ARGS),
    ):
        await rb.fleet.wait_for_workers(2)

        async def kill() -> None:
            doomed.kill()

        results = await load.run(rb, strikes={5: kill}, max_in_flight=12)
        resumed = [each for result in results for each in samples(result) if each.attempts > 1]
        assert resumed
        assert {each.worker_ids[-1] for each in resumed} == {"b"}
        await observer.check_at_rest()


async def test_a_turn_that_waits_for_its_session_at_a_killed_worker_completes_once(nats_url: str, fleet: str) -> None:
    """A turn of a session waits at the full worker that has its prompt. If that worker is killed, it runs elsewhere."""
    args = {**ENGINE_ARGS, "max_num_seqs": 1, "max_model_len": 10_000_000}
    turns = [
        GenerateRequest(
            request_id=name, prompt_token_ids=2 * prompt(1), sampling=short, session_id="s", timeout_s=600.0
        )
        for name, short in (("first", SamplingParams(max_tokens=2)), ("second", SamplingParams(max_tokens=20, seed=1)))
    ]
    load = await Load.of(turns[1:], SyntheticConfig.from_args(args))
    async with (
        observing(nats_url, fleet) as observer,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "a", engine_args=args) as a,
        worker_process(nats_url, fleet, *LEASE, "--worker-id", "b", engine_args=args) as b,
        asyncio.TaskGroup() as tasks,
    ):
        await rb.fleet.wait_for_workers(2)
        [worker] = (await rb.complete(turns[0])).worker_ids
        others = [tasks.create_task(rb.complete(endless(f"other-{number}"))) for number in range(2)]
        while any(each.free_slots for each in (await rb.fleet.state()).workers):
            pass
        before = rb.stats().placed[PlacementReason.PLACED_SESSION]
        turn = tasks.create_task(load.run(rb))
        await until_true(lambda: rb.stats().placed[PlacementReason.PLACED_SESSION] > before)
        {"a": a, "b": b}[worker].kill()
        await until_true(lambda: len(rb.fleet.workers) == 1)
        for other in others:
            other.cancel()
        [result] = await turn
        await observer.check_at_rest()

    assert {result.worker_ids[-1]} == {"a", "b"} - {worker}
