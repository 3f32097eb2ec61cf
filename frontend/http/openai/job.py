"""Carrying out what a body asks for: whole answers and streams."""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.answers import Choice, Update, take_whole, updates, usage_of
from frontend.http.calls import JsonPieces
from frontend.http.logprobs_json import prompt_logprobs_json
from frontend.http.openai.nvext import Clock, nvext_json
from frontend.http.openai.options import Options
from frontend.http.openai.shapes import Namer, Shape
from frontend.http.service import Service
from frontend.http.stops import text_of
from frontend.http.tokens import Scores, Tokens, prompt_scores
from frontend.http.wanted import Target, id_headers, named_errors
from frontend.tokenization import Tokenizer

__all__ = ["Job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One HTTP request for answers."""

    service: Service
    request: Request
    shape: Shape
    target: Target
    tokenizer: Tokenizer
    wanted: Sequence[bus.GenerateRequest]
    """One for each prompt."""
    options: Options
    names: Mapping[str, str]
    """What the body calls the bus's fields."""
    clock: Clock
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self) -> Response:
        """All answers in one.

        Raises:
            HttpError: what went wrong.
        """
        with named_errors(self.names, self.wanted[0]):
            choices = self._choices(keep=True)
            await take_whole(self.service, self.request, self.wanted, choices, may_stop=bool(self.options.stops))
            return JsonPieces(self._answer_json(choices), id_headers(self.wanted[0]))

    async def stream(self) -> Response:
        """The answers as they come.

        Raises:
            HttpError: what went wrong before the first of them.
        """
        return await self.service.stream(self.request, self._events(), id_headers(self.wanted[0]))

    def _choices(self, *, keep: bool) -> list[Choice]:
        """By prompt and then by child."""
        options = self.options
        return [
            Choice(
                at * wanted.sampling.n + child,
                wanted,
                text_of(
                    wanted,
                    self.tokenizer,
                    options.stops,
                    include_stop=options.include_stop,
                    skip_special_tokens=options.skip_special_tokens,
                ),
                keep=keep,
            )
            for at, wanted in enumerate(self.wanted)
            for child in range(wanted.sampling.n)
        ]

    def _answer_json(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """The answer in pieces; what can be wrong with it is found before the first of them."""
        whole = [choice.taken() for choice in choices]
        n = self.wanted[0].sampling.n
        # Of several answers to a prompt, the first has its logprobs.
        of_prompts = [prompt_scores(choice.wanted, whole[choice.index - choice.index % n].tokens) for choice in choices]
        nvext = self._nvext(whole[0].tokens) if self.options.extra else None
        head = {
            "id": self._id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.target.name,
            "usage": self._usage(choices),
            **self._prompt_of_answer(),
        }

        def pieces() -> Iterator[bytes]:
            yield msgspec.json.encode(head)[:-1] + b',"choices":['
            for choice, update, of_prompt in zip(choices, whole, of_prompts, strict=True):
                yield b"," if choice.index else b""
                more = self._prompt_of_choice(choice)
                yield from self._choice_json(choice, update, more, of_prompt)
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
        choice: Choice,
        update: Update,
        more: dict[str, Any],
        of_prompt: Scores | None = None,
        *,
        delta: bool = False,
    ) -> Iterator[bytes]:
        """One answer, or what a stream tells of it, in pieces."""
        found = {
            "index": choice.index,
            **self.shape.text(update.text, delta=delta),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **more,
        }
        if self.options.token_ids:
            found["token_ids"] = update.tokens.ids.tolist()
        yield msgspec.json.encode(found)[:-1] + b',"logprobs":'
        width = self.options.top_logprobs
        if width is None or (delta and not len(update.tokens.ids)):
            yield b"null"
        else:
            yield from self.shape.logprobs(choice, update.tokens.scores, self._namer, width)
        if not (delta or self.shape.prompt_is_common):
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs_json(of_prompt, self._namer.name)
        yield b"}"

    def _nvext(self, tokens: Tokens) -> Iterator[bytes]:
        return nvext_json(self.options.extra, self.wanted[0], self.target, tokens, self.clock)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        with named_errors(self.names, self.wanted[0]):
            choices = self._choices(keep=bool(self.options.extra))
            has_begun = [False] * len(choices)
            async with aclosing(updates(self.service, self.wanted, choices)) as found:
                async for choice, update in found:
                    if len(update.tokens.ids):
                        self.clock.token()
                    is_first = not has_begun[choice.index]
                    opening = self.shape.opening(choice) if is_first else None
                    if opening is not None:
                        yield self._event(msgspec.json.encode(opening), choices, prompt=not any(has_begun))
                    has_begun[choice.index] = True
                    if not self._is_news(choice, update):
                        continue
                    more = self._prompt_of_choice(choice) if is_first else {}
                    shown = b"".join(self._choice_json(choice, update, more, delta=True))
                    nvext = b""
                    if choice.finish_reason and self.options.extra:
                        nvext = b"".join(self._nvext(choice.taken().tokens))
                    yield self._event(shown, choices, nvext=nvext)
            if self.options.usage:
                yield self._event(None, choices)

    def _is_news(self, choice: Choice, update: Update) -> bool:
        """Whether a stream's reader learns anything from it."""
        shows_tokens = self.options.token_ids or self.options.top_logprobs is not None
        return bool(update.text or choice.finish_reason or (shows_tokens and len(update.tokens.ids)))

    def _event(
        self, shown: bytes | None, choices: Sequence[Choice], *, prompt: bool = False, nvext: bytes = b""
    ) -> bytes:
        """One event of a stream; without an answer to tell of, that with the usage."""
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
            event |= self._prompt_of_answer()
        if nvext:
            event["nvext"] = msgspec.Raw(nvext)
        return msgspec.json.encode(event)

    @cached_property
    def _namer(self) -> Namer:
        return Namer(self.tokenizer, as_token_ids=self.options.as_token_ids)

    @property
    def _id(self) -> str:
        return f"{self.shape.id_prefix}{self.wanted[0].request_id}"

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        # Of several answers to a prompt, one has read it; the others may have found it.
        firsts = choices[:: self.wanted[0].sampling.n]
        return usage_of(
            sum(wanted.prompt_len for wanted in self.wanted),
            sum(choice.num_tokens for choice in choices),
            [choice.cached_tokens for choice in firsts],
        )

    def _prompt_of_answer(self) -> dict[str, Any]:
        if not self.options.token_ids or not self.shape.prompt_is_common:
            return {}
        return {"prompt_token_ids": np.asarray(self.wanted[0].prompt_token_ids).tolist()}

    def _prompt_of_choice(self, choice: Choice) -> dict[str, Any]:
        if not self.options.token_ids or self.shape.prompt_is_common:
            return {}
        return {"prompt_token_ids": np.asarray(choice.wanted.prompt_token_ids).tolist()}
