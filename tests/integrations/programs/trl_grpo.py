"""Program for the trainers' Python: an unchanged `GRPOTrainer` with a fleet's completions; prints JSON results.

python trl_grpo.py URL FLEET MODEL_FOLDER STEPS OUTPUT [lora]
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollbus.integrations.trl import PublishPolicy, Rollouts

GROUP = 8
PROMPTS = ["one", "two and two", "a longer prompt of several words", "0 1 2 3"]
WANTED = 200
"""Tokens below this id are rewarded."""


def share_of_wanted(completion_ids, weight_versions, **_):
    """Return the share of a completion's tokens that are rewarded."""
    seen["versions"].append([min(map(min, weight_versions)), max(map(max, weight_versions))])
    return [sum(token < WANTED for token in ids) / len(ids) for ids in completion_ids]


class Compared(Rollouts):
    """Compares the sampler's log probabilities with those that the trainer's own code computes."""

    def __call__(self, prompts, trainer):
        """Return the completions, and compare their log probabilities."""
        answer = super().__call__(prompts, trainer)
        with torch.no_grad():
            for prompt, tokens, logprobs in zip(
                answer["prompt_ids"], answer["completion_ids"], answer["logprobs"], strict=True
            ):
                ids = torch.tensor([[*prompt, *tokens]])
                own, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), len(tokens)
                )
                seen["difference"] = max(seen["difference"], float((own[0] - torch.tensor(logprobs)).abs().max()))
        seen["workers"].append(sorted({name for found in self.generations for name in found.worker_ids}))
        seen["attempts"] = max(seen["attempts"], *(found.attempts for found in self.generations))
        return answer


class StepPrinter(TrainerCallback):
    """Prints each finished step to stdout, so that the test can kill a worker then."""

    def on_step_end(self, args, state, control, **_):
        """Print a line for each step."""
        print(f"step {state.global_step}", flush=True)


LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
url, fleet, folder, steps = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
seen = {"versions": [], "difference": 0.0, "workers": [], "attempts": 0}
torch.manual_seed(0)
torch.set_num_threads(1)
publish = PublishPolicy(url, fleet=fleet, model="policy", checkpoint=folder)
with Compared(url, fleet=fleet, model="policy") as rollouts:
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=share_of_wanted,
        rollout_func=rollouts,
        callbacks=[publish, StepPrinter()],
        peft_config=LORA if "lora" in sys.argv[6:] else None,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        args=GRPOConfig(
            output_dir=sys.argv[5],
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            max_steps=steps,
            per_device_train_batch_size=len(PROMPTS) * GROUP,
            num_generations=GROUP,
            max_completion_length=12,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
seen["rewards"] = [line["reward"] for line in trainer.state.log_history if "reward" in line]
seen["version"] = publish.version
seen["stored"] = publish.last.num_changed / publish.last.num_tensors
print("seen " + json.dumps(seen), flush=True)
