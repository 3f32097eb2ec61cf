"""The OpenAI routes with the OpenAI client, on a synthetic engine."""

import asyncio
from typing import Any

import openai
import pytest
from msgspec.structs import replace

import rollbus
from rollbus.bus.client.calls import Call
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import CHAT, COMPLETIONS, Talk, by_bus, byte_level, client_of
from tests.support.fleet import until_idle
from tests.support.requests import all_of

USER = {"role": "user", "content": "the é 🙂"}
MESSAGES: Any = [USER]
IDS = {"return_token_ids": True}


async def test_a_chat_gives_the_same_result_streamed_or_not(talk: Talk) -> None:
    """A chat gives the same text, tokens, logprobs and usage streamed or not, with one choice or several."""
    async with talk() as (http, client):
        for n in (1, 3):
            asked: Any = {"model": "synthetic", "messages": MESSAGES, "max_tokens": 12, "seed": 7, "n": n}
            asked |= {"logprobs": True, "top_logprobs": 2}
            answer = await client.chat.completions.create(**asked, extra_body=IDS)
            events = await all_of(
                await client.chat.completions.create(
                    **asked, stream=True, stream_options={"include_usage": True}, extra_body=IDS
                )
            )
            prompt = answer.prompt_token_ids
            direct = await by_bus(http.rb, prompt, max_tokens=12, seed=7, n=n, logprobs=2)

            *events, last = events
            assert (answer.object, events[0].object) == ("chat.completion", "chat.completion.chunk")
            assert (last.choices, last.usage) == ([], answer.usage)
            assert answer.usage.completion_tokens == sum(len(s.token_ids) for s in (direct, *direct.siblings))
            assert answer.usage.prompt_tokens == len(prompt)
            assert events[0].prompt_token_ids == prompt
            for choice, generation in zip(answer.choices, (direct, *direct.siblings), strict=True):
                deltas = [event.choices[0] for event in events if event.choices[0].index == choice.index]
                assert [delta.delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
                assert "".join(delta.delta.content for delta in deltas) == choice.message.content
                assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [choice.finish_reason]
                assert choice.token_ids == generation.token_ids.tolist()
                assert [token_id for delta in deltas[1:] for token_id in delta.token_ids] == choice.token_ids
                entries = choice.logprobs.content
                assert [entry for delta in deltas[1:] for entry in delta.logprobs.content] == entries
                assert [entry.logprob for entry in entries] == generation.logprobs.tolist()
                data = b"".join(bytes(entry.bytes or []) for entry in entries)
                assert data.decode(errors="replace").removesuffix("<|end|>") == choice.message.content
                for entry in entries:
                    assert len(entry.top_logprobs) == 2
                    assert all(top.token and top.bytes for top in entry.top_logprobs)


async def test_concurrent_conversations_receive_the_tokens_of_the_bus(talk: Talk) -> None:
    """Concurrent conversations of three turns, streamed or not, each receive the tokens of the bus."""
    async with talk() as (http, client):

        async def converse(number: int) -> None:
            messages: Any = [{"role": "system", "content": f"the {number}"}]
            for _ in range(3):
                messages.append(USER)
                asked: Any = {"model": "synthetic", "messages": messages, "max_tokens": 6, "seed": number}
                if number % 2:
                    answer = await client.chat.completions.create(**asked, extra_body=IDS)
                    prompt = answer.prompt_token_ids
                    ids, text = answer.choices[0].token_ids, answer.choices[0].message.content
                else:
                    events = await all_of(await client.chat.completions.create(**asked, stream=True, extra_body=IDS))
                    prompt, events = events[0].prompt_token_ids, events[1:]
                    ids = [token_id for event in events for token_id in event.choices[0].token_ids]
                    text = "".join(event.choices[0].delta.content for event in events)
                assert ids == (await by_bus(http.rb, prompt, max_tokens=6, seed=number)).token_ids.tolist()
                messages.append({"role": "assistant", "content": text})

        async with asyncio.TaskGroup() as tasks:
            for number in range(20):
                tasks.create_task(converse(number))


async def test_a_stop_string_ends_text_and_tokens_and_stops_the_engine(talk: Talk) -> None:
    """The text ends before or with the stop string, the tokens with the one that completes it, and the engine stops."""
    config = SyntheticConfig(vocab_size=262, eos_token_id=300, max_model_len=65_536)
    async with talk(config) as (http, client):
        asked: Any = {"model": "synthetic", "prompt": "the", "seed": 1, "max_tokens": 60_000}
        plain = await client.completions.create(**{**asked, "max_tokens": 40}, extra_body=IDS)
        ids = plain.choices[0].token_ids
        text = plain.choices[0].text
        at = next(index for index in range(10, len(text) - 2) if "\ufffd" not in text[index : index + 2])
        stop = text[at : at + 2]
        at = text.index(stop)
        for include in (False, True):
            extra = {**IDS, "include_stop_str_in_output": include}
            answer = await client.completions.create(**asked, stop=["nowhere", stop], extra_body=extra)
            events = await all_of(await client.completions.create(**asked, stop=stop, stream=True, extra_body=extra))
            (choice,) = answer.choices
            assert choice.text == text[: at + 2 * include]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            kept = choice.token_ids
            assert kept == ids[: len(kept)]
            assert answer.usage.completion_tokens == len(kept) < 40
            assert "".join(event.choices[0].text for event in events) == choice.text
            assert [token_id for event in events for token_id in event.choices[0].token_ids] == kept
            assert events[-1].choices[0].finish_reason == "stop"
        await until_idle(http.engine, http.rb)


async def test_a_completion_accepts_texts_and_token_ids(talk: Talk) -> None:
    """A completion accepts texts or token ids, one or several, each with n choices in order, streamed or not."""
    async with talk() as (http, client):
        for prompt in ("the é", [5, 6], ["the", "é"], [[5, 6], [7]]):
            asked: Any = {"model": "synthetic", "prompt": prompt, "n": 2, "seed": 3, "logprobs": 1, "max_tokens": 5}
            answer = await client.completions.create(**asked, extra_body=IDS)
            events = await all_of(await client.completions.create(**asked, stream=True, extra_body=IDS))

            several = isinstance(prompt, list) and not isinstance(prompt[0], int)
            assert [choice.index for choice in answer.choices] == list(range(4 if several else 2))
            for choice in answer.choices:
                ids = choice.prompt_token_ids
                direct = await by_bus(http.rb, ids, seed=3, n=2, max_tokens=5, logprobs=1)
                expected = (direct, *direct.siblings)[choice.index % 2]
                assert choice.token_ids == expected.token_ids.tolist()
                shown = choice.logprobs
                assert shown.token_logprobs == expected.logprobs.tolist()
                parts = [event.choices[0] for event in events if event.choices[0].index == choice.index]
                assert parts[0].prompt_token_ids == ids
                assert "".join(part.text for part in parts) == choice.text
                assert [offset for part in parts for offset in part.logprobs.text_offset] == shown.text_offset
                assert shown.text_offset == [sum(map(len, shown.tokens[:at])) for at in range(len(shown.tokens))]


async def test_a_stop_token_is_in_the_token_ids_but_not_in_the_text(talk: Talk) -> None:
    """A stop token is in the token ids of a choice but not in its text, and the defaults are those of OpenAI."""
    async with talk() as (http, client):
        plain = await by_bus(http.rb, [5, 6], max_tokens=16, seed=1)
        stop = int(plain.token_ids[3])
        answer = await client.completions.create(
            model="synthetic", prompt=[5, 6], seed=1, extra_body={**IDS, "stop_token_ids": [stop]}
        )
        default = await client.completions.create(model="synthetic", prompt=[5, 6], seed=1, extra_body=IDS)
        rest = await client.chat.completions.create(
            model="synthetic", messages=MESSAGES, extra_body={**IDS, "ignore_eos": True}
        )
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == plain.token_ids[: len(choice.token_ids)].tolist()
    assert choice.token_ids[-1] == stop
    assert default.choices[0].token_ids == plain.token_ids.tolist()
    assert choice.text == byte_level().decode(choice.token_ids[:-1])
    assert default.choices[0].text.startswith(choice.text)
    assert (rest.choices[0].finish_reason, rest.usage.total_tokens) == ("length", 512)


async def test_errors_are_exceptions_of_the_openai_client(talk: Talk) -> None:
    """Errors are raised as exceptions of the OpenAI client with field and code, before any event of a stream."""
    async with talk() as (_, client):
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.chat.completions.create(model="nobody's", messages=MESSAGES, stream=stream)
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.chat.completions.create(
                    model="synthetic", messages=[{"role": "user", "content": "the" * 600}], stream=stream
                )
            with pytest.raises(openai.BadRequestError) as too_many:
                await client.chat.completions.create(
                    model="synthetic", messages=MESSAGES, max_completion_tokens=600, stream=stream
                )
            assert (unknown.value.code, unknown.value.param) == ("unknown_model", "model")
            assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "messages")
            assert (too_many.value.code, too_many.value.param) == ("invalid_request", "max_completion_tokens")


