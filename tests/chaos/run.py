"""A chaos run: requests through a fleet with faults. Each result is compared with the undisturbed one."""

import asyncio
import contextlib
import dataclasses
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

import rollbus
from rollbus.bus.client.generation import Generation
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.presence import WorkerRole
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.faults import Victims, schedule, victims
from tests.chaos.workload import VOCAB_SIZE, make_requests, undisturbed
from tests.support.disagg import until_paired
from tests.support.invariants import assert_equal, check_results, check_stream, observing
from tests.support.processes import worker_process
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import until

FLEET = "chaos"
GRACE_S = 60.0
"""Seconds for a lost request to find a worker, because all workers may be away for a while."""
PREFILL_MIN_TOKENS = 2
"""Lower than the default, because the prompts here are short."""
STREAM_EVERY = 40
"""One of this many short requests is streamed, one after another. All other requests are completed."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run. They determine the requests and the faults, and roughly their timing."""

    num_requests: int = 10_000
    seed: int = 0
    seconds_between_faults: float = 3.0
    num_workers: int = 3
    max_in_flight: int = 128
    step_s: float = 0.004
    """Seconds of an engine step. Requests must run long enough to be hit by faults."""
    max_num_seqs: int = 32
    """Slots of each worker: fewer than the requests in flight, so that some wait in the queue."""
    lease_s: float = 5.0
    """Lease of the workers in seconds."""
    num_prefill: int = 0
    """Number of prefill workers. If it is above 0, all other workers are decode workers."""
    kv_load_s: float = 0.01
    """Seconds of a KV transfer from a prefill worker to a decode worker."""

    @property
    def engine(self) -> SyntheticConfig:
        """Engine configuration of the workers, without their role."""
        return SyntheticConfig(
            step_s=self.step_s, max_num_seqs=self.max_num_seqs, vocab_size=VOCAB_SIZE, kv_load_s=self.kv_load_s
        )

    def role(self, index: int) -> WorkerRole:
        """Return the role of a worker."""
        if not self.num_prefill:
            return "both"
        return "prefill" if index < self.num_prefill else "decode"


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    num_results: int
    num_tokens: int
    attempts: Counter[int]
    """Number of results, each sample counted separately, by their number of attempts."""
    faults: Counter[str]
    counters: dict[str, Any]
    """Counters of the client that are not zero."""
    seconds: float

    def lines(self) -> list[str]:
        """Return the report of the run."""
        return [
            f"{self.num_results} results, all equal to the undisturbed ones, none twice, none missing",
            f"{self.num_tokens} tokens in {self.seconds:.1f} s",
            "faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())),
            "attempts: " + ", ".join(f"{count} took {number}" for number, count in sorted(self.attempts.items())),
            "counters: " + ", ".join(f"{name}={value}" for name, value in self.counters.items()),
        ]


async def run(settings: Settings, *, stderr: int, say: Callable[[str], None]) -> Summary:
    """Run to the end, and check that nothing remains.

    Args:
        stderr: file descriptor for the workers' logs.
        say: function that receives one line for each fault.

    Raises:
        AssertionError: a result is missing, arrived twice, failed or differs from the undisturbed one, or something
            remains.
    """
    requests = make_requests(settings.num_requests, settings.seed)
    engine = settings.engine
    expected = await undisturbed(requests, engine)

    def start_worker(index: int) -> AbstractAsyncContextManager[Process]:
        options = ("--worker-id", f"w{index}", "--lease-s", str(settings.lease_s), "--log-level", "debug")
        arguments = msgspec.to_builtins(msgspec.structs.replace(engine, role=settings.role(index)))
        return worker_process(server.url, FLEET, *options, engine_args=arguments, stderr=stderr)

    async with (
        EmbeddedServer() as server,
        observing(server.url, FLEET) as observer,
        tcp_proxy(server.url) as network,
        victims(server, network, start_worker, settings.num_workers) as suffering,
        rollbus.connect(
            network.url, fleet=FLEET, client="trainer", worker_grace_s=GRACE_S, prefill_min_tokens=PREFILL_MIN_TOKENS
        ) as rb,
    ):
        await until_paired(rb, *(f"w{index}" for index in range(settings.num_workers)))
        course = _Course(rb, expected, legs=2 if settings.num_prefill else 1)
        await course.run(settings, requests, suffering, say)
        await suffering.revive()
        # A client may still count an incarnation that was just killed, but the server does not.
        await until(observer.workers, {f"w{index}" for index in range(settings.num_workers)})
        await observer.check_at_rest()
        return course.summary(suffering.counts)


