"""Run one request on vLLM's AsyncLLM without the adapter."""

from pathlib import Path
from typing import Any

import pytest

from rollbus.workers.engines.vllm.launch import set_environment


async def generate(
    model: Path, prompt: list[int], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Return vLLM's tokens, log probabilities and routed experts of one request."""
    set_environment(str(model), None)
    # This setting makes vLLM start one process instead of two.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 28,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
    )
    llm = AsyncLLM.from_engine_args(args)
    try:
        params = SamplingParams(**sampling, detokenize=False)
        final = None
        async for output in llm.generate({"prompt_token_ids": prompt}, params, "direct"):
            final = output.outputs[0]
    finally:
        llm.shutdown()
    tokens = list(final.token_ids)
    return {
        "token_ids": tokens,
        "logprobs": [position[token].logprob for position, token in zip(final.logprobs, tokens, strict=True)],
        "routed_experts": final.routed_experts.tolist(),
    }
