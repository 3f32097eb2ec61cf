"""The parts that TRL's `AsyncGRPOTrainer` needs: the fleet generates without a pause and loads new weights.

`AsyncGRPOTrainer` itself needs CUDA: there, pass `rollout_worker=worker, weight_transfer=transfer`. Here a short loop
replaces it, with TRL's own queue, samples and limit of staleness, so that the program runs on a CPU.

Run it on the workers' machine, with a Python that has `rollbus[trl]`. It needs no engine. Twenty steps take a minute
on two CPU cores:

    rollbus up             # in another terminal: NATS and a worker
    python trl_async.py    # --nats URL, if `rollbus up` prints another address than nats://127.0.0.1:4222
"""

import argparse
import string
from collections import defaultdict
from itertools import islice

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

import rollbus
from rollbus.integrations.trl import RolloutWorker, WeightTransfer

QUESTIONS = ["How many apples are left?", "When does the train arrive?", "What is the capital?", "Please explain why."]


def letters(completions, **_):
    """Return the share of letters in each answer, 0 to 1."""
    return [sum(c in string.ascii_letters for c in text) / max(len(text), 1) for text in completions]


def main(nats: str | None, num_steps: int) -> None:
    """Train the model that the fleet serves."""
    PartialState(cpu=True)
    with rollbus.sync.connect(nats) as rb:
        rb.fleet.wait_for_workers()
        served = next(worker for worker in rb.fleet.workers if worker.state == "serving")
    model = AutoModelForCausalLM.from_pretrained(served.model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    # `policy`: for a model with experts, TRL's names of the tensors are not those of the checkpoint.
    transfer = WeightTransfer(nats, model=served.model, checkpoint=served.model_path, policy=lambda: model)
    worker = RolloutWorker(
        nats, model=served.model, dataset=[{"prompt": text} for text in QUESTIONS], reward_funcs=[letters],
        tokenizer=AutoTokenizer.from_pretrained(served.model_path), sampling=rollbus.SamplingParams(max_tokens=16),
        num_generations=8, max_groups=2, queue_size=16, transfer=transfer,
    )  # fmt: skip
    version, metrics = 0, defaultdict(list)
    samples = RolloutQueueDataset(worker.rollout_buffer, lambda: version, worker.check_health, 300.0, metrics, 3, 1.0)
    transfer.init_weight_transfer()
    transfer.send_weights(model.named_parameters())  # the fleet may have the weights of an earlier run
    worker.update_model_version(0)
    worker.start()
    for version in range(num_steps):
        batch = list(islice(samples, 16))
        for sample in batch:
            ids, mask = torch.tensor(sample["input_ids"]), torch.tensor(sample["completion_mask"])[1:]
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            ratio = (logprobs.detach() - torch.tensor(sample["old_log_probs"])[1:]).exp().clamp(max=2.0)
            (-sample["advantage"] * (ratio * logprobs * mask).sum() / (mask.sum() * len(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
        transfer.send_weights(model.named_parameters())
        worker.update_model_version(version + 1)
        reward = sum(sample["metrics"]["reward"] for sample in batch) / len(batch)
        print(f"step {version + 1}: mean reward {reward:.3f}; weights are now {transfer.version}", flush=True)
    worker.stop()
    transfer.destroy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", help="address of the NATS server (default: $ROLLBUS_NATS, else port 4222 here)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    main(arguments.nats, arguments.steps)
