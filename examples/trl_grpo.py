"""TRL's `GRPOTrainer` on a fleet: the workers answer the prompts, and load the policy after each optimizer step.

The trainer is TRL's own, unchanged. The program adds only `Rollouts` and `PublishPolicy`. The policy is the model that
the workers serve. The tiny model of `rollbus up` has random weights, so the reward is easy to learn: the share of
letters in an answer. Replace the dataset and the rewards by your own.

Run it on the workers' machine, with a Python that has `rollbus[trl]`. It needs no engine. Twenty steps take a minute
on two CPU cores:

    rollbus up            # in another terminal: NATS and a worker
    python trl_grpo.py    # --nats URL, if `rollbus up` prints another address than nats://127.0.0.1:4222
"""

import argparse
import string

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rollbus
from rollbus.integrations.trl import PublishPolicy, Rollouts

QUESTIONS = ["How many apples are left?", "When does the train arrive?", "What is the capital?", "Please explain why."]


def letters(completions, **_):
    """Return the share of letters in each answer, 0 to 1."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character in string.ascii_letters for character in text) / max(len(text), 1) for text in texts]


class StepPrinter(TrainerCallback):
    """Prints a line for each step."""

    def on_log(self, args, state, control, logs, **_):
        """Print the result of the step."""
        if "reward" in logs:
            print(f"step {state.global_step}: mean reward {logs['reward']:.3f}")


def main(nats: str | None, num_steps: int) -> None:
    """Train the model that the fleet serves."""
    with rollbus.sync.connect(nats) as rb:
        rb.fleet.wait_for_workers()
        worker = next(worker for worker in rb.fleet.workers if worker.state == "serving")
    publish = PublishPolicy(nats, model=worker.model, checkpoint=worker.model_path)
    trainer = GRPOTrainer(
        model=worker.model_path,
        reward_funcs=letters,
        rollout_func=Rollouts(nats, model=worker.model),
        callbacks=[publish, StepPrinter()],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]),
        args=GRPOConfig(
            output_dir="trl-output", max_steps=num_steps, learning_rate=2e-3, lr_scheduler_type="constant",
            num_generations=8, per_device_train_batch_size=32, max_completion_length=16, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
            model_init_kwargs={"dtype": "float32"},
        ),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print(f"the fleet has the weights of version {publish.version}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", help="address of the NATS server (default: $ROLLBUS_NATS, else port 4222 here)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    main(arguments.nats, arguments.steps)
