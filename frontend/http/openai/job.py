"""Carrying out what a body asks for: whole answers and streams."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.calls import until_disconnect
from frontend.http.openai.merge import first_error, merged
from frontend.http.openai.nvext import Clock, nvext_json
from frontend.http.openai.options import Options
from frontend.http.openai.pieces import Choice, Piece, Update
from frontend.http.openai.shapes import Shape, choice_json
from frontend.http.routing_json import JsonPieces
from frontend.http.service import Service
from frontend.http.wanted import Target, id_headers, named_errors
from frontend.tokenization import Tokenizer

__all__ = ["Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
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
            if self.options.stops:
                await until_disconnect(self.request.receive, self._take_all(choices))
            else:
                await self._complete(choices)
            return JsonPieces(self._answer_json(choices), id_headers(self.wanted[0]))

    async def stream(self) -> Response:
        """The answers as they come.

        Raises:
            HttpError: what went wrong before the first of them.
        """
        return await self.service.stream(self.request, self._events(), id_headers(self.wanted[0]))

    def _choices(self, *, keep: bool) -> list[Choice]:
        """By prompt and then by child."""
        return [
            Choice(at * wanted.sampling.n + child, wanted, self.options, self.tokenizer, keep=keep)
            for at, wanted in enumerate(self.wanted)
            for child in range(wanted.sampling.n)
        ]

    async def _complete(self, choices: Sequence[Choice]) -> None:
        results: Sequence[bus.Generation]
        if len(self.wanted) == 1:
            results = [await self.service.complete(self.request, self.wanted[0])]
        else:
            with first_error():
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(self.service.complete(self.request, wanted)) for wanted in self.wanted]
            results = [task.result() for task in running]
        generations = [each for result in results for each in (result, *result.siblings)]
        for choice, generation in zip(choices, generations, strict=True):
            choice.add(Piece.of_generation(generation))

    async def _take_all(self, choices: Sequence[Choice]) -> None:
        async with aclosing(self._updates(choices)) as updates:
            async for _ in updates:
                pass

    async def _updates(self, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Update], None]:
        """What chunks add to the answers, until all have ended; closing aborts the others."""
        open_choices = len(choices)
        n = self.wanted[0].sampling.n
        async with aclosing(merged([self.service.chunks(wanted) for wanted in self.wanted])) as chunks:
            async for at, chunk in chunks:
                choice = choices[at * n + chunk.child]
                if choice.finish_reason is not None:
                    # A stop string has ended it; the fleet goes on for the sake of the others.
                    continue
                if chunk.num_tokens:
                    self.clock.token()
                yield choice, choice.add(Piece.of_chunk(chunk))
                open_choices -= choice.finish_reason is not None
                if not open_choices:
                    return

    def _answer_json(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """The answer in pieces; what can be wrong with it is found before the first of them."""
        shown = []
        tokens: Piece | None = None
        for choice in choices:
            text, tokens = choice.taken()
            found = choice_json(self.shape, choice, Update(text, tokens), self.options, self.tokenizer, delta=False)
            shown.append({**found, **self._prompt_of_choice(choice)})
        head = {
            "id": self._id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.target.name,
            "choices": shown,
            "usage": self._usage(choices),
            **self._prompt_of_answer(),
        }
        return self._with_nvext(msgspec.json.encode(head), tokens)

    def _with_nvext(self, head: bytes, tokens: Piece | None) -> Iterator[bytes]:
        """An object with the field `nvext` added, if it is asked for."""
        if not self.options.extra or tokens is None:
            return iter([head])
        return _spliced(head, nvext_json(self.options.extra, self.wanted[0], self.target, tokens, self.clock))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        with named_errors(self.names, self.wanted[0]):
            choices = self._choices(keep=bool(self.options.extra))
            has_begun = [False] * len(choices)
            async with aclosing(self._updates(choices)) as updates:
                async for choice, update in updates:
                    is_first = not has_begun[choice.index]
                    opening = self.shape.opening(choice) if is_first else None
                    if opening is not None:
                        yield self._event(opening, choices, prompt=not any(has_begun))
                    has_begun[choice.index] = True
                    if not self._is_news(choice, update):
                        continue
                    shown = choice_json(self.shape, choice, update, self.options, self.tokenizer, delta=True)
                    if is_first:
                        shown |= self._prompt_of_choice(choice)
                    tokens = choice.taken()[1] if choice.finish_reason and self.options.extra else None
                    yield b"".join(self._with_nvext(self._event(shown, choices), tokens))
            if self.options.usage:
                yield self._event(None, choices)

    def _is_news(self, choice: Choice, update: Update) -> bool:
        """Whether a stream's reader learns anything from it."""
        shows_tokens = self.options.token_ids or self.options.top_logprobs is not None
        return bool(update.text or choice.finish_reason or (shows_tokens and len(update.tokens.ids)))

    def _event(self, shown: dict[str, Any] | None, choices: Sequence[Choice], *, prompt: bool = False) -> bytes:
        """One event of a stream; without an answer to tell of, that with the usage."""
        event: dict[str, Any] = {
            "id": self._id,
            "object": self.shape.event_object,
            "created": self.created,
            "model": self.target.name,
            "choices": [] if shown is None else [shown],
        }
        if self.options.usage:
            is_due = shown is None or self.options.continuous_usage
            event["usage"] = self._usage(choices) if is_due else None
        if prompt:
            event |= self._prompt_of_answer()
        return msgspec.json.encode(event)

    @property
    def _id(self) -> str:
        return f"{self.shape.id_prefix}{self.wanted[0].request_id}"

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prompt_tokens = sum(wanted.prompt_len for wanted in self.wanted)
        completion_tokens = sum(choice.num_tokens for choice in choices)
        n = self.wanted[0].sampling.n
        # Of several answers to a prompt, one has read it; the others may have found it.
        cached = [choice.cached_tokens for choice in choices[::n] if choice.cached_tokens is not None]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
        }

    def _prompt_of_answer(self) -> dict[str, Any]:
        if not self.options.token_ids or not self.shape.prompt_is_common:
            return {}
        return {"prompt_token_ids": np.asarray(self.wanted[0].prompt_token_ids).tolist()}

    def _prompt_of_choice(self, choice: Choice) -> dict[str, Any]:
        if not self.options.token_ids or self.shape.prompt_is_common:
            return {}
        return {"prompt_token_ids": np.asarray(choice.wanted.prompt_token_ids).tolist()}


def _spliced(head: bytes, nvext: Iterator[bytes]) -> Iterator[bytes]:
    yield head[:-1] + b',"nvext":'
    yield from nvext
    yield b"}"
