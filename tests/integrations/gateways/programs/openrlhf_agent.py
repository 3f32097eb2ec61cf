"""Program for the trainers' Python: OpenRLHF's agent executors and samples generator, unchanged.

python openrlhf_agent.py URL TOKENIZER SETTINGS

It loads examples/openrlhf_agent.py as OpenRLHF's Ray actor does. It runs single turns, and conversations of several
turns whose second turn ends only after the file `gate` exists.
"""

import asyncio
import json
import os
import sys
from copy import deepcopy
from pathlib import Path

import torch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from transformers import AutoTokenizer
from vllm import SamplingParams

MAX_LENGTH = 4000


def conversation(gate, turns):
    """Return the class of an environment whose second turn waits until the file `gate` exists."""

    class Environment(AgentInstanceBase):
        def __init__(self):
            self.turn = 0

        async def step(self, states, **_):
            self.turn += 1
            if self.turn == 1:
                print("first", flush=True)
            while self.turn == 2 and not gate.exists():  # noqa: ASYNC110 - the test is another process
                await asyncio.sleep(0.05)
            feedback = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
            return {"rewards": torch.tensor(1.0), "environment_feedback": feedback, "done": self.turn == turns}

    return Environment


async def main(url, tokenizer, settings):
    """Print the experiences that OpenRLHF makes of the responses, and the versions of their tokens."""
    os.environ["ROLLBUS_HTTP"] = url
    executor = _load_agent_executor(settings["agent"])
    fleet_engine = type(executor).execute.__globals__["FleetEngine"]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    # As those of OpenRLHF's generator, with stop ids.
    sampling = SamplingParams(
        max_tokens=24, min_tokens=1, skip_special_tokens=False, logprobs=1, stop_token_ids=settings["stops"]
    )
    prompts = [f"<|im_start|>user\nWhat is {seed}?<|im_end|>\n<|im_start|>assistant\n" for seed in settings["seeds"]]
    common = {"label": "x", "max_length": MAX_LENGTH, "hf_tokenizer": tokenizer}
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                executor.execute(prompt=each, sampling_params=deepcopy(sampling), llm_engine=None, **common)
            )
            for each in prompts
        ]
    single = [task.result() for task in running]
    engines = [fleet_engine(url) for _ in prompts]
    several = MultiTurnAgentExecutor(conversation(Path(settings["gate"]), 4))
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                several.execute(prompt=each, sampling_params=deepcopy(sampling), llm_engine=engine, **common)
            )
            for each, engine in zip(prompts, engines, strict=True)
        ]
    multi = [task.result() for task in running]
    generator = SamplesGenerator.__new__(SamplesGenerator)
    seen = {"versions": [engine.weight_versions for engine in engines]}
    for name, responses in (("single", single), ("multi", multi)):
        made = [generator._process_response_into_experience(each, max_len=MAX_LENGTH) for each in responses]
        seen[name] = [
            {
                "token_ids": each.sequences[0].tolist(),
                "mask": each.action_mask[0].tolist(),
                "logprobs": each.rollout_log_probs[0].tolist(),
            }
            for each in made
        ]
    print("seen", json.dumps(seen), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], json.loads(sys.argv[3])))
