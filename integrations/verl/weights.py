"""verl's checkpoint engine `rollbus`: `checkpoint_engine.custom_backend_module=rollbus.integrations.verl.weights`.

Rank 0 of the trainer stores a version and returns at its commit. The other ranks only draw their tensors. Each replica
waits until the workers have loaded the version, and draws no tensors.
"""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from . import NAME
from .options import Options
from .outputs import RolloutFailed
from .sender import Sender, exhaust, new_update


class Receiver(NamedTuple):
    """The replica whose worker this process is."""

    options: Options
    server: str
    """Name of its server actor."""


_receivers: list[Receiver] = []
"""The replica of this process; empty in the trainer."""


def set_receiver(options: Options, server: str) -> None:
    """Record the replica of this process."""
    _receivers[:] = [Receiver(options, server)]


def register() -> None:
    """Register the checkpoint engine with verl."""
    CheckpointEngineRegistry.register(NAME)(RollbusCheckpointEngine)


class RollbusCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Sends weights through the object store of the fleet.

    Args:
        bucket_size: not used; rollbus stores each tensor by itself.
        is_master: True at rank 0 of the trainer.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._sender: Sender | None = None
        self._update = ""
        self._leads = False
        self._servers: list[Any] = []

    def prepare(self) -> dict[str, Any]:
        """Return the options and the server of a replica. The trainer's ranks return nothing."""
        if not _receivers:
            return {}
        receiver = _receivers[0]
        return {"options": asdict(receiver.options), "server": ray.get_actor(receiver.server)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give the trainer the servers of all replicas, and both sides the id of this update."""
        replicas = [found for found in metadata if found]
        if len(replicas) != rollout_world_size or not replicas:
            raise RolloutFailed(
                f"{len(replicas)} of {rollout_world_size} replicas are of rollbus; "
                "allowed: all, with actor_rollout_ref.rollout.name=rollbus"
            )
        update = new_update()
        servers = [found["server"] for found in replicas]
        trainer: dict[str, list[Any]] = {
            "update": [update] * actor_wg_world_size,
            "options": [replicas[0]["options"]] * actor_wg_world_size,
            "servers": [servers] * actor_wg_world_size,
        }
        rollouts: dict[str, list[Any]] = {
            "update": [update] * rollout_world_size,
            "leads": [rank == 0 for rank in range(rollout_world_size)],
        }
        return trainer, rollouts

    def init_process_group(
        self,
        update: str,
        options: dict[str, Any] | None = None,
        servers: list[Any] | None = None,
        leads: bool = False,
    ) -> None:
        """Take what `build_topology` made for this process."""
        self._update = update
        self._leads = leads
        self._servers = list(servers or [])
        if self._is_master and self._sender is None and options is not None:
            self._sender = Sender(Options(**options))

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Store the weights at rank 0, and return its figures at the commit. Other ranks draw their tensors.

        Raises:
            RolloutFailed: the weights were not stored. Generation has resumed with the old version.
        """
        if not self._is_master:
            exhaust(weights)
            return {}
        if self._sender is None:
            raise RolloutFailed("rank 0 of the trainer got no options of the rollout before it sent weights")
        return await self._sender.send(weights, update=self._update, step=global_steps, servers=self._servers)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait until the workers have loaded the weights. Yields nothing.

        Raises:
            RolloutFailed: too few workers loaded the weights. Generation has resumed.
        """
        server = ray.get_actor(_receivers[0].server)
        await server.apply_update.remote(self._update, self._leads)
        nothing: tuple[tuple[str, torch.Tensor], ...] = ()
        for tensor in nothing:
            yield tensor

    def finalize(self) -> None:
        """Forget this update. The connection and the lease stay for the next one."""
        self._update = ""
        self._servers = []


register()
