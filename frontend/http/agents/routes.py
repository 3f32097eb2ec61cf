"""`POST /v1/responses`, `/v1/messages` and `/v1/messages/count_tokens`, whole or streamed, through the chat route."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....schemas.decoding import JsonObject
from ..body import decode_body, read_body
from ..calls import json_response
from ..openai.body import ChatBody
from ..openai.requests import chat_prompt, read_question
from ..openai.routes import AskedTurn, join_named_session
from ..openai.shapes import RequestClock
from ..requests import find_target, id_headers, named_errors
from ..service import HttpRoute, RequestAborted, RouteTable, Service
from . import messages, responses
from .format import MESSAGES, RESPONSES, AgentApi, AgentFormat, aborted
from .message_blocks import message_error
from .turns import renamed_errors

FindServed = Callable[[str], Sequence[JsonObject]]
"""Returns the messages up to a response with this id.

Raises HttpError: 400, no such response was served.
"""
SHORT_BODY: Final = 64 << 10
"""Bytes of a body that is translated in less time than a switch to a thread takes."""


async def create_response(service: Service, request: Request) -> Response:
    """Answer a request of OpenAI's Responses API.

    Nothing is stored: `input` has the whole history, and the response has `store` false.
    """
    return await _answer(service, request, RESPONSES)


async def create_message(service: Service, request: Request) -> Response:
    """Answer a request of Anthropic's Messages API."""
    return await _answer(service, request, MESSAGES)


async def read_turn(
    service: Service, request: Request, api: AgentApi, find_served: FindServed | None = None
) -> AskedTurn:
    """Return the request of an API as one of the chat route.

    Args:
        find_served: finds the messages up to a response that the request continues; None: no response is known.

    Raises:
        HttpError: 400, naming the field; 413, the body is too large.
    """
    body, chat, data = await _translate(service, request, api.body, api, find_served)
    return AskedTurn(chat, data, AgentFormat(api, body))


async def _translate(
    service: Service, request: Request, body: type[Any], api: AgentApi, find_served: FindServed | None = None
) -> tuple[Any, ChatBody, bytes]:
    data = await read_body(request, service.settings)
    decoded, translate = decode_body(data, body), api.translate
    if find_served is not None and decoded.previous_response_id is not None:
        translate = partial(responses.translate_response, served=find_served(decoded.previous_response_id))
    if len(data) <= SHORT_BODY:
        return decoded, translate(decoded), data
    return decoded, await asyncio.to_thread(translate, decoded), data


async def _answer(service: Service, request: Request, api: AgentApi) -> Response:
    clock = RequestClock()
    service.admit(request)
    asked = await read_turn(service, request, api)
    chat, form = asked.body, asked.form
    with renamed_errors(api.names):
        joined = await join_named_session(service, request, asked)
        if joined is not None:
            return joined
        try:
            async with service.preparing(request, chat.request_id):
                writer = await form.prepare(service, request, chat, clock)
        except RequestAborted:
            raise aborted() from None
        headers = id_headers(writer.requests[0].request_id)
        if chat.stream:
            return await service.stream(request, form.events(service, request, writer), headers, form)
        with named_errors(writer.names, writer.requests[0]):
            choices = await writer.collect(service, request)
        return Response(await form.whole(writer, choices), headers=headers, media_type="application/json")


async def count_tokens(service: Service, request: Request) -> Response:
    """Return the number of prompt tokens of a request of Anthropic's Messages API. This generates nothing."""
    service.admit(request)
    body, chat, _ = await _translate(service, request, messages.CountTokensBody, MESSAGES)
    with renamed_errors(MESSAGES.names):
        target = await find_target(service, request, body.model, body.timeout_s)
        shown = msgspec.structs.replace(chat, tool_choice="none")
        read_question(shown, None)

        async def load() -> Any:
            return await service.tokenizer(target.worker)

        prompt = await chat_prompt(shown, load)
    return json_response({"input_tokens": len(prompt.token_ids)})


ROUTES: RouteTable = {
    ("POST", "/v1/responses"): HttpRoute(create_response, responses.ResponsesBody),
    ("POST", "/v1/messages"): HttpRoute(create_message, messages.MessagesBody, errors=message_error),
    ("POST", "/v1/messages/count_tokens"): HttpRoute(count_tokens, messages.CountTokensBody, errors=message_error),
}
