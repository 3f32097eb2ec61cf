"""The requests of a chaos run and their expected results, computed by the synthetic engine without a bus."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollbus.bus.client.generation import Generation
from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.chunk import FinishReason, TopLogprobs
from rollbus.schemas.request import GenerateRequest, expand_children
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

VOCAB_SIZE = 300
"""Small, so that some requests end at a stop token."""
NUM_SESSIONS = 20
TIMEOUT_S = 600.0
"""Seconds far above the time of any request, so that a forgotten request does not delay the run for an hour."""
SHARES = {"short": 40, "long": 15, "seeded": 15, "penalties": 10, "samples": 5, "session": 10, "large": 5}


def make_requests(count: int, seed: int) -> list[GenerateRequest]:
    """Return `count` requests of all kinds, the same for the same seed. Each has exactly one right result."""
    rng = random.Random(seed)
    kinds = rng.choices(list(SHARES), list(SHARES.values()), k=count)
    return [_make(kind, f"{kind}-{index}", rng) for index, kind in enumerate(kinds)]


def _make(kind: str, request_id: str, rng: random.Random) -> GenerateRequest:
    # A request that is not greedy has one right result only with a seed.
    sampling: dict[str, Any] = {
        "seeded": {"temperature": 1.0, "seed": rng.randrange(2**32)},
        "penalties": {"temperature": 0.7, "seed": rng.randrange(2**32), "presence_penalty": 0.5},
        "samples": {"temperature": 1.0, "seed": rng.randrange(2**32), "n": rng.randint(2, 4)},
    }.get(kind, {"temperature": 0.0})
    max_tokens = rng.randint(150, 400) if kind == "long" else rng.randint(1, 60)
    prompt_len = rng.randint(1000, 3000) if kind == "large" else rng.randint(1, 40)
    with_prompt = rng.random() < 0.05
    return GenerateRequest(
        request_id=request_id,
        timeout_s=TIMEOUT_S,
        prompt_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)],
        session_id=f"session-{rng.randrange(NUM_SESSIONS)}" if kind == "session" else None,
        priority=rng.choice([0, 0, 0, 0, -1, 1]),
        routed_experts_prompt_start=rng.randint(0, prompt_len) if rng.random() < 0.3 else 0,
        return_routed_experts=rng.choice([None, None, None, False]),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=rng.random() < 0.5,
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
            stop_token_ids=[rng.randrange(VOCAB_SIZE)] if rng.random() < 0.3 else [],
            logprobs=rng.choice([0, 0, 0, 2, None]),
            prompt_logprobs=1 if with_prompt else None,
            **sampling,
        ),
    )


@dataclass
class _Output:
    """The output of the engine for one child request."""

    request: GenerateRequest
    steps: list[RequestStep] = field(default_factory=list)


async def undisturbed(
    requests: Sequence[GenerateRequest], config: SyntheticConfig, model: Path | None = None
) -> dict[str, Generation]:
    """Return the result of each request on an undisturbed engine, by request id.

    Args:
        model: checkpoint with which the engine starts.
    """
    # The same model, without delays.
    engine = SyntheticEngine(msgspec.structs.replace(config, step_s=0.0), model)
    await engine.start()
    outputs: dict[str, _Output] = {}
    for request in requests:
        for child, child_request in enumerate(expand_children(request)):
            outputs[f"{request.request_id}/{child}"] = _Output(child_request)
            await engine.add(f"{request.request_id}/{child}", child_request)
    num_open = len(outputs)
    steps = engine.steps()
    while num_open:
        for step in split(await anext(steps)):
            outputs[step.key].steps.append(step)
            num_open -= step.finish_reason is not None
    await engine.close()
    return {request.request_id: _generation(request, outputs) for request in requests}


def _generation(request: GenerateRequest, outputs: dict[str, _Output]) -> Generation:
    first, *others = (
        _child(request, child, outputs[f"{request.request_id}/{child}"]) for child in range(request.sampling.n)
    )
    return _child(request, 0, outputs[f"{request.request_id}/0"], tuple(others)) if others else first


def _child(asked: GenerateRequest, child: int, output: _Output, siblings: tuple[Generation, ...] = ()) -> Generation:
    request, steps = output.request, output.steps
    rows = [step.routed_experts for step in steps if step.routed_experts is not None]
    logprobs = [step.logprobs for step in steps if step.logprobs is not None]
    top_ids, top_logprobs = _tops(step.top_logprobs for step in steps)
    prompt = [step.prompt_logprobs for step in steps if step.prompt_logprobs is not None]
    prompt_ids, prompt_tops = _tops(part.top for part in prompt)
    return Generation(
        request=asked,
        request_id=asked.request_id,
        child=child,
        prompt_len=request.prompt_len,
        token_ids=np.concatenate([step.token_ids for step in steps]),
        logprobs=np.concatenate(logprobs) if logprobs else None,
        weight_versions=np.zeros(sum(len(step.token_ids) for step in steps), np.int32),
        routed_experts=np.concatenate(rows) if rows else None,
        start=request.routed_experts_prompt_start,
        finish_reason=steps[-1].finish_reason or FinishReason.ERROR,
        stop_reason=steps[-1].stop_reason,
        top_token_ids=top_ids,
        top_logprobs=top_logprobs,
        prompt_logprobs=np.concatenate([np.frombuffer(p.logprobs_data, "<f4") for p in prompt]) if prompt else None,
        prompt_top_token_ids=prompt_ids,
        prompt_top_logprobs=prompt_tops,
        siblings=siblings,
    )


def _tops(
    parts: Iterable[TopLogprobs | None],
) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
    """Return the token ids and logprobs of all parts as [positions, width] each, or None without parts."""
    found = [part for part in parts if part is not None]
    if not found:
        return None, None
    width = found[0].width
    ids = np.frombuffer(b"".join(part.token_ids_data for part in found), "<i4")
    logprobs = np.frombuffer(b"".join(part.logprobs_data for part in found), "<f4")
    return ids.reshape(-1, width), logprobs.reshape(-1, width)
