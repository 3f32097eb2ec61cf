"""The answers to one HTTP request as JSON, whole or as the events of a stream, in the shape of its route."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ...schemas.decoding import JsonObject
from ...schemas.rows import Rows
from ..tokenization import Tokenizer
from .answers import AnswerChoice, Update, collect_answers, updates, usage_of
from .calls import PING, EventStream, JsonPieces, StreamEnd, encode_event, in_pieces, object_json, objects_json
from .edge import SEND_BYTES
from .errors import HttpError
from .openai.parsers import AnswerParts, AnswerReader, CallPart, joined_parts
from .openai.requests import Echo, EchoedScores, Options
from .openai.shapes import AnswerShape, JsonParts, Namer, Reading, RequestClock, nvext_json, parts_json
from .requests import Names, RequestTarget, id_headers, named_errors
from .sampling import count_samples
from .service import RequestAborted, Service
from .text import AnswerText, text_of
from .tokens import Scores, Tokens, Usage, prompt_list, prompt_logprobs_json, prompt_scores, whole_rows

KEEP_ALIVE_S: Final = 15.0
"""Seconds without an event, while text is held back, after which a stream has a comment."""


class ServedAnswers:
    """The answers to one HTTP request as its client gets them, for a caller that keeps them."""

    def __init__(self) -> None:
        self.choices: Sequence[AnswerChoice] = ()
        self._updates: dict[int, list[Update]] = {}
        self._parts: dict[int, list[AnswerParts]] = {}

    def add(self, choice: AnswerChoice, update: Update, parts: AnswerParts | None) -> None:
        """Record the next part of an answer. Without parsed parts, its text is content."""
        self._updates.setdefault(choice.index, []).append(update)
        self._parts.setdefault(choice.index, []).append(AnswerParts(content=update.text) if parts is None else parts)

    def tokens(self, choice: AnswerChoice) -> Tokens | None:
        """Return the tokens of an answer so far; None: it has none."""
        updates = self._updates.get(choice.index) or [choice.pop_update()] if choice.num_tokens else []
        return Tokens.joined([update.tokens for update in updates]) if updates else None

    def message(self, choice: AnswerChoice) -> JsonObject:
        """Return the assistant's message that the client has when it has read the answer."""
        parts = self._parts.get(choice.index, [])
        calls: dict[int, CallPart] = {}
        for call in (call for part in parts for call in part.calls):
            before = calls.get(call.index)
            more = call if before is None else replace(before, arguments=before.arguments + call.arguments)
            calls[call.index] = more
        whole = replace(joined_parts(parts), calls=tuple(calls.values()))
        message: JsonObject = parts_json(whole, delta=False)["message"]
        return {name: value for name, value in message.items() if name != "refusal"}


AnswerSource = Callable[
    [Service, Request, Sequence[bus.GenerateRequest], Sequence[AnswerChoice]],
    AsyncGenerator[Iterator[tuple[AnswerChoice, Update]], None],
]
"""Yields the updates that chunks add to answers, as `updates` does."""


