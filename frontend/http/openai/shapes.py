"""The answer formats of the two routes: messages of a chat, or plain text."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, Protocol

from ...tokenization import Tokenizer, token_text
from ..answer_types import Message, SampledToken, TopToken
from ..answers import AnswerChoice
from ..logprobs_json import list_json
from ..tokens import Scored

__all__ = ["CHAT", "COMPLETION", "AnswerShape", "Namer"]


class TokenBlocks(Protocol):
    """Tokens and their log probabilities, in blocks of positions."""

    def blocks(self) -> Iterator[list[list[Scored]]]:
        """Yield blocks with the tokens of each position. The first token of a position is its actual token."""


class AnswerShape(Protocol):
    """The answer format of one route."""

    id_prefix: str
    object: str
    event_object: str
    prompt_is_common: bool
    """True if all answers belong to one prompt, so that its token ids and logprobs are fields of the whole response."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the event content before the first text of an answer in a stream; None: there is none."""

    def text(self, text: str, *, delta: bool) -> dict[str, Any]:
        """Return the fields for the text of an answer, or for a part of the text."""

    def logprobs(self, choice: AnswerChoice, scores: TokenBlocks, namer: "Namer", width: int) -> Iterator[bytes]:
        """Yield the logprobs of the answer's next tokens as JSON pieces, with `width` alternatives to each token."""


class Namer:
    """The names of tokens in logprobs."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids or tokenizer is None

    def name(self, token_id: int) -> str:
        """Return the text of a token, or `token_id:N`."""
        data = None if self._as_token_ids else self.bytes(token_id)
        return f"token_id:{token_id}" if data is None else token_text(data)

    def bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, which may be a part of a character; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)


def _tops(position: list[Scored], width: int) -> list[Scored]:
    """Return the `width` most likely tokens of a position, the most likely token first."""
    return sorted((each for each in position if each.rank is not None), key=lambda each: each.rank or 0)[:width]


class _ChatShape:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    event_object = "chat.completion.chunk"
    prompt_is_common = True

    def opening(self, index: int) -> dict[str, Any] | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def text(self, text: str, *, delta: bool) -> dict[str, Any]:
        if delta:
            return {"delta": {"content": text}}
        return {"message": Message("assistant", text, None)}

    def logprobs(self, choice: AnswerChoice, scores: TokenBlocks, namer: Namer, width: int) -> Iterator[bytes]:
        def named(each: Scored) -> tuple[str, float, list[int] | None]:
            data = namer.bytes(each.token_id)
            return namer.name(each.token_id), each.logprob, None if data is None else list(data)

        yield b'{"content":'
        yield from list_json(
            [
                SampledToken(*named(position[0]), [TopToken(*named(each)) for each in _tops(position, width)])
                for position in block
            ]
            for block in scores.blocks()
        )
        yield b',"refusal":null}'


class _Completion:
    id_prefix = "cmpl-"
    object = "text_completion"
    event_object = "text_completion"
    prompt_is_common = False

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def text(self, text: str, *, delta: bool) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, choice: AnswerChoice, scores: TokenBlocks, namer: Namer, width: int) -> Iterator[bytes]:
        def names() -> Iterator[list[str]]:
            return ([namer.name(position[0].token_id) for position in block] for block in scores.blocks())

        def offsets() -> Iterator[list[int]]:
            for block in names():
                *places, choice.text_offset = itertools.accumulate(map(len, block), initial=choice.text_offset)
                yield places

        def top(position: list[Scored]) -> dict[str, float] | None:
            if math.isnan(position[0].logprob):
                return None
            # The sampled token is included even if it is not among the most likely tokens.
            return {namer.name(each.token_id): each.logprob for each in [*_tops(position, width), position[0]]}

        yield b'{"tokens":'
        yield from list_json(names())
        yield b',"token_logprobs":'
        yield from list_json([position[0].logprob for position in block] for block in scores.blocks())
        yield b',"top_logprobs":'
        yield from list_json([top(position) for position in block] for block in scores.blocks())
        yield b',"text_offset":'
        yield from list_json(offsets())
        yield b"}"


CHAT: Final[AnswerShape] = _ChatShape()
COMPLETION: Final[AnswerShape] = _Completion()
