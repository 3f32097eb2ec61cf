"""Log probabilities as JSON, in pieces: of a long answer they are many objects, and never there all at once."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from .answer_types import OfPrompt
from .tokens import Scores

__all__ = ["list_json", "prompt_logprobs_json"]


def list_json(blocks: Iterable[list[Any]]) -> Iterator[bytes]:
    """A JSON array, block by block."""
    before = b"["
    for block in blocks:
        yield before + msgspec.json.encode(block)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def prompt_logprobs_json(scores: Scores | None, text_of: Callable[[int], str] | None = None) -> Iterator[bytes]:
    """The list `prompt_logprobs` of vLLM: null for the first token, then objects by token id; null: there are none.

    Args:
        text_of: a token's text, if there is any.
    """
    if scores is None:
        yield b"null"
        return
    blocks = (
        [
            {
                each.token_id: OfPrompt(each.logprob, each.rank, None if text_of is None else text_of(each.token_id))
                for each in position
            }
            for position in block
        ]
        for block in scores.blocks()
    )
    yield from list_json(itertools.chain([[None]], blocks))
