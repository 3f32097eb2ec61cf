"""A run through weight versions: each is published during a fault, and afterwards the fleet has it exactly.

    python -m tests.chaos.weights --versions 300 --seed 1

The tensors are random bits of several dtypes, of which none, few or all change. Three workers share the folders of one
machine and serve requests throughout. After each version, the folders have the hashes of whole checkpoints. Each token
names the weight version that produced it, and equals the token of a fresh engine with that version's whole checkpoint.
"""

import asyncio
import itertools
import random
import sys
import time
import zlib
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

import rollbus
from rollbus.bus.client.generation import Generation
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from tests.chaos.checkpoints import Checkpoints, assert_fresh
from tests.chaos.command import run_command
from tests.chaos.faults import Victims, victims
from tests.chaos.publisher import FLEET, MODEL
from tests.chaos.weights_faults import KINDS, Trainer
from tests.support.invariants import observing
from tests.support.processes import print_line, worker_process
from tests.support.requests import greedy
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import until_true

ENGINE = SyntheticConfig(step_s=0.03, max_num_seqs=8, faults=SyntheticFaults(load_s=0.03))
"""Loads and canaries take long enough for a fault to hit them."""
NUM_STREAMS = 2
"""Number of streams that are in flight during the whole run."""
NUM_QUESTIONS = 3
"""Number of requests after each version, sent when every worker has the version."""
GRACE_S = 60.0
"""Seconds for a lost request to find a worker, because all workers may be away for a while."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run. They determine versions and faults, and roughly their timing."""

    num_versions: int = len(KINDS)
    seed: int = 0
    num_workers: int = 3
    lease_s: float = 2.0
    """Lease of the workers in seconds."""


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    num_versions: int
    num_tokens: int
    faults: Counter[str]
    refusals: Counter[str]
    """Failed publications that were repeated, by type of the error."""

    def lines(self) -> list[str]:
        """Return the report of the run."""
        return [
            f"{self.num_versions} versions, all exact; {self.num_tokens} tokens, each of its version",
            "faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())),
            "refusals: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.refusals.items())),
        ]


class Walk:
    """One run in progress.

    Args:
        cache: cache folder of the machine with all workers.
    """

    def __init__(
        self, rb: rollbus.Client, suffering: Victims, trainer: Trainer, checkpoints: Checkpoints, cache: Path
    ) -> None:
        self._rb = rb
        self._suffering = suffering
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._cache = cache
        self._asked: dict[str, GenerateRequest] = {}
        self._results: list[Generation] = []
        self.num_tokens = 0

    async def run(self, settings: Settings, say: Callable[[str], None]) -> None:
        """Publish all versions while requests are served."""
        rng = random.Random(settings.seed)
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._stream(i), name="walk.stream") for i in range(NUM_STREAMS)]
            for number in range(settings.num_versions):
                kind = KINDS[number] if number < len(KINDS) else rng.choice(["nothing", rng.choice(KINDS)])
                # A version without changes has no delta to damage.
                self._checkpoints.change("few" if kind == "delta damaged" else None)
                victim = rng.randrange(settings.num_workers)
                started = time.monotonic()
                version = await self._trainer.publish(kind, victim)
                await self._check(version)
                say(f"version {version}: {kind}, in {time.monotonic() - started:.1f} s")
            for stream in streams:
                stream.cancel()

    async def _check(self, version: int) -> None:
        """Check that every worker has the version, and that all folders and tokens are exact."""
        await self._suffering.revive()
        await until_true(lambda: self._have(version))
        self._checkpoints.check(self._cache)
        for seed in range(NUM_QUESTIONS):
            generation = await self._ask(f"{version}-question-{seed}")
            assert {*generation.weight_versions.tolist()} == {version}
        results, self._results = self._results, []
        for generation in results:
            request = self._asked.pop(generation.request_id)
            await assert_fresh(generation, request, self._checkpoints.folders, ENGINE)
            self.num_tokens += len(generation.token_ids)

    def _have(self, version: int) -> bool:
        """Return True if all current worker processes serve the version."""
        heard = {worker.pid: worker for worker in self._rb.fleet.workers}
        return heard.keys() == {*self._suffering.pids} and all(
            (worker.state, worker.weight_version) == (WorkerState.SERVING, version) for worker in heard.values()
        )

    async def _stream(self, number: int) -> None:
        for serial in itertools.count():
            await self._ask(f"stream-{number}-{serial}")

    async def _ask(self, request_id: str) -> Generation:
        prompt = zlib.crc32(request_id.encode()) % 1000
        request = self._asked[request_id] = greedy(prompt, 10 + prompt % 50, request_id=request_id)
        generation = await self._rb.complete(request)
        self._results.append(generation)
        return generation


async def walk(settings: Settings, folder: Path, *, stderr: int, say: Callable[[str], None]) -> Summary:
    """Run to the end, and check that nothing remains.

    Args:
        folder: empty folder for checkpoints and caches.
        stderr: file descriptor for the workers' logs.
        say: function that receives one line for each version.

    Raises:
        AssertionError: a folder or a token is not that of its version, or something remains.
    """
    checkpoints, cache = Checkpoints(folder, settings.seed), folder / "machine"

    def start(name: str, cache: Path, *more: str) -> AbstractAsyncContextManager[Process]:
        options = ["--model", str(checkpoints.folders[0]), "--served-model-name", MODEL, "--engine", "synthetic"]
        options += ["--worker-id", name, "--lease-s", str(settings.lease_s), "--cache-dir", str(cache), *more]
        arguments = msgspec.to_builtins(ENGINE)
        return worker_process(server.url, FLEET, *options, engine_args=arguments, stderr=stderr)

    async with (
        EmbeddedServer() as server,
        observing(server.url, FLEET) as observer,
        tcp_proxy(server.url) as network,
        victims(server, network, lambda index: start(f"w{index}", cache), settings.num_workers) as suffering,
        rollbus.connect(network.url, fleet=FLEET, client="walker", worker_grace_s=GRACE_S) as rb,
    ):
        await rb.fleet.wait_for_workers(settings.num_workers)
        async with Trainer(rb, server.url, suffering, checkpoints, partial(start, "late")) as trainer:
            course = Walk(rb, suffering, trainer, checkpoints, cache)
            await course.run(settings, say)
            await trainer.check_store()
        await observer.check_at_rest()
        return Summary(settings.num_versions, course.num_tokens, trainer.faults, trainer.refusals)


if __name__ == "__main__":
    sys.exit(run_command("tests.chaos.weights", Settings(), lambda *one: walk(*one[:2], stderr=one[2], say=print_line)))
