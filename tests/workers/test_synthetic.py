"""The synthetic engine supports all calls of a controller, and simulates the configured faults."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.errors import ControlCode, ControlError, InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

Collected = dict[str, list[RequestStep]]


def checkpoint(folder: Path, content: bytes) -> Path:
    """Write a folder with one file of weights, and return it."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def request(length: int = 40, num_tokens: int = 4, **fields: object) -> GenerateRequest:
    """Return a greedy request."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=list(range(length)), sampling=sampling, **fields)  # type: ignore[arg-type]


class Reader:
    """Reads an engine's steps, and notifies waiters of new steps."""

    def __init__(self, engine: SyntheticEngine) -> None:
        self.engine = engine
        self.steps: Collected = {}
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Read until cancelled."""
        async for steps in self.engine.steps():
            async with self._changed:
                for step in split(steps):
                    self.steps.setdefault(step.key, []).append(step)
                self._changed.notify_all()

    async def until_tokens(self, key: str, count: int) -> None:
        """Wait until a request has `count` steps."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.steps.get(key, ())) >= count)

    async def result(self, key: str, asked: GenerateRequest) -> list[RequestStep]:
        """Run one request to its end, and return its steps."""
        await self.engine.add(key, asked)
        return await self.end_of(key)

    async def end_of(self, key: str) -> list[RequestStep]:
        """Wait for a request's end, and return its steps."""
        async with self._changed:
            await self._changed.wait_for(lambda: key in self.steps and self.steps[key][-1].finish_reason is not None)
        return self.steps[key]


@contextlib.asynccontextmanager
async def reading(engine: SyntheticEngine) -> AsyncIterator[Reader]:
    """Start an engine, and yield a reader of its steps."""
    await engine.start()
    reader = Reader(engine)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(reader.run(), name="reader")
        yield reader
        task.cancel()


def tokens(steps: list[RequestStep]) -> list[int]:
    """Return the sampled tokens."""
    return [int(token) for step in steps for token in step.token_ids]


def routing(steps: list[RequestStep]) -> bytes:
    """Return the bytes of all rows."""
    return np.concatenate([step.routed_experts for step in steps if step.routed_experts is not None]).tobytes()


async def test_a_paused_engine_makes_no_step_and_resumes_without_a_difference() -> None:
    """Tokens that were sampled before are delivered when `pause` returns.

    The stream then equals a stream without a pause.
    """
    async with reading(SyntheticEngine()) as reader:
        undisturbed = tokens(await reader.result("a", request(num_tokens=200)))
        await reader.engine.add("b", request(num_tokens=200))
        await reader.until_tokens("b", 3)
        await reader.engine.pause()
        await reader.engine.pause()
        count = len(reader.steps["b"])
        await reader.engine.add("c", request())
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(reader.steps["b"]) == count < 200
        assert "c" not in reader.steps
        await reader.engine.resume()
        assert tokens(await reader.end_of("b")) == undisturbed
        await reader.end_of("c")


async def test_the_results_depend_on_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    """An engine that loads a checkpoint gives the results of an engine that started with it.

    Another checkpoint gives other results.
    """
    first, second = checkpoint(tmp_path / "1", b"one"), checkpoint(tmp_path / "2", b"two")
    async with (
        reading(SyntheticEngine(model=first)) as updated,
        reading(SyntheticEngine(model=second)) as fresh,
    ):
        before = await updated.result("a", request())
        await updated.engine.load_weights(second)
        after, expected = await updated.result("b", request()), await fresh.result("a", request())
    assert tokens(before) != tokens(after) == tokens(expected)
    assert routing(before) != routing(after) == routing(expected)


async def test_a_prompt_that_older_weights_cached_is_not_found(tmp_path: Path) -> None:
    """Weights, adapters and salts each have separate cached prefixes, and a reset removes all."""
    folder = checkpoint(tmp_path / "1", b"one")
    async with reading(SyntheticEngine(SyntheticConfig(prefix_cache=True))) as reader:
        engine = reader.engine

        async def cached(key: str, **fields: object) -> int | None:
            return (await reader.result(key, request(**fields)))[0].cached_tokens  # type: ignore[arg-type]

        assert (await cached("a"), await cached("b"), await cached("c", cache_salt="x")) == (0, 32, 0)
        await engine.load_lora("l", folder, 1)
        assert (await cached("d", lora="l"), await cached("e", lora="l")) == (0, 32)
        await engine.load_lora("l", folder, 2)
        assert await cached("f", lora="l") == 0
        await engine.load_weights(folder)
        assert (await cached("g"), await cached("h")) == (0, 32)
        assert await engine.reset_cache(preempt=False)
        assert await cached("i") == 0


