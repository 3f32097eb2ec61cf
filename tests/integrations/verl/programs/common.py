"""What the programs share: verl's configuration, a small Ray, and the trainer's side of an update."""

import os
import sys
from pathlib import Path

import ray
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs

PROMPTS = ["one", "two and two", "a longer prompt of several words", "what is the capital of the country"]


def start_ray(num_cpus=8, num_gpus=0):
    """Start a Ray of this process alone (K48), and have its workers find the programs."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=100 * 1024**2,
        log_to_driver="--log" in sys.argv,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}},
        _system_config={"prestart_worker_first_driver": False, "worker_niceness": 0},
    )


def make_config(url, fleet, checkpoint, *overrides):
    """Return the configuration of verl's trainer, with what the guide sets and the sizes of a tiny model."""
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        return compose(
            config_name="ppo_trainer",
            overrides=[
                "actor_rollout_ref.hybrid_engine=False",
                "actor_rollout_ref.rollout.name=rollbus",
                f"+actor_rollout_ref.rollout.engine_kwargs.rollbus.url={url}",
                f"+actor_rollout_ref.rollout.engine_kwargs.rollbus.fleet={fleet}",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=rollbus",
                "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=rollbus.integrations.verl.weights",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
                "actor_rollout_ref.rollout.calculate_log_probs=True",
                f"actor_rollout_ref.model.path={checkpoint}",
                "actor_rollout_ref.rollout.prompt_length=64",
                "actor_rollout_ref.rollout.response_length=128",
                "actor_rollout_ref.rollout.agent.num_workers=1",
                *overrides,
            ],
        )


class Actor(Worker):
    """The trainer's side of an update: one rank with the checkpoint's tensors, and verl's checkpoint engine."""

    def __init__(self, rollout, folder):
        super().__init__()
        settings = rollout.checkpoint_engine
        import_external_libs(settings.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(settings.backend, is_master=self.rank == 0, bucket_size=1)
        self.folder, self.scale, self.breaks = folder, 1.0, False

    def tensors(self):
        """Yield the tensors of the present weights; of two ranks that gather together, both draw all."""
        generator = torch.Generator().manual_seed(0)
        for name, tensor in load_file(f"{self.folder}/model.safetensors").items():
            if self.breaks and "layers.2" in name:
                raise ValueError("the trainer ran out of memory")
            noise = torch.randn(tensor.shape, generator=generator) * tensor.abs().mean()
            yield name, tensor + (self.scale - 1.0) * noise

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        """As verl's `ActorRolloutRefWorker.update_weights`."""
        return await self.checkpoint_engine.send_weights(self.tensors(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        """As verl's worker."""
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, scale, breaks=False):
        """Take other weights, or weights that cannot be drawn to the end."""
        self.scale, self.breaks = scale, breaks

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self):
        """Return the present weights."""
        return dict(self.tensors())
