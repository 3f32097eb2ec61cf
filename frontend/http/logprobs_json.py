"""Log probabilities as JSON, in pieces, so that the many objects of a long answer never exist at the same time."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from .answer_types import OfPrompt
from .tokens import Scores

__all__ = ["list_json", "prompt_logprobs_json"]


def list_json(blocks: Iterable[list[Any]]) -> Iterator[bytes]:
    """Yield a JSON array, block by block."""
    before = b"["
    for block in blocks:
        yield before + msgspec.json.encode(block)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def prompt_logprobs_json(scores: Scores | None, text_of: Callable[[int], str] | None = None) -> Iterator[bytes]:
    """Yield vLLM's list `prompt_logprobs`: null for the first token, then objects by token id.

    Without scores, the result is null.

    Args:
        text_of: returns a token's text, if the answer includes it.
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