async def test_adapters_change_the_output_until_they_are_unloaded(tmp_path: Path) -> None:
    """The bytes of an adapter change the output under its name. Without the adapter, the request is an error."""
    one, two = checkpoint(tmp_path / "1", b"one"), checkpoint(tmp_path / "2", b"two")
    async with reading(SyntheticEngine(SyntheticConfig(max_loras=1))) as reader:
        engine = reader.engine
        base = tokens(await reader.result("a", request()))
        await engine.load_lora("l", one, 1)
        first = tokens(await reader.result("b", request(lora="l")))
        await engine.load_lora("l", two, 2)
        second = tokens(await reader.result("c", request(lora="l")))
        assert len({tuple(base), tuple(first), tuple(second)}) == 3
        assert tokens(await reader.result("d", request())) == base
        assert engine.loras == {"l": 2}
        with pytest.raises(ControlError, match="1 adapters are loaded"):
            await engine.load_lora("m", one, 1)
        await engine.unload_lora("l")
        await engine.unload_lora("l")
        with pytest.raises(InvalidRequest, match="lora"):
            await engine.add("e", request(lora="l"))


async def test_weights_that_were_transferred_in_parts_equal_those_of_the_files(tmp_path: Path) -> None:
    """Between start and finish of a transfer, the weights are neither old nor new.

    A part without a start is rejected.
    """
    folder = checkpoint(tmp_path / "1", b"onetwo")
    async with reading(SyntheticEngine(model=folder)) as fresh, reading(SyntheticEngine()) as reader:
        engine, expected = reader.engine, tokens(await fresh.result("a", request()))
        with pytest.raises(ControlError, match="no weight update was started"):
            await engine.update_weight_chunk({"data": "b25l"})
        await engine.init_weight_transfer({})
        await engine.start_weight_update()
        with pytest.raises(ControlError) as caught:
            await engine.finish_weight_update()
        assert caught.value.code is ControlCode.HALF_WRITTEN
        await engine.update_weight_chunk({"data": "b25l"})
        between = tokens(await reader.result("a", request()))
        await engine.update_weight_chunk({"data": "dHdv"})
        await engine.finish_weight_update()
        after = tokens(await reader.result("b", request()))
    assert between != after == expected


@pytest.mark.parametrize(("fault", "is_touched"), [("refused", False), ("half_written", True)])
async def test_a_load_can_be_configured_to_fail_before_or_after_a_change_of_weights(
    fault: str, is_touched: bool, tmp_path: Path
) -> None:
    """A load fails as configured, after the configured number of successful loads."""
    folder = checkpoint(tmp_path / "1", b"one")
    faults = SyntheticFaults(load=fault, good_loads=1)  # type: ignore[arg-type]
    async with reading(SyntheticEngine(SyntheticConfig(faults=faults))) as reader:
        await reader.engine.load_weights(folder)
        before = tokens(await reader.result("a", request()))
        with pytest.raises(ControlError) as caught:
            await reader.engine.load_weights(folder)
        assert (caught.value.code is ControlCode.HALF_WRITTEN) == is_touched
        assert (tokens(await reader.result("b", request())) != before) == is_touched


async def test_a_load_can_be_configured_to_give_wrong_routing(tmp_path: Path) -> None:
    """A load can be configured to give right tokens and wrong routing, as vLLM's reload on a CPU does."""
    folder = checkpoint(tmp_path / "1", b"one")
    config = SyntheticConfig(faults=SyntheticFaults(load="wrong_experts"))
    async with reading(SyntheticEngine(config, folder)) as reader:
        before = await reader.result("a", request())
        await reader.engine.load_weights(folder)
        after = await reader.result("b", request())
    assert tokens(before) == tokens(after)
    assert routing(before) != routing(after)
