"""`POST /v1/responses`, `/v1/messages` and `/v1/messages/count_tokens`, whole or streamed, through the chat route."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ..answers import AnswerChoice, collect_answers, updates
from ..body import decode_body, read_body
from ..calls import PING, json_response
from ..chat import encode_text
from ..errors import HttpError
from ..openai.body import ChatBody
from ..openai.parsers import AnswerParts, AnswerReader
from ..openai.requests import chat_prompt, read_question
from ..openai.routes import prepare_answer
from ..openai.shapes import RequestClock
from ..requests import find_target, id_headers, named_errors
from ..service import HttpRoute, RequestAborted, RouteTable, Service
from ..tokens import Usage
from ..writer import KEEP_ALIVE_S, AnswerWriter
from . import messages, responses
from .answers import ABORTED, AnswerEnd, BlockWriter, encode_events, whole_answer
from .message_blocks import MessageWriter, message_error
from .response_items import ResponseWriter
from .turns import renamed_errors

SHORT_BODY: Final = 64 << 10
"""Bytes of a body that is translated in less time than a switch to a thread takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentApi:
    """An API that is translated to the chat route."""

    body: type[Any]
    translate: Callable[[Any], ChatBody]
    writer: Callable[[Any, str, str], BlockWriter]
    """Creates the writer of an answer from the body, the answer's id and the name of the model."""
    names: Sequence[tuple[str, str]]
    """Names of fields, for `renamed_errors`."""
    fits_limit: bool = False
    """True: a limit of tokens above the rest of the context is reduced to it."""


RESPONSES: Final = AgentApi(
    body=responses.ResponsesBody,
    translate=responses.translate_response,
    writer=ResponseWriter,
    names=responses.NAMES,
)
MESSAGES: Final = AgentApi(
    body=messages.MessagesBody,
    translate=messages.translate_message,
    writer=lambda _, answer_id, model: MessageWriter(answer_id, model),
    names=messages.NAMES,
    fits_limit=True,
)


class ChatTurn:
    """One answer to a prepared request of the chat route, whole or in parts."""

    def __init__(self, service: Service, request: Request, writer: AnswerWriter) -> None:
        self._service = service
        self._request = request
        self._writer = writer
        self._reasoning: list[str] = []

    async def whole(self) -> tuple[AnswerParts, AnswerEnd]:
        """Return all parts of the answer, and its end.

        Raises:
            HttpError: the request failed or was aborted.
        """
        writer = self._writer
        with named_errors(writer.names, writer.requests[0]):
            (choice,) = choices = writer.make_choices(keep=True)
            may_stop = bool(writer.options.stops)
            await collect_answers(self._service, self._request, writer.requests, choices, may_stop=may_stop)
            (reader,), update = writer.readers(choices), choice.pop_update()
            parts = AnswerParts(content=update.text or None)
            if reader is not None:
                parts = await reader.whole(update.text, update.tokens.ids.tolist())
            self._reasoning.append(parts.reasoning or "")
            return parts, await self._end(choice, reader)

    async def parts(self) -> AsyncGenerator[tuple[AnswerParts, Usage, AnswerEnd | None], None]:
        """Yield the additions to the answer, perhaps empty, with the usage so far. The last ones have the end.

        Raises:
            HttpError: the request failed or was aborted.
        """
        writer = self._writer
        with named_errors(writer.names, writer.requests[0]):
            (choice,) = choices = writer.make_choices(keep=False)
            (reader,) = writer.readers(choices)
            async with aclosing(updates(self._service, self._request, writer.requests, choices)) as found:
                async for added in found:
                    for _, update in added:
                        final = choice.finish_reason is not None
                        parts = AnswerParts(content=update.text or None)
                        if reader is not None:
                            parts = await reader.add(update.text, update.tokens.ids.tolist(), final=final)
                        self._reasoning.append(parts.reasoning or "")
                        end = await self._end(choice, reader) if final else None
                        yield parts, writer.usage(choices), end

    async def _end(self, choice: AnswerChoice, reader: AnswerReader | None) -> AnswerEnd:
        writer, reason = self._writer, choice.finish_reason or bus.FinishReason.STOP
        if reason == bus.FinishReason.ABORT:
            raise aborted()
        usage, thoughts = writer.usage([choice]), "".join(self._reasoning)
        thinking = 0
        if thoughts and writer.tokenizer is not None:
            thinking = len(await encode_text(writer.tokenizer, thoughts, add_special_tokens=False))
        return AnswerEnd(
            finish_reason=reason if reader is None else reader.finish_reason(reason),
            stop=choice.stop_reason,
            usage=usage,
            reasoning_tokens=min(thinking, usage.completion_tokens),
            is_full=usage.total_tokens >= writer.target.capabilities.max_model_len,
        )


