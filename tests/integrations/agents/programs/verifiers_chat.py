# mypy: ignore-errors
"""Program for the trainers' Python: a published, unchanged environment of verifiers, whose agent uses a session.

python verifiers_chat.py MODEL URL KEY FOLDER TURNS
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.types import Sampling
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def main(model, url, key, folder, turns):
    """Play one episode of the environment with a tool."""
    # The environment starts its tool servers with this Python and its harnesses with this Python's uv.
    sys.path[:0] = [folder]
    os.environ |= {"PYTHONPATH": folder, "AGENT_KEY": key}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": int(turns)}
    env = load_environment(resolve_env_config({"taskset": {"id": "echo-tool-v1"}, "agent": agent}))
    client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="AGENT_KEY")
    context = ModelContext(model=model, client=client, sampling=Sampling(temperature=1.0))
    async with env.serving():
        episode = await env.run_slot(env.slots(next(iter(env.taskset.load())), 1)[0], context)
    (trace,) = episode.traces
    seen = {
        "errors": [f"{error.type}: {error.message}" for error in [*episode.errors, *trace.errors]],
        "results": [str(message.content) for message in trace.tool_messages],
        "answer": trace.nodes[-1].message.content.strip(),
    }
    print("seen " + json.dumps(seen), flush=True)


asyncio.run(main(*sys.argv[1:]))
