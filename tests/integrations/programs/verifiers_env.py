"""Program for the trainers' Python: a published, unchanged environment of verifiers; prints its traces as JSON.

python verifiers_env.py URL MODEL TOKENIZER TASKSET SETTINGS
"""

import asyncio
import base64
import itertools
import json
import os
import sys
import time
from pathlib import Path

from renderers import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.types import Sampling
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from rollbus.integrations.verifiers import samples, weight_versions


def seen_of(trace):
    """Return the result of the environment, and the samples that a trainer makes of it."""
    return {
        "errors": [f"{error.type}: {error.message}" for error in trace.errors],
        "roles": [node.message.role for node in trace.nodes],
        "results": [str(message.content) for message in trace.tool_messages],
        "rewards": {name: reward and reward.score for name, reward in trace.rewards.items()},
        "finish_reasons": [call.finish_reason for call in trace.calls],
        # The tokens that each message adds to the sequence, and how many of them were sampled.
        "sizes": [[len(node.token_ids), sum(node.mask)] for node in trace.nodes],
        "samples": [
            {
                "token_ids": sample.token_ids.tolist(),
                "loss_mask": sample.loss_mask.tolist(),
                "logprobs": sample.logprobs.tolist(),
                "weight_versions": sample.weight_versions.tolist(),
                "shape": sample.routed_experts.shape,
                "rows": base64.b64encode(sample.routed_experts.tobytes()).decode(),
            }
            for sample in samples(trace)
        ],
    }


def wait_for(path):
    """Wait until the test creates this file."""
    while not path.exists():
        time.sleep(0.1)


async def main(url, model, tokenizer, taskset, settings):
    """Play `rollouts` episodes of each of `tasks` tasks. The last task starts when the file `gate` exists."""
    # The environment starts its tool servers with this Python and its harnesses with this Python's uv.
    sys.path[:0] = settings["folders"]
    os.environ["PYTHONPATH"] = os.pathsep.join(settings["folders"])
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": settings["turns"]}
    env = load_environment(resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))
    client = TrainClientConfig(base_url=f"{url}/v1", renderer=Qwen3RendererConfig(), renderer_model_name=tokenizer)
    context = ModelContext(model=model, client=client, sampling=Sampling(**settings["sampling"]))
    tasks = list(itertools.islice(env.taskset.load(), settings["tasks"]))
    traces = []

    async def play(slot):
        if slot.task is tasks[-1]:
            await asyncio.to_thread(wait_for, Path(settings["gate"]))
        episode = await env.run_slot(slot, context)
        for error in episode.errors:
            print(f"episode: {error.type} {error.message}", flush=True)
        traces.extend(map(seen_of, episode.traces))
        print(f"traces {len(traces)}", flush=True)

    with weight_versions():
        async with env.serving(), asyncio.TaskGroup() as group:
            for task in tasks:
                for slot in env.slots(task, settings["rollouts"]):
                    group.create_task(play(slot))
    print("seen " + json.dumps({"traces": traces}), flush=True)


asyncio.run(main(*sys.argv[1:5], json.loads(sys.argv[5])))
