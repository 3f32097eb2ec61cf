"""Requests and commands over three servers with faults: `python -m tests.chaos.cluster --seconds 600`.

At any time one server is killed, frozen, or disconnected from the other servers with or without an error. Sometimes a
second server is killed as well. Each result is compared with the undisturbed one.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

import rollbus
from rollbus.bus.client.generation import Generation
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.server import Server
from rollbus.frontend.cli.local.fleet import local_users
from rollbus.schemas.errors import RollbusError
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.run import FLEET, GRACE_S
from tests.chaos.workload import VOCAB_SIZE, make_requests, undisturbed
from tests.support.invariants import assert_equal, observing
from tests.support.nats_cluster import NatsCluster, nats_cluster
from tests.support.processes import print_line, worker_process

ENGINE = SyntheticConfig(step_s=0.01, max_num_seqs=8, vocab_size=VOCAB_SIZE)
NUM_KINDS = 300
"""Number of different requests. They are repeated with other ids."""
MAX_IN_FLIGHT = 48
AWAY_S = 12.0
"""Maximum seconds for which a server is away, longer than an election takes."""
SECOND = 0.15
"""Probability that a second server is killed too."""
MODEL = "synthetic"
PAUSE_S = 6.0
"""Seconds between commands."""
RETRY_S = 0.25
"""Seconds before a failed command is sent again."""


class _Course:
    """One run in progress."""

    def __init__(self, rb: rollbus.Client, cluster: NatsCluster, seconds: float, seed: int) -> None:
        self._rb = rb
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._started = time.monotonic()
        self._ends_at = self._started + seconds
        self._last = self._started
        self._is_whole = True
        self.num_results = 0
        self.gaps: list[tuple[float, bool]] = []
        """Seconds above 1 without a result, and whether two servers were away in that time."""
        self.attempts: Counter[int] = Counter()
        self.commands: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._two_gone_at = 0.0

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    async def run(self) -> None:
        """Send requests and commands and cause faults until the time is over and all results have arrived."""
        requests = make_requests(NUM_KINDS, 0)
        expected = await undisturbed(requests, ENGINE)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._break(), name="chaos.break")
            tasks.create_task(self._command(), name="chaos.command")
            await self._complete(requests, expected)

    def _again(self, requests: list[GenerateRequest]) -> Iterator[GenerateRequest]:
        for number in itertools.count():
            for request in requests:
                if self._is_over:
                    return
                yield msgspec.structs.replace(request, request_id=f"{number}:{request.request_id}")

    async def _complete(self, requests: list[GenerateRequest], expected: Mapping[str, Generation]) -> None:
        seen: set[str] = set()
        async for generation in self._rb.complete_many(self._again(requests), max_in_flight=MAX_IN_FLIGHT):
            assert generation.error is None, f"{generation.request_id}: {generation.error}"
            assert generation.request_id not in seen
            seen.add(generation.request_id)
            assert_equal(generation, expected[generation.request_id.partition(":")[2]])
            self.num_results += 1
            self.attempts[generation.attempts] += 1
            now = time.monotonic()
            if now - self._last > 1.0:
                self.gaps.append((round(now - self._last, 1), self._two_gone_at >= self._last))
            self._last = now

    async def _break(self) -> None:
        while not self._is_over:
            await asyncio.sleep(self._rng.uniform(1, 8))
            index = self._rng.randrange(3)
            kind = self._rng.choice(["killed", "killed", "restarted", "stopped", "parted", "parted silently"])
            away_s = self._rng.choice([0.0, self._rng.uniform(0, AWAY_S)])
            second = (index + 1) % 3 if self._rng.random() < SECOND else None
            print_line(
                f"{time.monotonic() - self._started:6.1f} s  n{index} {kind} for {away_s:.1f} s"
                f"{'' if second is None else f', n{second} killed'}; {self.num_results} results so far"
            )
            self.faults[kind if second is None else f"{kind}, and one killed"] += 1
            await self._strike(index, kind)
            if second is not None:
                self._two_gone_at = time.monotonic()
                await self._cluster.servers[second].kill()
            await asyncio.sleep(away_s)
            if second is not None:
                self._two_gone_at = time.monotonic()
                await self._cluster.servers[second].restart()
            await self._repair(index)
            await self._cluster.ready()

    async def _strike(self, index: int, kind: str) -> None:
        match kind:
            case "killed":
                await self._cluster.servers[index].kill()
            case "restarted":
                await self._cluster.servers[index].stop()
            case "stopped":
                self._cluster.stop(index)
            case _:
                self._cluster.isolate(index, silently=kind == "parted silently")

    async def _repair(self, index: int) -> None:
        self._cluster.go_on()
        await self._cluster.heal()
        if not self._cluster.servers[index].is_running:
            await self._cluster.servers[index].restart()

    async def _command(self) -> None:
        """Pause and resume repeatedly. A fault may interrupt a resume, which is then repeated."""
        while not self._is_over:
            await asyncio.sleep(PAUSE_S)
            await self._give("pause")
            while not await self._give("resume"):
                pass

    async def _give(self, name: str) -> bool:
        try:
            give = self._rb.fleet.pause if name == "pause" else self._rb.fleet.resume
            is_complete = (await give(timeout_s=PAUSE_S)).is_complete
        except RollbusError as error:
            self.commands[f"{name}: {str(error)[:120]}"] += 1
            await asyncio.sleep(RETRY_S)
            return False
        self.commands[f"{name}d"] += is_complete
        return is_complete

    def lines(self) -> list[str]:
        """Return the report of the run."""
        return [
            f"{self.num_results} results, all equal to the undisturbed ones, none twice, none missing",
            f"faults: {dict(self.faults)}",
            f"attempts: {dict(sorted(self.attempts.items()))}",
            f"commands: {dict(self.commands)}",
            f"gaps with one gone: {sorted((gap for gap, two in self.gaps if not two), reverse=True)[:10]}",
            f"gaps with two gone: {sorted((gap for gap, two in self.gaps if two), reverse=True)[:10]}",
        ]


async def run(seconds: float, seed: int, *, stderr: int, is_secure: bool) -> None:
    """Run to the end, and check that nothing remains."""
    arguments = msgspec.to_builtins(ENGINE)
    workers = [f"w{index}" for index in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rollbus-chaos-")))
        users = local_users(folder, FLEET, workers) if is_secure else None
        cluster = await stack.enter_async_context(nats_cluster(users=None if users is None else users.everybody))
        observer = None
        if users is None:
            observer = await stack.enter_async_context(observing(cluster.urls[0], FLEET, num_servers=3))
        else:
            await provision(Server(",".join(cluster.urls), users.admin), FLEET, [MODEL])
        for worker, url in zip(workers, cluster.urls, strict=True):
            options = ["--worker-id", worker, "--log-level", "info"]
            options += [] if users is None else ["--creds", str(users.workers[worker])]
            process = worker_process(url, FLEET, *options, engine_args=arguments, stderr=stderr)
            await stack.enter_async_context(process)
        credentials = None if users is None else users.frontend
        rb = await stack.enter_async_context(
            rollbus.connect(cluster.urls, fleet=FLEET, credentials=credentials, worker_grace_s=GRACE_S)
        )
        await rb.fleet.wait_for_workers(3)
        await rb.fleet.resume()
        if users is None:
            await cluster.replicate()
        course = _Course(rb, cluster, seconds, seed)
        try:
            await course.run()
            if observer is not None:
                await observer.check_at_rest()
        finally:
            for line in course.lines():
                print_line(line)
        await stack.aclose()


def main() -> int:
    """Run the chaos and return 0 if every result was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.cluster", description="Requests over dying servers.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--secure", action="store_true", help="with users, in accounts by role")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="a file for the logs of all")
    args = parser.parse_args()
    with args.log.open("ab") as log:
        logging.basicConfig(filename=args.log, level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
        asyncio.run(run(args.seconds, args.seed, stderr=log.fileno(), is_secure=args.secure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
