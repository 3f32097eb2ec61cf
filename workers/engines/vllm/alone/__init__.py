"""vLLM without rollbus's transport, with the engine arguments of a worker: in this process, or as vLLM's own server.

    python -m rollbus.workers.engines.vllm.alone --model DIR [--engine-args JSON] [--serve PORT]

In this process, each line on stdin is a JSON object `{"prompts": [[...]], "max_tokens": N}`. Its answer is a line on
stdout with the number of generated tokens. All prompts run at once: greedy, with a log probability for each token.
"""

import argparse
import asyncio
import ctypes
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..launch import GRAMMARS, Launch, engine_arguments, set_environment

PR_SET_PDEATHSIG: Final = 1
OF_WORKERS: Final = frozenset({"model", "worker_extension_cls", GRAMMARS})
"""Arguments that vLLM's own server gets in another way, or that only a worker needs."""


def server_flags(model: str, given: Mapping[str, Any]) -> list[str]:
    """Return the engine arguments of a worker as options of vLLM's own server.

    Raises:
        EngineDead: vLLM does not know an argument.
    """
    chosen = engine_arguments(model, given)
    plain = type(chosen)(model=model)
    flags = ["--model", model]
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        if field.name in OF_WORKERS or value == getattr(plain, field.name) or value is None:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            shown = json.dumps(given[field.name]) if not isinstance(value, str | int | float) else value
            flags.append(f"--{name}={shown}")
    return flags


def serve(model: str, given: Mapping[str, Any], port: int) -> None:
    """Replace this process by vLLM's own server."""
    set_environment(model, None)
    # The program keeps this setting: it ends with the command that measures it, even if that is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    flags = [*server_flags(model, given), "--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "error"]
    # Only then it has the route for tokens.
    flags.append("--tokens-only")
    program = [sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"]
    os.execv(program[0], [*program, *flags])


async def answer_lines(model: str, given: Mapping[str, Any]) -> None:
    """Start the engine, then answer the lines on stdin until it ends."""
    launch = Launch(model, given, None)
    await asyncio.to_thread(launch.run)
    try:
        write({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            write({"tokens": await generate(launch.llm, question["prompts"], question["max_tokens"])})
    finally:
        launch.llm.shutdown()


async def generate(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Generate for all prompts at once, and return the number of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

    async def one(number: int, prompt: Sequence[int]) -> int:
        outputs = llm.generate({"prompt_token_ids": list(prompt)}, params, f"alone-{number}-{os.urandom(8).hex()}")
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(number, prompt)) for number, prompt in enumerate(prompts)]
    return sum(task.result() for task in running)


def write(answer: Mapping[str, Any]) -> None:
    """Write a line to stdout."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m rollbus.workers.engines.vllm.alone", description="vLLM alone.")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="engine arguments as JSON")
    parser.add_argument("--serve", type=int, metavar="PORT", help="run vLLM's own server at this port of 127.0.0.1")
    options = parser.parse_args()
    if options.serve is None:
        asyncio.run(answer_lines(options.model, options.engine_args))
    else:
        serve(options.model, options.engine_args, options.serve)