async def test_the_engine_stops_if_the_client_disconnects(talk: Talk) -> None:
    """If the client disconnects, the engine stops: for streams, several prompts and stop strings."""
    config = SyntheticConfig(vocab_size=262, eos_token_id=300, max_model_len=65_536, step_s=0.002)
    async with talk(config) as (http, client):
        asked: Any = {"model": "synthetic", "max_tokens": 60_000}
        for more in ({}, {"stop": "\x00\x01\x02\x03\x04"}):
            for prompt in ("the", ["the", "é"]):
                stream = await client.completions.create(**asked, **more, prompt=prompt, stream=True)
                await anext(aiter(stream))
                await stream.close()
                impatient = client_of(http).with_options(timeout=0.2)
                with pytest.raises(openai.APITimeoutError):
                    await impatient.completions.create(**asked, **more, prompt=prompt)
        await until_idle(http.engine, http.rb)


async def test_an_engine_error_ends_every_response(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine error gives 502 for one prompt or several, and an error event in a stream that has begun."""

    async def fail(call: Call, most_bytes: int) -> Any:
        if call.wire_id in begun:
            raise rollbus.RequestFailed(code=rollbus.ErrorCode.ENGINE_ERROR, message="the engine has failed")
        begun.add(call.wire_id)
        # A worker may send all tokens in the first chunk.
        return [replace(chunk, end=None) for chunk in await next_chunks(call, most_bytes)]

    async def fail_whole(_client: rollbus.Client, _wanted: rollbus.GenerateRequest, **_: object) -> Any:
        raise rollbus.RequestFailed(code=rollbus.ErrorCode.ENGINE_ERROR, message="the engine has failed")

    begun, next_chunks = set[str](), Call.next_chunks
    monkeypatch.setattr(Call, "next_chunks", fail)
    monkeypatch.setattr(rollbus.Client, "complete", fail_whole)
    async with talk() as (http, client):
        for prompt in ("the", ["the", "é"]):
            for more in ({}, {"stop": "nowhere"}):
                with pytest.raises(openai.InternalServerError) as failed:
                    await client.completions.create(model="synthetic", prompt=prompt, **more)
                assert (failed.value.status_code, failed.value.code) == (502, "engine_error")
            # With logprobs, each token has an event, also if it is only part of a character.
            stream = await client.completions.create(model="synthetic", prompt=prompt, logprobs=0, stream=True)
            with pytest.raises(openai.APIError, match="the engine has failed"):
                await all_of(stream)
        monkeypatch.undo()
        await until_idle(http.engine, http.rb)


# `echo` of /v1/completions with the OpenAI client, on a synthetic engine.


ASKED: Any = {"model": "synthetic", "seed": 3, "max_tokens": 5}


async def test_each_choice_starts_with_its_prompt(talk: Talk) -> None:
    """Each choice starts with its prompt, for texts and token ids, streamed or not.

    The prompt logprobs are those of the bus.
    """
    async with talk() as (http, client):
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


async def test_with_max_tokens_0_the_prompt_is_scored_without_a_completion(talk: Talk) -> None:
    """With max_tokens 0, the prompt is scored without a completion. With token ids, its text is omitted, as in vLLM."""
    async with talk() as (_, client):
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


# Requests that the OpenAI routes refuse before publishing, and fields that they ignore.


OPENAI_REFUSED_USER = {"role": "user", "content": "the"}
TOOL = {"type": "function", "function": {"name": "f"}}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 2, "nvext": {"extra_fields": ["engine_data"]}}, "n"),
    ({"seed": -2}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"min_tokens": 20, "max_tokens": 3}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [264]}, "stop_token_ids"),
    ({"logit_bias": {"264": 1}}, "logit_bias"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": False}}, "stream_options"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"bad_words": [" "], "max_tokens": 1}, "bad_words"),
    ({"nvext": {"token_data": []}}, "nvext.token_data"),
    ({"nvext": {"token_data": [264]}}, "nvext.token_data[0]"),
    ({"nvext": {"token_data": [1]}, "tokens": [2]}, "tokens"),
    ({"nvext": {"cache_salt": "a"}, "cache_salt": "b"}, "cache_salt"),
    ({"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
    ({"nvext": {"routed_experts_prompt_start": 500}}, "nvext.routed_experts_prompt_start"),
    ({"nvext": {"extra_fields": ["timing", "token_idz"]}}, "nvext.extra_fields[1]"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"prompt_cache_key": "a\n"}, "prompt_cache_key"),
    ({"tokens": [1] * 512}, "tokens"),
]
OF_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["the", 5]}, "prompt"),
    ({"prompt": ["the", [5]]}, "prompt"),
    ({"prompt": [[5], [264]]}, "prompt[1][0]"),
    ({"prompt": [[5], []]}, "prompt[1]"),
    ({"prompt": ["the"] * 257}, "prompt"),
    ({"prompt": ["a", "b"], "nvext": {"extra_fields": ["engine_data"]}}, "prompt"),
    ({"best_of": 3}, "best_of"),
]
HARMLESS: dict[str, Any] = {
    "stop": None,
    "echo": False,
    "stream_options": {},
    "response_format": {"type": "text"},
    "nvext": {"annotations": ["x"], "agent_hints": {"osl": 3}, "extra_fields": ["stop_reason"]},
    "max_tokens": 2,
}


async def test_a_refused_request_names_its_field(talk: Talk) -> None:
    """A refused request gives 400 with the field's name, streamed or not, and never reaches the engine."""
    async with talk() as (http, _):
        base: dict[str, Any] = {"messages": [OPENAI_REFUSED_USER]}
        cases = [(CHAT, base, *case) for case in [*BOTH, *OF_CHAT]]
        cases += [(COMPLETIONS, {"prompt": "the"}, *case) for case in [*BOTH, *OF_COMPLETIONS]]
        for path, base, body, param in cases:
            for stream in ({}, {"stream": True}) if "stream_options" not in body else ({},):
                answer = await http.client.post(path, json={**base, **body, **stream})
                assert answer.status_code == 400, (path, body, answer.text)
                error = answer.json()["error"]
                assert error["param"] == param, (path, body, error)
                assert error["message"].startswith(param), (path, body, error)
        assert http.own.stats().requests == 0


async def test_fields_that_request_nothing_are_ignored(talk: Talk) -> None:
    """Fields of other servers that request nothing, and unknown hints, are ignored."""
    async with talk() as (http, _):
        for path, body in (
            (CHAT, {"messages": [OPENAI_REFUSED_USER], "parallel_tool_calls": True, "tool_choice": "auto"}),
            (COMPLETIONS, {"prompt": "the", "best_of": 1}),
        ):
            answer = await http.client.post(path, json={**body, **HARMLESS})
            assert answer.status_code == 200, answer.text
            assert "nvext" not in answer.json()


async def test_tools_are_shown_to_the_model(talk: Talk) -> None:
    """With `tool_choice` none, the prompt contains the tools. A prompt of token ids stays unchanged."""
    asked = {"messages": [OPENAI_REFUSED_USER], "tools": [TOOL], "max_tokens": 1, "return_token_ids": True}
    async with talk() as (http, _):
        shown = (await http.client.post(CHAT, json={**asked, "tool_choice": "none"})).json()
        given = (await http.client.post(CHAT, json={**asked, "nvext": {"token_data": [5, 6]}})).json()
        text = await http.client.post("/v1/detokenize", json={"tokens": shown["prompt_token_ids"]})
    assert text.json()["prompt"].startswith("(f)<user>the")
    assert given["prompt_token_ids"] == [5, 6]
