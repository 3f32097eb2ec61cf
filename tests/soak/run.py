"""A soak run: the same kinds of requests repeatedly under faults.

It compares each result and measures the processes.
"""

import asyncio
import contextlib
import itertools
import os
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import msgspec

import rollbus
from rollbus.bus.client.generation import Generation
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.errors import RollbusError
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.faults import Victims, schedule, victims
from tests.chaos.run import FLEET, GRACE_S
from tests.chaos.workload import VOCAB_SIZE, make_requests, undisturbed
from tests.soak.meter import Meter, Trend
from tests.support.invariants import assert_equal
from tests.support.processes import worker_process
from tests.support.tcp_proxy import tcp_proxy

FAULTS = ("worker killed", "worker stopped", "worker restarted", "server stopped", "client cut", "client frozen")
"""Faults that client, server and the other workers survive without a restart."""
NUM_KINDS = 400
"""Number of different requests. They are repeated with other ids."""
NUM_NAMES = 32
"""Number of ids for each request.

Ids are then repeated, because a client remembers 65,536 ids, and new ids would let it grow for a long time.
"""
PAUSE_S = 5.0
"""Seconds between commands."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    seconds: float = 600.0
    warm_up_s: float = 120.0
    """Seconds before the first measurement: caches fill, and the server stores the ids of two minutes.

    They are included in `seconds`.
    """
    look_every_s: float = 2.0
    seconds_between_faults: float = 5.0
    num_steady: int = 2
    """Number of measured workers, in addition to the one that is killed."""
    max_in_flight: int = 64
    seed: int = 0
    engine: SyntheticConfig = field(
        default_factory=lambda: SyntheticConfig(step_s=0.01, max_num_seqs=24, vocab_size=VOCAB_SIZE)
    )
    lease_s: float = 8.0
    """Longer than a process stalls on a busy machine, and shorter than the longest faults."""


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    num_results: int
    attempts: Counter[int]
    faults: Counter[str]
    num_commands: int
    """Number of commands that all workers applied. A fault interrupted the other commands."""
    trends: list[Trend]

    def lines(self) -> list[str]:
        """Return the report of the run."""
        return [
            f"{self.num_results} results, all equal to the undisturbed ones; {self.num_commands} commands",
            "faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())),
            "attempts: " + ", ".join(f"{count} took {number}" for number, count in sorted(self.attempts.items())),
            *(f"{'flat' if trend.is_flat else 'GROWS'}: {trend}" for trend in self.trends),
        ]


async def run(settings: Settings, *, stderr: int, say: Callable[[str], None]) -> Summary:
    """Run to the end.

    Args:
        stderr: file descriptor for the workers' logs.
        say: function that receives one line for each fault.

    Raises:
        AssertionError: a result failed or differs from the undisturbed one, or a worker without a fault exited.
    """
    requests = make_requests(NUM_KINDS, settings.seed)
    expected = await undisturbed(requests, settings.engine)
    engine_args = msgspec.to_builtins(settings.engine)

    def start_worker(index: int) -> AbstractAsyncContextManager[Process]:
        options = ("--worker-id", f"w{index}", "--lease-s", str(settings.lease_s), "--log-level", "warning")
        return worker_process(server.url, FLEET, *options, engine_args=engine_args, stderr=stderr)

    num_workers = 1 + settings.num_steady
    async with (
        EmbeddedServer() as server,
        tcp_proxy(server.url) as network,
        victims(server, network, start_worker, num_workers) as suffering,
    ):
        async with rollbus.connect(network.url, fleet=FLEET, client="trainer", worker_grace_s=GRACE_S) as rb:
            await rb.fleet.wait_for_workers(num_workers)
            # Only the first worker has faults.
            steady = {f"worker w{index}": pid for index, pid in enumerate(suffering.pids) if index}
            course = _Course(settings, rb, Meter({"client": os.getpid(), "server": server.pid, **steady}))
            await course.run(requests, expected, suffering, say)
        await suffering.revive()
        assert suffering.pids[1:] == list(steady.values())
        # A worker that has just started does not handle the signal to stop yet. A new client counts only workers that
        # run.
        async with rollbus.connect(server.url, fleet=FLEET) as rb:
            await rb.fleet.wait_for_workers(num_workers)
        return course.summary(suffering)


class _Course:
    """One soak run in progress."""

    def __init__(self, settings: Settings, rb: rollbus.Client, meter: Meter) -> None:
        self._settings = settings
        self._rb = rb
        self._meter = meter
        self._started = time.monotonic()
        self._num_results = self._num_commands = 0
        self._attempts: Counter[int] = Counter()

    @property
    def _left_s(self) -> float:
        return self._started + self._settings.seconds - time.monotonic()

    async def run(
        self,
        requests: list[GenerateRequest],
        expected: Mapping[str, Generation],
        suffering: Victims,
        say: Callable[[str], None],
    ) -> None:
        """Send requests during faults. After the time is over, wait for the requests in flight."""
        async with asyncio.TaskGroup() as others:
            background = [
                others.create_task(self._trouble(suffering, say), name="soak.trouble"),
                others.create_task(self._look(), name="soak.look"),
                others.create_task(self._command(), name="soak.command"),
            ]
            await self._complete(requests, expected)
            for task in background:
                await task

    def _again(self, requests: list[GenerateRequest]) -> Iterator[GenerateRequest]:
        for number in itertools.count():
            for request in requests:
                if self._left_s <= 0:
                    return
                yield msgspec.structs.replace(request, request_id=f"{number % NUM_NAMES}:{request.request_id}")

    async def _complete(self, requests: list[GenerateRequest], expected: Mapping[str, Generation]) -> None:
        results = self._rb.complete_many(self._again(requests), max_in_flight=self._settings.max_in_flight)
        async for generation in results:
            assert generation.error is None, f"{generation.request_id}: {generation.error}"
            assert_equal(generation, expected[generation.request_id.partition(":")[2]])
            self._num_results += 1
            self._attempts[generation.attempts] += 1

    async def _trouble(self, suffering: Victims, say: Callable[[str], None]) -> None:
        between = self._settings.seconds_between_faults
        for fault in schedule(self._settings.seed, num_workers=1, seconds_between=between, kinds=FAULTS):
            if fault.after_s >= self._left_s:
                return
            await asyncio.sleep(fault.after_s)
            say(f"{time.monotonic() - self._started:6.1f} s  {fault}, {self._num_results} results so far")
            await suffering.inject(fault)

    async def _look(self) -> None:
        await asyncio.sleep(self._settings.warm_up_s)
        while self._left_s > 0:
            self._meter.look()
            await asyncio.sleep(self._settings.look_every_s)

    async def _command(self) -> None:
        """Pause and resume repeatedly. A fault may interrupt a resume, which is then repeated."""
        while self._left_s > PAUSE_S:
            await asyncio.sleep(PAUSE_S)
            with contextlib.suppress(RollbusError):
                self._num_commands += (await self._rb.fleet.pause(timeout_s=PAUSE_S)).is_complete
            is_resumed = False
            while not is_resumed:
                with contextlib.suppress(RollbusError):
                    is_resumed = (await self._rb.fleet.resume(timeout_s=PAUSE_S)).is_complete
            self._num_commands += 1

    def summary(self, suffering: Victims) -> Summary:
        """Return the summary of the run."""
        trends = self._meter.trends()
        return Summary(self._num_results, self._attempts, suffering.counts, self._num_commands, trends)