def aborted() -> HttpError:
    """Return the error for an aborted request."""
    return HttpError(503, "the request was aborted", code=ABORTED)


async def create_response(service: Service, request: Request) -> Response:
    """Answer a request of OpenAI's Responses API.

    Nothing is stored: `input` has the whole history, and the response has `store` false.
    """
    return await _answer(service, request, RESPONSES)


async def create_message(service: Service, request: Request) -> Response:
    """Answer a request of Anthropic's Messages API."""
    return await _answer(service, request, MESSAGES)


async def _translate(service: Service, request: Request, body: type[Any], api: AgentApi) -> tuple[Any, ChatBody]:
    service.admit(request)
    data = await read_body(request, service.settings)
    decoded = decode_body(data, body)
    if len(data) <= SHORT_BODY:
        return decoded, api.translate(decoded)
    return decoded, await asyncio.to_thread(api.translate, decoded)


async def _answer(service: Service, request: Request, api: AgentApi) -> Response:
    clock = RequestClock()
    body, chat = await _translate(service, request, api.body, api)
    with renamed_errors(api.names):
        try:
            async with service.preparing(request, body.request_id):
                prepared = await _prepare(service, request, chat, clock, api)
        except RequestAborted:
            raise aborted() from None
        turn, request_id = ChatTurn(service, request, prepared), prepared.requests[0].request_id
        writer = api.writer(body, request_id, prepared.target.name)
        headers = id_headers(request_id)
        if body.stream:
            return await service.stream(request, write_events(turn, writer, api), headers, end=b"")
        answer = msgspec.json.encode(whole_answer(writer, *await turn.whole()))
        return Response(answer, headers=headers, media_type="application/json")


async def _prepare(
    service: Service, request: Request, chat: ChatBody, clock: RequestClock, api: AgentApi
) -> AnswerWriter:
    try:
        return await prepare_answer(service, request, chat, clock)
    except HttpError as error:
        limit = chat.max_completion_tokens
        if not api.fits_limit or error.param != "max_completion_tokens" or limit is None or limit < 1:
            raise
        # The limit is above the rest of the context.
        return await prepare_answer(service, request, msgspec.structs.replace(chat, max_completion_tokens=None), clock)


async def write_events(turn: ChatTurn, writer: BlockWriter, api: AgentApi) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. An error after the first event becomes the last event.

    Raises:
        HttpError: there is no first event.
    """
    has_begun, silent_since = False, time.monotonic()
    try:
        with renamed_errors(api.names):
            async with aclosing(turn.parts()) as found:
                async for parts, usage, end in found:
                    events = [] if has_begun else writer.begin(usage)
                    has_begun = True
                    events += writer.add(parts)
                    if end is not None:
                        events += writer.end(end)
                    if events:
                        silent_since = time.monotonic()
                        yield encode_events(events)
                    elif time.monotonic() - silent_since >= KEEP_ALIVE_S:
                        silent_since = time.monotonic()
                        yield PING
    except HttpError as error:
        if not has_begun:
            raise
        yield encode_events(writer.fail(error))


async def count_tokens(service: Service, request: Request) -> Response:
    """Return the number of prompt tokens of a request of Anthropic's Messages API. This generates nothing."""
    body, chat = await _translate(service, request, messages.CountTokensBody, MESSAGES)
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
