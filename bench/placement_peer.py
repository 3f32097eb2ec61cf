"""Compares Dynamo's KV router with its round robin, on its own mocker, with the traces of `bench.placement`.

One dependency of Dynamo (`aisimulate`) has no wheel on PyPI, and Dynamo's replay does not need it. So install Dynamo
into a separate environment:

    python -m venv DIR; DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    DIR/bin/pip install typing_extensions pydantic pyyaml
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.placement_engine import EngineShape
from bench.placement_traces import GROUP, Tokens, Trace, block_keys, least_computed

MODES: Final = {"dynamo, round robin": "round_robin", "dynamo, kv": "kv_router"}
"""Ways and Dynamo's names for them."""
SCRIPT: Final = Path(__file__).with_name("placement_dynamo.py")


def _prompts(trace: Trace) -> Iterator[tuple[str, int, Tokens, int]]:
    """Yield session, number of samples, prompt and number of tokens of each request. Outputs are random."""
    outputs = np.random.default_rng(0)
    for conversation in trace.conversations:
        before = np.empty(0, np.int32)
        for turn in conversation.turns:
            prompt = np.concatenate([before, turn.new_tokens])
            yield conversation.name, conversation.samples, prompt, turn.max_tokens
            before = np.concatenate([prompt, outputs.integers(10, 500, turn.max_tokens, np.int32)])


def trace_lines(trace: Trace, block_tokens: int) -> Iterator[str]:
    """Yield the lines of a trace in Mooncake's format.

    A number stands for each block of a prompt together with all blocks before it.
    """
    numbers: dict[int, int] = {}
    begun: set[str] = set()
    for name, samples, prompt, max_tokens in _prompts(trace):
        # Append a token, because the last block counts here too.
        keys = block_keys(np.append(prompt, np.int32(0)), block_tokens)
        blocks = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(prompt) % block_tokens:
            blocks.append(numbers.setdefault(hash(prompt.tobytes()), len(numbers)))
        for sample in range(samples):
            session = f"{name}/{sample}"
            when = {"delay": 0} if session in begun else {"timestamp": 0}
            begun.add(session)
            sizes = {"input_length": len(prompt), "output_length": max_tokens, "hash_ids": blocks}
            yield json.dumps({"session_id": session, **when, **sizes})


async def play_on_dynamo(python: Path, trace: Trace, mode: str, num_workers: int, shape: EngineShape) -> dict[str, Any]:
    """Play a trace. Return the data from which `bench.placement` computes figures.

    Raises:
        RuntimeError: Dynamo did not play the whole trace.
    """
    engine = {
        "num_gpu_blocks": shape.cache_tokens // shape.block_tokens,
        "block_size": shape.block_tokens,
        "max_num_seqs": shape.slots,
        "max_num_batched_tokens": 8192,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(f"{line}\n" for line in trace_lines(trace, shape.block_tokens))
        file.flush()
        in_flight = max(trace.max_in_flight, GROUP)
        process = await asyncio.create_subprocess_exec(
            *(python, SCRIPT, file.name, str(num_workers), str(in_flight), mode, str(shape.block_tokens)),
            json.dumps(engine),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"DYN_LOG": "error"},
        )
        output, _ = await process.communicate()
    requests = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    if process.returncode or len(requests) != sum(samples for _, samples, _, _ in _prompts(trace)):
        raise RuntimeError(f"Dynamo exited with code {process.returncode} after {len(requests)} requests")
    return {
        "computed": sum(one["input_length"] - one["reused_input_tokens"] for one in requests),
        "least": least_computed(((prompt, [prompt] * n) for _, n, prompt, _ in _prompts(trace)), shape.block_tokens),
        "tokens": trace.num_tokens,
        "seconds": max(one["terminal_time_ms"] for one in requests) / 1000,
        "ended_s": [one["terminal_time_ms"] / 1000 for one in requests],
        "first_s": [one["ttft_ms"] / 1000 for one in requests],
    }
