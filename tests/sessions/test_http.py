"""Sessions over HTTP: agents with an unchanged client, and samples with the tokens that the engine sampled."""

import json
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from msgspec.structs import replace
from tokenizers import normalizers

from rollbus.frontend.http import Settings
from rollbus.frontend.http.sessions import running
from rollbus.integrations.sessions import AgentSession, SessionFailed, open_session, run_group
from rollbus.trainer import PackError, Sample
from tests.http.support import client_of, http_before, rows_of
from tests.sessions.families import tokenizer_of
from tests.sessions.support import CONFIG, EOS, TOOL, Serving, agent_of, write_call
from tests.support.waits import until

USER = {"role": "user", "content": "How much is 1 + 2 + 3 + 4 + 5?"}
FINAL = "<think>\nThat is all.\n</think>\n\nIt is 15."


def ids_of(text: str) -> list[int]:
    """Return the ids that the engine samples for a text."""
    return [*tokenizer_of("qwen3").encode(text, add_special_tokens=False), EOS]


async def turn(agent: Any, messages: list[Any], *, stream: bool = False, **fields: Any) -> tuple[dict[str, Any], str]:
    """Send a turn. Return the assistant's message, as clients send it back, and the finish reason."""
    asked: dict[str, Any] = {"model": "synthetic", "messages": messages, "tools": [TOOL], **fields}
    if not stream:
        (choice,) = (await agent.chat.completions.create(**asked)).choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, Any] = {}
    reason = ""
    async for event in await agent.chat.completions.create(**asked, stream=True):
        for choice in event.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, {"type": "function", "function": {"name": "", "arguments": ""}})
                known["id"] = call.id or known.get("id")
                known["function"]["name"] += call.function.name or ""
                known["function"]["arguments"] += call.function.arguments or ""
    return {**message, **({"tool_calls": list(calls.values())} if calls else {})}, reason


