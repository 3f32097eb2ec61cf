"""An elastic run: workers come and go at random while the fleet serves, and everything stays right."""

import asyncio
import logging
import random
import signal
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

import rollbus
from bench.processes import Way
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.control import PauseMode
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from tests.chaos.checkpoints import Checkpoints
from tests.chaos.publisher import FLEET, MODEL
from tests.elastic.load import Load
from tests.elastic.machines import Machines
from tests.elastic.publishing import Publishing, publisher
from tests.support.checkpoints import Shapes, write_adapter
from tests.support.invariants import observing
from tests.support.processes import worker_process

logger = logging.getLogger(__name__)
ENGINE = SyntheticConfig(step_s=0.004, max_num_seqs=8, vocab_size=300, faults=SyntheticFaults(load_s=0.03))
GRACE_S = 60.0
"""Seconds for a lost request to find a worker."""
MIN_WORKERS, MAX_WORKERS = 2, 5
RETRY_S = 0.1


@dataclass(frozen=True)
class Settings:
    """Settings of a run. They determine requests, changes and commands, and roughly their timing."""

    seconds: float = 600.0
    seed: int = 0
    seconds_between_changes: float = 2.0
    seconds_between_versions: float = 5.0
    max_in_flight: int = 48
    """More than the slots of all workers, so that some requests wait in the queue."""
    lease_s: float = 3.0
    step_s: float = ENGINE.step_s


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    results: Counter[str]
    num_tokens: int
    num_mixed: int
    attempts: Counter[int]
    changes: Counter[str]
    refusals: Counter[str]
    """Commands and publications that failed at some worker, for example because it was killed, by their error."""
    num_versions: int

    def lines(self) -> list[str]:
        """Return the report of the run."""
        return [
            f"{self.results.total()} results, all as if undisturbed: {listed(self.results)}",
            f"{self.num_tokens} tokens, {self.num_mixed} results with several of {self.num_versions} versions",
            f"changes: {listed(self.changes)}",
            f"refusals: {listed(self.refusals)}",
            f"attempts: {', '.join(f'{count} took {number}' for number, count in sorted(self.attempts.items()))}",
        ]


