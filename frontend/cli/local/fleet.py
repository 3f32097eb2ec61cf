"""Runs a whole fleet on this machine: NATS, its users, workers and, if the user has no model, a tiny model.

The GPUs of the machine are divided among the workers. CUDA shows a process the GPUs that `CUDA_VISIBLE_DEVICES` lists,
in that order, and vLLM computes on the first of them. So each worker gets a different list.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

from ....bus.auth.credentials import TLS_VARIABLES, Role, User, load_credentials
from ....bus.auth.users import ensure_users
from ....bus.client.presence import PresenceWatcher
from ....bus.control.updates import provision
from ....bus.nats.connection import connected, subscribe
from ....bus.nats.embedded import EmbeddedServer
from ....bus.nats.server import CREDENTIALS_VARIABLE, Server
from ....bus.subjects import Subjects
from ....schemas.options import ON_CPU, computes_on_cpu, pip_install
from ....schemas.presence import WorkerPresence, WorkerState
from ..console import note
from ..exits import CommandFailed, ExitCode, WrongUsage
from ..options import python_env, python_module
from .display import FleetObserver
from .processes import ProcessSpec, RestartRule, StartAnnouncer, is_announcement, run_tool, run_workers

EXPIRE_EVERY_S: Final = 1.0
"""Seconds between two checks for expired leases. Workers publish presence at the same interval."""


@asynccontextmanager
async def watch_fleet(
    server: Server, fleet: str, on_presence: Callable[[Sequence[WorkerPresence]], None]
) -> AsyncIterator[PresenceWatcher]:
    """Watch the presence of a fleet's workers while the body runs.

    The watcher is not a client: it publishes no presence, so workers do not know of it.

    Args:
        on_presence: called with the live workers at each presence of a worker.

    Raises:
        BusBroken: no NATS server answers.
    """

    async def expire() -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            watcher.expire()

    async with connected(server, name="rollbus up") as nats:
        subjects = Subjects(fleet)
        watcher = PresenceWatcher(
            nats, subjects, lambda _: None, lambda: None, on_heard=lambda _: on_presence(watcher.table.workers())
        )
        await subscribe(nats, subjects.presences, watcher.receive)
        async with asyncio.TaskGroup() as tasks:
            expiring = tasks.create_task(expire(), name="expire leases")
            yield watcher
            expiring.cancel()


async def _until_serving(watcher: PresenceWatcher, workers: Sequence[str], timeout_s: float) -> None:
    """Wait until these workers serve.

    Raises:
        CommandFailed: some do not within `timeout_s` seconds. The message has their states.
    """

    def num_serving() -> int:
        live = watcher.table.workers()
        return sum(worker.state is WorkerState.SERVING and worker.worker in workers for worker in live)

    if not await watcher.wait_until(lambda: num_serving() == len(workers), timeout_s):
        raise CommandFailed(
            f"{num_serving()} of {len(workers)} workers serve after {timeout_s:g} s"
            f"{watcher.snapshot.describe_others(None)}",
            ExitCode.TIMEOUT,
        )


VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
DRIVER_ORDER: Final = "PCI_BUS_ID"
"""Order of the driver's list. On a machine with GPUs of several kinds, the default order of CUDA is different."""
NO_DEVICES: Final = frozenset({"", "-1", "none", "void", "nodevfiles"})
"""Values that mean no GPU. The names come from NVIDIA's container runtime and from Slurm."""
DEVICE: Final = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")
DRIVER_TIMEOUT_S: Final = 30.0
"""Seconds to wait for the driver. It first initializes GPUs that no process uses: some seconds for eight GPUs."""
SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
"""Engine arguments of vLLM. The product of their values is the number of GPUs of an engine."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs for workers, as entries of `CUDA_VISIBLE_DEVICES`, and the name of the source that lists them."""

    devices: tuple[str, ...]
    source: str

    @classmethod
    def from_variable(cls, value: str) -> "Gpus":
        """Parse a value of `CUDA_VISIBLE_DEVICES`: indices, or UUIDs of GPUs or of MIG devices.

        Raises:
            CommandFailed: an entry has another form, or occurs twice.
        """
        devices: tuple[str, ...] = ()
        if value.strip().lower() not in NO_DEVICES:
            devices = tuple(entry.strip() for entry in value.split(","))
        for i, device in enumerate(devices):
            if not DEVICE.fullmatch(device):
                allowed = "indices, GPU-... and MIG-... with commas between them, or nothing for no GPU"
                raise WrongUsage(f"${VISIBLE_DEVICES} has {device!r}; allowed: {allowed}")
            if device in devices[:i]:
                raise WrongUsage(f"${VISIBLE_DEVICES} has {device!r} twice")
        return cls(devices, f"${VISIBLE_DEVICES}")

    @classmethod
    def from_driver(cls, listing: str) -> "Gpus":
        """Parse the output of `nvidia-smi -L`. MIG devices replace the GPU that is divided into them."""
        found: dict[str, list[str]] = {}
        for line in listing.splitlines():
            if gpu := re.match(r"GPU (\d+):", line):
                found[gpu[1]] = []
            elif (mig := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line)) and found:
                found[[*found][-1]].append(mig[1])
        return cls(tuple(device for index, parts in found.items() for device in parts or [index]), "nvidia-smi")

    def environment(self, share: Sequence[str]) -> dict[str, str]:
        """Return the environment variables of a process that may see only the GPUs in `share`."""
        # If the user set the list, its indices count in the order of devices that the user chose.
        order = {} if self.source != "nvidia-smi" else {DEVICE_ORDER: DRIVER_ORDER}
        return {VISIBLE_DEVICES: ",".join(share), **order}


