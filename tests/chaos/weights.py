"""A walk through versions of weights: each is published while something goes wrong, and then the fleet has it exactly.

    python -m tests.chaos.weights --versions 300 --seed 1

The tensors are random bits of several dtypes, of which none, few or all change. Three workers share a machine's folders
and serve requests all the time. After each version the folders have the hashes of whole checkpoints, and each token
bears the version of the weights that made it: it is the token of a fresh engine on that version's whole checkpoint.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
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
from rollbus.workers.engines.synthetic import SyntheticConfig, SyntheticFaults
from tests.chaos.checkpoints import Checkpoints
from tests.chaos.faults import Victims, victims
from tests.chaos.fresh import assert_fresh
from tests.chaos.publisher import FLEET, MODEL
from tests.chaos.weights_faults import KINDS, Trainer
from tests.support.invariants import observing
from tests.support.requests import greedy
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import until_true
from tests.support.worker_process import worker_process

__all__ = ["Settings", "walk"]

ENGINE = SyntheticConfig(step_s=0.003, max_num_seqs=8, faults=SyntheticFaults(load_s=0.03))
"""Loads and canaries take long enough to be met by a fault."""
NUM_STREAMS = 4
"""Requests in flight all the time."""
NUM_QUESTIONS = 3
"""Asked after each version, when every worker has it."""
GRACE_S = 60.0
"""For a lost request to find a worker: all of them may be away for a while."""


@dataclass(frozen=True)
class Settings:
    """How far it goes; versions and faults follow from it, their timing roughly."""

    num_versions: int = 30
    seed: int = 0
    num_workers: int = 3
    lease_s: float = 2.0
    """Of the workers."""


@dataclass(frozen=True)
class Summary:
    """What came of a walk."""

    num_versions: int
    num_tokens: int
    faults: Counter[str]
    refusals: Counter[str]
    """Publications that failed and were made again, by the type of the error."""

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.num_versions} versions, all exact; {self.num_tokens} tokens, each of its version",
            "faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())),
            "refusals: " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.refusals.items())),
        ]


class Walk:
    """One walk under way.

    Args:
        cache: of the machine on which all workers are.
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
        """Go through all versions while requests are served."""
        rng = random.Random(settings.seed)
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._stream(i), name="walk.stream") for i in range(NUM_STREAMS)]
            for number in range(settings.num_versions):
                kind = KINDS[number] if number < len(KINDS) else rng.choice(["nothing", rng.choice(KINDS)])
                # Where nothing changed there is no delta to damage.
                self._checkpoints.change("few" if kind == "delta damaged" else None)
                victim = rng.randrange(settings.num_workers)
                started = time.monotonic()
                version = await self._trainer.publish(kind, victim)
                await self._check(version)
                say(f"version {version}: {kind}, in {time.monotonic() - started:.1f} s")
            for stream in streams:
                stream.cancel()

    async def _check(self, version: int) -> None:
        """Every worker has the version, and nothing else is on the machine or in any token."""
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
        """All workers that live now serve it."""
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
    """Go to the end, and look that nothing is left.

    Args:
        folder: empty, for checkpoints and caches.
        stderr: the file descriptor that takes the workers' logs.
        say: called with one line for each version.

    Raises:
        AssertionError: a folder or a token is not that of its version, or something is left.
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


def main() -> int:
    """Walk; returns 0 if everything was right."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.weights", description="Published weights and faults.")
    parser.add_argument("--versions", type=int, default=defaults.num_versions)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of versions and faults")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="a file for the logs of the workers")
    args = parser.parse_args()
    settings = Settings(num_versions=args.versions, seed=args.seed)
    with args.log.open("ab") as log, tempfile.TemporaryDirectory(prefix="rollbus-walk-") as folder:
        summary = asyncio.run(walk(settings, Path(folder), stderr=log.fileno(), say=_say))
    for line in summary.lines():
        _say(line)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
