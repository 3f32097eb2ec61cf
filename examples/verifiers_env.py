"""Play a published environment of verifiers on the fleet, and make samples for a trainer.

verifiers' own client sends token ids to the HTTP service. It reads the token ids, log probabilities and routed experts
of the answers. `weight_versions` adds the versions of the weights. `samples` makes samples for `rollbus.trainer.pack`
from each conversation. `marble-v1` is a package on PyPI. Name another environment with `--environment`.

Run it on the workers' machine, with a Python that has `rollbus[verifiers]` and the environment. It takes some seconds:

    rollbus up                 # in another terminal: NATS, a worker, and the HTTP service
    python verifiers_env.py    # --http URL, if `rollbus up` prints another address than http://127.0.0.1:8080
"""

import argparse
import asyncio
import itertools
import os
import sys
from pathlib import Path

import httpx
import numpy as np
from renderers import Qwen3RendererConfig
from verifiers.v1 import ModelContext, Sampling, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from rollbus.integrations.verifiers import samples, weight_versions
from rollbus.trainer import group_advantages

GROUP = 4
"""Episodes of one task."""


async def main(http: str, environment: str, num_steps: int, has_tools: bool) -> None:
    """Play a group of episodes for each task in turn."""
    async with httpx.AsyncClient() as client:
        (model, *_) = (await client.get(f"{http}/v1/models")).json()["data"]
    # For a model with tools, name a renderer of the package `renderers`. By default it uses the model's chat template.
    renderer = Qwen3RendererConfig() if has_tools else None
    config = TrainClientConfig(
        base_url=f"{http}/v1",
        api_key_var="ROLLBUS_HTTP_TOKEN",
        renderer=renderer,
        renderer_model_name=model["root"],
    )
    context = ModelContext(model=model["id"], client=config, sampling=Sampling(temperature=1.0, max_tokens=64))
    # verifiers' smallest harness, as a process on this machine. It needs uv, which is in the folder of this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    env = load_environment(resolve_env_config({"taskset": {"id": environment}, "agent": agent}))

    with weight_versions():
        async with env.serving():
            for step, task in enumerate(itertools.islice(env.taskset.load(), num_steps)):
                async with asyncio.TaskGroup() as group:
                    playing = [group.create_task(env.run_slot(slot, context)) for slot in env.slots(task, GROUP)]
                traces = [trace for each in playing for trace in each.result().traces]
                advantages = group_advantages([trace.reward for trace in traces])
                print(f"task {step + 1}: rewards {[trace.reward for trace in traces]}")
                for trace, advantage in zip(traces, advantages, strict=True):
                    for sample in samples(trace, advantage=float(advantage)):
                        versions = np.unique(sample.weight_versions[sample.loss_mask]).tolist()
                        routed = None if sample.routed_experts is None else sample.routed_experts.shape
                        print(f"  {sample.loss_mask.sum()} of {len(sample.token_ids)} tokens sampled by weights "
                              f"{versions}, routed experts {routed}, stopped by {trace.stop_condition}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", default="http://127.0.0.1:8080", help="address of the service (default: %(default)s)")
    parser.add_argument("--environment", default="marble-v1", help="name of its package (default: %(default)s)")
    parser.add_argument("--tools", action="store_true", help="for an environment with tools; the model must be a Qwen3")
    parser.add_argument("--steps", type=int, default=2, help="tasks to play, each four times (default: 2)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not 1 or more")
    asyncio.run(main(arguments.http, arguments.environment, arguments.steps, arguments.tools))