async def run_agent(agent: Any, messages: list[Any], *, stream: bool, **fields: Any) -> list[Any]:
    """Call the tool until the model answers. Return the history."""
    while True:
        message, reason = await turn(agent, messages, stream=stream, **fields)
        messages = [*messages, message]
        if reason != "tool_calls":
            return messages
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            result = str(arguments["a"] + arguments["b"])
            messages = [*messages, {"role": "tool", "tool_call_id": call["id"], "content": result}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_gives_one_sample_with_the_sampled_tokens(
    serve: Serving, writes: list[str], stream: bool
) -> None:
    """An unchanged client runs five turns. The sample has their tokens, logprobs, versions and rows, in order."""
    texts = [write_call(1, 2), write_call(3, 3), write_call(6, 4), write_call(10, 5), FINAL]
    writes += texts
    async with serve() as (_, owner):
        session = await owner.open(routed_experts=True)
        async with agent_of(session) as agent:
            history = await run_agent(agent, [USER], stream=stream)
            assert history[-1]["content"].strip() == "It is 15."
        (sample,) = await owner.samples(session)
        read = await owner.read(session)
    ids, mask = np.array(sample["token_ids"]), np.array(sample["loss_mask"])
    assert ids[mask].tolist() == [each for text in texts for each in ids_of(text)]
    size = len(ids)
    assert (np.array(sample["weight_versions"])[mask] >= 0).all()
    assert (np.array(sample["logprobs"])[mask] <= 0).all()
    assert rows_of(sample["routed_experts"]).shape[0] == size - 1
    assert sample["turn_of_token"] == sorted(sample["turn_of_token"])
    # The last turn is compared when the sample is read.
    assert sample["joins"] == ["whole", "checked", "tail", "checked", "checked"]
    assert sample["kv_version_spans"] == [[[0, 0]]] * 5
    assert sample["forks"] == [None] * 5
    assert read["num_tokens"] == size
    text = tokenizer_of("qwen3").decode(ids.tolist(), skip_special_tokens=False)
    assert text.count("<|im_end|>") == 10 + 1  # the system prompt with the tools, the question, five answers, results


async def run_on_responses(agent: Any, history: list[Any], *, stream: bool) -> str:
    """Call the tool over the Responses API until the model answers. Return the answer."""
    function = {"type": "function", **TOOL["function"]}
    while True:
        asked: dict[str, Any] = {"model": "synthetic", "input": history, "tools": [function]}
        answer = await agent.responses.create(**asked, stream=stream)
        if stream:
            answer = [event async for event in answer][-1].response
        calls = [item for item in answer.output if item.type == "function_call"]
        history = [*history, *(item.model_dump(mode="json", exclude_none=True) for item in answer.output)]
        if not calls:
            return str(answer.output_text)
        for call in calls:
            arguments = json.loads(call.arguments)
            result = str(arguments["a"] + arguments["b"])
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


async def run_on_messages(agent: Any, history: list[Any], *, stream: bool) -> str:
    """Call the tool over the Messages API until the model answers. Return the answer."""
    tool = {"name": "add", "description": "Adds", "input_schema": TOOL["function"]["parameters"]}
    while True:
        # Above the context of the model, as agents send it.
        asked: dict[str, Any] = {"model": "synthetic", "messages": history, "tools": [tool], "max_tokens": 20_000}
        if stream:
            async with agent.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await agent.messages.create(**asked)
        content = [block.model_dump(mode="json", exclude_none=True) for block in answer.content]
        history = [*history, {"role": "assistant", "content": content}]
        uses = [block for block in content if block["type"] == "tool_use"]
        if not uses:
            return str(content[-1]["text"])
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": str(use["input"]["a"] + use["input"]["b"])}
            for use in uses
        ]
        history.append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_the_other_apis_give_the_same_sample_as_chat(
    serve: Serving, writes: list[str], api: str, stream: bool
) -> None:
    """The clients of Responses and Messages run five turns, whose sample is that of the chat API: one branch."""
    texts = [
        f"<think>\nNext.\n</think>\n\n{write_call(1, 2)}",
        write_call(3, 3),
        write_call(6, 4),
        write_call(10, 5),
        FINAL,
    ]
    async with serve() as (_, owner):
        writes += texts
        chat, session = await owner.open(routed_experts=True), await owner.open(routed_experts=True)
        async with agent_of(chat) as agent:
            await run_agent(agent, [USER], stream=stream)
        writes += texts
        if api == "responses":
            async with agent_of(session) as agent:
                answer = await run_on_responses(agent, [USER], stream=stream)
        else:
            base_url = session["base_url"].removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=base_url, api_key=session["api_key"], max_retries=0) as agent:
                answer = await run_on_messages(agent, [USER], stream=stream)
        assert answer.strip() == "It is 15."
        ((wanted,), (found,)) = await owner.samples(chat), await owner.samples(session)
    assert found["forks"] == [None] * 5
    for name in ("token_ids", "loss_mask", "joins"):
        assert found[name] == wanted[name], name
    assert rows_of(found["routed_experts"]).shape[0] == len(found["token_ids"]) - 1


