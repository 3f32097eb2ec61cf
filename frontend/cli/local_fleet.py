"""Runs a whole fleet on this machine: NATS, workers and, if the user has no model, a tiny model."""

import asyncio
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...bus.auth.credentials import load_credentials
from ...bus.auth.tls import TLS_VARIABLES
from ...bus.control.provision import provision
from ...bus.nats.embedded import EmbeddedServer
from ...bus.nats.server import CREDENTIALS_VARIABLE, Server
from ...schemas.install import pip_install
from ...schemas.presence import WorkerPresence
from .exits import CommandFailed
from .fleet_display import FleetObserver
from .fleet_watch import watch_fleet
from .local_users import LocalUsers
from .processes import ProcessSpec, run_tool, run_workers
from .restarts import RestartRule
from .start_announcer import StartAnnouncer, is_announcement
from .worker_options import python_env, python_module

__all__ = ["TINY_MOE", "LocalFleet", "check_vllm", "default_state_dir", "make_tiny_moe", "run_fleet", "worker_names"]

TINY_MOE = "tiny-moe"
"""Served name of the tiny model that `make_tiny_moe` creates, and name of its folder."""
TINY_MOE_MARKER = "tiny_moe.json"
"""File in that folder that records how the model was created."""
ANY_PORT = -1
CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
"""Variable with the cores on which an engine on CPUs computes. Without it, all engines use the same first cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleet:
    """Description of the fleet to run."""

    fleet: str = "default"
    model: Path | None = None
    """Folder of the checkpoint. None: the engine needs no checkpoint."""
    num_workers: int = 1
    num_prefill: int = 0
    """Number of prefill workers. They are the last workers, and the others are decode workers."""
    worker_flags: Sequence[str] = ()
    """Additional flags of `python -m rollbus.workers`."""
    nats_port: int = ANY_PORT
    start_timeout_s: float = 1800.0
    """Seconds until all workers must serve. Loading a large model from a slow disk takes many minutes."""
    served_model: str
    """Served name of the model. With `users`, the admin creates the queue of this name."""
    restarts: RestartRule | None = None
    """Rule for restarts of workers that exit unexpectedly after all workers have served. None: no restarts."""
    users: LocalUsers | None = None
    """Users that may connect. None: every program may connect and has all permissions."""
    worker_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Additional variables of each worker by its name, for example its GPUs. A restart uses the same variables."""
    worker_ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        """Name the workers."""
        object.__setattr__(self, "worker_ids", worker_names(self.num_workers))

    def spec(self, worker_id: str, nats_url: str) -> ProcessSpec:
        """Return how to start a worker."""
        model = () if self.model is None else ("--model", str(self.model))
        names = ("--nats", nats_url, "--fleet", self.fleet, "--worker-id", worker_id)
        # --listen-s 0: a worker need not look for another worker with its id. This command assigns the ids and restarts
        # a worker only after its process has ended.
        timeout = ("--start-timeout", str(self.start_timeout_s), "--listen-s", "0")
        env = python_env()
        # The credentials in the environment of this process are for another server.
        for variable in (CREDENTIALS_VARIABLE, *TLS_VARIABLES.values()):
            env.pop(variable, None)
        if self.users is not None:
            env[CREDENTIALS_VARIABLE] = str(self.users.workers[worker_id])
        cores = core_share(self.worker_ids.index(worker_id), self.num_workers, sorted(os.sched_getaffinity(0)))
        # The list of cores applies to one process. An engine with several processes divides its cores itself.
        if cores and not any("parallel_size" in flag for flag in self.worker_flags):
            env.setdefault(CORES_VARIABLE, cores)
        env |= self.worker_env.get(worker_id, {})
        program = python_module("rollbus.workers")
        command = [*program, *names, *timeout, *model, *self._role(worker_id), *self.worker_flags]
        return ProcessSpec(worker_id, command, env)

    def announcer(self, tasks: asyncio.TaskGroup, nats_url: str) -> StartAnnouncer:
        """Return the announcer of the workers that start."""

        def login(worker: str) -> Server:
            return Server(nats_url, None if self.users is None else load_credentials(self.users.workers[worker]))

        model = self.served_model
        return StartAnnouncer(tasks, login, fleet=self.fleet, model=model, start_timeout_s=self.start_timeout_s)

    def _role(self, worker_id: str) -> tuple[str, ...]:
        if not self.num_prefill:
            return ()
        return ("--role", "prefill" if worker_id in self.worker_ids[-self.num_prefill :] else "decode")


