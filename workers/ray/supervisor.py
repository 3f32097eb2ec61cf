"""The actors of a fleet on Ray: workers, NATS servers, and the one that owns them and starts lost workers again.

Ray restarts no actor of the fleet (`max_restarts=0`): it could start a worker on another node while the old process
still serves. Instead each launch of a worker is a new actor. It has a new worker id, unless the worker ended in order,
as it does on the command `drain --all --one-by-one`, which waits for the same id.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ...bus.logs import set_up
from ...bus.nats.embedded import EmbeddedServer
from ...bus.protocol.fleet.restarts import RestartDelays
from ...schemas.checks import check_int
from ...schemas.errors import EXIT_DUPLICATE_WORKER, DuplicateWorker, InvalidRequest, RollbusError
from ..__main__ import WorkerProcess, configure, parser, serve
from ..worker import Worker
from .plan import MAX_WORKERS, NAMESPACE, FleetSpec, nats_text, shape

logger = logging.getLogger("rollbus.workers.ray")

POLL_S = 0.5
"""Seconds between two looks at nodes and placement groups."""
STARTS_S = 120.0
"""Seconds for the start of the NATS servers."""
USAGE = 2
"""Exit code of a worker with a wrong option, which no restart mends."""


class WorkerActor:
    """One worker. Its engine runs in this actor's process, because vLLM finds a placement group only in an actor."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = list(flags)
        self._process: WorkerProcess | None = None
        self._is_stopping = False

    async def run(self) -> tuple[int, str]:
        """Run the worker to its end. Return the exit code that its process would have, and the reason."""
        try:
            args = parser().parse_args(self._flags)
        except SystemExit:
            return USAGE, f"wrong option; the worker's log has it: {' '.join(self._flags[2:])}"
        set_up(args.log_level.upper(), args.log_format)
        try:
            config, make_engine = await asyncio.to_thread(configure, args)
            if not self._is_stopping:
                self._process = WorkerProcess(config, lambda config: Worker(config, make_engine()))
                await serve(config, self._process.make)
        except asyncio.CancelledError:
            # Only `stop` cancels this task, before the worker is connected.
            if not self._is_stopping:
                raise
        except InvalidRequest as exc:
            return USAGE, exc.message
        except DuplicateWorker as exc:
            return EXIT_DUPLICATE_WORKER, str(exc)
        except RollbusError as exc:
            return 1, str(exc)
        return 0, "stopped"

    async def stop(self) -> None:
        """Drain the worker and stop it. `run` then returns."""
        self._is_stopping = True
        if self._process is not None:
            self._process.stop()


class NatsActor:
    """One NATS server with JetStream. It ends with this actor's process."""

    def __init__(self) -> None:
        self._host = ray.util.get_node_ip_address()
        self._server: EmbeddedServer | None = None
        # Held until the server starts, so that another program does not take the port.
        self._reserved = socket.create_server((self._host, 0))

    async def route(self) -> str:
        """Return the address for the other servers of the cluster."""
        return f"{self._host}:{self._reserved.getsockname()[1]}"

    async def start(self, name: str, password: str, routes: Sequence[str]) -> str:
        """Start the server and return its URL with user and password.

        Args:
            routes: addresses of all servers of the cluster; one: no cluster.
        """
        port = self._reserved.getsockname()[1]
        self._reserved.close()
        login = {"user": "rollbus", "password": password}
        extra: dict[str, Any] = {"server_name": name, "authorization": login}
        if len(routes) > 1:
            peers = [f"nats://rollbus:{password}@{route}" for route in routes]
            listen = f"{self._host}:{port}"
            extra["cluster"] = {"name": "rollbus", "listen": listen, "routes": peers, "authorization": login}
        self._server = EmbeddedServer(host=self._host, extra=extra)
        await self._server.__aenter__()
        return self._server.url.replace("//", f"//rollbus:{password}@")

    async def wait(self) -> str:
        """Wait for the end of the server. Return the end of its log."""
        if self._server is not None:
            await self._server.wait()
        return "" if self._server is None else self._server.log_tail().rpartition("\n")[2]

    async def stop(self) -> None:
        """Stop the server and remove its files."""
        if self._server is not None:
            await self._server.__aexit__(None, None, None)


@dataclass(slots=True)
class Slot:
    """One worker of the fleet, over all its launches."""

    index: int
    launches: int = 0
    id_launch: int = 1
    """Number of the launch that gave the worker its id."""
    state: str = "waiting for resources"
    node: str | None = None
    last_end: str | None = None
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    delays: RestartDelays = field(default_factory=RestartDelays)

    @property
    def worker_id(self) -> str:
        """The id of the current launch."""
        return f"ray-{self.index}-{self.id_launch}"


