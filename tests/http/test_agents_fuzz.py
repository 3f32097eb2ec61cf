"""Random requests of Responses and Messages: each is one of the chat route, or a typed error that names a field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.frontend.http.agents import messages, responses
from rollbus.frontend.http.body import decode_body
from rollbus.frontend.http.chat import template_message
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.openai.body import ChatBody
from rollbus.frontend.sessions.messages import call_ids, key_of
from rollbus.frontend.sessions.tree import SessionTree

TEXT = st.sampled_from(["", "a", "x" * 300, "\u0000", "e\u0301", "<|im_end|>", "{}", "[1"])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | TEXT,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "id", "a"]), each),
    max_leaves=6,
)


def fields(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with some of the known fields, of which few have any value."""
    optional = {name: st.one_of(*[each] * 12, ANY) for name, each in known.items()}
    return st.fixed_dictionaries({}, optional=optional)


def whole(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with all of the fields."""
    return st.fixed_dictionaries(known)


IDS = st.sampled_from(["c1", "c2", ""])
CALL = whole(type=st.just("tool_use"), id=IDS, name=st.just("f"), input=st.dictionaries(TEXT, ANY, max_size=2))
RESULT = whole(type=st.just("tool_result"), tool_use_id=IDS, content=TEXT)
SAID = whole(type=st.just("text"), text=TEXT)
THOUGHT = whole(type=st.just("thinking"), thinking=TEXT, signature=TEXT)
BLOCK = fields(
    type=st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "redacted_thinking"]),
    text=TEXT,
    thinking=TEXT,
    signature=TEXT,
    id=IDS,
    tool_use_id=IDS,
    name=TEXT,
    input=st.dictionaries(TEXT, ANY, max_size=2),
    content=TEXT,
)
MESSAGE = fields(
    role=st.sampled_from(["user", "assistant", "system", "tool"]), content=TEXT | st.lists(BLOCK, max_size=4)
)
MESSAGES = fields(
    messages=st.lists(MESSAGE, min_size=1, max_size=5),
    max_tokens=st.just(5),
    system=TEXT | st.lists(BLOCK, max_size=2),
    tools=st.lists(fields(name=TEXT, input_schema=st.just({}), type=st.just("custom")), max_size=2),
    tool_choice=fields(type=st.sampled_from(["auto", "any", "tool"]), name=TEXT),
    thinking=fields(type=st.sampled_from(["enabled", "disabled"]), budget_tokens=st.just(1)),
    metadata=fields(user_id=TEXT),
    context_management=fields(edits=st.lists(ANY, max_size=2)),
    output_config=fields(format=ANY),
)
ITEM = st.one_of(
    whole(role=st.sampled_from(["user", "assistant", "developer"]), content=TEXT, id=TEXT),
    whole(type=st.just("reasoning"), summary=st.just([]), encrypted_content=TEXT),
    whole(type=st.just("function_call"), call_id=IDS, name=st.just("f"), arguments=TEXT),
    whole(type=st.just("function_call_output"), call_id=IDS, output=TEXT),
) | fields(
    type=st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "item_reference"]),
    role=st.sampled_from(["user", "assistant", "developer"]),
    id=TEXT,
    content=TEXT | st.lists(fields(type=st.just("input_text"), text=TEXT), max_size=2),
    summary=st.lists(fields(type=st.just("summary_text"), text=TEXT), max_size=2),
    encrypted_content=TEXT,
    call_id=IDS,
    name=TEXT,
    arguments=TEXT,
    output=TEXT,
)
RESPONSES = whole(input=st.lists(ITEM, max_size=6)) | fields(
    input=TEXT | st.lists(ITEM, max_size=6),
    instructions=TEXT,
    tools=st.lists(fields(type=st.just("function"), name=TEXT, parameters=st.just({})), max_size=2),
    tool_choice=fields(type=st.just("function"), name=TEXT),
    include=st.lists(TEXT, max_size=1),
    text=fields(format=ANY),
    reasoning=fields(effort=TEXT),
    previous_response_id=st.none(),
)


@pytest.mark.parametrize(
    ("kind", "translate", "bodies"),
    [
        (messages.MessagesBody, messages.translate_message, MESSAGES),
        (responses.ResponsesBody, responses.translate_response, RESPONSES),
    ],
    ids=["messages", "responses"],
)
@given(data=st.data())
def test_random_requests_are_translated_or_have_typed_errors(
    kind: type[Any], translate: Callable[[Any], ChatBody], bodies: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    """No request fails in another way, and what is translated has messages that a session and a template can read."""
    try:
        chat = translate(decode_body(json.dumps(data.draw(bodies)).encode(), kind))
    except HttpError as error:
        assert error.status == 400
        assert error.param
        return
    assert chat.messages
    for index, message in enumerate(chat.messages):
        assert template_message(f"messages[{index}]", message)["role"] in ("user", "assistant", "system", "tool")
        assert key_of(message).role
        assert all(call_ids(message))
    assert SessionTree().find(chat.messages, {"model": "", "tools": None, "variables": {}}).parent is None