@dataclass(kw_only=True, eq=False)
class AnswerWriter:
    """Writes the answers to one HTTP request."""

    shape: AnswerShape
    target: RequestTarget
    tokenizer: Tokenizer | None
    """None: both the request and the answer have only token ids."""
    requests: Sequence[bus.GenerateRequest]
    """One request for each prompt."""
    options: Options
    names: Names
    """Returns the body's names for fields of `GenerateRequest`."""
    clock: RequestClock = field(default_factory=RequestClock)
    reading: Reading | None = None
    """Parsing of a chat's answers; None: the whole text is content."""
    echo: Echo | None = None
    """The prompts before the answers; None: no `echo`."""
    created: int = field(default_factory=lambda: int(time.time()))
    served: ServedAnswers | None = None
    """Records the answers; None: nobody keeps them."""
    source: AnswerSource = updates

    async def answer(self, service: Service, http_request: Request) -> Response:
        """Return one response with all answers.

        Raises:
            HttpError: the request failed.
        """
        with named_errors(self.names, self.requests[0]):
            choices = await self.collect(service, http_request)
            return JsonPieces(await self.answer_json(choices), id_headers(self.requests[0].request_id))

    async def collect(self, service: Service, http_request: Request) -> list[AnswerChoice]:
        """Return all answers when they have ended. If the client disconnects, abort the requests."""
        choices = self.make_choices(keep=True)
        await collect_answers(service, http_request, self.requests, choices, may_stop=bool(self.options.stops))
        return choices

    async def stream(self, service: Service, http_request: Request) -> Response:
        """Return a stream of the answers.

        Raises:
            HttpError: the request failed before the first event.
        """
        events = self.events(service, http_request)
        return await service.stream(http_request, events, id_headers(self.requests[0].request_id), StreamEnd())

    def make_choices(self, *, keep: bool) -> list[AnswerChoice]:
        """Return the empty answers, ordered by prompt and then by child request."""
        choices = [
            AnswerChoice(at * request.sampling.n + child, request, self._text(request), keep=keep)
            for at, request in enumerate(self.requests)
            for child in range(request.sampling.n)
        ]
        if self.served is not None:
            self.served.choices = choices
        return choices

    def _text(self, request: bus.GenerateRequest) -> AnswerText | None:
        """Return the empty text of a new answer; None if the request needs no text."""
        if not self.options.text or self.tokenizer is None:
            return None
        return text_of(
            request,
            self.tokenizer,
            self.options.stops,
            include_stop=self.options.include_stop,
            skip_special_tokens=self.options.skip_special_tokens,
        )

    def _echo(self, choice: AnswerChoice, update: Update) -> Update:
        if self.echo is None:
            return update
        return self.echo.update(choice.index // self.requests[0].sampling.n, update, is_first=not choice.has_begun)

    def readers(self, choices: Sequence[AnswerChoice]) -> list[AnswerReader | None]:
        """Return the reader of each answer; None: the whole text is content."""
        reading = self.reading if self.options.text else None
        return [None if reading is None else reading.reader(choice.request) for choice in choices]

    def _write_parts(
        self,
        choice: AnswerChoice,
        update: Update,
        reader: AnswerReader | None,
        parts: AnswerParts | None,
        *,
        delta: bool = False,
    ) -> JsonObject:
        """Return the text or the parsed parts of an answer, and its finish reason."""
        if reader is None or parts is None:
            return {**self.shape.text(update.text, delta=delta), "finish_reason": choice.finish_reason}
        reason = choice.finish_reason
        return {
            **parts_json(parts, delta=delta),
            "finish_reason": None if reason is None else reader.finish_reason(reason),
        }

    async def answer_json(self, choices: Sequence[AnswerChoice]) -> Iterator[bytes]:
        """Return the response in pieces. All errors are raised before the first piece.

        Args:
            choices: all answers, each of which has ended.

        Raises:
            HttpError: 502, rows of routed experts or log probabilities of the prompt are missing.
        """
        n, updates, checked = self.requests[0].sampling.n, list[Update](), []
        for choice, reader in zip(choices, self.readers(choices), strict=True):
            update, parts = self._echo(choice, choice.pop_update()), None
            if reader is not None:
                parts = await reader.whole(update.text, update.tokens.ids.tolist())
            if self.served is not None:
                self.served.add(choice, update, parts)
            updates.append(update)
            shown = self._write_parts(choice, update, reader, parts) | self._prompt_ids(choice.request, of_answer=False)
            rows = whole_rows(choice.request, self.target, update.tokens) if self.options.routed_experts else None
            # If a prompt has several answers, the first answer has the logprobs of the prompt.
            of_prompt = prompt_scores(choice.request, updates[choice.index - choice.index % n].tokens)
            checked.append((choice, update, shown, rows, of_prompt))
        document: JsonObject = {
            **self._head(is_event=False),
            "usage": self.usage(choices),
            **self._prompt_ids(self.requests[0], of_answer=True),
        }
        if len(checked) > 1:
            # They are made one by one, at the speed at which the client reads.
            document["choices"] = objects_json(starmap(self._choice, checked))
        else:
            only = [self._choice(*checked[0])]
            document["choices"] = objects_json(only) if in_pieces(only[0]) else only
        if self.shape.prompt_is_common:
            document["prompt_logprobs"] = self._prompt_logprobs(checked[0][-1])
        if self.options.extra:
            document["nvext"] = self._nvext(updates[0].tokens)
        return object_json(document)

    def _choice(
        self,
        choice: AnswerChoice,
        update: Update,
        shown: JsonObject,
        rows: Rows | None,
        of_prompt: Scores | None = None,
        *,
        delta: bool = False,
    ) -> JsonObject:
        """Return one answer, or an answer in a stream event, for `object_json`."""
        shape, width, tokens = self.shape, self.options.top_logprobs, update.tokens
        fields = shape.fields(choice, update, shown, with_ids=self.options.token_ids)
        fields["logprobs"] = None
        if width is not None and not (delta and shape.has_text and not len(tokens.ids)):
            scores: Scores | EchoedScores = tokens.scores
            if self.echo is not None and of_prompt is not None:
                scores = self.echo.scores(choice.request, of_prompt, tokens.scores)
            fields["logprobs"] = shape.logprobs(choice, scores, self._namer, width)
        if not (delta or shape.prompt_is_common):
            fields["prompt_logprobs"] = self._prompt_logprobs(of_prompt)
        fields |= shape.masks(tokens)
        if self.options.routed_experts:
            fields["routed_experts"] = None if rows is None else self.options.as_json(rows, tokens.start)
        return fields

    def _prompt_logprobs(self, scores: Scores | None) -> JsonParts:
        if scores is None:
            return None
        return prompt_logprobs_json(scores, self._namer.name if self.shape.has_text else None)

    def _nvext(self, tokens: Tokens) -> JsonObject | Iterator[bytes]:
        return nvext_json(self.options.extra, self.requests[0], self.target, tokens, self.clock)

    async def events(self, service: Service, http_request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. The last ones, with the finish reasons, come when all answers have ended."""
        with named_errors(self.names, self.requests[0]):
            choices = self.make_choices(keep=bool(self.options.extra))
            readers = self.readers(choices)
            silent_since: float | None = None
            events = bytearray()
            async with aclosing(self.source(service, http_request, self.requests, choices)) as found:
                async for added in found:
                    try:
                        for choice, part in added:
                            await self._add_events(events, choices, choice, part, readers[choice.index])
                            # A client may not read, and chunks are smaller than their events.
                            if len(events) >= SEND_BYTES:
                                silent_since = None
                                yield _pop_all(events)
                    except HttpError:
                        if events:
                            yield _pop_all(events)
                        raise
                    if events:
                        silent_since = None
                        yield _pop_all(events)
                    elif silent_since is None:
                        # A tool call is held back until it is complete, which may take minutes.
                        silent_since = time.monotonic()
                    elif (now := time.monotonic()) - silent_since >= KEEP_ALIVE_S:
                        silent_since = now
                        yield PING
            if self.options.usage:
                yield self._event(None, choices)

    async def _add_events(
        self,
        events: bytearray,
        choices: Sequence[AnswerChoice],
        choice: AnswerChoice,
        part: Update,
        reader: AnswerReader | None,
    ) -> None:
        """Append the events for an update, if it has new content for the client."""
        if self.options.extra and len(part.tokens.ids):
            self.clock.token()
        update, prompt, parts = self._echo(choice, part), False, None
        more: JsonObject = {}
        if not choice.has_begun:
            # The first event of the stream has the token ids of the prompt, if the request asks for them.
            prompt = self.options.token_ids and not any(each.has_begun for each in choices)
            choice.has_begun, more = True, self._prompt_ids(choice.request, of_answer=False)
            if (opening := self.shape.opening(choice.index)) is not None:
                events += self._event(msgspec.json.encode(opening), choices, choice, prompt=prompt)
                prompt = False
        if reader is not None:
            ids, final = update.tokens.ids.tolist(), choice.finish_reason is not None
            parts = await reader.add(update.text, ids, final=final)
        if self.served is not None:
            self.served.add(choice, part, parts)
        if not self._is_news(choice, update, parts):
            return
        text = self._write_parts(choice, update, reader, parts, delta=True) | more
        shown = b"".join(object_json(self._choice(choice, update, text, part.tokens.rows, delta=True)))
        nvext = b""
        if choice.finish_reason and self.options.extra:
            found = self._nvext(choice.pop_update().tokens)
            nvext = b"".join(found) if isinstance(found, Iterator) else msgspec.json.encode(found)
        events += self._event(shown, choices, choice, prompt=prompt, nvext=nvext)

    def _is_news(self, choice: AnswerChoice, update: Update, parts: AnswerParts | None) -> bool:
        """Return True if an event for this update has new content for the client."""
        if not self.shape.has_text or choice.finish_reason or (update.text if parts is None else parts):
            return True
        options = self.options
        shows_tokens = options.token_ids or options.top_logprobs is not None or options.routed_experts
        return bool(shows_tokens and len(update.tokens.ids))

    def _event(
        self,
        shown: bytes | None,
        choices: Sequence[AnswerChoice],
        choice: AnswerChoice | None = None,
        *,
        prompt: bool = False,
        nvext: bytes = b"",
    ) -> bytes:
        """Return one event of a stream. If `shown` is None, the event has no choice and only the usage."""
        if shown is not None and not (self.options.usage or prompt):
            more = b',"nvext":%b' % nvext if nvext else b""
            return b'data: %b,"choices":[%b]%b}\n\n' % (self._event_head, shown, more)
        event = {**self._head(is_event=True), "choices": [] if shown is None else [msgspec.Raw(shown)]}
        if self.options.usage:
            is_due = shown is None or self.options.continuous_usage
            has_text = self.shape.has_text
            counted = choices if choice is None or has_text else [choice]
            event["usage"] = self.usage(counted, with_cached=has_text) if is_due else None
        if prompt:
            event |= self._prompt_ids(self.requests[0], of_answer=True)
        if nvext:
            event["nvext"] = msgspec.Raw(nvext)
        return encode_event(msgspec.json.encode(event))

    @cached_property
    def _namer(self) -> Namer:
        return Namer(self.tokenizer, as_token_ids=self.options.as_token_ids)

    @cached_property
    def _event_head(self) -> bytes:
        """The first fields of each event, which stay the same."""
        return msgspec.json.encode(self._head(is_event=True))[:-1]

    def _head(self, *, is_event: bool) -> JsonObject:
        request_id, created = self.requests[0].request_id, self.created
        return self.shape.head(request_id, self.target.name, self.target.lora, created, is_event=is_event)

    def usage(self, choices: Sequence[AnswerChoice], *, with_cached: bool = True) -> Usage:
        """Return the token counts of the answers so far."""
        # If a prompt has several answers, count the cached tokens of the first answer. The other answers may have found
        # the prompt that the first answer computed.
        firsts = choices[:: self.requests[0].sampling.n]
        return usage_of(
            sum(request.prompt_len for request in self.requests),
            sum(choice.num_tokens for choice in choices),
            [choice.cached_tokens for choice in firsts] if with_cached else (),
        )

    def _prompt_ids(self, request: bus.GenerateRequest, *, of_answer: bool) -> JsonObject:
        """Return the prompt's token ids, if the shape has them at this place and the request asks for token ids."""
        if not self.options.token_ids or self.shape.prompt_is_common is not of_answer:
            return {}
        return {"prompt_token_ids": prompt_list(request)}


async def respond(
    service: Service,
    request: Request,
    body: Any,
    shape: AnswerShape,
    prepare: Callable[[], Awaitable[AnswerWriter]],
    count_choices: Callable[[Any], int] = lambda body: count_samples(body.sampling_params),
) -> Response:
    """Prepare the token requests of an HTTP request and answer it, as a stream if its body asks for one.

    Args:
        body: the decoded body. It has at least `request_id`, `model`, `stream` and `stream_options`.
        count_choices: returns the number of answers if the request is aborted before its token requests are open.
    """
    stream = bool(body.stream)
    try:
        async with service.preparing(request, body.request_id):
            writer = await prepare()
    except RequestAborted as error:
        with_usage = not stream or (body.stream_options is not None and bool(body.stream_options.include_usage))
        head = shape.head(error.request_id, body.model or error.model, None, int(time.time()), is_event=stream)
        documents = _write_aborted(shape, head, count_choices(body), stream=stream, with_usage=with_usage)
        first, *others = map(msgspec.json.encode, documents)
        headers = id_headers(error.request_id)
        return (
            EventStream(encode_event(first), _each(others), headers, StreamEnd())
            if stream
            else JsonPieces([first], headers)
        )
    return await (writer.stream(service, request) if stream else writer.answer(service, request))


def _write_aborted(
    shape: AnswerShape, head: JsonObject, num_choices: int, *, stream: bool, with_usage: bool
) -> list[JsonObject]:
    """Return the answer to a request that was aborted before it was open, or the events of its stream: no tokens."""
    nothing: JsonObject = {} if stream else {"prompt_logprobs": None}
    ended = {"finish_reason": bus.FinishReason.ABORT, **shape.nothing, **({} if shape.prompt_is_common else nothing)}
    choices = [{"index": index, **shape.text("", delta=stream), **ended} for index in range(num_choices)]
    if not stream:
        return [{**head, "choices": choices, "usage": usage_of(0, 0), **(nothing if shape.prompt_is_common else {})}]
    parts = [part for choice in choices for part in (shape.opening(choice["index"]), choice) if part is not None]
    events = [{**head, "choices": [part]} for part in parts]
    return [*events, {**head, "choices": [], "usage": usage_of(0, 0)}] if with_usage else events


async def _each(documents: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for document in documents:
        yield encode_event(document)


def _pop_all(data: bytearray) -> bytes:
    popped = bytes(data)
    data.clear()
    return popped
