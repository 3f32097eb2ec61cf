"""Real vLLM engines for tests: started once, on an event loop of their own, used by one test after the other."""

import asyncio
import contextlib
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bus.protocol.step import RequestStep, split
from schemas.request import GenerateRequest
from schemas.rows import Rows
from workers.engines.vllm import VllmEngine

__all__ = ["Result", "RunningEngine", "running_engines"]

T = TypeVar("T")


@dataclass
class Result:
    """All that came for one request, put together."""

    steps: list[RequestStep] = field(default_factory=list)

    @property
    def last(self) -> RequestStep:
        """The step that ended the request."""
        return self.steps[-1]

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return [int(token) for step in self.steps for token in step.token_ids]

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """f4[G]."""
        return np.concatenate([step.logprobs for step in self.steps if step.logprobs is not None])

    @property
    def rows(self) -> Rows:
        """The routing, checked to be contiguous; u1|u2[num_rows, num_layers, top_k]."""
        parts = [step.routed_experts for step in self.steps if step.routed_experts is not None]
        position = self.steps[0].routed_experts_start
        for step in self.steps:
            if step.routed_experts is not None:
                assert step.routed_experts_start == position
                position += len(step.routed_experts)
        rows: Rows = np.concatenate(parts)
        return rows


class RunningEngine:
    """A started engine and the one iterator over its steps; its methods run on the engine's event loop."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._steps = engine.steps()
        self._loop = asyncio.get_running_loop()
        self._num_requests = 0

    def call(self, scenario: Coroutine[Any, Any, T], *, timeout_s: float = 100.0) -> T:
        """Run `scenario` on the engine's event loop, from the test's own thread."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(scenario, timeout_s), self._loop).result()

    def generate(self, *requests: GenerateRequest) -> list[Result]:
        """Run `requests` at the same time, to their ends."""
        return self.call(self._generate(requests))

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Result]:
        keys = [await self.add(request) for request in requests]
        results = await self.finish(*keys)
        return [results[key] for key in keys]

    async def add(self, request: GenerateRequest) -> str:
        """Submit `request` under a new key."""
        key = f"test-{self._num_requests}"
        self._num_requests += 1
        await self.engine.add(key, request)
        return key

    async def next(self) -> Sequence[RequestStep]:
        """What the next engine step produced."""
        return split(await anext(self._steps))

    async def finish(self, *keys: str) -> dict[str, Result]:
        """Read steps until each of `keys` has ended."""
        results = {key: Result() for key in keys}
        open_keys = set(keys)
        while open_keys:
            for step in await self.next():
                if step.key not in results:
                    continue
                results[step.key].steps.append(step)
                if step.finish_reason is not None:
                    # A second end is an error: the key is gone from the set.
                    open_keys.remove(step.key)
        return results


@contextlib.contextmanager
def running_engines(make: Callable[[], Sequence[VllmEngine]]) -> Iterator[list[RunningEngine]]:
    """Start engines side by side on an event loop in a thread, and close them: no task and no process is left."""
    loop_started = threading.Event()
    state: dict[str, Any] = {}

    async def serve() -> None:
        state["loop"] = asyncio.get_running_loop()
        state["main"] = asyncio.current_task()
        state["stop"] = asyncio.Event()
        loop_started.set()
        await state["stop"].wait()

    def run() -> None:
        with asyncio.Runner() as runner:
            runner.run(serve())

    async def start() -> list[RunningEngine]:
        engines = make()
        state["engines"] = engines
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(engine.start())
        return [RunningEngine(engine) for engine in engines]

    async def close() -> list[str]:
        async with asyncio.TaskGroup() as group:
            for engine in state.get("engines", ()):
                group.create_task(engine.close())
        return [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task(), state["main"]}]

    thread = threading.Thread(target=run, name="engines")
    thread.start()
    loop_started.wait()
    loop = state["loop"]
    try:
        with warnings.catch_warnings():
            # Of other people's code while it is imported.
            warnings.simplefilter("ignore")
            running = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield running
    finally:
        tasks_left = asyncio.run_coroutine_threadsafe(close(), loop).result()
        loop.call_soon_threadsafe(state["stop"].set)
        thread.join()
    assert tasks_left == []
    assert [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")] == []
