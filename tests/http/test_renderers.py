"""The published `renderers` package with a real engine: unchanged, over several turns, and many at a time."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from renderers import (  # type: ignore[import-untyped]
    DefaultRendererConfig,
    OverlongPromptError,
    Renderer,
    create_renderer,
)
from renderers.client import generate  # type: ignore[import-untyped]

import rollbus
from tests.http.support import http_before, rows_of

pytestmark = pytest.mark.vllm

NUM_ROLLOUTS = 16
QUESTIONS = ("How many apples are left?", "And when does the train arrive?", "Please explain.")


@pytest.fixture(scope="module")
def renderer(tiny_moe_float32: Path) -> Renderer:
    """Return a renderer as a trainer creates it for a model without a special renderer."""
    from transformers import AutoTokenizer

    return create_renderer(AutoTokenizer.from_pretrained(tiny_moe_float32), DefaultRendererConfig())


async def rollout(client: AsyncOpenAI, renderer: Renderer, model: str, number: int) -> list[dict[str, Any]]:
    """Run several turns, each with the tokens of the previous turns. Return the client's parsed responses."""
    turns: list[dict[str, Any]] = []
    ids: list[int] = []
    for question in QUESTIONS:
        messages: Any = [{"role": "user", "content": f"{number}: {question}"}]
        prompt_ids = ids + renderer.render_ids(messages, add_generation_prompt=True)
        # The next turn returns the row of the last sampled token.
        sampling = {"max_tokens": 6, "temperature": 0.0, "routed_experts_prompt_start": max(len(ids) - 1, 0)}
        turn = await generate(
            client=client,
            renderer=renderer,
            messages=messages,
            model=model,
            prompt_ids=prompt_ids,
            sampling_params=sampling,
            cache_salt=f"salt-{number % 4}",
            priority=number % 3 - 1,
            extra_headers={"X-Session-ID": f"rollout-{number}"},
        )
        turns.append(turn)
        ids = prompt_ids + turn["completion_ids"]
    return turns


async def test_the_turns_of_parallel_rollouts_have_all_rows(nats_url: str, real_fleet: str, renderer: Renderer) -> None:
    """Each turn has its tokens and logprobs, and the rows of the turns join to those of the conversation."""
    async with http_before(nats_url, real_fleet) as http:
        await http.own.fleet.wait_for_workers()
        (worker,) = http.own.fleet.workers
        async with (
            AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client,
            asyncio.TaskGroup() as tasks,
        ):
            running = [tasks.create_task(rollout(client, renderer, worker.model, i)) for i in range(NUM_ROLLOUTS)]
        finished = [task.result() for task in running]
        again = [await http.rb.complete(whole_conversation(turns)) for turns in finished[:4]]

    for turns in finished:
        position = 0
        for turn in turns:
            assert len(turn["completion_ids"]) == len(turn["completion_logprobs"]) > 0
            assert turn["finish_reason"] in ("stop", "length")
            assert turn["routed_experts"]["start"] == position
            position += len(rows_of(turn["routed_experts"]))
            assert position == len(turn["prompt_ids"]) + len(turn["completion_ids"]) - 1
    for turns, expected in zip(finished[: len(again)], again, strict=True):
        rows = np.concatenate([rows_of(turn["routed_experts"]) for turn in turns])
        assert np.array_equal(rows, expected.routed_experts[: len(rows)])


def whole_conversation(turns: list[dict[str, Any]]) -> rollbus.GenerateRequest:
    """Return a request whose prompt is all tokens of a rollout."""
    last = turns[-1]
    return rollbus.GenerateRequest(
        prompt_token_ids=last["prompt_ids"] + last["completion_ids"], sampling=rollbus.SamplingParams(max_tokens=1)
    )


async def test_the_client_refuses_a_long_prompt_before_sending(
    nats_url: str, real_fleet: str, renderer: Renderer
) -> None:
    """The client reads the context length from `/v1/models` and refuses a longer prompt."""
    async with http_before(nats_url, real_fleet) as http:
        await http.own.fleet.wait_for_workers()
        (worker,) = http.own.fleet.workers
        limit = worker.capabilities.max_model_len
        async with AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(OverlongPromptError) as error:
                await generate(
                    client=client, renderer=renderer, messages=[], model=worker.model, prompt_ids=[10] * (limit + 1)
                )
    assert (error.value.prompt_len, error.value.max_prompt_len) == (limit + 1, limit)