class _Course:
    """One run in progress."""

    def __init__(self, rb: rollbus.Client, expected: Mapping[str, Generation], *, legs: int) -> None:
        self._rb = rb
        self._expected = expected
        self._legs = legs
        self._results: list[Generation] = []
        self._problems: list[str] = []
        self._started = time.monotonic()
        self._seconds = 0.0

    async def run(
        self, settings: Settings, requests: list[GenerateRequest], suffering: Victims, say: Callable[[str], None]
    ) -> None:
        """Send all requests during faults, and check each result."""
        streamed = [request for request in requests if request.request_id.startswith("short")][::STREAM_EVERY]
        streamed_ids = {request.request_id for request in streamed}
        others = (request for request in requests if request.request_id not in streamed_ids)
        is_done = asyncio.Event()
        async with asyncio.TaskGroup() as trouble:
            trouble.create_task(self._trouble(settings, suffering, say, is_done), name="chaos.trouble")
            async with asyncio.TaskGroup() as serving:
                serving.create_task(self._complete(others, settings.max_in_flight), name="chaos.complete")
                serving.create_task(self._stream(streamed), name="chaos.stream")
            self._seconds = time.monotonic() - self._started
            is_done.set()

        assert self._problems == []
        completed = [request for request in requests if request.request_id not in streamed_ids]
        check_results(self._results, completed, legs=self._legs)

    async def _trouble(
        self, settings: Settings, suffering: Victims, say: Callable[[str], None], is_done: asyncio.Event
    ) -> None:
        faults = schedule(
            settings.seed, num_workers=settings.num_workers, seconds_between=settings.seconds_between_faults
        )
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(fault.after_s):
                        await is_done.wait()
                    return
                say(f"{time.monotonic() - self._started:6.1f} s  {fault}, {len(self._results)} results so far")
                tasks.create_task(suffering.inject(fault), name="chaos.fault")

    async def _complete(self, requests: Iterable[GenerateRequest], max_in_flight: int) -> None:
        async for generation in self._rb.complete_many(requests, max_in_flight=max_in_flight):
            self._results.append(generation)
            self._compare(generation)

    def _compare(self, generation: Generation) -> None:
        """Record a failure or difference and continue, so that the run shows all of them."""
        request_id = generation.request_id
        story = f"{request_id}: attempts={generation.attempts} workers={generation.worker_ids}"
        if generation.error is not None:
            self._problems.append(f"{story} {generation.error}")
            return
        try:
            assert_equal(generation, self._expected[request_id])
        except AssertionError as error:
            self._problems.append(f"{story} {error}")

    async def _stream(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            chunks = [chunk async for chunk in self._rb.generate(request)]
            check_stream(chunks, request)
            tokens = np.concatenate([chunk.token_ids for chunk in chunks])
            np.testing.assert_array_equal(tokens, self._expected[request.request_id].token_ids)

    def summary(self, faults: Counter[str]) -> Summary:
        """Return the summary after the run."""
        children = [child for result in self._results for child in (result, *result.siblings)]
        counters = dataclasses.asdict(self._rb.stats())
        return Summary(
            num_results=len(self._expected),
            num_tokens=sum(len(child.token_ids) for child in children),
            attempts=Counter(child.attempts for child in children),
            faults=faults,
            counters={name: value for name, value in counters.items() if value},
            seconds=self._seconds,
        )
