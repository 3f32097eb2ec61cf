"""verl's view of the fleet: a replica with one server actor, and the adapter through which verl waits for weights."""

from collections.abc import AsyncIterable
from dataclasses import asdict
from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from ...schemas.errors import InvalidRequest
from .options import Options
from .outputs import RolloutFailed
from .server import RollbusServer
from .weights import set_receiver

PREFIX = "rollbus_server_"


def server_name(replica_rank: int) -> str:
    """Return the name of the server actor of a replica."""
    return f"{PREFIX}{replica_rank}"


class RollbusReplica(RolloutReplica):  # type: ignore[misc]
    """One connection to the fleet. It has no engine and needs no GPU: the workers of the fleet are not verl's."""

    async def init_hybrid(self, worker_group: Any) -> None:
        """Raise `InvalidRequest`: the fleet does not share the trainer's GPUs."""
        raise InvalidRequest(
            "actor_rollout_ref.hybrid_engine", "is set", "False, with trainer.v1.trainer_mode=separate_async"
        )

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> None:
        """Raise `InvalidRequest`, as `init_hybrid`."""
        await self.init_hybrid(worker_group)

    async def init_colocated(self, resource_pool: Any) -> None:
        """Raise `InvalidRequest`, as `init_hybrid`."""
        await self.init_hybrid(None)

    async def init_standalone(self) -> None:
        """Start the server, and the worker that waits for new weights, on CPUs.

        Raises:
            InvalidRequest: the replica is of a reward model or a teacher.
        """
        if self.is_reward_model or self.is_teacher_model:
            raise InvalidRequest("rollout.name", "is rollbus for a reward model or a teacher", "another rollout")
        self.rollout_mode = RolloutMode.STANDALONE
        self.resource_pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"rollbus_weights_{self.replica_rank}",
            use_gpu=False,
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        """Start the server actor, and wait until it is connected and a worker of the fleet serves."""
        path = self.model_config.path
        options = Options.parse(self.config.engine_kwargs, path)
        limits = {
            "prompt": self.config.prompt_length,
            "response": self.config.response_length,
            "max_model_len": self.config.max_model_len or 0,
            "ignore_eos": self.config.ignore_eos,
            "rows": self.config.enable_rollout_routing_replay,
        }
        server = (
            ray.remote(RollbusServer)
            .options(
                name=server_name(self.replica_rank),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
            )
            .remote(asdict(options), limits)
        )
        await server.start.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"rollbus:{options.fleet or 'default'}:{self.replica_rank}"

    def rollout_worker_use_gpu(self) -> bool:
        """Return False: the worker only waits for new weights."""
        return False


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """Waits for weights that the checkpoint engine `rollbus` has sent.

    Args:
        replica_rank: rank of the replica whose worker this process is. -1: this process is a rank of the trainer.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1, **_options: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = True
        if replica_rank >= 0:
            options = Options.parse(self.config.engine_kwargs, self.model_config.path)
            set_receiver(options, server_name(replica_rank))

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the fleet has its own GPUs."""

    async def release(self) -> None:
        """Do nothing: the fleet has its own GPUs."""

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_options: Any) -> None:
        """Wait for the checkpoint engine `rollbus`, which yields no tensors.

        Raises:
            RolloutFailed: too few workers loaded the weights, or the weights are of another checkpoint engine.
        """
        if isinstance(weights, AsyncIterable):
            async for _ in weights:
                break
            else:
                return
        raise RolloutFailed(
            "the weights are not of the checkpoint engine rollbus; allowed: checkpoint_engine.backend=rollbus"
        )
