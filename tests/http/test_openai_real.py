"""The OpenAI routes with vLLM."""

import asyncio

import numpy as np
import pytest

from tests.http.support import CHAT, by_bus, client_of, http_before, rows_of

pytestmark = pytest.mark.vllm

MESSAGES = [{"role": "user", "content": "How many apples are left?"}]


async def test_conversations_have_the_tokens_and_logprobs_of_the_bus(nats_url: str, real_fleet: str) -> None:
    """Sixteen concurrent conversations of two turns, streamed or not, have the tokens and logprobs of the bus."""
    async with http_before(nats_url, real_fleet) as http, client_of(http) as client:
        await http.own.fleet.wait_for_workers()
        await http.rb.fleet.wait_for_workers()
        (model,) = (await client.models.list()).data
        extra = {"return_token_ids": True, "ignore_eos": True}

        async def converse(number: int) -> None:
            messages = [*MESSAGES, {"role": "user", "content": f"And of {number}?"}]
            for _ in range(2):
                fields = {"model": model.id, "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True}
                if number % 2:
                    answer = await client.chat.completions.create(**fields, extra_body=extra)
                    (choice,) = answer.choices
                    prompt, ids = answer.prompt_token_ids, choice.token_ids
                    entries, text = choice.logprobs.content, choice.message.content
                else:
                    stream = await client.chat.completions.create(**fields, stream=True, extra_body=extra)
                    events = [event async for event in stream]
                    prompt = events[0].prompt_token_ids
                    deltas = [event.choices[0] for event in events[1:]]
                    ids = [token_id for delta in deltas for token_id in delta.token_ids]
                    entries = [entry for delta in deltas for entry in delta.logprobs.content]
                    text = "".join(delta.delta.content for delta in deltas)
                direct = await by_bus(http.rb, prompt, max_tokens=8, temperature=0, ignore_eos=True)
                assert ids == direct.token_ids.tolist()
                assert direct.logprobs is not None
                np.testing.assert_allclose([entry.logprob for entry in entries], direct.logprobs, atol=1e-4)
                messages = [*messages, {"role": "assistant", "content": text}, *MESSAGES]

        async with asyncio.TaskGroup() as tasks:
            for number in range(16):
                tasks.create_task(converse(number))


async def test_a_token_prompt_returns_tokens_logprobs_and_experts(nats_url: str, real_fleet: str) -> None:
    """A token prompt returns the engine's tokens, logprobs and experts. Later turns start after the prefix."""
    prompt = list(range(20, 60))
    async with http_before(nats_url, real_fleet) as http:
        await http.own.fleet.wait_for_workers()
        await http.rb.fleet.wait_for_workers()
        for start in (0, 30):
            nvext: dict[str, object] = {
                "token_data": prompt,
                "extra_fields": ["engine_data", "worker_id", "weight_version"],
            }
            if start:
                nvext["routed_experts_prompt_start"] = start
            body = {"messages": [{"role": "user", "content": ""}], "nvext": nvext, "max_completion_tokens": 6}
            answer = await http.client.post(CHAT, json={**body, "temperature": 0, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            found = answer.json()["nvext"]
            direct = await by_bus(http.rb, prompt, start, max_tokens=6, temperature=0, ignore_eos=True)
            engine = found["engine_data"]
            assert engine["prompt_token_ids"] == prompt
            assert engine["completion_token_ids"] == direct.token_ids.tolist()
            assert direct.logprobs is not None
            np.testing.assert_allclose(engine["completion_logprobs"], direct.logprobs, atol=1e-4)
            assert engine["routed_experts"]["start"] == start
            # Kernels for cached prefixes and for decoding may order equal experts differently.
            rows = np.sort(rows_of(engine["routed_experts"]), axis=2)
            assert direct.routed_experts is not None
            assert np.array_equal(rows, np.sort(direct.routed_experts, axis=2))
            assert found["worker_id"]["decode_worker_id"] == direct.worker_ids[-1]
            assert found["weight_version"] == direct.weight_versions[-1]


async def test_structured_outputs_give_one_of_the_allowed_texts(nats_url: str, real_fleet: str) -> None:
    """With structured outputs, a model with random weights writes one of the given texts."""
    async with http_before(nats_url, real_fleet) as http, client_of(http) as client:
        await http.own.fleet.wait_for_workers()
        (model,) = (await client.models.list()).data
        answer = await client.completions.create(
            model=model.id,
            prompt="Yes or no?",
            max_tokens=8,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
    assert answer.choices[0].text in ("yes", "no")
