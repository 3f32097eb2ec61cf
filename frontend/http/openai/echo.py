"""`echo` of /v1/completions: the prompt before its answer, as vLLM and OpenAI show it."""

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
    """The texts of the prompts, which stand before the answers."""

    texts: Sequence[str]
    """By request."""
    alone: bool
    """`max_tokens` is 0: no answers stand behind them. The engine makes one token each, which is not shown."""

    def update(self, at: int, update: Update, *, is_first: bool = True) -> Update:
        """What is shown of an answer to the request `at`, or of a part of it."""
        before = self.texts[at] if is_first else ""
        return Update(before if self.alone else before + update.text, update.tokens)

    def scores(self, request: bus.GenerateRequest, of_prompt: Scores, scores: Scores) -> "EchoedScores":
        """The prompt's log probabilities before those of an answer."""
        first = int(np.asarray(request.prompt_token_ids)[0])
        return EchoedScores(first, (of_prompt,) if self.alone else (of_prompt, scores))


@dataclass(frozen=True, slots=True)
class EchoedScores:
    """Log probabilities of a whole prompt, and of what follows it."""

    first: int
    """Token that begins the prompt: it has no log probability, which JSON shows as null."""
    parts: Sequence[Scores]

    def blocks(self) -> Iterator[list[list[Scored]]]:
        """As those of `Scores`."""
        yield [[Scored(self.first, float("nan"), None)]]
        for part in self.parts:
            yield from part.blocks()


async def read_echo(
    body: ChatBody | CompletionBody, prompts: Sequence[BodyPrompt], options: Options, tokenizer: Tokenizer | None
) -> Echo | None:
    """What is echoed; None: nothing is.

    Raises:
        HttpError: 400, a stream shall have the prompt's logprobs.
    """
    if not isinstance(body, CompletionBody) or not body.echo:
        return None
    if body.stream and options.top_logprobs is not None:
        raise invalid("echo", "is given with stream and logprobs", "two of them: streams have no logprobs of prompts")
    texts = []
    for prompt in prompts:
        text = prompt.text
        if tokenizer is None or not options.text or body.return_token_ids:
            # With token ids vLLM leaves the text of the prompt out: they stand in `prompt_token_ids`.
            text = ""
        elif text is None:
            text = await asyncio.to_thread(tokenizer.decode, prompt.token_ids, skip_special_tokens=False)
        texts.append(text)
    return Echo(texts, body.max_tokens == 0)
