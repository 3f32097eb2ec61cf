"""GRPO in one file: prompts, answers, rewards, advantages, router replay, an optimizer step, new weights.

The policy is the mixture of experts that the workers serve. The tiny model of `rollbus up` has random weights, so the
reward is easy to learn: the share of letters in an answer. Replace QUESTIONS and `reward_of` by your own.

Run it on the workers' machine, with the Python that has rollbus. Twenty steps take half a minute on two CPU cores:

    rollbus up        # in another terminal: NATS and a worker
    python grpo.py    # --nats URL, if `rollbus up` prints another address than nats://127.0.0.1:4222
"""

import argparse
import asyncio
import itertools
import string

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollbus
from rollbus.trainer import Stitcher, group_advantages, importance_weights, pack, replay
from rollbus.trainer.checkpoint import checkpoint_tensors

QUESTIONS = ["How many apples are left?", "When does the train arrive?", "What is the capital?", "Please explain why."]
SAMPLING = rollbus.SamplingParams(max_tokens=16, temperature=1.0)


def reward_of(text: str) -> float:
    """Return the share of letters, 0 to 1."""
    return sum(character in string.ascii_letters for character in text) / max(len(text), 1)


def train(model, optimizer, samples) -> None:
    """Make one optimizer step. The model computes each token with the experts that the sampler chose."""
    batches = pack(samples, max_tokens=4096)
    num_trained = sum(int(batch.loss_mask.sum()) for batch in batches)
    for batch in batches:
        with replay(model, batch.routed_experts):
            logits = model(**batch.model_inputs()).logits.float()
            logprobs = logits.log_softmax(-1).gather(-1, batch.target_ids[..., None])[..., 0]
            weights = importance_weights(logprobs, batch.sampler_logprobs, batch.loss_mask)
            loss = -(weights * batch.advantages * logprobs)[batch.loss_mask].sum() / num_trained
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


async def main(nats: str | None, num_steps: int, record: str | None, tensorboard: str | None) -> None:
    """Train the model that the fleet serves."""
    torch.set_num_threads(1)  # the tiny model needs no more; the workers need the other cores
    log = None
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        log = SummaryWriter(tensorboard)
    async with rollbus.connect(nats) as rb:
        recorder = rb.record(record) if record else None
        await rb.fleet.wait_for_workers()
        worker = next(worker for worker in rb.fleet.workers if worker.state == "serving")
        folder, dtype = worker.model_path, getattr(torch, worker.capabilities.dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
        prompts = itertools.cycle([tokenizer.encode(question) for question in QUESTIONS])
        async with (
            # A step starts 10 groups of 8 answers and takes the first 8 groups. The next step continues the others.
            rb.groups(prompts, n=8, need=8, over=1.25, sampling=SAMPLING, max_lag=2) as groups,
            rollbus.WeightPublisher(rb, model=worker.model, checkpoint=folder) as publisher,
        ):

            async def publish(version: int) -> None:
                """Publish the current weights to all workers, in the dtype in which they compute."""
                tensors = ((name, tensor.to(dtype)) for name, tensor in checkpoint_tensors(model))
                await publisher.publish(tensors, version=version)

            version = worker.weight_version + 1
            await publish(version)  # the fleet may have the weights of an earlier run
            for step in range(num_steps):
                rewards, samples = [], []
                groups_step = await groups.step(version=version)
                for group in groups_step.groups:
                    rewards.append([reward_of(tokenizer.decode(answer.token_ids)) for answer in group.generations])
                    scores = zip(rewards[-1], group_advantages(rewards[-1]).tolist(), strict=True)
                    for answer, (reward, advantage) in zip(group.generations, scores, strict=True):
                        stitcher = Stitcher()
                        stitcher.add(group.request.prompt_token_ids, answer)
                        samples.append(stitcher.sample(advantage=advantage))
                        if recorder:
                            recorder.score(answer, reward=reward, advantage=advantage)
                metrics = groups_step.metrics(rewards=rewards)
                # For another logger: wandb.log(metrics, step=step), trackio.log(metrics, step=step)
                for name, value in metrics.items() if log else ():
                    log.add_scalar(name, value, step)
                train(model, optimizer, samples)
                await publish(version := version + 1)
                mean = f"mean reward of {len(samples)} answers {metrics['reward/mean']:.3f}"
                print(f"step {step + 1}: {mean}; weights are now {version}")
    if log:
        log.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", help="address of the NATS server (default: $ROLLBUS_NATS, else port 4222 here)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--record", help="directory for a record of the run; needs rollbus[data] (default: none)")
    parser.add_argument("--tensorboard", help="directory for TensorBoard; needs tensorboard (default: none)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    asyncio.run(main(arguments.nats, arguments.steps, arguments.record, arguments.tensorboard))
