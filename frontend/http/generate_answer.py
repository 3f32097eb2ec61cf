"""The answers of `POST /inference/v1/generate`, as vLLM 0.30 defines them, except that routing is a JSON object."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

import bus
from frontend.http.answers import Choice, usage_of
from frontend.http.logprobs_json import list_json, prompt_logprobs_json
from frontend.http.routing_json import routed_experts_json
from frontend.http.tokens import Scored, Scores, Tokens, prompt_scores, whole_rows
from frontend.http.wanted import Target
from schemas.rows import Rows

__all__ = ["answer_json", "event_json"]


class _Top(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: None = None


class _Sampled(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top]
    bytes: None = None


def answer_json(
    wanted: bus.GenerateRequest, target: Target, choices: Sequence[Choice], *, with_prompt: bool
) -> Iterator[bytes]:
    """The answer that is no stream, in pieces; what can be wrong with it is found before the first of them.

    Raises:
        HttpError: 502, rows of routing or logprobs of the prompt are missing.
    """
    tokens = [choice.taken().tokens for choice in choices]
    rows = [whole_rows(wanted, target, each) for each in tokens]
    of_prompt = prompt_scores(wanted, tokens[0])
    small = {
        "request_id": wanted.request_id,
        "model": target.name,
        "created": int(time.time()),
        "usage": usage_of(wanted.prompt_len, sum(choice.num_tokens for choice in choices), [choices[0].cached_tokens]),
        "prompt_token_ids": np.asarray(wanted.prompt_token_ids).tolist() if with_prompt else None,
        "mm_placeholders": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }

    def pieces() -> Iterator[bytes]:
        yield msgspec.json.encode(small)[:-1] + b',"choices":['
        for choice, own, own_rows in zip(choices, tokens, rows, strict=True):
            yield b"," if choice.index else b""
            yield from _choice_json(choice, own, own_rows)
        yield b'],"prompt_logprobs":'
        yield from prompt_logprobs_json(of_prompt)
        yield b"}"

    return pieces()


def event_json(
    wanted: bus.GenerateRequest,
    told: tuple[Choice, Tokens] | None,
    *,
    usage: dict[str, Any] | None = None,
    prompt_token_ids: list[int] | None = None,
) -> bytes:
    """One event of a stream; where there is no news `told` of a choice, the last one, which has the usage only."""
    small: dict[str, Any] = {"request_id": wanted.request_id, "usage": usage}
    if prompt_token_ids is not None:
        small["prompt_token_ids"] = prompt_token_ids
    pieces = [msgspec.json.encode(small)[:-1], b',"choices":[']
    if told is not None:
        choice, tokens = told
        pieces += _choice_json(choice, tokens, tokens.rows)
    return b"".join((*pieces, b"]}"))


def _choice_json(choice: Choice, tokens: Tokens, rows: Rows | None) -> Iterator[bytes]:
    small = {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "token_ids": tokens.ids.tolist(),
        "sampling_mask": None,
    }
    yield msgspec.json.encode(small)[:-1] + b',"logprobs":'
    yield from _logprobs_json(tokens.scores, choice.wanted.sampling.logprobs)
    yield b',"routed_experts":'
    if rows is None:
        yield b"null"
    else:
        yield from routed_experts_json(rows, tokens.start)
    yield b"}"


def _logprobs_json(scores: Scores, width: int | None) -> Iterator[bytes]:
    """The object `logprobs`: of each token, and of as many as were asked for, of which it is the first."""
    if width is None:
        yield b"null"
        return
    yield b'{"content":'
    yield from list_json([_sampled(position, width) for position in block] for block in scores.blocks())
    yield b"}"


def _sampled(position: list[Scored], width: int) -> _Sampled:
    tops = [_Top(f"token_id:{each.token_id}", each.logprob) for each in position[: max(width, 1)]]
    return _Sampled(tops[0].token, tops[0].logprob, tops)
