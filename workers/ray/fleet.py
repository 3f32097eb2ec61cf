"""`rollbus.ray.Fleet`: starts, scales and stops a fleet on a Ray cluster. All methods block."""

import contextlib
import os
import platform
import time
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Final, Self

from ...schemas.errors import RollbusError
from ...schemas.options import pip_install
from .plan import NAMESPACE, FleetSpec, Versions, check_versions

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as exc:
    raise RollbusError(f"Ray is not installed: {pip_install('ray')}") from exc

CHECK_S: Final = 300.0
"""Seconds for a process on each node, which may install its runtime environment first."""
ASKED_S: Final = 30.0
"""Seconds for an answer of a supervisor that runs."""
HEAD: Final = {"node:__internal_head__": 0.001}
"""Resource of the head node. The supervisor runs there: without this node there is no cluster."""


def connect(address: str | None) -> None:
    """Connect this process to a Ray cluster, unless it is connected.

    Raises:
        RollbusError: there is no cluster at the address, or its versions differ.
    """
    if ray.is_initialized():
        return
    # Ray compares the patch version of Python too by default.
    os.environ.setdefault("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    try:
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise RollbusError(f"cannot connect to Ray at {address or 'auto'}: {' '.join(str(exc).split())}") from exc


def versions(where: str = "this process") -> Versions:
    """Return the versions of this process."""
    return Versions(where, ray.__version__, platform.python_version())


def find(fleet: str) -> Any:
    """Return the supervisor of a fleet, or None."""
    try:
        return ray.get_actor(supervisor_name(fleet), namespace=NAMESPACE)
    except ValueError:
        return None


def supervisor_name(fleet: str) -> str:
    """Return the name of the actor that owns a fleet."""
    return f"rollbus:{fleet}"


def end(supervisor: Any, timeout_s: float) -> None:
    """Stop a fleet and wait until its supervisor has nothing left, then end the supervisor.

    Raises:
        RollbusError: the fleet did not stop in time. It is killed then.
    """
    try:
        ray.get(supervisor.stop.remote(), timeout=ASKED_S)
        ray.get(supervisor.finished.remote(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as exc:
        raise RollbusError(f"the fleet did not stop within {timeout_s:g} s, so it was killed") from exc
    except ray.exceptions.RayActorError:
        # It has ended meanwhile, and Ray has removed what it owned.
        return
    finally:
        ray.kill(supervisor)


@dataclass(kw_only=True)
class Fleet(FleetSpec):
    """A fleet on a Ray cluster, inside `with` or from `start` to `stop`.

        with rollbus.ray.Fleet(model="/models/m", workers=8, gpus_per_worker=1) as fleet:
            fleet.wait_serving()
            with rollbus.sync.connect(fleet.url) as rb: ...

    A program that is connected to Ray uses its own connection. Otherwise the fleet connects to `address`.
    """

    address: str | None = None
    """Address of the Ray cluster. None: $RAY_ADDRESS, or the cluster of this machine."""

    def __post_init__(self) -> None:
        """Validate the options."""
        super().__post_init__()
        self._supervisor: Any = None
        self._running: Any = None
        self.url = ""
        """URL of the NATS servers, with their password. Known after `start`."""
        self.servers = ""
        """Which NATS servers the fleet has, and what their loss means."""

    def __enter__(self) -> Self:
        """Start the fleet."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the fleet, unless it is detached."""
        if not self.detach:
            self.stop()

    def start(self) -> None:
        """Check the cluster, and start NATS and the workers. Return when NATS runs.

        Raises:
            RollbusError: versions differ, the fleet runs already, or NATS did not start.
        """
        connect(self.address)
        check_versions(versions(), self._node_versions())
        # Import here: the actors' modules import the worker.
        from .supervisor import Supervisor

        own = {name.name for name in fields(FleetSpec)}
        spec = {name: value for name, value in asdict(self).items() if name in own}
        options = ray.remote(Supervisor).options(
            name=supervisor_name(self.fleet),
            namespace=NAMESPACE,
            lifetime="detached" if self.detach else None,
            num_cpus=0,
            resources=HEAD,
            runtime_env=dict(self.runtime_env),
            max_restarts=0,
        )
        try:
            self._supervisor = options.remote(spec)
        except ValueError as exc:
            raise RollbusError(self._refusal()) from exc
        self._running = self._supervisor.run.remote()
        described = self._supervisor.describe.remote()
        try:
            # `run` ends first only if NATS does not start.
            ready, _ = ray.wait([described, self._running], num_returns=1)
            if described not in ready:
                ray.get(self._running)
            found = ray.get(described)
        except ray.exceptions.RayError as exc:
            ray.kill(self._supervisor)
            raise _as_ours(exc) from exc
        self.url, self.servers = found["nats"], found["servers"]

    def wait_serving(self, timeout_s: float = 1800.0) -> None:
        """Wait until all workers serve.

        Raises:
            NoWorkers: they do not, within this time.
            RollbusError: the fleet has ended.
        """
        from ...bus.client.sync import connect as connect_bus

        until = time.monotonic() + timeout_s
        with connect_bus(self.url, fleet=self.fleet) as rb:
            rb.fleet.wait_for_workers(len(self.status()), timeout_s=max(until - time.monotonic(), 1.0))

    def scale(self, workers: int) -> None:
        """Change the number of workers while the fleet serves. Workers that leave drain first."""
        self._ask(self._supervisor.scale.remote(workers), self.stop_s + ASKED_S)

    def status(self) -> list[dict[str, Any]]:
        """Return the workers: id, state, node, number of launches, and how the last launch ended."""
        found: list[dict[str, Any]] = self._ask(self._supervisor.status.remote(), ASKED_S)
        return found

    def wait(self) -> None:
        """Wait for the end of the fleet.

        Raises:
            RollbusError: it did not end by `stop`. The message has the reason.
        """
        self._ask(self._running, None)

    def stop(self) -> None:
        """Drain and stop all workers, and leave no actor, placement group or process."""
        if self._supervisor is not None:
            supervisor, self._supervisor = self._supervisor, None
            end(supervisor, self.stop_s + CHECK_S)

    def _ask(self, answer: Any, timeout_s: float | None) -> Any:
        try:
            return ray.get(answer, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as exc:
            raise RollbusError(f"the supervisor of fleet {self.fleet} does not answer") from exc
        except ray.exceptions.RayError as exc:
            raise _as_ours(exc) from exc

    def _refusal(self) -> str:
        where = "an address that it does not tell yet"
        with contextlib.suppress(ray.exceptions.RayError):
            where = ray.get(find(self.fleet).describe.remote(), timeout=ASKED_S)["nats"].rpartition("@")[2]
        return (
            f"fleet {self.fleet} runs already on this Ray cluster, at {where}; end it with `rollbus ray down`, or "
            "choose another --fleet"
        )

    def _node_versions(self) -> list[Versions]:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        # A process that has imported this release must not become an actor after an upgrade.
        ask = ray.remote(max_calls=1)(versions)
        asked = [
            ask.options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
                runtime_env=dict(self.runtime_env),
            ).remote(f"node {node['NodeManagerAddress']}")
            for node in nodes
        ]
        ray.wait(asked, num_returns=len(asked), timeout=CHECK_S)
        found = []
        try:
            for task in asked:
                # The task needs no resources, so only a node that died since it was listed cannot run it.
                with contextlib.suppress(ray.exceptions.TaskUnschedulableError):
                    found.append(ray.get(task, timeout=0))
        except ray.exceptions.RayError as exc:
            raise RollbusError(f"a node cannot run rollbus: {' '.join(str(exc).split())[-500:]}") from exc
        return found


def _as_ours(error: Exception) -> RollbusError:
    """Return the error of the supervisor, without Ray's traceback."""
    cause = getattr(error, "cause", None)
    return RollbusError(str(cause) if cause is not None else " ".join(str(error).split())[-1000:])
