"""A shared engine is replaced after a test has broken it. These tests use synthetic engines, which start fast."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import cast

import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.vllm.engine import VllmEngine
from tests.control.support import folders, write_adapter
from tests.support.vllm_engine import Engines, RunningEngine, running_engines

ENDLESS = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=5000, ignore_eos=True))
SHORT = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=3, temperature=0.0))


Damage = Callable[[RunningEngine], Coroutine[object, object, None]]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Run two synthetic engines with the interface of vLLM engines."""
    model, _ = folders(tmp_path)
    with running_engines(dict.fromkeys("ab", lambda: cast("VllmEngine", SyntheticEngine(model=model)))) as running:
        yield running


async def kill(running: RunningEngine) -> None:
    """Kill the engine."""
    cast("SyntheticEngine", running.engine).kill()


async def lose_the_reader(running: RunningEngine) -> None:
    """Cancel the reader of the steps."""
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(running.next())
        await asyncio.sleep(0)
        reading.cancel()


async def change_weights(running: RunningEngine) -> None:
    """Load other weights."""
    await running.engine.load_weights(Path(running_folder(running)).parent / "two")


async def load_adapter(running: RunningEngine) -> None:
    """Load an adapter and leave it loaded."""
    folder = write_adapter(running_folder(running).parent / "adapter")
    await running.engine.load_lora("left", folder, 1)


def running_folder(running: RunningEngine) -> Path:
    """Return the folder of the engine's checkpoint."""
    folder = cast("SyntheticEngine", running.engine)._folder
    assert folder is not None
    return folder


@pytest.mark.parametrize("breaks", [kill, lose_the_reader, change_weights, load_adapter])
def test_a_broken_engine_is_replaced(engines: Engines, breaks: Damage) -> None:
    """The next test receives a new engine in place of a dead, unread or changed one, and the other engine stays."""
    broken, other = engines.get("a"), engines.get("b")
    [expected] = broken.generate(SHORT)
    with contextlib.suppress(asyncio.CancelledError):
        broken.call(breaks(broken))
    made = engines.get("a")

    assert made is not broken
    assert made.generate(SHORT)[0].token_ids == expected.token_ids
    assert engines.get("a") is made
    assert engines.get("b") is other


async def leave_running(running: RunningEngine) -> None:
    """Leave two running requests, one of which the wrapper did not add."""
    await running.engine.add("by-hand", ENDLESS)
    await running.next()
    await running.add(ENDLESS)


async def leave_paused(running: RunningEngine) -> None:
    """Leave the engine paused with a waiting request, without reading its steps."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await running.engine.pause()
    await running.add(ENDLESS)


@pytest.mark.parametrize("leaves", [leave_running, leave_paused])
def test_requests_and_pauses_of_a_failed_test_are_ended(engines: Engines, leaves: Damage) -> None:
    """The requests of a failed test are aborted and its pause ends.

    The engine stays, and the next steps belong to the next test.
    """
    running = engines.get("a")
    running.call(leaves(running))
    assert engines.get("a") is running

    async def keys_of_next() -> tuple[str, set[str]]:
        return await running.add(SHORT), {step.key for step in await running.next()}

    key, seen = running.call(keys_of_next())
    assert seen == {key}
