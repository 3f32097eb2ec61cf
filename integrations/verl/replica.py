"""verl's view of the fleet: a replica with one server actor, and the adapter through which verl sends weights."""

import os
from collections.abc import AsyncIterable, Iterable
from dataclasses import asdict
from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from ...schemas.errors import InvalidRequest
from .options import Options
from .sender import Sender, exhaust, new_update, wait_all
from .server import RollbusServer

PREFIX = "rollbus_server_"


def server_name(replica_rank: int, kind: str = "") -> str:
    """Return the name of the server actor of a replica. Reward models and teachers have a `kind`."""
    return f"{PREFIX}{kind}{replica_rank}"


class RollbusReplica(RolloutReplica):  # type: ignore[misc]
    """One connection to the fleet. It has no engine and needs no GPU: the workers of the fleet are not verl's."""

    async def init_standalone(self) -> None:
        """Start the server, and the worker that waits for new weights, on CPUs."""
        self.rollout_mode = RolloutMode.STANDALONE
        self.resource_pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix=self._kind)
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"rollbus_weights_{self._kind}{self.replica_rank}",
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
                name=server_name(self.replica_rank, self._kind),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
            )
            .remote(asdict(options), limits)
        )
        await server.start.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"rollbus:{options.fleet or 'default'}:{self._kind}{self.replica_rank}"

    @property
    def _kind(self) -> str:
        kind = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        return f"{kind}{self.name_suffix}_" if kind or self.name_suffix else ""

    def rollout_worker_use_gpu(self) -> bool:
        """Return False: the worker only waits for new weights."""
        return False


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """Sends weights in trainers whose rollout shares the actor's process, or waits for those that were sent.

    Args:
        replica_rank: rank of the replica whose worker this process is. -1: this process is a rank of the trainer.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1, **_options: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.options = Options.parse(self.config.engine_kwargs, self.model_config.path)
        self.replica_rank = replica_rank
        self.is_leader_rank = True
        self._sender: Sender | None = None
        if replica_rank >= 0:
            from .weights import set_receiver

            set_receiver(self.options, server_name(replica_rank))

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the fleet has its own GPUs."""

    async def release(self) -> None:
        """Do nothing: the fleet has its own GPUs."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]] | AsyncIterable[Any],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Send the weights from rank 0, and return when the fleet has loaded them.

        Raises:
            InvalidRequest: the weights are an adapter without its base, or verl's deltas.
            RolloutFailed: the weights were not stored, or too few workers loaded them.
        """
        if isinstance(weights, AsyncIterable):  # of our checkpoint engine, which has waited when it ends
            async for name, _ in weights:
                raise InvalidRequest("weights", f"have the tensor {name!r}", "none from the checkpoint engine rollbus")
            return
        if wire_format != "named_tensors" or options.get("peft_config") is not None:
            problem = "are an adapter" if options.get("peft_config") is not None else f"have the form {wire_format!r}"
            raise InvalidRequest("weights", problem, "whole weights; for LoRA, set model.lora.merge=True")
        if int(os.environ.get("RANK", "0")) != 0:
            exhaust(weights)
            return
        if self._sender is None:
            self._sender = Sender(self.options)
        servers = [ray.get_actor(server_name(rank)) for rank in range(self._num_replicas())]
        update = new_update()
        applied = [server.apply_update.remote(update, rank == 0) for rank, server in enumerate(servers)]
        await self._sender.send(weights, update=update, step=global_steps, servers=servers)
        await wait_all(applied)

    def _num_replicas(self) -> int:
        """Return the number of replicas that verl makes of the ranks of this trainer."""
        size = int(
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        return int(os.environ.get("WORLD_SIZE", "1")) // size
