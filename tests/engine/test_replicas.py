"""An engine with replicas of its model (`data_parallel_size`) behaves as one engine."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbus.schemas.errors import EngineDead
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.engine import VllmEngine
from tests.engine.conftest import SMALL_CACHE
from tests.engine.support import prompt
from tests.support.vllm_engine import RunningEngine, running_engines

pytestmark = pytest.mark.vllm

REPLICAS = {"dtype": "float32", "block_size": 32, "max_model_len": 512, "max_num_seqs": 4, "data_parallel_size": 2}
NUM_TOKENS = 12


def stream(seed: int, salt: str, max_tokens: int = NUM_TOKENS) -> GenerateRequest:
    """Return a greedy request that shares cached prefixes only with requests of the same salt."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=prompt(40, seed=seed), sampling=params, cache_salt=salt)


async def paused_under_load(
    running: RunningEngine, salt: str, *, short: int, new: Path | None
) -> tuple[bool, bool, list[list[int]]]:
    """Pause while only one of two replicas has a request, load weights and resume.

    Request number `short` ends before the pause; the other request is in flight.

    Returns:
        The results of two resets of the cache, without and with preemption, and the tokens of both requests.
    """
    keys = [await running.add(stream(n, salt, NUM_TOKENS if n == short else 450)) for n in range(2)]
    tokens: dict[str, list[int]] = {key: [] for key in keys}
    open_keys = set(keys)

    async def read() -> None:
        for step in await running.next():
            tokens[step.key].extend(int(token) for token in step.token_ids)
            if step.finish_reason is not None:
                open_keys.remove(step.key)

    while keys[short] in open_keys:
        await read()
    # The test continues to read, because `pause` waits until the sampled tokens are read.
    async with asyncio.TaskGroup() as group:
        pause = group.create_task(running.engine.pause())
        while not pause.done():
            reading = group.create_task(read())
            await asyncio.wait({pause, reading}, return_when=asyncio.FIRST_COMPLETED)
        kept = await running.engine.reset_cache(preempt=False)
        if new is not None:
            await running.engine.load_weights(new)
        taken = await running.engine.reset_cache(preempt=True)
        await running.engine.resume()
    other = keys[1 - short]
    goal = len(tokens[other]) + NUM_TOKENS
    while len(tokens[other]) < goal:
        await read()
    await running.engine.abort([other])
    while open_keys:
        await read()
    return kept, taken, [tokens[key] for key in keys]


def test_replicas_serve_pause_update_and_die_as_one(models: dict[str, Path]) -> None:
    """Each replica serves, pauses, resets and updates. The death of a replica ends the engine without a hang."""
    args = {**REPLICAS, **SMALL_CACHE}
    with running_engines({"replicas": lambda: VllmEngine(models["dense"], engine_args=args)}) as engines:
        running = engines.get("replicas")
        engine = running.engine
        assert (engine.capabilities.data_parallel_size, engine.capabilities.max_num_seqs) == (2, 8)
        assert engine.capabilities.world_size == 2
        alone = [running.generate(stream(n, "alone"))[0].token_ids for n in range(4)]
        together = running.generate(*(stream(n, "together") for n in range(4)))
        assert [result.token_ids for result in together] == alone

        for short, new in enumerate((None, models["dense2"])):
            kept, taken, tokens = running.call(paused_under_load(running, f"short-{short}", short=short, new=new))
            assert (kept, taken) == (False, True)
            assert tokens[short] == alone[short]
            assert new is not None or tokens[1 - short][:NUM_TOKENS] == alone[1 - short]

        # Enough requests of one prompt that both replicas get some.
        updated = [result.token_ids for result in running.generate(*(stream(0, f"new-{n}") for n in range(4)))]
        assert updated[0] != alone[0]
        assert updated == updated[:1] * 4

        running.call(killed(running))


async def killed(running: RunningEngine) -> None:
    """Kill one replica while both have requests."""
    keys = [await running.add(stream(n, "lost", 400)) for n in range(4)]
    await running.next()
    cores = running.engine._launch.llm.engine_core.resources.engine_manager.processes
    assert len(cores) == 2
    psutil.Process(cores[1].pid).kill()
    with pytest.raises(EngineDead):
        await running.finish(*keys)
    async with asyncio.TaskGroup() as group:
        for call in (running.engine.pause(), running.engine.load_weights(Path("/nowhere"))):
            group.create_task(refused(call))


async def refused(call: Coroutine[Any, Any, object]) -> None:
    """Wait until a call into the engine fails, because no call may outlive the engine."""
    with pytest.raises(EngineDead):
        await call
