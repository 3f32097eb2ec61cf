"""`echo` of /v1/completions with the OpenAI client, on a synthetic engine."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http.openai_support import talking
from tests.http.small_tokenizers import byte_level
from tests.http.support import by_bus
from tests.support.streams import all_of

ASKED: Any = {"model": "synthetic", "seed": 3, "max_tokens": 5}


async def test_each_choice_starts_with_its_prompt(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Each choice starts with its prompt, for texts and token ids, streamed or not.

    The prompt logprobs are those of the bus.
    """
    async with talking(nats_url, fleet, tmp_path) as (http, client):
        for prompt in ("the é", [5, 6], ["the", "é"], [[5, 6], [7]]):
            several = isinstance(prompt, list) and not isinstance(prompt[0], int)
            prompts: list[Any] = prompt if several and isinstance(prompt, list) else [prompt]
            asked = {**ASKED, "prompt": prompt, "n": 2}
            plain = await client.completions.create(**asked, logprobs=1)
            answer = await client.completions.create(**asked, logprobs=1, echo=True)
            events = await all_of(await client.completions.create(**asked, echo=True, stream=True))

            assert answer.usage == plain.usage
            assert len(answer.choices) == 2 * len(prompts)
            for choice, without in zip(answer.choices, plain.choices, strict=True):
                given = prompts[choice.index // 2]
                text = given if isinstance(given, str) else byte_level().decode(given, skip_special_tokens=False)
                ids = byte_level().encode(given) if isinstance(given, str) else given
                direct = await by_bus(http.rb, ids, seed=3, n=2, max_tokens=5, logprobs=1, prompt_logprobs=1)
                assert choice.text == text + without.text
                parts = [event.choices[0].text for event in events if event.choices[0].index == choice.index]
                assert "".join(parts) == choice.text
                shown, later = choice.logprobs, without.logprobs
                expected = [None, *direct.prompt_logprobs.tolist()]
                assert shown.token_logprobs == [*expected, *later.token_logprobs]
                assert shown.top_logprobs[0] is None
                assert [len(top) > 0 for top in shown.top_logprobs[1 : len(ids)]] == [True] * (len(ids) - 1)
                assert shown.top_logprobs[len(ids) :] == later.top_logprobs
                assert shown.tokens[len(ids) :] == later.tokens
                assert shown.text_offset == [sum(map(len, shown.tokens[:at])) for at in range(len(shown.tokens))]


async def test_with_max_tokens_0_the_prompt_is_scored_without_a_completion(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """With max_tokens 0, the prompt is scored without a completion. With token ids, its text is omitted, as in vLLM."""
    async with talking(nats_url, fleet, tmp_path) as (_, client):
        asked = {**ASKED, "max_tokens": 0, "prompt": "the é", "echo": True}
        [scored] = (await client.completions.create(**asked, logprobs=0)).choices
        events = await all_of(await client.completions.create(**asked, stream=True))
        [with_ids] = (await client.completions.create(**asked, extra_body={"return_token_ids": True})).choices
        ids = byte_level().encode("the é")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(**asked, logprobs=0, stream=True)
        with pytest.raises(openai.BadRequestError) as nothing:
            await client.completions.create(**{**asked, "echo": False})
    assert scored.text == "the é"
    assert (len(scored.logprobs.tokens), scored.logprobs.token_logprobs[0]) == (len(ids), None)
    assert all(logprob <= 0 for logprob in scored.logprobs.token_logprobs[1:])
    assert "".join(event.choices[0].text for event in events) == "the é"
    assert (with_ids.text, with_ids.prompt_token_ids) == ("", ids)
    assert [each.value.param for each in (refused, nothing)] == ["echo", "max_tokens"]
