"""A whole fleet on this machine: NATS, workers, and a tiny model for who brings none."""

import asyncio
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...bus.auth.tls import TLS_VARIABLES
from ...bus.control.provision import provision
from ...bus.nats.embedded import EmbeddedServer
from ...bus.nats.server import CREDENTIALS_VARIABLE, Server
from .exits import CommandFailed
from .fleet_display import FleetObserver
from .fleet_watch import watch_fleet
from .local_users import LocalUsers
from .processes import ProcessSpec, run_tool, run_workers
from .restarts import RestartRule
from .worker_options import python_env, python_module

__all__ = ["TINY_MOE", "LocalFleet", "check_vllm", "default_state_dir", "make_tiny_moe", "run_fleet", "worker_names"]

TINY_MOE = "tiny-moe"
"""Served name of the model that is made on the spot, and of its folder."""
TINY_MOE_MARKER = "tiny_moe.json"
"""The file in it that says how it was made."""
ANY_PORT = -1
CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
"""Which cores an engine on CPUs computes on. Left to itself each of several takes the first ones, all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleet:
    """What to run."""

    fleet: str = "default"
    model: Path | None = None
    """Folder of the checkpoint; None: an engine that needs none."""
    num_workers: int = 1
    num_prefill: int = 0
    """The last so many of them compute prompts for the others."""
    worker_flags: Sequence[str] = ()
    """More flags of `python -m rollbus.workers`."""
    nats_port: int = ANY_PORT
    start_timeout_s: float = 1800.0
    """Until all workers serve; loading a large model from a slow disk takes many minutes."""
    served_model: str = ""
    """Its served name, for who makes its queue."""
    restarts: RestartRule | None = None
    """How a worker is started again that ends by itself, once all have served; None: it is not."""
    users: LocalUsers | None = None
    """Who may connect; None: everybody, and may do everything."""
    worker_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More variables of each worker by its name, such as its GPUs; the same ones whenever it is started again."""
    worker_ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        """Name the workers."""
        object.__setattr__(self, "worker_ids", worker_names(self.num_workers))

    def spec(self, worker_id: str, nats_url: str) -> ProcessSpec:
        """How to start one of the workers."""
        model = () if self.model is None else ("--model", str(self.model))
        names = ("--nats", nats_url, "--fleet", self.fleet, "--worker-id", worker_id)
        # The ids are our own, and a worker is started again only when the process before it has ended.
        timeout = ("--start-timeout", str(self.start_timeout_s), "--listen-s", "0")
        env = python_env()
        # Those in our own environment are for another server.
        for variable in (CREDENTIALS_VARIABLE, *TLS_VARIABLES.values()):
            env.pop(variable, None)
        if self.users is not None:
            env[CREDENTIALS_VARIABLE] = str(self.users.workers[worker_id])
        cores = core_share(self.worker_ids.index(worker_id), self.num_workers, sorted(os.sched_getaffinity(0)))
        # One list is for one process; an engine that spreads over several shares out its cores itself.
        if cores and not any("parallel_size" in flag for flag in self.worker_flags):
            env.setdefault(CORES_VARIABLE, cores)
        env |= self.worker_env.get(worker_id, {})
        program = python_module("rollbus.workers")
        command = [*program, *names, *timeout, *model, *self._role(worker_id), *self.worker_flags]
        return ProcessSpec(worker_id, command, env)

    def _role(self, worker_id: str) -> tuple[str, ...]:
        if not self.num_prefill:
            return ()
        return ("--role", "prefill" if worker_id in self.worker_ids[-self.num_prefill :] else "decode")


def worker_names(num_workers: int) -> tuple[str, ...]:
    """What the workers of one command are called."""
    return tuple(f"local-{i}" for i in range(num_workers))


def core_share(index: int, num_workers: int, cores: Sequence[int]) -> str:
    """The cores of one of several workers as a comma-separated list; empty when there is nothing to share out."""
    if num_workers == 1 or num_workers > len(cores):
        return ""
    first, past = (len(cores) * i // num_workers for i in (index, index + 1))
    return ",".join(str(core) for core in cores[first:past])


@asynccontextmanager
async def run_fleet(fleet: LocalFleet, observer: FleetObserver) -> AsyncIterator[Server]:
    """Run NATS and the workers while the body runs; yields the NATS server to connect to once all workers serve.

    Args:
        observer: hears what the workers print, announce, and that they end.

    Raises:
        BusBroken: NATS could not be started.
        ExceptionGroup: of `CommandFailed`, when a worker did not come up in time, the last worker or NATS ended by
            itself, and of what the body raises.
    """
    users = fleet.users
    listed = None if users is None else users.everybody
    async with EmbeddedServer(port=fleet.nats_port, users=listed) as server, asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_watch_server(server), name="watch nats-server")
        if users is not None:
            await provision(Server(server.url, users.admin), fleet.fleet, [fleet.served_model])
        login = Server(server.url, None if users is None else users.frontend)
        specs = [fleet.spec(name, server.url) for name in fleet.worker_ids]
        async with (
            watch_fleet(login, fleet.fleet, observer.set_workers) as seen,
            run_workers(specs, observer.add_line, observer.add_end) as workers,
        ):
            await seen.wait_until_serving(fleet.worker_ids, fleet.start_timeout_s)
            workers.can_lose_some, workers.rule = True, fleet.restarts
            yield login
        watch.cancel()


async def _watch_server(server: EmbeddedServer) -> None:
    await server.wait()
    raise CommandFailed(f"nats-server ended by itself; its log:\n{server.log_tail()}")


def check_vllm() -> None:
    """Say what to install before anything is started without it.

    Raises:
        CommandFailed: vLLM is not there.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CommandFailed(
            "vLLM is not installed: pip install 'rollbus[worker]' with a GPU; on a CPU run `make` in a checkout, "
            "or see CONTRIBUTING.md"
        )


def default_state_dir() -> Path:
    """Where files are kept that take time to make: `$XDG_CACHE_HOME/rollbus`, else `~/.cache/rollbus`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rollbus"


async def make_tiny_moe(state_dir: Path, *, seed: int = 0) -> Path:
    """Make the tiny mixture-of-experts model, unless an earlier run did, and return its folder.

    Args:
        seed: of its random weights; those of another seed are in a folder of their own.

    Raises:
        CommandFailed: that failed; the message says why.
    """
    folder = state_dir / (f"{TINY_MOE}-{seed}" if seed else TINY_MOE)
    command = [*python_module("rollbus.workers.engines.vllm.tiny_moe"), "--output", str(folder), "--seed", str(seed)]
    spec = ProcessSpec("making the tiny MoE", command, python_env())
    try:
        await run_tool(spec)
    except CommandFailed:
        if not await asyncio.to_thread((folder / TINY_MOE_MARKER).is_file):
            raise
        # It is one, but another release of rollbus made it in another way.
        await asyncio.to_thread(shutil.rmtree, folder)
        await run_tool(spec)
    return folder