async def test_the_other_apis_join_a_session_by_its_id_and_refuse_what_it_cannot_have(
    serve: Serving, writes: list[str]
) -> None:
    """`X-Session-ID` joins on the ordinary routes. Errors have the format and the names of each API."""
    writes += ["One.", "Two."]
    async with serve() as (http, owner):
        session = await owner.open()
        key, joined = {"x-api-key": session["api_key"]}, {"X-Session-ID": session["id"]}
        told = {"model": "synthetic", "messages": [USER], "max_tokens": 100}
        assert (await http.client.post("/v1/messages", json=told, headers=joined)).status_code == 200
        asked = {"model": "synthetic", "input": [USER, {"role": "assistant", "content": "One."}, USER]}
        assert (await http.client.post("/v1/responses", json=asked, headers=joined)).status_code == 200
        (sample,) = await owner.samples(session)
        assert len(sample["turns"]) == 2
        url, no_key = f"{session['base_url']}/messages", {"x-api-key": "none"}
        for body, headers, status, words in (
            (told, no_key, 401, "key"),
            ({**told, "messages": [USER, {"role": "assistant", "content": "I"}]}, key, 400, "messages continues"),
            ({**told, "thread": {}}, key, 400, "thread"),
            ({**told, "stop_sequences": [""]}, key, 400, "stop_sequences"),
        ):
            refused = await http.client.post(url, json=body, headers=headers)
            assert (refused.status_code, refused.json()["type"]) == (status, "error"), refused.text
            assert words in refused.json()["error"]["message"]
        counted = await http.client.post(f"{url}/count_tokens", json={"messages": [USER]}, headers=key)
        assert counted.json()["input_tokens"] > 0
        refused = await http.client.post(
            f"{session['base_url']}/responses",
            json={"input": "x", "previous_response_id": "resp_1"},
            headers={"Authorization": f"Bearer {session['api_key']}"},
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert (await owner.read(session))["num_turns"] == 2


async def test_edited_and_repeated_histories_fork(serve: Serving, writes: list[str]) -> None:
    """A changed answer, a compacted history and the same request again give branches with reasons, and own samples."""
    writes += [write_call(1, 2), "It is 3.", "It is three.", "Compacted.", "Again."]
    async with serve() as (_, owner), agent_of(session := await owner.open()) as agent:
        call, _ = await turn(agent, [USER])
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "3"}
        await turn(agent, [USER, call, result])
        edited = {**call, "tool_calls": [{**call["tool_calls"][0], "function": {"name": "add", "arguments": "{}"}}]}
        await turn(agent, [USER, edited, result])
        await turn(agent, [{"role": "system", "content": "Summary: 3."}, USER])
        await turn(agent, [USER, call, result])
        read, samples = await owner.read(session), await owner.samples(session)
    forks = [each["fork"] and (each["fork"]["message"], each["fork"]["field"]) for each in read["turns"]]
    assert forks == [None, None, (1, "tool_calls"), (0, "role"), (3, "sibling")]
    assert len(samples) == 4
    assert [each["messages"][-1]["content"].strip() for each in samples] == [
        "It is 3.", "It is three.", "Compacted.", "Again.",
    ]  # fmt: skip
    # The common prefix of two branches is stored once.
    shared = sum(len(each["token_ids"]) for each in samples) - read["num_tokens"]
    assert shared == len(ids_of(write_call(1, 2))) + next(
        at for at, sampled in enumerate(samples[0]["loss_mask"]) if sampled
    )


