"""OpenAI's Responses API in a session, where a request has only what follows the response that it names."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.sessions.support import TOOL, Serving, agent_of, write_call

ASKED: dict[str, Any] = {"model": "synthetic", "tools": [{"type": "function", **TOOL["function"]}], "store": True}


async def ask(agent: Any, given: Any, *, stream: bool = False, **fields: Any) -> Any:
    """Return the response to an input."""
    answer = await agent.responses.create(**ASKED, input=given, stream=stream, **fields)
    return [event async for event in answer][-1].response if stream else answer


def result_of(response: Any) -> list[dict[str, Any]]:
    """Return the result of a response's call as the next input."""
    (call,) = [item for item in response.output if item.type == "function_call"]
    arguments = json.loads(call.arguments)
    result = str(arguments["a"] + arguments["b"])
    return [{"type": "function_call_output", "call_id": call.call_id, "output": result}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("instructions", [None, "Use the tool."])
async def test_turns_that_name_the_response_before_them_are_one_branch(
    serve: Serving, writes: list[str], stream: bool, instructions: str | None
) -> None:
    """Five turns with only a result each have the tokens of a whole history, and so has a sixth one with all of it."""
    writes += [write_call(1, 2), write_call(3, 3), write_call(6, 4), write_call(10, 5), "It is 15.", "Yes."]
    question = {"role": "user", "content": "How much is 1 + 2 + 3 + 4 + 5?"}
    async with serve() as (_, owner):
        session = await owner.open()
        async with agent_of(session) as agent:
            response = await ask(agent, [question], stream=stream, instructions=instructions)
            history = [question]
            for _ in range(4):
                given = result_of(response)
                history += [item.model_dump(mode="json", exclude_none=True) for item in response.output] + given
                more = {"instructions": instructions, "previous_response_id": response.id}
                response = await ask(agent, given, stream=stream, **more)
            assert response.output_text.strip() == "It is 15."
            history += [item.model_dump(mode="json", exclude_none=True) for item in response.output]
            history.append({"role": "user", "content": "Are you sure?"})
            await ask(agent, history, stream=stream, instructions=instructions)
        (sample,) = await owner.samples(session)
        assert sample["forks"] == [None] * 6
        assert sample["messages"][0]["role"] == ("user" if instructions is None else "system")


async def test_a_response_may_be_continued_twice_and_others_are_rejected(serve: Serving, writes: list[str]) -> None:
    """Two continuations are two branches. An unknown response and a call without a result are errors of the client."""
    writes += [write_call(1, 2), "It is 3.", "It is 4."]
    async with serve() as (_, owner):
        session, other = await owner.open(), await owner.open()
        async with agent_of(session) as agent, agent_of(other) as stranger:
            first = await ask(agent, "How much is 1 + 2?", instructions="Be brief.")
            for result in ("3", "4"):
                await ask(agent, [{**result_of(first)[0], "output": result}], previous_response_id=first.id)
            for client, given, named, param in (
                (agent, result_of(first), "resp_1", "previous_response_id"),
                (stranger, result_of(first), first.id, "previous_response_id"),
                (agent, "And now?", first.id, "previous_response_id"),
                (agent, [{**result_of(first)[0], "call_id": "x"}], first.id, "input[0].call_id"),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    await ask(client, given, previous_response_id=named)
                assert refused.value.param == param
        samples = await owner.samples(session)
        assert [each["messages"][-2]["content"] for each in samples] == ["3", "4"]
        assert {each["messages"][0]["content"] for each in samples} == {"Be brief."}


async def test_a_response_is_continued_by_the_name_of_its_session_too(serve: Serving, writes: list[str]) -> None:
    """On the ordinary route, the header or `user` names the session of the response. Another session has none."""
    writes += ["It is 3.", "Yes.", "Really."]
    async with serve() as (http, owner):
        session, other = await owner.open(), await owner.open()
        asked: dict[str, Any] = {"model": "synthetic", "input": "1 + 2?"}

        async def post(owned: dict[str, Any], fields: dict[str, Any], **headers: str) -> httpx.Response:
            named = {"X-Session-ID": owned["id"]} if "user" not in fields else {}
            return await http.client.post("/v1/responses", json={**asked, **fields}, headers={**named, **headers})

        served = (await post(session, {})).json()["id"]
        second = await post(session, {"input": "Sure?", "previous_response_id": served})
        named = {"input": "Really?", "previous_response_id": second.json()["id"], "user": session["id"]}
        assert (await post(session, named)).status_code == 200
        (sample,) = await owner.samples(session)
        assert (len(sample["turns"]), sample["forks"]) == (3, [None] * 3)
        for owned, headers, status, param in (
            (other, {}, 400, "previous_response_id"),
            ({"id": "none"}, {}, 400, "previous_response_id"),
            (session, {"Authorization": f"Bearer {other['api_key']}"}, 401, None),
        ):
            refused = await post(owned, {"previous_response_id": served}, **headers)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


async def test_input_after_a_response_changes_nothing_that_was_served(serve: Serving, writes: list[str]) -> None:
    """A call that a client adds to a served answer is only in its own request. A system message may have parts."""
    writes += ["It is 3.", "It is 4.", "It is 5."]
    async with serve() as (_, owner):
        session = await owner.open()
        system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
        async with agent_of(session) as agent:
            asked: dict[str, Any] = {"tools": [TOOL], "messages": [system, {"role": "user", "content": "1 + 2?"}]}
            chat = await agent.chat.completions.create(model="synthetic", **asked)
            served = f"resp_{chat.id.removeprefix('chatcmpl-')}"
            call = {"type": "function_call", "call_id": "x", "name": "add", "arguments": "{}"}
            added = [call, {"type": "function_call_output", "call_id": "x", "output": "4"}]
            await ask(agent, added, previous_response_id=served)
            await ask(agent, "And 5?", previous_response_id=served)
        forked, continued = sorted(await owner.samples(session), key=lambda sample: len(sample["turns"]))
        assert forked["messages"][2]["tool_calls"]
        assert continued["messages"][0] == system
        assert not continued["messages"][2].get("tool_calls")
        assert len(continued["turns"]) == 2
