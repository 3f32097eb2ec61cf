"""Run one request on vLLM's AsyncLLM without the adapter: `python -m tests.engine.direct_llm MODEL TASK`."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from workers.engines.vllm.launch import set_environment


async def generate(model: str, task: dict[str, Any]) -> dict[str, Any]:
    """Generate what `task` says."""
    set_environment(model, None)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
    )
    llm = AsyncLLM.from_engine_args(args)
    try:
        params = SamplingParams(**task["sampling"], detokenize=False)
        final = None
        async for output in llm.generate({"prompt_token_ids": task["prompt"]}, params, "direct"):
            final = output.outputs[0]
    finally:
        llm.shutdown()
    if final is None:
        raise SystemExit("no output")
    tokens = list(final.token_ids)
    return {
        "token_ids": tokens,
        "logprobs": [position[token].logprob for position, token in zip(final.logprobs, tokens, strict=True)],
        "routed_experts": final.routed_experts.tolist(),
    }


if __name__ == "__main__":
    task = json.loads(sys.argv[2])
    Path(task["output"]).write_text(json.dumps(asyncio.run(generate(sys.argv[1], task))))