def find_gpus(environment: Mapping[str, str]) -> Gpus:
    """Return the GPUs of `CUDA_VISIBLE_DEVICES`. If it is not set, return the GPUs that the driver lists.

    Without `nvidia-smi` there are no GPUs.

    Raises:
        CommandFailed: the variable has a wrong entry, or the driver does not answer.
    """
    value = environment.get(VISIBLE_DEVICES)
    if value is not None:
        return Gpus.from_variable(value)
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=DRIVER_TIMEOUT_S
        )
    except FileNotFoundError:
        return Gpus((), "nvidia-smi, which is not installed")
    except (OSError, subprocess.SubprocessError) as exc:
        said = getattr(exc, "stdout", None) or getattr(exc, "stderr", None) or exc
        raise CommandFailed(
            f"`nvidia-smi -L` failed: {str(said).strip()}; set ${VISIBLE_DEVICES}, empty for no GPU"
        ) from exc
    return Gpus.from_driver(done.stdout)


def gpus_per_engine(engine_args: str | None) -> int:
    """Return the number of GPUs that an engine with these arguments uses.

    Args:
        engine_args: fields of vLLM's `AsyncEngineArgs` as a JSON object. None: no fields.

    Raises:
        CommandFailed: one of `SIZES` is not a positive integer.
    """
    given = json.loads(engine_args or "{}")
    sizes = {name: given.get(name, 1) for name in SIZES}
    # Count only the part of the engine on this machine, if the engine uses several machines.
    sizes["data_parallel_size"] = given.get("data_parallel_size_local") or sizes["data_parallel_size"]
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise WrongUsage(f"--engine-args: {name} is {size!r}; allowed: integers from 1")
    return prod(sizes.values())


def gpu_shares(gpus: Gpus, workers: Sequence[str], each: int) -> dict[str, tuple[str, ...]]:
    """Return the GPUs of each worker. Each worker gets `each` GPUs, and no GPU belongs to two workers.

    Raises:
        CommandFailed: there are too few GPUs.
    """
    devices = gpus.devices
    if not devices:
        raise WrongUsage(f"--gpus-per-worker {each}: no GPU listed by {gpus.source}")
    needed = len(workers) * each
    if needed > len(devices):
        plural = "s" * (len(workers) > 1), "s" * (each > 1)
        raise WrongUsage(
            f"{len(workers)} worker{plural[0]} with {each} GPU{plural[1]} each need {needed} GPUs, but "
            f"{gpus.source} lists {len(devices)} ({', '.join(devices)}); allowed: at most {len(devices) // each} "
            "workers, including prefill workers, or --gpus-per-worker 0, with which all workers see all GPUs"
        )
    return {name: devices[i * each : (i + 1) * each] for i, name in enumerate(workers)}


