"""`echo` of /v1/completions: the prompt before its answer, in the format of vLLM and OpenAI."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .... import bus
from ...tokenization import Tokenizer
from ..answers import Update
from ..errors import invalid
from ..tokens import Scored, Scores
from .body import ChatBody, CompletionBody
from .options import Options
from .prompts import BodyPrompt

__all__ = ["Echo", "EchoedScores", "read_echo"]


@dataclass(frozen=True, slots=True)
class Echo:
    """The texts of the prompts that precede the answers."""

    texts: Sequence[str]
    """The text of each request's prompt."""
    alone: bool
    """True if `max_tokens` is 0, so that no answers follow. The engine generates one token, which the answer omits."""

    def update(self, at: int, update: Update, *, is_first: bool = True) -> Update:
        """Return the shown text and tokens of an answer, or a part of an answer, to the request with index `at`."""
        before = self.texts[at] if is_first else ""
        return Update(before if self.alone else before + update.text, update.tokens)

    def scores(self, request: bus.GenerateRequest, of_prompt: Scores, scores: Scores) -> "EchoedScores":
        """Return the log probabilities of the prompt, followed by those of an answer."""
        first = int(np.asarray(request.prompt_token_ids)[0])
        return EchoedScores(first, (of_prompt,) if self.alone else (of_prompt, scores))


@dataclass(frozen=True, slots=True)
class EchoedScores:
    """Log probabilities of a whole prompt and of the answer after it."""

    first: int
    """First token of the prompt. It has no log probability, so JSON has null."""
    parts: Sequence[Scores]

    def blocks(self) -> Iterator[list[list[Scored]]]:
        """Yield blocks of positions, as `Scores.blocks` does."""
        yield [[Scored(self.first, float("nan"), None)]]
        for part in self.parts:
            yield from part.blocks()


async def read_echo(
    body: ChatBody | CompletionBody, prompts: Sequence[BodyPrompt], options: Options, tokenizer: Tokenizer | None
) -> Echo | None:
    """Return the prompts to echo; None if the request has no `echo`.

    Raises:
        HttpError: 400, `echo`, `stream` and `logprobs` are all set.
    """
    if not isinstance(body, CompletionBody) or not body.echo:
        return None
    if body.stream and options.top_logprobs is not None:
        raise invalid(
            "echo", "is given with stream and logprobs", "at most two of them: streams have no logprobs of prompts"
        )
    texts = []
    for prompt in prompts:
        text = prompt.text
        if tokenizer is None or not options.text or body.return_token_ids:
            # With token ids, vLLM omits the text of the prompt, because `prompt_token_ids` has its ids.
            text = ""
        elif text is None:
            text = await asyncio.to_thread(tokenizer.decode, prompt.token_ids, skip_special_tokens=False)
        texts.append(text)
    return Echo(texts, body.max_tokens == 0)