class Supervisor:
    """Owns the actors and placement groups of one fleet.

    `run` lasts as long as the fleet. All methods run on the event loop of this actor.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        set_up("INFO", "text")
        self._spec = FleetSpec(**spec)
        self._slots: dict[int, Slot] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._alive: frozenset[str] = frozenset()
        self._nats: list[Any] = []
        self._nats_losses: list[str] = []
        self._url = self._spec.nats
        self._num_servers = 0
        self._stopping = asyncio.Event()
        self._is_up = asyncio.Event()
        self._has_ended = asyncio.Event()

    async def finished(self) -> None:
        """Wait until `run` has ended and nothing of the fleet is left but this actor."""
        await self._has_ended.wait()

    async def describe(self) -> dict[str, Any]:
        """Wait until NATS runs. Return the address of the fleet."""
        await self._is_up.wait()
        return {"nats": self._url, "fleet": self._spec.fleet, "servers": nats_text(self._spec, self._num_servers)}

    async def status(self) -> list[dict[str, Any]]:
        """Return the workers: id, state, node, number of launches, and how the last launch ended."""
        told = ("state", "node", "launches", "last_end")
        slots = self._slots.values()
        return [{"worker": slot.worker_id, **{name: getattr(slot, name) for name in told}} for slot in slots]

    async def scale(self, workers: int) -> None:
        """Start workers, or drain and stop those with the highest numbers. Return when the stopped ones have ended."""
        check_int("workers", workers, 0, MAX_WORKERS)
        # The number of a worker that leaves is free when the worker has ended.
        if ending := [self._keepers[slot.index] for slot in self._slots.values() if slot.leaving.is_set()]:
            await asyncio.wait(ending)
        if self._tasks is None or self._stopping.is_set():
            raise RollbusError(f"fleet {self._spec.fleet} is not running")
        for index in range(workers):
            if index not in self._slots:
                slot = self._slots[index] = Slot(index)
                self._keepers[index] = self._tasks.create_task(self._keep(slot), name=f"worker {index}")
        leaving = [slot for slot in self._slots.values() if slot.index >= workers]
        for slot in leaving:
            slot.leaving.set()
        if leaving:
            # A caller that goes away does not end the workers' own tasks.
            await asyncio.wait([self._keepers[slot.index] for slot in leaving])

    async def stop(self) -> None:
        """Drain and stop everything. `run` then returns."""
        self._stopping.set()

    async def run(self) -> str:
        """Run the fleet until `stop`. Return the reason of its end.

        Raises:
            RollbusError: the NATS servers did not start or are lost, or a worker got a wrong option.
        """
        try:
            async with asyncio.timeout(STARTS_S):
                await self._start_nats()
            async with asyncio.TaskGroup() as self._tasks:
                others = [self._tasks.create_task(self._watch_nodes(), name="nodes")]
                others += [self._tasks.create_task(self._watch_nats(nats), name="nats") for nats in self._nats]
                self._is_up.set()
                await self.scale(self._spec.workers)
                await self._stopping.wait()
                for slot in self._slots.values():
                    slot.leaving.set()
                if self._keepers:
                    await asyncio.wait(self._keepers.values())
                for task in others:
                    task.cancel()
        except TimeoutError as exc:
            raise RollbusError(f"NATS did not start within {STARTS_S:g} s") from exc
        except BaseExceptionGroup as group:
            # One cause ends everything, and the caller reads one line.
            raise RollbusError(str(_first(group))) from None
        finally:
            try:
                await self._stop_nats()
            finally:
                self._has_ended.set()
        return "stopped"

    async def _start_nats(self) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._alive = frozenset(node["NodeID"] for node in nodes)
        if self._spec.nats is not None:
            return
        count = self._num_servers = self._spec.nats_servers or (3 if len(nodes) >= 3 else 1)
        if count > len(nodes):
            raise RollbusError(f"nats_servers is 3, and the cluster has {len(nodes)} nodes; allowed: 1")
        # Begin with the node of this actor, without which there is no fleet.
        own = ray.get_runtime_context().get_node_id()
        nodes.sort(key=lambda node: node["NodeID"] != own)
        for i, node in enumerate(nodes[:count]):
            near = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            name = f"rollbus:{self._spec.fleet}:nats-{i}"
            self._nats.append(self._actor(NatsActor, name, near, num_cpus=0).remote())
        password = secrets.token_urlsafe(24)
        routes = [await nats.route.remote() for nats in self._nats]
        starts = [nats.start.remote(f"nats-{i}", password, routes) for i, nats in enumerate(self._nats)]
        urls = [await start for start in starts]
        # Further servers of a list have the login of the first one.
        self._url = ",".join([urls[0], *(url.rpartition("@")[2] for url in urls[1:])])

    async def _watch_nats(self, nats: Any) -> None:
        try:
            end = await nats.wait.remote()
        except ray.exceptions.RayError as exc:
            end = _line(exc)
        self._nats_losses.append(end)
        logger.error("nats.lost left=%d reason=%s", len(self._nats) - len(self._nats_losses), end)
        if 2 * len(self._nats_losses) >= len(self._nats):
            raise RollbusError(
                f"{len(self._nats_losses)} of {len(self._nats)} NATS servers inside the cluster are lost, so the fleet "
                f"ends: {end}"
            )

    async def _stop_nats(self) -> None:
        for nats in self._nats:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(STARTS_S):
                    await nats.stop.remote()
            ray.kill(nats)

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            nodes = await asyncio.to_thread(ray.nodes)
            self._alive = frozenset(node["NodeID"] for node in nodes if node["Alive"])

    async def _keep(self, slot: Slot) -> None:
        """Run one launch of a worker after the other, until the worker leaves the fleet."""
        try:
            while not slot.leaving.is_set():
                began = time.monotonic()
                slot.launches += 1
                code, reason = await self._launch(slot)
                slot.node, slot.last_end = None, reason
                if slot.leaving.is_set():
                    break
                if code == USAGE:
                    raise RollbusError(f"worker {slot.worker_id}: {reason}")
                delay_s = slot.delays.next_s(time.monotonic() - began, was_asked=code == 0)
                slot.state = f"ended; starts again after {delay_s:g} s"
                logger.warning("worker.ended worker=%s delay_s=%s reason=%s", slot.worker_id, delay_s, reason)
                if code != 0:
                    # It may still serve somewhere.
                    slot.id_launch = slot.launches + 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await slot.leaving.wait()
        finally:
            self._slots.pop(slot.index, None)
            self._keepers.pop(slot.index, None)

    async def _launch(self, slot: Slot) -> tuple[int, str]:
        """Run one actor to its end, in a new placement group. Return its exit code and the reason."""
        spec = self._spec
        largest = max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        plan = shape(spec, largest)
        # The name of the last actor is free only after Ray has removed it.
        name = f"rollbus:{spec.fleet}:ray-{slot.index}-{slot.launches}"
        slot.state = "waiting for resources"
        group = placement_group(plan.bundles, strategy=plan.strategy, name=name)
        actor = None
        try:
            nodes = await self._until_placed(group, slot)
            if nodes is None:
                return 0, "stopped"
            bundle = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
            )
            cpus = plan.bundles[0].get("CPU", 0)
            actor = self._actor(WorkerActor, name, bundle, num_cpus=cpus, num_gpus=plan.actor_gpus).remote(
                spec.flags(str(self._url), slot.worker_id, plan)
            )
            slot.state, slot.node = "running", ", ".join(sorted(nodes))
            return await self._until_ended(actor, slot, nodes)
        except ray.exceptions.RayError as exc:
            return 1, _line(exc)
        finally:
            if actor is not None:
                # The worker has stopped, or cannot be asked any more.
                ray.kill(actor)
            remove_placement_group(group)

    def _actor(self, kind: type, name: str, strategy: Any, **resources: float) -> Any:
        """Return what starts an actor of the fleet."""
        return ray.remote(kind).options(
            name=name,
            namespace=NAMESPACE,
            scheduling_strategy=strategy,
            runtime_env=dict(self._spec.runtime_env),
            max_restarts=0,
            **resources,
        )

    async def _until_placed(self, group: Any, slot: Slot) -> frozenset[str] | None:
        """Wait until the group has its nodes, and return them. Return None if the worker leaves before."""
        while not slot.leaving.is_set():
            table = await asyncio.to_thread(placement_group_table, group)
            if table["state"] == "CREATED":
                return frozenset(table["bundles_to_node_id"].values())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await slot.leaving.wait()
        return None

    async def _until_ended(self, actor: Any, slot: Slot, nodes: frozenset[str]) -> tuple[int, str]:
        running = asyncio.wrap_future(actor.run.remote().future())
        stop_at: float | None = None
        while True:
            done, _ = await asyncio.wait([running], timeout=POLL_S)
            if done:
                code, reason = running.result()
                return int(code), str(reason)
            if lost := nodes - self._alive:
                # A worker on several nodes ends as a whole: the rest of its engine cannot compute.
                return 1, f"node {', '.join(sorted(lost))} died"
            if slot.leaving.is_set() and stop_at is None:
                slot.state, stop_at = "draining", time.monotonic() + self._spec.stop_s
                actor.stop.remote()
            if stop_at is not None and time.monotonic() >= stop_at:
                return 1, f"killed: it did not stop within {self._spec.stop_s:g} s"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _line(error: Exception) -> str:
    """Return the error of Ray in one line."""
    return " ".join(str(error).split())[:1000]
