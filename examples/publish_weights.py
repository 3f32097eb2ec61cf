"""Publish new weights from a trainer's memory, while the fleet generates answers.

The publisher compares the tensors with the last version and stores only the changes. All workers load the new version
between two engine steps. Answers in flight keep their tokens and continue. Each token has the version of its weights.

Run it on the workers' machine, with the Python that has rollbus. It takes some seconds:

    rollbus up                   # in another terminal: NATS and a worker
    python publish_weights.py    # --nats URL, if `rollbus up` prints another address than nats://127.0.0.1:4222
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import rollbus


def read_checkpoint(folder: str) -> dict[str, torch.Tensor]:
    """Read all tensors. With a model of transformers, use `rollbus.trainer.checkpoint.checkpoint_tensors(model)`."""
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def train(tensors: dict[str, torch.Tensor]) -> None:
    """Imitate an optimizer step: change one element in fifty by 1 %, as at the learning rates of RL."""
    for tensor in tensors.values():
        tensor.mul_(1 + 0.01 * (torch.rand(tensor.shape) < 0.02))


async def main(nats: str | None, num_steps: int) -> None:
    """Publish the checkpoint that the workers started with, and a changed version after each step."""
    async with rollbus.connect(nats) as rb:
        await rb.fleet.wait_for_workers()
        worker = next(worker for worker in rb.fleet.workers if worker.state == "serving")
        tensors = read_checkpoint(worker.model_path)
        async with rollbus.WeightPublisher(rb, model=worker.model, checkpoint=worker.model_path) as publisher:
            for version in range(worker.weight_version + 1, worker.weight_version + 2 + num_steps):
                request = rollbus.GenerateRequest(
                    prompt_token_ids=[1, 2, 3], sampling=rollbus.SamplingParams(max_tokens=400, ignore_eos=True)
                )
                async with asyncio.TaskGroup() as tasks:
                    answering = tasks.create_task(rb.complete(request))
                    published = await publisher.publish(tensors.items(), version=version)
                share = published.stored_bytes / published.model_bytes
                print(
                    f"version {version}: {published.num_changed} of {published.num_tensors} tensors changed, "
                    f"{published.stored_bytes:,} bytes stored ({share:.1%} of the model), "
                    f"loaded by {', '.join(published.ledger.applied)} in {published.seconds:.2f} s"
                )
                spans = zip(*np.unique(answering.result().weight_versions, return_counts=True), strict=True)
                parts = ", ".join(f"{count} tokens by weights {each}" for each, count in spans)
                print(f"  a request that was in flight: {parts}")
                train(tensors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", help="address of the NATS server (default: $ROLLBUS_NATS, else port 4222 here)")
    parser.add_argument("--steps", type=int, default=3, help="changed versions to publish (default: 3)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    asyncio.run(main(arguments.nats, arguments.steps))