def divide_gpus(args: argparse.Namespace, workers: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the variables that give each worker its own GPUs, and print the GPUs of each worker on stderr.

    The result is empty if the GPUs are not divided.

    Args:
        args: the options `gpus_per_worker`, `engine` and `engine_args`.

    Raises:
        CommandFailed: there are too few GPUs, or an engine needs a different number of GPUs than the option states.
    """
    each: int | None = args.gpus_per_worker
    needs_gpus = args.engine == "vllm" and not computes_on_cpu()
    if each == 0 or (each is None and not needs_gpus):
        return {}
    if args.engine == "vllm" and not needs_gpus:
        raise WrongUsage(f"--gpus-per-worker {each}: {ON_CPU}")
    gpus = find_gpus(os.environ)
    if each is None and not gpus.devices:
        return {}
    needed = gpus_per_engine(args.engine_args) if needs_gpus or each is None else each
    if each not in (None, needed):
        raise WrongUsage(
            f"--gpus-per-worker {each}: an engine with these --engine-args uses {needed} GPUs, the product of "
            f"{', '.join(SIZES)}; allowed: the same number, or no --gpus-per-worker"
        )
    shares = gpu_shares(gpus, workers, needed)
    shown = [f"{name} has {', '.join(share)}" for name, share in shares.items()]
    if unused := gpus.devices[len(workers) * needed :]:
        shown.append(f"unused: {', '.join(unused)}")
    note(f"GPUs of {gpus.source}: {'; '.join(shown)}")
    return {name: gpus.environment(share) for name, share in shares.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUsers:
    """The NATS users of a local fleet and their credentials."""

    everybody: tuple[User, ...]
    """All users that the server accepts."""
    workers: Mapping[str, Path]
    """Credentials file of each worker."""
    others: Mapping[str, Path]
    """Credentials file of each role except worker and publisher. The admin creates the queue, the user frontend is that
    of the HTTP service and of this command, and the others are for the user of the command."""


def local_users(folder: Path, fleet: str, workers: Sequence[str]) -> LocalUsers:
    """Create the users that are missing in `folder`: one for each worker, and one for each other role but publisher.

    Raises:
        BusBroken: the folder holds other files, or the key of a user is missing.
        OSError: the folder cannot be read or written.
    """
    single = tuple(role for role in Role if role not in {Role.WORKER, Role.PUBLISHER})
    listed = [(fleet, role, str(role)) for role in single] + [(fleet, Role.WORKER, name) for name in workers]
    entries = ensure_users(folder, listed)
    paths = {(entry.user.role, entry.user.name): entry.path for entry in entries}
    return LocalUsers(
        everybody=tuple(entry.user for entry in entries),
        workers={name: paths[Role.WORKER, name] for name in workers},
        others={str(role): paths[role, str(role)] for role in single},
    )


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

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The names of the workers."""
        return worker_names(self.num_workers)

    def spec(self, worker_id: str, nats_url: str) -> ProcessSpec:
        """Return how to start a worker."""
        model = () if self.model is None else ("--model", str(self.model))
        names = ("--nats", nats_url, "--fleet", self.fleet, "--worker-id", worker_id)
        # --listen-s 0: a worker need not look for another worker with its id. This command assigns the ids and restarts
        # a worker only after its process has ended.
        # A short --drain-s: all workers end together, so no other worker takes over their requests.
        timeout = ("--start-timeout", str(self.start_timeout_s), "--listen-s", "0", "--drain-s", "2")
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

    def server(self, url: str, *, worker: str | None = None, role: str = "frontend") -> Server:
        """Return the server with the login of a worker, or else of the user of a role."""
        if self.users is None:
            return Server(url)
        path = self.users.others[role] if worker is None else self.users.workers[worker]
        return Server(url, load_credentials(path))

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
            await provision(fleet.server(server.url, role="admin"), fleet.fleet, [fleet.served_model])
        login = fleet.server(server.url)
        specs = [fleet.spec(name, server.url) for name in fleet.worker_ids]
        announcer = StartAnnouncer(
            tasks,
            lambda worker: fleet.server(server.url, worker=worker),
            fleet=fleet.fleet,
            model=fleet.served_model,
            start_timeout_s=fleet.start_timeout_s,
        )

        def on_presence(seen: Sequence[WorkerPresence]) -> None:
            announcer.on_presence(seen)
            observer.set_workers([presence for presence in seen if not is_announcement(presence)])

        try:
            async with (
                watch_fleet(login, fleet.fleet, on_presence) as watcher,
                run_workers(specs, observer.add_line, observer.add_end, announcer=announcer) as workers,
            ):
                await _until_serving(watcher, fleet.worker_ids, fleet.start_timeout_s)
                workers.can_lose_some, workers.rule = True, fleet.restarts
                yield login
        finally:
            announcer.end()
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
