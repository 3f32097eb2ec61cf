"""The answers to one HTTP request: they grow with each chunk and end at a stop string."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from starlette.requests import Request

from ... import bus
from .calls import first_error, merged
from .edge import while_connected
from .service import Service
from .text import AnswerText
from .tokens import CachedTokens, Tokens, Usage


class Update(NamedTuple):
    """The text and tokens that some chunks add to an answer."""

    text: str
    tokens: Tokens
    """The new tokens that belong to the answer."""


class AnswerChoice:
    """One answer of an HTTP request, which grows with each chunk.

    Args:
        index: position among the answers to the HTTP request.
        request: the request that this answers.
        text: detokenizer that also finds stop strings. None if the client needs no text.
        keep: True if the caller reads the whole answer at the end.

    Attributes:
        num_tokens: number of tokens so far.
        has_begun: True if a stream has an event of this answer.
        finish_reason: OpenAI's finish reason; None while the answer grows.
        stop_reason: the stop string or the id of the stop token that ended the answer.
        cached_tokens: prompt tokens that the engine found in its prefix cache; None while unknown.
    """

    def __init__(self, index: int, request: bus.GenerateRequest, text: AnswerText | None, *, keep: bool) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.has_begun = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cached_tokens: int | None = None
        self.text_offset = 0
        """Offset of the next token in the text of all tokens. The code that formats the tokens advances it."""
        self._text = text
        self._keep = keep
        self._updates: list[Update] = []

    def add(self, tokens: Tokens) -> Update:
        """Add the next tokens to an answer that has not ended.

        Raises:
            HttpError: 502, the log probabilities do not belong to these tokens.
        """
        sampling = self.request.sampling
        ids = tokens.scores.ids
        text, kept, stop = "", len(ids), None
        if sampling.logprobs is not None and kept:
            tokens.scores.check(sampling.logprobs, "tokens")
        if self._text is not None:
            delta = self._text.add(
                ids.tolist(),
                final=tokens.finish_reason is not None,
                by_stop_token=tokens.finish_reason is bus.FinishReason.STOP,
            )
            text, kept, stop = delta.text, delta.kept, delta.stop
        self.num_tokens += kept
        # The last token has no row, because no later engine step processed it.
        if kept < len(ids):
            tokens = tokens.cut(kept, self.request.prompt_len + self.num_tokens - 1)
        self.cached_tokens, update = tokens.cached_tokens, Update(text, tokens)
        if stop is not None:
            self.finish_reason, self.stop_reason = bus.FinishReason.STOP, stop
        elif tokens.finish_reason is not None:
            self.finish_reason, self.stop_reason = tokens.finish_reason, tokens.stop_token
        if self._keep:
            self._updates.append(update)
        return update

    def pop_update(self) -> Update:
        """Return the whole answer so far and remove it from this object."""
        parts, self._updates = self._updates, []
        return Update("".join(part.text for part in parts), Tokens.joined([part.tokens for part in parts]))


async def updates(
    service: Service, http_request: Request, requests: Sequence[bus.GenerateRequest], choices: Sequence[AnswerChoice]
) -> AsyncGenerator[Iterator[tuple[AnswerChoice, Update]], None]:
    """Yield the updates that chunks add to the answers, until all answers have ended. Closing aborts the open requests.

    The caller reads each iterator, which has all that has come, to its end before the next one.

    Args:
        choices: ordered by request, then by child.
    """
    open_choices = len(choices)
    n = requests[0].sampling.n
    # The first request waits for the first byte. If it has none in time, no status was sent.
    running = [service.chunks(http_request, each, at, is_limited=not at) for at, each in enumerate(requests)]

    def added(at: int, chunks: Sequence[bus.Chunk]) -> Iterator[tuple[AnswerChoice, Update]]:
        nonlocal open_choices
        # A service that is busy has several chunks of an answer: one update for all costs much less than one for each.
        for (child, _), parts in groupby(chunks, attrgetter("child", "attempt")):
            choice = choices[at * n + child]
            # If a stop string has ended this answer, the fleet continues, because other answers are still open.
            if choice.finish_reason is None:
                update = choice.add(Tokens.of_chunks([*parts], choice.request))
                open_choices -= choice.finish_reason is not None
                yield choice, update

    async with aclosing(merged(running) if len(running) > 1 else running[0]) as found:
        async for at, chunks in found:
            yield added(at, chunks)
            if not open_choices:
                return


async def collect_answers(
    service: Service,
    http_request: Request,
    requests: Sequence[bus.GenerateRequest],
    choices: Sequence[AnswerChoice],
    *,
    may_stop: bool,
) -> None:
    """Wait until all answers have ended. If the client disconnects, abort the requests.

    Args:
        may_stop: True if the request has stop strings. The text of each chunk is then searched, so that the engine does
            not generate tokens after a stop string.
    """
    if may_stop:
        with while_connected(http_request.scope):
            async with aclosing(updates(service, http_request, requests, choices)) as found:
                async for added in found:
                    deque(added, 0)
        return
    if len(requests) == 1:
        results = [await service.complete(http_request, requests[0])]
    else:
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(service.complete(http_request, each)) for each in requests]
        results = [task.result() for task in running]
    generations = [each for result in results for each in (result, *result.siblings)]
    for choice, generation in zip(choices, generations, strict=True):
        choice.add(Tokens.of_generation(generation, choice.request))


def usage_of(prompt_tokens: int, completion_tokens: int, cached: Sequence[int | None] = ()) -> Usage:
    """Return the token counts as OpenAI's usage object.

    Args:
        cached: for each prompt, the tokens that the engine found in its prefix cache, if known.
    """
    known = [each for each in cached if each is not None]
    details = CachedTokens(sum(known)) if known else None
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
