"""The answers of `POST /inference/v1/generate`, as in vLLM 0.30. By default, routed experts are a JSON object."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ... import bus
from ...schemas.rows import Rows
from .answer_types import SampledToken, TopToken, Usage
from .answers import AnswerChoice, usage_of
from .logprobs_json import list_json, prompt_logprobs_json
from .request_target import RequestTarget
from .routing_json import RowsJson, routed_experts_json
from .tokens import BLOCK, Scored, Scores, Tokens, prompt_scores, whole_rows

__all__ = ["answer_json", "event_json"]


def answer_json(
    request: bus.GenerateRequest,
    target: RequestTarget,
    choices: Sequence[AnswerChoice],
    *,
    with_prompt: bool,
    as_json: RowsJson = routed_experts_json,
) -> Iterator[bytes]:
    """Return the complete answer in pieces. All checks run before the first piece.

    Args:
        as_json: format of the routed experts.

    Raises:
        HttpError: 502, rows of routed experts or log probabilities of the prompt are missing.
    """
    tokens = [choice.pop_update().tokens for choice in choices]
    rows = [whole_rows(request, target, each) for each in tokens]
    of_prompt = prompt_scores(request, tokens[0])
    small = {
        "request_id": request.request_id,
        "model": target.name,
        "lora": target.lora,
        "created": int(time.time()),
        "usage": usage_of(request.prompt_len, sum(choice.num_tokens for choice in choices), [choices[0].cached_tokens]),
        "prompt_token_ids": np.asarray(request.prompt_token_ids).tolist() if with_prompt else None,
        "mm_placeholders": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }

    def pieces() -> Iterator[bytes]:
        yield msgspec.json.encode(small)[:-1] + b',"choices":['
        for choice, own, own_rows in zip(choices, tokens, rows, strict=True):
            yield b"," if choice.index else b""
            yield from _choice_json(choice, own, own_rows, as_json)
        yield b'],"prompt_logprobs":'
        yield from prompt_logprobs_json(of_prompt)
        yield b"}"

    return pieces()


def event_json(
    request: bus.GenerateRequest,
    target: RequestTarget,
    update: tuple[AnswerChoice, Tokens] | None,
    *,
    usage: Usage | None = None,
    prompt_token_ids: list[int] | None = None,
    as_json: RowsJson = routed_experts_json,
) -> bytes:
    """Return one event of a stream. Without an `update` of a choice, it is the last event, with the usage only."""
    small: dict[str, Any] = {"request_id": request.request_id, "model": target.name, "usage": usage}
    if prompt_token_ids is not None:
        small["prompt_token_ids"] = prompt_token_ids
    pieces = [msgspec.json.encode(small)[:-1], b',"choices":[']
    if update is not None:
        choice, tokens = update
        pieces += _choice_json(choice, tokens, tokens.rows, as_json)
    return b"".join((*pieces, b"]}"))


def _choice_json(choice: AnswerChoice, tokens: Tokens, rows: Rows | None, as_json: RowsJson) -> Iterator[bytes]:
    small = {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "token_ids": tokens.ids.tolist(),
        "weight_versions": tokens.weight_versions.tolist(),
    }
    yield msgspec.json.encode(small)[:-1] + b',"logprobs":'
    yield from _logprobs_json(tokens.scores, choice.request.sampling.logprobs)
    yield b',"sampling_mask":'
    if tokens.masks is None:
        yield b"null"
    else:
        # Block by block, because the masks of a long answer are millions of ids.
        masks = tokens.masks.split()
        blocks = (masks[at : at + BLOCK] for at in range(0, len(masks), BLOCK))
        yield from list_json([ids.tolist() for ids in block] for block in blocks)
    yield b',"routed_experts":'
    if rows is None:
        yield b"null"
    else:
        yield from as_json(rows, tokens.start)
    yield b"}"


def _logprobs_json(scores: Scores, width: int | None) -> Iterator[bytes]:
    """Yield the object `logprobs`: each sampled token first, then its most likely alternatives."""
    if width is None:
        yield b"null"
        return
    yield b'{"content":'
    yield from list_json([_sampled(position, width) for position in block] for block in scores.blocks())
    yield b"}"


def _sampled(position: list[Scored], width: int) -> SampledToken:
    tops = [TopToken(f"token_id:{each.token_id}", each.logprob, None) for each in position[: max(width, 1)]]
    return SampledToken(tops[0].token, tops[0].logprob, None, tops)
