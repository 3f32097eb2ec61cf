"""Decisions of a fleet on Ray, without Ray: options, shapes of placement groups, versions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...schemas.checks import check_float, check_int, check_subject_token
from ...schemas.errors import InvalidRequest, RollbusError
from ...schemas.options import pip_install

NAMESPACE: Final = "rollbus"
"""Namespace of all actors of rollbus on a Ray cluster."""
MAX_WORKERS: Final = 4096
BACKEND: Final = "distributed_executor_backend"


@dataclass(kw_only=True)
class FleetSpec:
    """What a fleet on Ray consists of. The constructor raises `InvalidRequest`."""

    model: str | None = None
    """Folder of the checkpoint on each node, or a name that vLLM downloads. None only for the engine synthetic."""
    workers: int = 1
    gpus_per_worker: int = 0
    """GPUs of each worker. Above the GPUs of every node, vLLM's Ray executor divides the worker between nodes."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray reserves for each worker."""
    fleet: str = "default"
    engine: str = "vllm"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    nats: str | None = None
    """URL of NATS servers outside. None: `nats_servers` servers run inside the cluster."""
    nats_servers: int | None = None
    """1 or 3. None: 3 if the cluster has three nodes, else 1."""
    worker_flags: Sequence[str] = ()
    """Further options of `rollbus worker`."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Runtime environment of all actors of the fleet."""
    detach: bool = False
    """True: the fleet lives until `rollbus ray down`. False: it ends with the program that started it."""
    stop_s: float = 120.0
    """Seconds for a worker to drain and stop before Ray kills it."""

    def __post_init__(self) -> None:
        """Validate names and ranges."""
        check_subject_token("fleet", self.fleet)
        check_int("workers", self.workers, 0, MAX_WORKERS)
        check_int("gpus_per_worker", self.gpus_per_worker, 0, 1024)
        check_float("cpus_per_worker", float(self.cpus_per_worker), 0, 1024)
        check_float("stop_s", float(self.stop_s), 0, 3600)
        if self.engine not in ("vllm", "synthetic"):
            raise InvalidRequest(field="engine", problem=f"is {self.engine!r}", allowed="vllm, synthetic")
        if self.model is None and self.engine == "vllm":
            raise InvalidRequest(field="model", problem="is missing", allowed="a folder that each node has")
        if self.nats_servers not in (None, 1, 3):
            raise InvalidRequest(field="nats_servers", problem=f"is {self.nats_servers!r}", allowed="1, 3")
        if self.nats is not None and self.nats_servers is not None:
            raise InvalidRequest(field="nats_servers", problem="is set, and so is nats", allowed="one of the two")
        for flag in ("--worker-id", "--nats", "--fleet", "--model", "--engine", "--engine-args", "--creds", "--otel"):
            if any(given.partition("=")[0] == flag for given in self.worker_flags):
                raise InvalidRequest(field="worker_flags", problem=f"has {flag}", allowed="other options of a worker")

    def flags(self, nats_url: str, worker_id: str, shape: "Shape") -> list[str]:
        """Return the options of one worker."""
        model = [] if self.model is None else ["--model", self.model]
        args = dict(self.engine_args)
        if self.engine == "vllm" and shape.backend is not None:
            args.setdefault(BACKEND, shape.backend)
        own = ["--nats", nats_url, "--fleet", self.fleet, "--worker-id", worker_id, "--engine", self.engine]
        # No other worker has the id: the last launch with it, if any, has ended in order.
        own += ["--listen-s", "0"]
        return [*own, *model, "--engine-args", json.dumps(args), *self.worker_flags]


@dataclass(frozen=True, slots=True)
class Shape:
    """The placement group of one worker."""

    bundles: list[dict[str, float]]
    strategy: str
    actor_gpus: int
    """GPUs that the actor itself takes from bundle 0. With vLLM's Ray executor none: vLLM's own actors take them."""
    backend: str | None
    """Executor that vLLM must use. vLLM would choose Ray's for several GPUs, because it sees a placement group."""


def shape(spec: FleetSpec, largest_node_gpus: float) -> Shape:
    """Return the placement group of each worker.

    Args:
        largest_node_gpus: GPUs of the node that has the most.
    """
    gpus, cpus = spec.gpus_per_worker, float(spec.cpus_per_worker)
    fits = gpus <= largest_node_gpus
    chosen = spec.engine_args.get(BACKEND)
    if gpus > 1 and (chosen == "ray" or (chosen is None and not fits)):
        # One bundle a GPU, as vLLM's Ray executor requires.
        first = {"GPU": 1.0, **({"CPU": cpus} if cpus else {})}
        strategy = "STRICT_PACK" if fits else "PACK"
        return Shape([first, *({"GPU": 1.0} for _ in range(gpus - 1))], strategy, 0, "ray")
    bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", float(gpus))) if amount}
    # Ray rejects an empty bundle.
    return Shape([bundle or {"CPU": 0.001}], "STRICT_PACK", gpus, "mp" if gpus > 1 else None)


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of a process."""

    where: str
    ray: str
    python: str


def check_versions(driver: Versions, nodes: Sequence[Versions]) -> None:
    """Check that driver and nodes have the same Ray and Python, to the minor version.

    Raises:
        RollbusError: they differ.
    """
    for node in nodes:
        for name, own, other in (("Ray", driver.ray, node.ray), ("Python", driver.python, node.python)):
            if own.split(".")[:2] != other.split(".")[:2]:
                raise RollbusError(
                    f"{name} {own} of {driver.where} and {name} {other} of {node.where} differ; allowed: the same "
                    f"minor version; install {name} {other} here: {pip_install('ray')}"
                )


def nats_text(spec: FleetSpec, servers: int) -> str:
    """Return which NATS servers the fleet has, and what their loss means."""
    if spec.nats is not None:
        return "NATS: outside of the Ray cluster (--nats)"
    if servers == 1:
        return "NATS: one server inside the Ray cluster, for trying: its loss ends the fleet"
    return "NATS: three servers on three nodes: the fleet survives the loss of one"
