"""Real vLLM engines for tests, started once on their own event loop and used by one test after the other.

Before each test the engine answers the same request. If its answer differs from the first answer, a test has broken the
engine. It is then replaced, so that no other test fails.
"""

import asyncio
import contextlib
import functools
import multiprocessing
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.errors import EngineDead
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import Rows
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.engine import VllmEngine
from rollbus.workers.engines.vllm.launch import cpu_refusal, set_environment
from tests.support.requests import TOLERANCE
from tests.support.waits import HANGS_AFTER_S, SOON_S, patient

QUESTION = GenerateRequest(
    prompt_token_ids=[11, 12, 13],
    sampling=SamplingParams(max_tokens=2, temperature=0.0, logprobs=0, ignore_eos=True),
    cache_salt="sound",
)
"""Too short for a block of the prefix cache."""
ANSWERS_WITHIN_S = patient(30.0)
"""An engine that takes longer is replaced, which only costs time."""

T = TypeVar("T")


@dataclass
class Result:
    """All steps of one request."""

    steps: list[RequestStep] = field(default_factory=list)

    @property
    def last(self) -> RequestStep:
        """The last step of the request."""
        return self.steps[-1]

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return [int(token) for step in self.steps for token in step.token_ids]

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """The logprobs of the generated tokens, f4[G]."""
        return np.concatenate([step.logprobs for step in self.steps if step.logprobs is not None])

    @property
    def rows(self) -> Rows:
        """The routed experts, u1|u2[num_rows, num_layers, top_k], without gaps; empty if vLLM returns none."""
        parts = [step.routed_experts for step in self.steps if step.routed_experts is not None]
        position = self.steps[0].routed_experts_start
        for step in self.steps:
            if step.routed_experts is not None:
                assert step.routed_experts_start == position
                position += len(step.routed_experts)
        if not parts and no_routing_here() is not None:
            return np.empty((0, 0, 0), np.uint8)
        rows: Rows = np.concatenate(parts)
        return rows


class RunningEngine:
    """A started engine and the only iterator over its steps. Its coroutines run on the engine's event loop."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._steps = engine.steps()
        self._loop = asyncio.get_running_loop()
        self._num_requests = 0
        self._open: set[str] = set()
        self._first: Result | None = None

    def call(self, scenario: Coroutine[Any, Any, T], *, timeout_s: float = HANGS_AFTER_S) -> T:
        """Run `scenario` on the engine's event loop, from the test's own thread."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(scenario, timeout_s), self._loop).result()

    def generate(self, *requests: GenerateRequest) -> list[Result]:
        """Run `requests` in parallel to their ends."""
        return self.call(self._generate(requests))

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[Result]:
        keys = [await self.add(request) for request in requests]
        results = await self.finish(*keys)
        return [results[key] for key in keys]

    async def add(self, request: GenerateRequest) -> str:
        """Add `request` under a new key."""
        key = f"test-{self._num_requests}"
        self._num_requests += 1
        await self.engine.add(key, request)
        self._open.add(key)
        return key

    async def next(self) -> Sequence[RequestStep]:
        """Return the output of the next engine step with output."""
        while not (steps := split(await anext(self._steps))):
            continue
        for step in steps:
            if step.finish_reason is None:
                self._open.add(step.key)
            else:
                self._open.discard(step.key)
        return steps

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
                    # A second end raises an error, because the key is no longer in the set.
                    open_keys.remove(step.key)
        return results

    def is_sound(self) -> bool:
        """Abort the requests of failed tests, then return True if the engine answers as it did at first."""
        try:
            return self.call(self.check(), timeout_s=ANSWERS_WITHIN_S)
        except (EngineDead, LookupError, RuntimeError, StopAsyncIteration, TimeoutError):
            # The engine is dead, has lost its steps with a cancelled reader, or hangs.
            return False

    async def check(self) -> bool:
        """Do the work of `is_sound`; store the first answer for later comparisons."""
        await self.engine.resume()
        if left := sorted(self._open):
            await self.engine.abort(left)
            await self.finish(*left)
        [answer] = await self._generate([QUESTION])
        first = self._first = self._first or answer
        has_same_weights = bool(np.abs(answer.logprobs - first.logprobs).max() < TOLERANCE)
        return has_same_weights and answer.token_ids == first.token_ids and not self.engine.loras


class Engines:
    """Engines by name, for one test after the other; `running_engines` creates it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, makers: Mapping[str, Callable[[], VllmEngine]]) -> None:
        self._loop = loop
        self._makers = makers
        self._engines: dict[str, VllmEngine] = {}
        self._running: dict[str, RunningEngine] = {}

    def get(self, name: str) -> RunningEngine:
        """Return the engine with this name; replace it first if it is broken."""
        running = self._running[name]
        if running.is_sound():
            return running
        self._call(running.engine.close())
        self._call(self._start(name))
        return self._running[name]

    def start(self) -> None:
        """Start all engines in parallel."""
        self._call(self._start(*self._makers))

    def close(self) -> None:
        """Close all engines."""
        self._call(self._close())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self, *names: str) -> None:
        async def start(name: str) -> None:
            engine = self._engines[name] = self._makers[name]()
            await engine.start()
            running = self._running[name] = RunningEngine(engine)
            await running.check()

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(start(name))

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for engine in self._engines.values():
                group.create_task(engine.close())


@contextlib.contextmanager
def running_engines(makers: Mapping[str, Callable[[], VllmEngine]]) -> Iterator[Engines]:
    """Run engines in parallel on an event loop in a thread; at the end, assert that no task and no process remains."""
    # Processes of engines in other fixtures.
    others = multiprocessing.active_children()
    loop_started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> list[str]:
        stop = asyncio.Event()
        loop_started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        return [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]

    with ThreadPoolExecutor(1, thread_name_prefix="engines") as thread:
        served = thread.submit(asyncio.run, serve())
        loop, stop = loop_started.result()
        engines = Engines(loop, makers)
        try:
            with warnings.catch_warnings():
                # Ignore the warnings of third-party code during its import.
                warnings.simplefilter("ignore")
                engines.start()
            yield engines
        finally:
            engines.close()
            loop.call_soon_threadsafe(stop.set)
        tasks_left = served.result()
    assert tasks_left == []
    left = [child for child in multiprocessing.active_children() if child not in others]
    cores = [child for child in left if child.name.startswith("EngineCore")]
    for core in cores:
        core.join(SOON_S)  # vLLM has killed the process, but does not wait for its end
    assert [core for core in cores if core.is_alive()] == []


# A check whether the installed vLLM returns routed experts on this machine; from 0.31 on it does so only on GPUs.


@functools.cache
def no_routing_here() -> str | None:
    """Return why vLLM returns no routed experts here, or None if it returns them."""
    # The environment must be set before `cpu_refusal` imports vLLM.
    set_environment("", None)
    return cpu_refusal()