def listed(counts: Counter[str]) -> str:
    """Return counts as text."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


class Course:
    """One run in progress."""

    def __init__(
        self, url: str, rb: rollbus.Client, machines: Machines, checkpoints: Checkpoints, adapter: Path, seed: int
    ) -> None:
        self.changes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.publishing = Publishing(url, checkpoints)
        self.has_ended = False
        self._rb = rb
        self._machines = machines
        self._checkpoints = checkpoints
        self._adapter = adapter
        self._rng = random.Random(seed)
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[object]]]] = {
            "join": (3, self._join),
            "leave": (2, self._leave),
            "drained and left": (1, self._drain_and_leave),
            "killed": (3, self._kill),
            "killed and replaced": (2, self._replace),
            "restarted on a command": (3, self._restart),
            "pause": (1, self._pause),
            "flush": (1, lambda: self._command(rb.fleet.flush_cache(preempt=True, timeout_s=20))),
            "adapter loaded": (1, lambda: self._command(rb.fleet.load_lora("a", adapter, upload=True, timeout_s=20))),
            "adapter unloaded": (1, lambda: self._command(rb.fleet.unload_lora("a", timeout_s=20))),
        }

    async def change(self, settings: Settings, say: Callable[[str], None]) -> None:
        """Change the fleet until `has_ended`. Each kind occurs once before any occurs by chance."""
        started, first = time.monotonic(), list(self._kinds)
        self._rng.shuffle(first)
        while not self.has_ended:
            await asyncio.sleep(settings.seconds_between_changes * self._rng.uniform(0.5, 1.5))
            weights = [weight for weight, _ in self._kinds.values()]
            kind = first.pop() if first else self._rng.choices(list(self._kinds), weights)[0]
            await self._kinds[kind][1]()
            self.changes[kind] += 1
            say(f"{time.monotonic() - started:6.1f} s  {kind}: {', '.join(self._machines.names)}")

    async def publish(self, way: Way, seconds_between: float) -> None:
        """Publish changed weights until `has_ended`."""
        while not self.has_ended:
            await asyncio.sleep(seconds_between)
            self._checkpoints.change("few")
            await self.publishing.publish(way)

    def _victim(self) -> str:
        return self._rng.choice(self._machines.names)

    async def _join(self) -> None:
        if len(self._machines.names) < MAX_WORKERS:
            self._machines.join()

    async def _make_room(self) -> None:
        """Let a worker join if another one may not leave."""
        if len(self._machines.names) <= MIN_WORKERS:
            self._machines.join()

    async def _leave(self) -> None:
        await self._make_room()
        await self._machines.leave(self._victim(), signal.SIGTERM)

    async def _drain_and_leave(self) -> None:
        await self._make_room()
        name = self._victim()
        await self._command(self._rb.fleet.drain([name], timeout_s=20))
        await self._machines.leave(name, signal.SIGTERM)

    async def _kill(self) -> None:
        self._machines.send(self._victim(), signal.SIGKILL)

    async def _replace(self) -> None:
        self._machines.join()
        await self._machines.leave(self._victim(), signal.SIGKILL)

    async def _restart(self) -> None:
        await self._command(self._rb.fleet.restart_one_by_one([self._victim()], start_timeout_s=60))

    async def _pause(self) -> None:
        mode: PauseMode = self._rng.choice(("keep", "wait"))
        await self._command(self._rb.fleet.pause(mode=mode, timeout_s=20))
        await asyncio.sleep(self._rng.uniform(0, 0.5))
        while not await self._command(self._rb.fleet.resume(timeout_s=20)):  # noqa: ASYNC110 - it is the command
            await asyncio.sleep(RETRY_S)

    async def _command(self, command: Awaitable[object]) -> bool:
        """Return True if all workers applied a command. A worker that comes or goes meanwhile is a reason to fail."""
        try:
            await command
        except (rollbus.CommandIncomplete, rollbus.NoWorkers, rollbus.InvalidRequest, rollbus.ControlError) as error:
            name = error.ledger.command if isinstance(error, rollbus.CommandIncomplete) else "not sent"
            self.refusals[f"{name}: {type(error).__name__}"] += 1
            logger.warning("%s: %s", name, error)
            return False
        return True


async def run(settings: Settings, folder: Path, *, stderr: int, say: Callable[[str], None]) -> Summary:
    """Run to the end, and check that nothing remains.

    Args:
        folder: empty folder for checkpoints and caches.
        stderr: file descriptor for the workers' logs.
        say: function that receives one line for each change.

    Raises:
        AssertionError: a result is missing, failed or differs, a worker has other weights, or something remains.
    """
    checkpoints, cache = Checkpoints(folder, settings.seed), folder / "machine"
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    pair: Shapes = {f"{module}.lora_A.weight": (2, 64), f"{module}.lora_B.weight": (64, 2)}
    adapter = write_adapter(folder / "adapter", shapes=pair)

    engine = msgspec.to_builtins(replace(ENGINE, step_s=settings.step_s))

    def start(name: str) -> AbstractAsyncContextManager[Process]:
        options = ["--model", str(checkpoints.folders[0]), "--served-model-name", MODEL, "--engine", "synthetic"]
        options += ["--worker-id", name, "--lease-s", str(settings.lease_s), "--cache-dir", str(cache)]
        return worker_process(server.url, FLEET, *options, engine_args=engine, stderr=stderr)

    async with (
        EmbeddedServer() as server,
        observing(server.url, FLEET) as observer,
        rollbus.connect(server.url, fleet=FLEET, client="trainer", worker_grace_s=GRACE_S) as rb,
        asyncio.TaskGroup() as keepers,
    ):
        machines = Machines(rb, keepers, start)
        for _ in range(MIN_WORKERS + 1):
            machines.join()
        await machines.until_all_serve()
        load = Load(rb, settings.seed, ENGINE, checkpoints.folders)
        course = Course(server.url, rb, machines, checkpoints, adapter, settings.seed)
        async with (
            publisher(server.url, "publisher", checkpoints.folders[0]) as way,
            asyncio.TaskGroup() as tasks,
        ):
            await course.publishing.publish(way)
            senders = load.begin(tasks, settings.max_in_flight)
            changing = [
                tasks.create_task(course.change(settings, say), name="elastic.change"),
                tasks.create_task(course.publish(way, settings.seconds_between_versions), name="elastic.publish"),
            ]
            await asyncio.sleep(settings.seconds)
            course.has_ended = True
            await asyncio.wait(changing)
            load.end()
            await asyncio.wait(senders)
            await course.publishing.publish(way)
        await machines.until_all_serve(course.publishing.version)
        checkpoints.check(cache)
        await observer.check_at_rest()
        await machines.stop()
    return Summary(
        load.results,
        load.num_tokens,
        load.num_mixed,
        load.attempts,
        course.changes,
        course.refusals + course.publishing.refusals,
        course.publishing.version,
    )