def worker_names(num_workers: int) -> tuple[str, ...]:
    """Return the names of the workers of one command."""
    return tuple(f"local-{i}" for i in range(num_workers))


def core_share(index: int, num_workers: int, cores: Sequence[int]) -> str:
    """Return the cores of one worker as a comma-separated list.

    The list is empty for a single worker, or if there are more workers than cores.
    """
    if num_workers == 1 or num_workers > len(cores):
        return ""
    first, past = (len(cores) * i // num_workers for i in (index, index + 1))
    return ",".join(str(core) for core in cores[first:past])


@asynccontextmanager
async def run_fleet(fleet: LocalFleet, observer: FleetObserver) -> AsyncIterator[Server]:
    """Run NATS and the workers while the body runs. Yield the address and login of NATS after all workers serve.

    Args:
        observer: receives the lines, the presence and the end of the workers.

    Raises:
        BusBroken: NATS could not be started.
        ExceptionGroup: contains the errors of the body. It also contains `CommandFailed` if a worker did not serve in
            time, or if NATS or the last worker exited unexpectedly.
    """
    users = fleet.users
    listed = None if users is None else users.everybody
    async with EmbeddedServer(port=fleet.nats_port, users=listed) as server, asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_watch_server(server), name="watch nats-server")
        if users is not None:
            await provision(Server(server.url, users.admin), fleet.fleet, [fleet.served_model])
        login = Server(server.url, None if users is None else users.frontend)
        specs = [fleet.spec(name, server.url) for name in fleet.worker_ids]
        announcer = fleet.announcer(tasks, server.url)

        def on_presence(seen: Sequence[WorkerPresence]) -> None:
            announcer.on_presence(seen)
            observer.set_workers([presence for presence in seen if not is_announcement(presence)])

        try:
            async with (
                watch_fleet(login, fleet.fleet, on_presence) as seen,
                run_workers(specs, observer.add_line, observer.add_end, announcer=announcer) as workers,
            ):
                await seen.wait_until_serving(fleet.worker_ids, fleet.start_timeout_s)
                workers.can_lose_some, workers.rule = True, fleet.restarts
                yield login
        finally:
            announcer.end_all()
        watch.cancel()


async def _watch_server(server: EmbeddedServer) -> None:
    await server.wait()
    raise CommandFailed(f"nats-server exited unexpectedly; its log:\n{server.log_tail()}")


def check_vllm() -> None:
    """Check that vLLM is installed, before any process starts.

    Raises:
        CommandFailed: vLLM is not installed. The message explains how to install it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CommandFailed(
            f"vLLM is not installed: {pip_install('worker')} with a GPU; on a CPU run `make` in a checkout, "
            "or see CONTRIBUTING.md"
        )


def default_state_dir() -> Path:
    """Return the folder for files that take time to create: `$XDG_CACHE_HOME/rollbus`, else `~/.cache/rollbus`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rollbus"


async def make_tiny_moe(state_dir: Path, *, seed: int = 0) -> Path:
    """Create the tiny mixture-of-experts model, unless an earlier run created it. Return its folder.

    Args:
        seed: seed of the random weights. Each seed has its own folder.

    Raises:
        CommandFailed: the model could not be created. The message has the reason.
    """
    folder = state_dir / (f"{TINY_MOE}-{seed}" if seed else TINY_MOE)
    command = [*python_module("rollbus.workers.engines.vllm.tiny_moe"), "--output", str(folder), "--seed", str(seed)]
    spec = ProcessSpec("making the tiny MoE", command, python_env())
    try:
        await run_tool(spec)
    except CommandFailed:
        if not await asyncio.to_thread((folder / TINY_MOE_MARKER).is_file):
            raise
        # The folder has a tiny model, but another release of rollbus created it differently.
        await asyncio.to_thread(shutil.rmtree, folder)
        await run_tool(spec)
    return folder