async def test_another_service_answers_the_session_and_a_restart_loses_no_turn(
    serve: Serving, nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """Turns that two services answer in one session are one sample, and a new service has all of them."""
    writes += [write_call(1, 2), write_call(3, 3), "It is 6."]
    async with serve() as (http, owner):
        session = await owner.open(routed_experts=True)
        settings = Settings(tokenizer=tmp_path, tool_call_parser="hermes", reasoning_parser="qwen3")
        async with agent_of(session) as agent:
            history = [USER, first := (await turn(agent, [USER]))[0]]
            history.append({"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"})
        async with http_before(nats_url, fleet, settings) as other:
            await other.own.fleet.wait_for_workers()
            moved = {**session, "base_url": session["base_url"].replace(http.url, other.url)}
            async with agent_of(moved) as agent:
                history.append(second := (await turn(agent, history))[0])
                history.append({"role": "tool", "tool_call_id": second["tool_calls"][0]["id"], "content": "6"})
        async with agent_of(session) as agent:
            await turn(agent, history)
        (sample,) = await owner.samples(session)
    assert len(sample["turns"]) == 3
    assert sample["forks"] == [None, None, None]
    assert rows_of(sample["routed_experts"]).shape[0] == len(sample["token_ids"]) - 1


async def test_keys_names_and_ends(serve: Serving, writes: list[str]) -> None:
    """Only the session's key gives access. An ended session is 410, and its samples and rewards stay."""
    writes += ["One.", "Two.", "Three."]
    async with serve() as (http, owner):
        session, other = await owner.open(), await owner.open()
        for wrong in ({**session, "api_key": other["api_key"]}, {**session, "base_url": f"{http.url}/sessions/x/v1"}):
            async with agent_of(wrong) as agent:
                with pytest.raises(openai.AuthenticationError):
                    await turn(agent, [USER])
        async with client_of(http) as plain:
            await turn(plain, [USER], extra_headers={"X-Session-ID": session["id"]})
            await turn(plain, [USER], user=session["id"])
            # An unknown name opens no session.
            await turn(plain, [USER], user="ses-" + 32 * "0")
        assert (await owner.read(session))["num_turns"] == 2
        ended = await owner.client.delete(f"/v1/rl/sessions/{session['id']}")
        assert ended.json()["is_open"] is False
        async with agent_of(session) as agent:
            with pytest.raises(openai.APIStatusError) as caught:
                await turn(agent, [USER])
            assert (caught.value.status_code, caught.value.code) == (410, "session_ended")
        rewards = f"/v1/rl/sessions/{session['id']}/rewards"
        leaf = (await owner.samples(session))[0]["leaf"]
        assert (await owner.client.post(rewards, json={"reward": 0.5})).status_code == 200
        assert (await owner.client.post(rewards, json={"reward": 1.0, "turn": leaf})).status_code == 200
        assert (await owner.client.post(rewards, json={"reward": 1.0, "turn": "x"})).status_code == 400
        assert [each["reward"] for each in await owner.samples(session)] == [1.0, 0.5]
        assert (await owner.client.get("/v1/rl/sessions/ses-x/samples")).status_code == 404


async def test_limits_end_a_turn_with_length_and_reject_the_next(serve: Serving, writes: list[str]) -> None:
    """At a bound of tokens a turn ends with `length`, and the next one is a 400 that no client retries."""
    writes += ["It is fifteen, I think." * 60, "No."]
    async with serve() as (_, owner):
        session = await owner.open(max_tokens=900)
        async with agent_of(session, max_retries=2) as agent:
            message, reason = await turn(agent, [USER])
            assert reason == "length"
            assert (await owner.read(session))["num_tokens"] == 900
            with pytest.raises(openai.BadRequestError) as caught:
                await turn(agent, [USER, message, USER])
            assert (caught.value.code, "900 tokens (branches: 1)" in caught.value.message) == ("session_limit", True)
        few = await owner.open(max_turns=1)
        async with agent_of(few) as agent:
            await turn(agent, [USER])
            with pytest.raises(openai.BadRequestError):
                await turn(agent, [USER])
        (sample,) = await owner.samples(session)
        assert sample["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_the_same_turn(serve: Serving, writes: list[str], stream: bool) -> None:
    """A retry with the same key, or with the header of an SDK, gets the stored answer; another body is an error."""
    writes += ["One.", "Two."]
    async with serve() as (_, owner):
        session = await owner.open()
        async with agent_of(session) as agent:
            key = {"Idempotency-Key": "k1"}
            first = await turn(agent, [USER], stream=stream, extra_headers=key)
            assert await turn(agent, [USER], stream=stream, extra_headers=key) == first
            with pytest.raises(openai.BadRequestError):
                await turn(agent, [USER, USER], stream=stream, extra_headers=key)
            again = {"X-Stainless-Retry-Count": "1"}
            assert await turn(agent, [USER], stream=stream, extra_headers=again) == first
            assert await turn(agent, [USER], stream=stream) != first
        assert (await owner.read(session))["num_turns"] == 2


async def test_a_turn_that_its_client_leaves_goes_on_for_a_retry_and_keeps_its_tokens(
    serve: Serving, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry attaches to the running turn. Without one, the turn ends, and its tokens are no leaf by default."""
    writes += ["Slowly, " * 100, "Slowly, " * 100]
    config = replace(CONFIG, step_s=0.005)
    async with serve(config=config) as (_, owner):
        session = await owner.open()
        async with agent_of(session) as agent:
            for key, attaches in (("k1", True), ("k2", False)):
                if not attaches:
                    monkeypatch.setattr(running, "ATTACH_S", 0.05)
                asked: Any = {"model": "synthetic", "messages": [USER], "extra_headers": {"Idempotency-Key": key}}
                events = await agent.chat.completions.create(**asked, stream=True)
                async for event in events:
                    if event.choices[0].delta.content:
                        break
                await events.close()
                if attaches:
                    # The body of the retry is the same, so it is the same turn.
                    text = ""
                    async for event in await agent.chat.completions.create(**asked, stream=True):
                        text += event.choices[0].delta.content or ""
                    assert text.strip() == ("Slowly, " * 100).strip()
        await until(lambda: owner.num_turns(session), 2)
        read, samples = await owner.read(session), await owner.samples(session)
        assert [each["is_complete"] for each in read["turns"]] == [True, False]
        assert 0 < read["turns"][1]["num_sampled"] < read["turns"][0]["num_sampled"]
        assert len(samples) == 1
        assert len(await owner.samples(session, interrupted=True)) == 2


async def test_reasoning_that_the_template_drops_stays_or_forks(serve: Serving, writes: list[str]) -> None:
    """With `keep` the sampled reasoning stays in the context; with `template` the next question forks."""
    for policy, forks in (("keep", [None, None]), ("template", [None, "reasoning_dropped"])):
        writes += [FINAL, "Yes."]
        async with serve() as (_, owner):
            session = await owner.open(reasoning=policy)
            async with agent_of(session) as agent:
                message, _ = await turn(agent, [USER])
                message.pop("reasoning", None)
                await turn(agent, [USER, message, {"role": "user", "content": "Sure?"}])
            turns = (await owner.read(session))["turns"]
            assert [each["fork"] and each["fork"]["field"] for each in turns] == forks, policy
            assert len(await owner.samples(session)) == (1 if policy == "keep" else 2)


async def test_the_client_of_trainers_returns_samples(serve: Serving, writes: list[str]) -> None:
    """`open_session` gives a URL and a key, samples of the trainer's type, and typed errors."""
    writes += [write_call(1, 2), "It is 3."]
    async with serve() as (http, _):
        async with open_session(http.url, routed_experts=True, max_turns=5) as session:
            async with openai.AsyncOpenAI(base_url=session.url, api_key=session.api_key) as agent:
                await run_agent(agent, [USER], stream=True)
            await session.set_reward(0.25)
            (found,) = await session.samples()
            with pytest.raises(SessionFailed, match="turn"):
                await session.set_reward(1.0, "x")
        assert isinstance(found.sample, Sample)
        assert found.reward == 0.25
        assert len(found.sample.routed_experts) == len(found.sample) - 1
        with pytest.raises(SessionFailed, match="max_turns"):
            async with open_session(http.url, max_turns=0):
                pass


async def test_a_group_of_sessions_has_the_advantages_of_its_rewards(serve: Serving, writes: list[str]) -> None:
    """Each member has its own session, and its leaves have the member's advantage. A failed agent ends all sessions."""
    opened: list[str] = []

    async def agent(session: AgentSession) -> float:
        opened.append(session.id)
        number = len(opened)
        if number > 2:
            raise ValueError("the sandbox is gone")
        async with openai.AsyncOpenAI(base_url=session.url, api_key=session.api_key) as client:
            for _ in range(number):
                await turn(client, [USER])
        return float(number)

    async with serve() as (http, _):
        found = await run_group(http.url, agent, n=2, max_turns=5)
        assert sorted((each.reward, round(float(each.sample.advantage), 3)) for each in found) == [
            (1.0, -1.0),
            (2.0, 1.0),
            (2.0, 1.0),
        ]
        with pytest.raises(ExceptionGroup) as failed:
            await run_group(http.url, agent, n=2)
        assert failed.group_contains(ValueError, match="sandbox")
        states = [(await http.client.get(f"/v1/rl/sessions/{name}")).json() for name in opened]
        assert len(set(opened)) == len(opened)
        assert not any(state["is_open"] for state in states)
        with pytest.raises(PackError, match="n is 0"):
            await run_group(http.url, agent, n=0)


async def test_other_tools_fork_if_the_tokenizer_changes_text(serve: Serving, writes: list[str]) -> None:
    """Changed text makes the comparison say nothing. Then no turn goes on with other tools, which its prompt lacks."""
    writes += ["One.", "Two."]
    backend: Any = tokenizer_of("qwen3").wrapped
    backend = backend.backend_tokenizer
    asked = {"role": "user", "content": "Cafe\u0301?"}
    before, backend.normalizer = backend.normalizer, normalizers.NFC()
    try:
        async with serve() as (_, owner), agent_of(session := await owner.open()) as agent:
            answer, _ = await turn(agent, [asked], tools=None)
            await turn(agent, [asked, answer, asked])
            forks = [each["fork"] for each in (await owner.read(session))["turns"]]
    finally:
        backend.normalizer = before
    assert forks == [None, {"message": 0, "field": "tools"}]
