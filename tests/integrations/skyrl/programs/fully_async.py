"""Program for SkyRL's Python: its fully asynchronous trainer, with a fleet as its external inference engine.

    python fully_async.py SETTINGS

`SETTINGS` is JSON with `url` of the HTTP service, `model` (served name), `checkpoint`, `new` (the next checkpoint, or
null), `data` (a folder), `steps`, `prompts` and `seed`.
The program runs SkyRL's `FullyAsyncTrainerSim.train`, `SkyRLGymGenerator`, client and environment unchanged. It prints
lines by which the test follows it, and writes the samples of each step to `batches.json` in `data`.
"""

import asyncio
import json
import random
import sys
import typing
from pathlib import Path

import typing_extensions

if sys.version_info < (3, 12):
    # pydantic demands this of models on Python 3.11, for which alone PyPI has a torch without CUDA.
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim, _SimDispatch
from skyrl.train.utils import validate_cfg

asked = json.loads(sys.argv[1])
data = Path(asked["data"])
batches = []


def write_prompts():
    """Write problems of SkyRL's own environment for several turns, with the trainer's fields."""
    numbers = random.Random(asked["seed"])
    with (data / "train.jsonl").open("w") as file:
        for _ in range(asked["prompts"]):
            a, b = numbers.randrange(100), numbers.randrange(100)
            file.write(
                json.dumps(
                    {
                        "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
                        "env_class": "gsm8k_multi_turn",
                        "reward_spec": {"ground_truth": str(a + b)},
                        "extra_info": {"max_turns": 2},
                    }
                )
                + "\n"
            )


def options():
    """Return the settings of the guide, and small numbers."""
    engine = {
        "run_engines_locally": "false",
        "external_proxy_url": asked["url"],
        "served_model_name": asked["model"],
        "enable_return_routed_experts": "true",
        # Of servers that SkyRL would start itself; it checks this even if it starts none.
        "distributed_executor_backend": "mp",
        "enable_ray_prometheus_stats": "false",
    }
    trainer = {
        "policy.model.path": asked["checkpoint"],
        # SkyRL replays routed experts with Megatron only. The simulated trainer builds no model.
        "strategy": "megatron",
        "policy.megatron_config.moe_enable_routing_replay": "true",
        "placement.colocate_all": "false",
        "fully_async.enabled": "true",
        "fully_async.simulate_training": "true",
        "fully_async.simulate_training_step_seconds": "0.2",
        "fully_async.max_staleness_steps": "1",
        "fully_async.num_parallel_generation_workers": "4",
        "train_batch_size": "2",
        "policy_mini_batch_size": "2",
        "critic_mini_batch_size": "2",
        "epochs": "1",
        "max_training_steps": str(asked["steps"]),
        "eval_interval": "-1",
        "ckpt_interval": "-1",
        "hf_save_interval": "-1",
        "resume_mode": "none",
        "update_ref_every_epoch": "false",
        "algorithm.policy_loss_type": "rollout_is",
        "algorithm.off_policy_correction.tis_ratio_type": "token",
        "algorithm.use_kl_loss": "false",
        "logger": "console",
        "enable_ray_gpu_monitor": "false",
        "export_path": str(data / "exports"),
        "ckpt_path": str(data / "checkpoints"),
        "log_path": str(data / "logs"),
        "max_prompt_length": "256",
    }
    generator = {
        "batched": "false",
        "n_samples_per_prompt": "2",
        "max_turns": "2",
        "max_input_length": "1024",
        "use_conversation_multi_turn": "true",
        "sampling_params.max_generate_length": str(asked["tokens"]),
        "sampling_params.temperature": "1.0",
        "sampling_params.logprobs": "0",
    }
    return [
        f"data.train_data=['{data}/train.jsonl']",
        "environment.env_class=gsm8k_multi_turn",
        *(f"generator.inference_engine.{name}={value}" for name, value in engine.items()),
        *(f"trainer.{name}={value}" for name, value in trainer.items()),
        *(f"generator.{name}={value}" for name, value in generator.items()),
    ]


class Dispatch(_SimDispatch):
    """SkyRL's dispatch of the simulated trainer, with new weights at its second synchronization.

    The released class lacks the last two methods, which the released `train` calls.
    """

    synced = 0

    async def save_weights_for_sampler(self):
        """Pause, load the new weights into the fleet, and resume, in the order of SkyRL's weight synchronization."""
        await super().save_weights_for_sampler()
        self.synced += 1
        if self.synced == 2 and asked["new"]:
            print("updating", flush=True)
            await self._client.fetch_weights(target_version=asked["version"], uri=asked["new"])
            print("updated", flush=True)

    def get_timing_metrics(self):
        """Return no further timings."""
        return {}

    def finalize_pending_saves(self, model):
        """Do nothing, because there are no checkpoints."""


class Trainer(FullyAsyncTrainerSim):
    """SkyRL's simulated trainer; it prints each batch that it would train on."""

    def init_weight_sync_state(self):
        """Use the dispatch with new weights."""
        self.dispatch = Dispatch(self.inference_engine_client, 0.0)

    async def _run_training(self, training_input):
        batches.append(to_samples(training_input))
        print(f"step {self.global_step}", flush=True)
        return await super()._run_training(training_input)


def to_samples(batch):
    """Return the samples of a batch without padding: token ids, mask, log probabilities and routed experts."""
    found = []
    rows = batch["rollout_expert_indices"]
    for index in range(len(batch["sequences"])):
        valid = batch["attention_mask"][index].bool()
        length = int(batch["response_mask"].shape[1])
        mask, logprobs = batch["loss_mask"][index], batch["rollout_logprobs"][index]
        answered = batch["response_mask"][index].bool()
        found.append(
            {
                "token_ids": batch["sequences"][index][valid].tolist(),
                "answer": int(answered.sum()),
                "loss_mask": mask[answered[:length]].tolist(),
                "logprobs": logprobs[answered[:length]].tolist(),
                "rows": rows_of(rows, index),
            }
        )
    return found


def rows_of(rows, index):
    """Return the routed experts of a sample as lists."""
    return rows[index].tolist()


class Experiment(BasePPOExp):
    """SkyRL's experiment; it reads its prompts in this process, because eight others would import torch first."""

    def get_train_dataset(self):
        """Return the dataset."""
        cfg = self.cfg
        return PromptDataset(cfg.data.train_data, self.tokenizer, cfg.trainer.max_prompt_length, num_workers=1)


def main():
    """Run the trainer."""
    write_prompts()
    cfg = SkyRLTrainConfig.from_cli_overrides(options())
    validate_cfg(cfg)
    exp = Experiment(cfg)
    client = exp.get_inference_client()
    generator = exp.get_generator(cfg, exp.tokenizer, client)
    kind = FullyAsyncTrainerSim if asked.get("released") else Trainer
    trainer = kind(
        cfg=cfg,
        tracker=exp.get_tracker(),
        tokenizer=exp.tokenizer,
        train_dataset=exp.train_dataset,
        eval_dataset=None,
        inference_engine_client=client,
        generator=generator,
        colocate_pg=None,
    )
    asyncio.run(trainer.train())
    # SkyRL logs to the same output, and the batches are long.
    (data / "batches.json").write_text(json.dumps(batches))
    print("\nseen {}", flush=True)


if __name__ == "__main__":
    main()
