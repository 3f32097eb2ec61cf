"""A soak run: load, new weights and commands for hours, while everything that can die is killed at random.

Three servers with users and TLS, workers, clients, HTTP services and a publisher of weights suffer independent faults,
which follow from the seed. The first worker, client and service are spared, so that their memory can be compared.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

import rollbus
from bench.ways import free_port
from rollbus.bus.auth.credentials import TLS_VARIABLES, Role, Tls, load_credentials
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import Connection, connected
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.nats.server import Server
from rollbus.schemas.errors import RollbusError
from tests.chaos.checkpoints import Checkpoints, assert_fresh_tokens
from tests.chaos.faults import Fault, schedule, stop_for
from tests.chaos.publisher import FLEET, MODEL
from tests.elastic.machines import Machines
from tests.elastic.publishing import Publishing, publisher
from tests.elastic.run import ENGINE, GRACE_S, listed
from tests.soak.client import COUNTS
from tests.soak.meter import Meter, Trend
from tests.support.nats_cluster import NatsCluster, nats_cluster
from tests.support.processes import forked
from tests.support.requests import greedy
from tests.support.tls_server import certificate
from tests.support.waits import patient, until

PARTS: Mapping[str, tuple[float, Mapping[str, tuple[int, float]]]] = {
    # Seconds between faults, and of each kind weight and maximum duration in seconds. Without two servers, nothing is
    # stored.
    "server": (
        15.0,
        {"killed": (5, 12.0), "restarted": (2, 0.0), "stopped": (2, 8.0), "parted": (2, 8.0), "two killed": (1, 6.0)},
    ),
    "worker": (6.0, {"killed": (3, 0.0), "stopped": (2, 10.0), "restarted": (2, 0.0)}),
    "client": (12.0, {"killed": (2, 0.0), "stopped": (1, 8.0)}),
    "service": (12.0, {"killed": (2, 0.0), "stopped": (1, 4.0), "restarted": (1, 0.0)}),
    "publisher": (20.0, {"killed": (2, 0.0), "stopped": (1, 4.0)}),
}
"""The parts of a fleet that suffer. A stopped process gets SIGSTOP, and SIGCONT later; a restarted one SIGTERM."""
NUM = {"worker": 4, "client": 3, "service": 2}
SPARED = 1
"""Processes of each of these kinds without faults: the first ones."""
UPLOAD_BYTES = 256 << 20
RETRY_S = 0.25
COMMAND_S = 8.0
"""Seconds between commands, and for each of them."""
SERVER_HEAP = "96MiB"
"""`GOMEMLIMIT` of each nats-server. In use are 20 MiB after two minutes."""
SHOWN_LINES = 150
"""Lines of a log in the exception, from the first traceback on: a group of exceptions shows its cause last."""
END_S = 300.0
"""Seconds after the last request in which all faults are undone and the publisher's version is recorded."""


def plan(seed: int, part: str, pace: float = 1.0) -> Iterator[Fault]:
    """Yield the faults of one part without end: a pure function of the arguments.

    Args:
        pace: factor for the seconds between faults.
    """
    seconds, kinds = PARTS[part]
    return schedule(f"{seed} {part}", num_workers=60, seconds_between=pace * seconds, kinds=kinds)


@dataclass(frozen=True)
class Settings:
    """Settings of a run. With `num_requests` or `num_versions`, it ends earlier when it has both."""

    seconds: float = 600.0
    num_requests: int = 0
    num_versions: int = 0
    warm_up_s: float = 120.0
    """Seconds before the first measurement, of `seconds`: caches fill, and servers store the ids of two minutes."""
    look_every_s: float = 5.0
    seconds_between_versions: float = 10.0
    pace: float = 1.0
    """Factor for the seconds between faults."""
    in_flight: int = 16
    """Requests that each client keeps open."""
    seed: int = 0
    step_s: float = ENGINE.step_s
    lease_s: float = 8.0
    """Longer than a process stalls on a busy machine, and shorter than the longest faults."""


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    seconds: float
    results: Counter[str]
    attempts: Counter[str]
    num_tokens: int
    num_versions: int
    faults: Counter[str]
    refusals: Counter[str]
    """Commands, publications and HTTP requests that a fault interrupted, and that were repeated."""
    trends: list[Trend]

    def lines(self) -> list[str]:
        """Return the report of the run."""
        attempts = sorted(self.attempts.items(), key=lambda each: int(each[0]))
        return [
            f"{self.results.total()} results in {self.seconds:.0f} s, all as if undisturbed: {listed(self.results)}",
            f"{self.num_tokens} tokens, each of its version; {self.num_versions} versions",
            f"{self.faults.total()} faults: {listed(self.faults)}",
            f"repeated: {listed(self.refusals)}",
            f"attempts: {', '.join(f'{count} took {number}' for number, count in attempts)}",
            *(f"{'flat' if trend.is_flat else 'GROWS'}: {trend}" for trend in self.trends),
        ]


