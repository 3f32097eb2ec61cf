"""Program for the trainers' Python: `GRPOTrainer` with conversations, accumulation, evaluation and checkpoints.

The trainer resumes from its last checkpoint if one exists. The program prints its results as JSON.

python trl_resume.py URL FLEET MODEL_FOLDER STEPS OUTPUT
"""

import asyncio
import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from rollbus.integrations.trl import PublishPolicy, Rollouts

GROUP, LENGTH, SAVE_EVERY = 6, 16, 3


def conversation(i):
    """Return a conversation of one to four messages of different lengths."""
    messages = [{"role": "user", "content": "count " * (1 + 3 * i) + str(i)}]
    if i % 2:
        messages.insert(0, {"role": "system", "content": "be brief"})
    if i % 3 == 0:
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    return {"prompt": messages, "level": i % 4}


async def short(completion_ids, level, **_):
    """Reward short completions, as a coroutine."""
    await asyncio.sleep(0)
    assert len(level) == len(completion_ids)
    return [-len(ids) / LENGTH for ids in completion_ids]


def low(completions, completion_ids, weight_versions, **_):
    """Reward low token ids, and return None for some completions."""
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    assert list(map(len, weight_versions)) == list(map(len, completion_ids))
    return [None if i % 5 == 0 else sum(t < 200 for t in ids) / LENGTH for i, ids in enumerate(completion_ids)]


class Compared(Rollouts):
    """Records for each batch its kind, step, weight versions and difference in log probabilities."""

    def __call__(self, prompts, trainer):
        """Return the completions, and compare their log probabilities."""
        answer = super().__call__(prompts, trainer)
        difference = 0.0
        with torch.no_grad():
            for prompt, tokens, logprobs in zip(
                answer["prompt_ids"], answer["completion_ids"], answer["logprobs"], strict=True
            ):
                ids = torch.tensor([[*prompt, *tokens]])
                own, *_ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), len(tokens)
                )
                difference = max(difference, float((own[0] - torch.tensor(logprobs)).abs().max()))
        versions = {version for each in answer["weight_versions"] for version in each}
        kind = "train" if trainer.model.training else "eval"
        seen["batches"].append([kind, trainer.state.global_step, sorted(versions), difference])
        print(f"{kind} {trainer.state.global_step}", flush=True)
        return answer


class StepPrinter(TrainerCallback):
    """Prints each finished step to stdout, so that the test can kill a process then."""

    def on_step_end(self, args, state, control, **_):
        """Print a line for each step."""
        print(f"step {state.global_step}", flush=True)


url, fleet, folder, steps, output = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
seen = {"batches": []}
torch.manual_seed(0)
torch.set_num_threads(1)
publish = PublishPolicy(url, fleet=fleet, model="policy", checkpoint=folder)
rows = Dataset.from_list([conversation(i) for i in range(9)])
with Compared(url, fleet=fleet, model="policy") as rollouts:
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=[short, low],
        rollout_func=rollouts,
        callbacks=[publish, StepPrinter()],
        train_dataset=rows,
        eval_dataset=rows.select(range(3)),
        args=GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=3,
            steps_per_generation=6,
            num_iterations=2,
            num_generations=GROUP,
            num_generations_eval=2,
            per_device_eval_batch_size=4,
            eval_strategy="steps",
            eval_steps=2,
            eval_on_start=True,
            mask_truncated_completions=True,
            max_completion_length=LENGTH,
            logging_steps=1,
            save_strategy="steps",
            save_steps=SAVE_EVERY,
            report_to=[],
            disable_tqdm=True,
        ),
    )
    checkpoint = get_last_checkpoint(output) if Path(output).exists() else None
    trainer.train(resume_from_checkpoint=checkpoint)
seen["resumed"] = checkpoint is not None
seen["version"] = publish.version
print("seen " + json.dumps(seen), flush=True)
