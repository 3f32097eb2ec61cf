"""How the two APIs make and write the answer to a request that is translated to the chat route."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request

from .... import bus
from ..answers import AnswerChoice, Update
from ..calls import PING
from ..chat import encode_text
from ..errors import HttpError
from ..openai.body import ChatBody
from ..openai.parsers import AnswerParts, AnswerReader
from ..openai.routes import ChatFormat, SessionPrompt
from ..openai.shapes import RequestClock
from ..requests import named_errors
from ..service import Service
from ..writer import KEEP_ALIVE_S, AnswerWriter
from . import messages, responses
from .answers import ABORTED, AnswerEnd, BlockWriter, encode_events
from .message_blocks import UNSEALED, MessageWriter
from .response_items import ResponseWriter
from .turns import renamed_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentApi:
    """An API that is translated to the chat route."""

    body: type[Any]
    translate: Callable[[Any], ChatBody]
    writer: Callable[[Any, str, str, str | None], BlockWriter]
    """Creates the writer of an answer from the body, the answer's id, the name of the model and a signature."""
    names: Sequence[tuple[str, str]]
    """Names of fields, for `renamed_errors`."""
    fits_limit: bool = False
    """True: a limit of tokens above the rest of the context is reduced to it."""


RESPONSES: Final = AgentApi(
    body=responses.ResponsesBody,
    translate=responses.translate_response,
    writer=lambda body, answer_id, model, seal: ResponseWriter(
        body, answer_id, model, seal=seal if responses.ENCRYPTED in (body.include or ()) else None
    ),
    names=responses.NAMES,
)
MESSAGES: Final = AgentApi(
    body=messages.MessagesBody,
    translate=messages.translate_message,
    writer=lambda _, answer_id, model, seal: MessageWriter(answer_id, model, seal=seal or UNSEALED),
    names=messages.NAMES,
    fits_limit=True,
)


class AgentFormat(ChatFormat):
    """Makes and writes the answer to one request of an API."""

    done = b""

    def __init__(self, api: AgentApi, body: Any) -> None:
        self._api = api
        self._body = body
        self._blocks = BlockWriter()
        self._reasoning: list[str] = []
        self.names = api.names

    async def prepare(
        self,
        service: Service,
        request: Request,
        chat: ChatBody,
        clock: RequestClock,
        session_prompt: SessionPrompt | None = None,
    ) -> AnswerWriter:
        """Return the writer of the parts of the answer, of which this object writes blocks.

        Raises:
            HttpError: the body is not valid, or its model is not served.
        """
        prepare, limit = super().prepare, chat.max_completion_tokens
        try:
            writer = await prepare(service, request, chat, clock, session_prompt)
        except HttpError as error:
            if not self._api.fits_limit or error.param != "max_completion_tokens" or limit is None or limit < 1:
                raise
            # The limit is above the rest of the context.
            unlimited = msgspec.structs.replace(chat, max_completion_tokens=None)
            writer = await prepare(service, request, unlimited, clock, session_prompt)
        self._blocks = self._api.writer(self._body, writer.requests[0].request_id, writer.target.name, self.seal)
        return writer

    async def whole(self, writer: AnswerWriter, choices: Sequence[AnswerChoice]) -> bytes:
        """Return the whole answer.

        Raises:
            HttpError: the answer cannot be parsed, or was aborted.
        """
        with named_errors(writer.names, writer.requests[0]):
            (choice,), (reader,) = choices, writer.readers(choices)
            update = choice.pop_update()
            parts = AnswerParts(content=update.text or None)
            if reader is not None:
                parts = await reader.whole(update.text, update.tokens.ids.tolist())
            self._keep(writer, choice, update, parts)
            end = await self._end(writer, choice, reader)
            # The events of a stream are not needed. The document is the same.
            self._blocks.begin(end.usage)
            self._blocks.add(parts)
            self._blocks.end(end)
            return msgspec.json.encode(self._blocks.document)

    async def events(self, service: Service, request: Request, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream.

        Raises:
            HttpError: the request failed or was aborted.
        """
        (choice,) = choices = writer.make_choices(keep=False)
        (reader,), blocks = writer.readers(choices), self._blocks
        has_begun, silent_since = False, time.monotonic()
        with renamed_errors(self.names), named_errors(writer.names, writer.requests[0]):
            async with aclosing(writer.source(service, request, writer.requests, choices)) as found:
                async for added in found:
                    for _, update in added:
                        final = choice.finish_reason is not None
                        parts = AnswerParts(content=update.text or None)
                        if reader is not None:
                            parts = await reader.add(update.text, update.tokens.ids.tolist(), final=final)
                        self._keep(writer, choice, update, parts)
                        end = await self._end(writer, choice, reader) if final else None
                        events = [] if has_begun else blocks.begin(writer.usage(choices))
                        has_begun = True
                        events += blocks.add(parts)
                        if end is not None:
                            events += blocks.end(end)
                        if events:
                            silent_since = time.monotonic()
                            yield encode_events(events)
                    if time.monotonic() - silent_since >= KEEP_ALIVE_S:
                        silent_since = time.monotonic()
                        yield PING

    def fail(self, error: HttpError) -> bytes:
        """Return the last event of a stream with an error."""
        return encode_events(self._blocks.fail(error))

    def _keep(self, writer: AnswerWriter, choice: AnswerChoice, update: Update, parts: AnswerParts) -> None:
        self._reasoning.append(parts.reasoning or "")
        if writer.served is not None:
            writer.served.add(choice, update, parts)

    async def _end(self, writer: AnswerWriter, choice: AnswerChoice, reader: AnswerReader | None) -> AnswerEnd:
        reason = choice.finish_reason or bus.FinishReason.STOP
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
