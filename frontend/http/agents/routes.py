"""`POST /v1/responses`, `/v1/messages` and `/v1/messages/count_tokens`, whole or streamed, through the chat route."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....schemas.checks import describe
from ....schemas.decoding import JsonObject
from ..body import decode_body, read_body
from ..calls import json_response
from ..errors import invalid
from ..openai.body import ChatBody
from ..openai.requests import chat_prompt, read_question
from ..openai.routes import AskedTurn
from ..openai.shapes import RequestClock
from ..requests import find_target, id_headers, named_errors
from ..service import HttpRoute, RequestAborted, RouteTable, Service
from ..sessions.manager import Session
from . import messages, responses
from .format import MESSAGES, RESPONSES, AgentApi, AgentFormat, aborted
from .message_blocks import message_error
from .turns import renamed_errors

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
    service: Service, request: Request, api: AgentApi, session: Session | None = None
) -> tuple[AskedTurn, Session | None]:
    """Return the request of an API as one of the chat route, and the session that has it or that it names.

    Args:
        session: the session of the request's path; None: an ordinary route.

    Raises:
        HttpError: 400, naming the field; 401, the key is that of another session; 413, the body is too large.
    """
    data = await read_body(request, service.settings)
    body, translate = decode_body(data, api.body), api.translate
    previous = body.previous_response_id if api is RESPONSES else None
    if previous is not None:
        session = session or await service.sessions.find_named(request, body.user, body.session_id)
        if session is not None:
            translate = partial(responses.translate_response, served=_served(session, previous))
    chat = await _translate(translate, body, len(data))
    session = session or await service.sessions.find_named(request, chat.user, chat.session_id)
    return AskedTurn(chat, data, AgentFormat(api, body)), session


async def _translate(translate: Callable[[Any], ChatBody], body: Any, num_bytes: int) -> ChatBody:
    return translate(body) if num_bytes <= SHORT_BODY else await asyncio.to_thread(translate, body)


def _served(session: Session, response: str) -> list[JsonObject]:
    """Return the messages up to a response of a session.

    Raises:
        HttpError: 400, there is no such response.
    """
    for turn in reversed(session.tree.turns.values()):
        if response == f"resp_{turn.request_id}":
            return session.tree.messages(turn)
    raise invalid("previous_response_id", f"is {describe(response)}", "a response of this session that has ended")


async def _answer(service: Service, request: Request, api: AgentApi) -> Response:
    clock = RequestClock()
    service.admit(request)
    asked, session = await read_turn(service, request, api)
    if session is not None:
        return await service.serve_turn(service, request, session, asked)
    chat, form = asked.body, asked.form
    with renamed_errors(api.names):
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
    data = await read_body(request, service.settings)
    body = decode_body(data, messages.CountTokensBody)
    chat = await _translate(MESSAGES.translate, body, len(data))
    with renamed_errors(MESSAGES.names):
        target = await find_target(service, request, body.model, body.timeout_s)
        shown = msgspec.structs.replace(chat, tool_choice="none")
        read_question(shown, None)
        prompt = await chat_prompt(shown, partial(service.tokenizer, target.worker))
    return json_response({"input_tokens": len(prompt.token_ids)})


ROUTES: RouteTable = {
    ("POST", "/v1/responses"): HttpRoute(create_response, responses.ResponsesBody),
    ("POST", "/v1/messages"): HttpRoute(create_message, messages.MessagesBody, errors=message_error),
    ("POST", "/v1/messages/count_tokens"): HttpRoute(count_tokens, messages.CountTokensBody, errors=message_error),
}
