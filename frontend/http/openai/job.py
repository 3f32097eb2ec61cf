"""Execution of completion requests, as whole answers and as streams."""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....schemas.rows import Rows
from ...tokenization import Tokenizer
from ..answer_types import Usage
from ..answers import AnswerChoice, Update, collect_answers, updates, usage_of
from ..calls import NO_EVENT, JsonPieces
from ..logprobs_json import prompt_logprobs_json
from ..request_target import RequestTarget, id_headers, named_errors
from ..service import Service
from ..stops import AnswerText, text_of
from ..tokens import Scores, Tokens, prompt_scores, whole_rows
from .echo import Echo, EchoedScores
from .nvext import RequestClock, nvext_json
from .options import Options
from .parsers import AnswerParts, AnswerReader
from .reading import Reading, parts_json
from .shapes import AnswerShape, Namer

__all__ = ["CompletionHandler"]

KEEP_ALIVE_S: Final = 15.0
"""Seconds without an event, while text is held back, after which a stream has a comment."""


@dataclass(frozen=True, kw_only=True)
class CompletionHandler:
    """One HTTP request for a chat completion or a completion."""

    service: Service
    http_request: Request
    shape: AnswerShape
    target: RequestTarget
    tokenizer: Tokenizer | None
    """None: both the request and the answer have only token ids."""
    requests: Sequence[bus.GenerateRequest]
    """One request for each prompt."""
    options: Options
    names: Mapping[str, str]
    """The body's names for fields of `GenerateRequest`."""
    clock: RequestClock
    reading: Reading | None = None
    """Parsing of a chat's answers; None: the whole text is content."""
    echo: Echo | None = None
    """The prompts before the answers; None: no `echo`."""
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self) -> Response:
        """Return one response with all answers.

        Raises:
            HttpError: the request failed.
        """
        with named_errors(self.names, self.requests[0]):
            choices = self._choices(keep=True)
            await collect_answers(
                self.service, self.http_request, self.requests, choices, may_stop=bool(self.options.stops)
            )
            whole = [self._echoed(choice, choice.pop_update()) for choice in choices]
            readers = self._readers(choices)
            parts = [
                None if reader is None else await reader.whole(update.text, update.tokens.ids.tolist())
                for reader, update in zip(readers, whole, strict=True)
            ]
            shown = [self._shown(*each) for each in zip(choices, whole, readers, parts, strict=True)]
            return JsonPieces(self._answer_json(choices, whole, shown), id_headers(self.requests[0]))

    async def stream(self) -> Response:
        """Return a stream of the answers.

        Raises:
            HttpError: the request failed before the first event.
        """
        return await self.service.stream(self.http_request, self._events(), id_headers(self.requests[0]))

    def _choices(self, *, keep: bool) -> list[AnswerChoice]:
        """Return the empty answers, ordered by prompt and then by child request."""
        return [
            AnswerChoice(
                at * request.sampling.n + child,
                request,
                self._text(request),
                keep=keep,
            )
            for at, request in enumerate(self.requests)
            for child in range(request.sampling.n)
        ]

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

    def _echoed(self, choice: AnswerChoice, update: Update, *, is_first: bool = True) -> Update:
        at = choice.index // self.requests[0].sampling.n
        return update if self.echo is None else self.echo.update(at, update, is_first=is_first)

    def _readers(self, choices: Sequence[AnswerChoice]) -> list[AnswerReader | None]:
        reading = self.reading if self.options.text else None
        return [None if reading is None else reading.reader(choice.request) for choice in choices]

    def _shown(
        self,
        choice: AnswerChoice,
        update: Update,
        reader: AnswerReader | None,
        parts: AnswerParts | None,
        *,
        delta: bool = False,
    ) -> dict[str, Any]:
        """Return the text or the parsed parts of an answer, and its finish reason."""
        if reader is None or parts is None:
            return {**self.shape.text(update.text, delta=delta), "finish_reason": choice.finish_reason}
        reason = choice.finish_reason
        return {
            **parts_json(parts, delta=delta),
            "finish_reason": None if reason is None else reader.finish_reason(reason),
        }

    def _answer_json(
        self, choices: Sequence[AnswerChoice], whole: Sequence[Update], shown: Sequence[dict[str, Any]]
    ) -> Iterator[bytes]:
        """Return the response in pieces. All errors are raised before the first piece."""
        n = self.requests[0].sampling.n
        # If a prompt has several answers, the first answer has the logprobs of the prompt.
        of_prompts = [
            prompt_scores(choice.request, whole[choice.index - choice.index % n].tokens) for choice in choices
        ]
        with_rows = self.options.routed_experts
        rows = [
            whole_rows(choice.request, self.target, update.tokens) if with_rows else None
            for choice, update in zip(choices, whole, strict=True)
        ]
        nvext = self._nvext(whole[0].tokens) if self.options.extra else None
        head = {
            "id": self._id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.target.name,
            "usage": self._usage(choices),
            **self._prompt_ids(self.requests[0], of_answer=True),
        }

        def pieces() -> Iterator[bytes]:
            yield msgspec.json.encode(head)[:-1] + b',"choices":['
            for choice, update, of_prompt, text, of_choice in zip(choices, whole, of_prompts, shown, rows, strict=True):
                yield b"," if choice.index else b""
                more = self._prompt_ids(choice.request, of_answer=False)
                yield from self._choice_json(choice, update, {**text, **more}, of_prompt, rows=of_choice)
            yield b"]"
            if self.shape.prompt_is_common:
                yield b',"prompt_logprobs":'
                yield from prompt_logprobs_json(of_prompts[0], self._namer.name)
            if nvext is not None:
                yield b',"nvext":'
                yield from nvext
            yield b"}"

        return pieces()

    def _choice_json(
        self,
        choice: AnswerChoice,
        update: Update,
        shown: dict[str, Any],
        of_prompt: Scores | None = None,
        *,
        rows: Rows | None,
        delta: bool = False,
    ) -> Iterator[bytes]:
        """Yield the JSON of one answer, or of an answer in a stream event, in pieces."""
        found = {
            "index": choice.index,
            **shown,
            "stop_reason": choice.stop_reason,
        }
        if self.options.token_ids:
            found["token_ids"] = update.tokens.ids.tolist()
        yield msgspec.json.encode(found)[:-1] + b',"logprobs":'
        width = self.options.top_logprobs
        if width is None or (delta and not len(update.tokens.ids)):
            yield b"null"
        else:
            scores: Scores | EchoedScores = update.tokens.scores
            if self.echo is not None and of_prompt is not None:
                scores = self.echo.scores(choice.request, of_prompt, update.tokens.scores)
            yield from self.shape.logprobs(choice, scores, self._namer, width)
        if not (delta or self.shape.prompt_is_common):
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs_json(of_prompt, self._namer.name)
        if self.options.routed_experts:
            yield b',"routed_experts":'
            yield from (b"null",) if rows is None else self.options.as_json(rows, update.tokens.start)
        yield b"}"

    def _nvext(self, tokens: Tokens) -> Iterator[bytes]:
        return nvext_json(self.options.extra, self.requests[0], self.target, tokens, self.clock)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        with named_errors(self.names, self.requests[0]):
            choices = self._choices(keep=bool(self.options.extra))
            has_begun = [False] * len(choices)
            readers = self._readers(choices)
            silent_since: float | None = None
            async with aclosing(updates(self.service, self.http_request, self.requests, choices)) as found:
                async for choice, part in found:
                    if len(part.tokens.ids):
                        self.clock.token()
                    is_first = not has_begun[choice.index]
                    update = self._echoed(choice, part, is_first=is_first)
                    opening = self.shape.opening(choice.index) if is_first else None
                    if opening is not None:
                        yield self._event(msgspec.json.encode(opening), choices, prompt=not any(has_begun))
                    has_begun[choice.index] = True
                    reader, parts = readers[choice.index], None
                    if reader is not None:
                        ids, final = update.tokens.ids.tolist(), choice.finish_reason is not None
                        parts = await reader.add(update.text, ids, final=final)
                    if not self._is_news(choice, update, parts):
                        # A tool call is held back until it is complete, which may take minutes.
                        if silent_since is None:
                            silent_since = time.monotonic()
                        elif time.monotonic() - silent_since >= KEEP_ALIVE_S:
                            yield NO_EVENT
                            silent_since = time.monotonic()
                        continue
                    silent_since = None
                    more = self._prompt_ids(choice.request, of_answer=False) if is_first else {}
                    text = self._shown(choice, update, reader, parts, delta=True)
                    shown = b"".join(
                        self._choice_json(choice, update, {**text, **more}, rows=update.tokens.rows, delta=True)
                    )
                    nvext = b""
                    if choice.finish_reason and self.options.extra:
                        nvext = b"".join(self._nvext(choice.pop_update().tokens))
                    yield self._event(shown, choices, nvext=nvext)
            if self.options.usage:
                yield self._event(None, choices)

    def _is_news(self, choice: AnswerChoice, update: Update, parts: AnswerParts | None) -> bool:
        """Return True if an event for this update has new content for the client."""
        options = self.options
        shows_tokens = options.token_ids or options.top_logprobs is not None or options.routed_experts
        text = update.text if parts is None else parts
        return bool(text or choice.finish_reason or (shows_tokens and len(update.tokens.ids)))

    def _event(
        self, shown: bytes | None, choices: Sequence[AnswerChoice], *, prompt: bool = False, nvext: bytes = b""
    ) -> bytes:
        """Return one event of a stream. If `shown` is None, the event has no choice and only the usage."""
        event: dict[str, Any] = {
            "id": self._id,
            "object": self.shape.event_object,
            "created": self.created,
            "model": self.target.name,
            "choices": [] if shown is None else [msgspec.Raw(shown)],
        }
        if self.options.usage:
            is_due = shown is None or self.options.continuous_usage
            event["usage"] = self._usage(choices) if is_due else None
        if prompt:
            event |= self._prompt_ids(self.requests[0], of_answer=True)
        if nvext:
            event["nvext"] = msgspec.Raw(nvext)
        return msgspec.json.encode(event)

    @cached_property
    def _namer(self) -> Namer:
        return Namer(self.tokenizer, as_token_ids=self.options.as_token_ids)

    @property
    def _id(self) -> str:
        return f"{self.shape.id_prefix}{self.requests[0].request_id}"

    def _usage(self, choices: Sequence[AnswerChoice]) -> Usage:
        # If a prompt has several answers, count the cached tokens of the first answer. The other answers may have found
        # the prompt that the first answer computed.
        firsts = choices[:: self.requests[0].sampling.n]
        return usage_of(
            sum(request.prompt_len for request in self.requests),
            sum(choice.num_tokens for choice in choices),
            [choice.cached_tokens for choice in firsts],
        )

    def _prompt_ids(self, request: bus.GenerateRequest, *, of_answer: bool) -> dict[str, Any]:
        """Return the prompt's token ids, if the shape has them at this place and the request asks for token ids."""
        if not self.options.token_ids or self.shape.prompt_is_common is not of_answer:
            return {}
        return {"prompt_token_ids": np.asarray(request.prompt_token_ids).tolist()}