class Course:
    """One run in progress.

    Args:
        machines: the processes of each part in `NUM`.
        urls: the addresses of the HTTP services.
    """

    def __init__(
        self,
        settings: Settings,
        rb: rollbus.Client,
        cluster: NatsCluster,
        machines: Mapping[str, Machines],
        publishing: Publishing,
        checkpoints: Checkpoints,
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.meter = Meter()
        self.services: dict[str, str] = {}
        """Addresses of the HTTP services by name."""
        self.num_by_http = 0
        self.publisher_pid: int | None = None
        self._settings = settings
        self._rb = rb
        self._cluster = cluster
        self._machines = machines
        self._publishing = publishing
        self._checkpoints = checkpoints
        self._started = time.monotonic()
        self._has_ended = asyncio.Event()

    async def run(self, folder: Path, admin: Server, arguments: Sequence[Any], say: Callable[[str], None]) -> None:
        """Let everything happen until the time is over. All faults have been undone then.

        Raises:
            TimeoutError: something still waits `END_S` after the end.
        """
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as tasks:
            for part in PARTS:
                tasks.create_task(self._suffer(part, say), name=f"soak.{part}")
            tasks.create_task(self._publish(arguments), name="soak.publish")
            tasks.create_task(self.command(), name="soak.command")
            tasks.create_task(self._ask_services(), name="soak.http")
            tasks.create_task(self._look(admin), name="soak.look")
            while not self._is_over(folder):  # noqa: ASYNC110 - counts are in files
                await asyncio.sleep(1.0)
            self.end()
            limit.reschedule(asyncio.get_running_loop().time() + patient(END_S))

    def end(self) -> None:
        """Begin no more requests, commands, versions and faults."""
        self._has_ended.set()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def _is_over(self, folder: Path) -> bool:
        if not self.meter.is_enough:  # on a busy machine, measurements take longer
            return False
        wanted = self._settings.num_requests, self._settings.num_versions
        if any(wanted) and self.seconds > 2 * self._settings.warm_up_s:
            results, _, _ = count_results(folder)
            if results.total() >= wanted[0] and self._publishing.version >= wanted[1]:
                return True
        return self.seconds >= self._settings.seconds

    async def _pause(self, seconds: float) -> bool:
        """Wait. Return False as soon as the run has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._has_ended.wait()
        return not self._has_ended.is_set()

    async def _suffer(self, part: str, say: Callable[[str], None]) -> None:
        for fault in plan(self._settings.seed, part, self._settings.pace):
            if not await self._pause(fault.after_s):
                return
            name = await self._strike(part, fault)
            if name is not None:
                self.faults[f"{part} {fault.kind}"] += 1
                say(f"{self.seconds:6.1f} s  {part} {name} {fault.kind} for {fault.away_s:.1f} s")

    async def _strike(self, part: str, fault: Fault) -> str | None:
        """Cause a fault and undo it. Return the name of its victim; None: it does not run now."""
        if part == "server":
            index = fault.victim % 3
            await self._strike_server(index, fault)
            return f"n{index}"
        if part == "publisher":
            name, pid = part, self.publisher_pid
        else:
            spared = sorted(self._machines[part].names)[SPARED:]
            name = spared[fault.victim % len(spared)]
            pid = self._machines[part].pids.get(name)
        if pid is None:
            return None
        if fault.kind == "stopped":
            await stop_for(pid, fault.away_s)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault.kind == "killed" else signal.SIGTERM)
        return name

    async def _strike_server(self, index: int, fault: Fault) -> None:
        struck = [self._cluster.servers[index]]
        match fault.kind:
            case "killed" | "two killed":
                struck += [self._cluster.servers[(index + 1) % 3]] * (fault.kind != "killed")
                for server in struck:
                    await server.kill()
            case "restarted":
                await struck[0].stop()
            case "stopped":
                self._cluster.stop(index)
            case _:
                self._cluster.isolate(index, silently=fault.victim % 2 == 0)
        await asyncio.sleep(fault.away_s)
        self._cluster.go_on()
        await self._cluster.heal()
        for server in struck:
            if not server.is_running:
                await server.restart()
        await self._cluster.ready()

    async def _publish(self, arguments: Sequence[Any]) -> None:
        """Publish changed weights from a process that is started again after its death."""
        while not self._has_ended.is_set():
            async with publisher(*arguments) as way:
                self.publisher_pid = way.pid
                # It was killed, perhaps in the middle of a version.
                with contextlib.suppress(RuntimeError, ConnectionError):
                    while await self._pause(self._settings.seconds_between_versions):
                        self._checkpoints.change("few")
                        await self._publishing.publish(way)
                self.publisher_pid = None

    async def command(self) -> None:
        """Pause, resume and flush repeatedly until the end. A fault may interrupt a command, which is then repeated."""
        fleet = self._rb.fleet
        while await self._pause(COMMAND_S):
            for give in (fleet.pause, fleet.resume, partial(fleet.flush_cache, preempt=True)):
                while not await self.give(give) and await self._pause(RETRY_S):
                    pass

    async def give(self, give: Callable[..., Awaitable[object]]) -> bool:
        """Send a command. Return True if all workers applied it."""
        try:
            await give(timeout_s=COMMAND_S)
        except RollbusError as error:
            self.refusals[f"command {type(error).__name__}"] += 1
            return False
        return True

    async def _ask_services(self) -> None:
        """Send requests to all HTTP services, one after another, and check the answers."""
        rng = random.Random(self._settings.seed)
        async with httpx.AsyncClient(timeout=GRACE_S) as client:
            while await self._pause(RETRY_S):
                request = greedy(rng.randrange(ENGINE.vocab_size), rng.randint(1, 60))
                sampling = {"max_tokens": request.sampling.max_tokens, "temperature": 0, "ignore_eos": True}
                body = {"token_ids": list(map(int, request.prompt_token_ids)), "sampling_params": sampling}
                url = rng.choice([*self.services.values()])
                try:
                    answer = await client.post(f"{url}/inference/v1/generate", json=body)
                except httpx.TransportError as error:
                    self.refusals[f"http {type(error).__name__}"] += 1
                    continue
                if answer.status_code != 200:
                    assert answer.status_code in (502, 503, 504), answer.text
                    self.refusals[f"http {answer.status_code}"] += 1
                    continue
                [choice] = answer.json()["choices"]
                versions, tokens = choice["weight_versions"], choice["token_ids"]
                assert len(tokens) == request.sampling.max_tokens
                await assert_fresh_tokens(versions, tokens, request, self._checkpoints.folders, ENGINE)
                self.num_by_http += 1

    async def _look(self, admin: Server) -> None:
        if not await self._pause(self._settings.warm_up_s):
            return
        async with connected(admin, name="soak") as nats:
            while await self._pause(self._settings.look_every_s):
                servers = [each for each in self._cluster.servers if each.is_running]
                pids = {f"server n{self._cluster.servers.index(each)}": each.pid for each in servers}
                for part, machines in self._machines.items():
                    # The others are often measured while they start.
                    spared = sorted(machines.names)[:SPARED]
                    pids |= {f"{part} {name}": machines.pids[name] for name in spared if name in machines.pids}
                self.meter.look(pids)
                # Between two leaders, JetStream does not answer.
                with contextlib.suppress(RollbusError):
                    states = [each["state"] for each in await streams_of(nats)]
                    if states:
                        count = sum(1 + state["consumer_count"] for state in states)
                        self.meter.add("store", sum(state["bytes"] for state in states), count)


async def streams_of(nats: Connection) -> list[dict[str, Any]]:
    """Return the descriptions of all streams; none if one has no leader now."""
    found = await ask(nats, "STREAM.LIST")
    return [] if found.get("missing") else list(found["streams"])


def count_results(folder: Path) -> tuple[Counter[str], Counter[str], int]:
    """Return the results of all clients by kind, by number of attempts, and their tokens."""
    results, attempts, num_tokens = Counter[str](), Counter[str](), 0
    for file in (folder / COUNTS).iterdir():
        if not file.suffix:
            counted = msgspec.json.decode(file.read_bytes())
            results.update(counted["results"])
            attempts.update(counted["attempts"])
            num_tokens += counted["tokens"]
    return results, attempts, num_tokens


@contextlib.contextmanager
def explained(log: Path) -> Iterator[None]:
    """Raise the first traceback in the log of the processes, or add it to the exception of the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(first_traceback(log) or f"no process has logged a traceback, see {log}")
        raise
    assert not (found := first_traceback(log)), f"a process failed, see {log}\n{found}"


def first_traceback(log: Path) -> str:
    """Return the first traceback in a log, also that of a group of exceptions, or an empty string."""
    _, found, more = log.read_text(errors="replace").partition("Traceback (most recent call last)")
    return "\n".join((found + more).splitlines()[:SHOWN_LINES])


async def run(settings: Settings, folder: Path, *, log: Path, say: Callable[[str], None]) -> Summary:
    """Run to the end, and check that everything has recovered and nothing remains.

    Args:
        folder: empty folder for keys, checkpoints and caches.
        log: file for the logs of all processes.
        say: function that receives one line for each fault.

    Raises:
        AssertionError: a result is missing, failed or differs, a worker has other weights, a process logged a
            traceback, or something remains.
    """
    checkpoints, cache = Checkpoints(folder, settings.seed), folder / "machine"
    (folder / COUNTS).mkdir()
    names = {"worker": "w", "client": "c", "service": "h"}
    roles = {"worker": Role.WORKER, "client": Role.TRAINER, "service": Role.FRONTEND}
    wanted = [(FLEET, roles[part], f"{names[part]}{number}") for part in NUM for number in range(NUM[part])]
    role = (FLEET, Role.PUBLISHER, "publisher")
    wanted += [role, (FLEET, Role.ADMIN, "admin"), (FLEET, Role.FRONTEND, "commander")]
    users = {entry.user.name: entry for entry in ensure_users(folder / "keys", wanted, {role: (MODEL,)})}
    cert, key = certificate(folder, days=7)
    tls = {"cert_file": str(cert), "key_file": str(key)}
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(explained(log))
        patches = stack.enter_context(pytest.MonkeyPatch.context())
        patches.setenv(TLS_VARIABLES["ca"], str(cert))
        # As docs/operate/run.md says: with GOGC 400, a heap grows to five times what is in use, for example the buffer
        # of up to 8 MiB that each stream and Raft log has for its last block. With a limit, only what is in use grows.
        patches.setenv("GOMEMLIMIT", SERVER_HEAP)
        stderr = stack.enter_context(log.open("wb")).fileno()
        cluster = await stack.enter_async_context(nats_cluster(users=[each.user for each in users.values()], tls=tls))
        urls = ",".join(cluster.urls)
        admin = Server(urls, load_credentials(users["admin"].path), Tls(ca=str(cert)))
        await provision(admin, FLEET, [MODEL], upload_bytes=UPLOAD_BYTES)
        ports = {f"h{number}": free_port() for number in range(NUM["service"])}

        engine = replace(ENGINE, step_s=settings.step_s)

        def start(part: str, name: str) -> AbstractAsyncContextManager[Process]:
            creds = str(users[name].path)
            if part == "client":
                arguments = [urls, name, str(folder), str(settings.seed), str(settings.in_flight), creds]
                return forked("tests.soak.client", arguments, streams=(None, stderr, stderr))
            options = ["--nats", urls, "--fleet", FLEET, "--creds", creds]
            if part == "service":
                return forked(
                    "rollbus.frontend.cli.app",
                    ["frontend", "--http", f"127.0.0.1:{ports[name]}", *options],
                    streams=(None, stderr, stderr),
                )
            options += ["--model", str(checkpoints.folders[0]), "--served-model-name", MODEL, "--engine", "synthetic"]
            options += ["--worker-id", name, "--lease-s", str(settings.lease_s), "--cache-dir", str(cache)]
            options += ["--engine-args", msgspec.json.encode(engine).decode(), "--listen-s", "0"]
            return forked("rollbus.workers.__main__", options, streams=(None, stderr, stderr))

        rb = await stack.enter_async_context(
            rollbus.connect(urls, fleet=FLEET, credentials=users["commander"].path, worker_grace_s=GRACE_S)
        )
        keepers = await stack.enter_async_context(asyncio.TaskGroup())
        machines = {part: Machines(rb, keepers, partial(start, part), names[part]) for part in NUM}
        for part, number in NUM.items():
            for _ in range(number):
                machines[part].join()
            if part == "worker":
                await machines[part].until_all_serve()
        publishing = Publishing(admin, checkpoints)
        course = Course(settings, rb, cluster, machines, publishing, checkpoints)
        course.services = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        arguments = urls, "publisher", checkpoints.folders[0], users["publisher"].path
        await course.run(folder, admin, arguments, say)

        async def is_resumed() -> bool:
            return await course.give(rb.fleet.resume)

        # The last faults have killed workers that may not serve yet.
        await until(is_resumed, expected=True)
        async with publisher(*arguments) as way:
            await publishing.publish(way)
        await machines["client"].stop()
        await machines["worker"].until_all_serve(publishing.version)
        checkpoints.check(cache)

        async def num_waiting() -> int:
            async with connected(admin, name="soak") as nats:
                streams = await streams_of(nats)
                queues = [each for each in streams if each["config"]["retention"] == "workqueue"]
                return sum(each["state"]["messages"] for each in queues) if queues else -1

        await until(num_waiting, 0)
        await machines["service"].stop()
        await machines["worker"].stop()
        seconds = course.seconds
    results, attempts, num_tokens = count_results(folder)
    results["http"] = course.num_by_http
    refusals = course.refusals + Counter({f"publish {name}": n for name, n in publishing.refusals.items()})
    return Summary(
        seconds, results, attempts, num_tokens, publishing.version, course.faults, refusals, course.meter.trends()
    )
