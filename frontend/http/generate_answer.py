"""The answers of `POST /inference/v1/generate`, as vLLM 0.30 defines them, except that routing is a JSON object."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import bus
from frontend.http.errors import HttpError
from frontend.http.routing_json import routed_experts_json
from frontend.http.wanted import Target
from schemas.chunk import JSON_MINUS_INFINITY
from schemas.errors import ErrorCode
from schemas.rows import Rows, no_rows

__all__ = ["Tokens", "answer_json", "event_json", "usage_of"]

BLOCK = 1024
"""Positions whose logprobs are made into objects at a time."""
Logprobs = npt.NDArray[np.float32]
_Scored = tuple[int, float, int | None]
"""Token id, log probability, and rank if it is known."""


class _Top(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: None = None


class _Sampled(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top]
    bytes: None = None


class _OfPrompt(msgspec.Struct, gc=False):
    logprob: float
    rank: int | None
    decoded_token: None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of tokens, and of what was likely in their places."""

    ids: npt.NDArray[np.int32]
    """i4[k]."""
    logprobs: Logprobs | None
    """f4[k]; None: not asked for."""
    top_ids: npt.NDArray[np.int32] | None
    """i4[k, width], best first; None: not asked for."""
    top_logprobs: Logprobs | None
    """f4[k, width]."""

    def check(self, width: int, what: str) -> None:
        """Refuse logprobs that are not those of the tokens.

        Args:
            width: how many alternatives were asked for.
            what: the tokens are, for people.

        Raises:
            HttpError: 502, a wrong number of logprobs, or one that is no number.
        """
        for values in (self.logprobs, self.top_logprobs) if width else (self.logprobs,):
            found = 0 if values is None else len(values)
            if found != len(self.ids):
                raise _broken(f"{len(self.ids)} {what} came with {found} logprobs")
            if values is not None and not np.all(values < np.inf):
                raise _broken(f"a logprob of the {what} is no number")

    def blocks(self) -> Iterator[list[list[_Scored]]]:
        """What stands at each position: its own token first, the others after it, best first; some positions a time."""
        for at in range(0, len(self.ids), BLOCK):
            here = slice(at, at + BLOCK)
            ids, logprobs = self.ids[here].tolist(), _finite(self.logprobs, here)
            top_ids = [()] * len(ids) if self.top_ids is None else self.top_ids[here].tolist()
            top_logprobs = _finite(self.top_logprobs, here) or top_ids
            yield [_position(*each) for each in zip(ids, logprobs, top_ids, top_logprobs, strict=True)]


def _position(own_id: int, own_logprob: float, ids: Sequence[int], logprobs: Sequence[float]) -> list[_Scored]:
    own_rank = ids.index(own_id) + 1 if own_id in ids else None
    tops = zip(ids, logprobs, itertools.count(1))
    return [(own_id, own_logprob, own_rank), *(top for top in tops if top[0] != own_id)]


def _finite(logprobs: Logprobs | None, here: slice) -> list[Any]:
    """As vLLM: JSON has no infinity."""
    return [] if logprobs is None else np.maximum(logprobs[here], JSON_MINUS_INFINITY).tolist()


def _broken(message: str) -> HttpError:
    return HttpError(502, message, code=ErrorCode.PROTOCOL_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one choice with what came with them: all of them, or those of one chunk."""

    index: int
    """Of the choice."""
    scores: Scores
    """Token ids and their log probabilities."""
    rows: Rows | None
    """u1|u2[rows, layers, top_k]."""
    start: int
    """Absolute position of the first row."""
    finish_reason: str | None
    """None: there will be more."""

    @classmethod
    def of_generation(cls, result: bus.Generation, target: Target) -> "Tokens":
        """All that one child produced; where a model has experts, there are rows, if only none of them."""
        routing, rows = target.capabilities.routed_experts, result.routed_experts
        if rows is None and routing is not None:
            rows = no_rows(routing.num_layers, routing.top_k, routing.dtype)
        return cls(
            index=result.child,
            scores=Scores(result.token_ids, result.logprobs, result.top_token_ids, result.top_logprobs),
            rows=rows,
            start=result.start,
            finish_reason=result.finish_reason,
        )

    @classmethod
    def of_chunk(cls, chunk: bus.Chunk) -> "Tokens":
        """What one chunk added."""
        top, rows = chunk.top_logprobs, chunk.routed_experts
        return cls(
            index=chunk.child,
            scores=Scores(
                chunk.token_ids,
                chunk.logprobs,
                None if top is None else top.token_ids,
                None if top is None else top.logprobs,
            ),
            rows=None if rows is None else rows.numpy(),
            start=0 if rows is None else rows.start,
            finish_reason=chunk.finish_reason,
        )


def answer_json(
    wanted: bus.GenerateRequest, target: Target, result: bus.Generation, *, with_prompt: bool
) -> Iterator[bytes]:
    """The answer that is no stream, in pieces; what can be wrong with it is found before the first of them.

    Raises:
        HttpError: 502, ids and logprobs are of unequal length, or a logprob is no number.
    """
    choices = [Tokens.of_generation(each, target) for each in (result, *result.siblings)]
    _check(choices, wanted.sampling)
    of_prompt = _scores_of_prompt(wanted, result)
    num_tokens = sum(len(choice.scores.ids) for choice in choices)
    small = {
        "request_id": wanted.request_id,
        "model": target.name,
        "created": int(time.time()),
        "usage": usage_of(wanted.prompt_len, num_tokens, result.cached_tokens),
        "prompt_token_ids": np.asarray(wanted.prompt_token_ids).tolist() if with_prompt else None,
        "mm_placeholders": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
    return _answer_pieces(small, choices, wanted.sampling, of_prompt)


def _answer_pieces(
    small: dict[str, Any], choices: list[Tokens], sampling: bus.SamplingParams, of_prompt: Scores | None
) -> Iterator[bytes]:
    yield msgspec.json.encode(small)[:-1] + b',"choices":['
    for choice in choices:
        yield b"," if choice.index else b""
        yield from _choice_json(choice, sampling)
    yield b'],"prompt_logprobs":'
    if of_prompt is None:
        yield b"null"
    else:
        yield from _prompt_logprobs_json(of_prompt)
    yield b"}"


def _check(choices: list[Tokens], sampling: bus.SamplingParams) -> None:
    for choice in choices:
        if sampling.logprobs is not None and len(choice.scores.ids):
            choice.scores.check(sampling.logprobs, "tokens")


def _scores_of_prompt(wanted: bus.GenerateRequest, result: bus.Generation) -> Scores | None:
    """Of all tokens of the prompt but the first; None: not asked for, or aborted before they were there."""
    width = wanted.sampling.prompt_logprobs
    if width is None or not len(result.token_ids):
        return None
    ids = np.asarray(wanted.prompt_token_ids)[1:]
    scores = Scores(ids, result.prompt_logprobs, result.prompt_top_token_ids, result.prompt_top_logprobs)
    if len(ids):
        scores.check(width, "tokens of the prompt")
    return scores


def usage_of(prompt_len: int, num_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """The usage; `cached_tokens` if it is known."""
    return {
        "prompt_tokens": prompt_len,
        "total_tokens": prompt_len + num_tokens,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


def event_json(
    wanted: bus.GenerateRequest,
    tokens: Tokens | None,
    *,
    usage: dict[str, Any] | None = None,
    prompt_token_ids: list[int] | None = None,
) -> bytes:
    """One event of a stream; without `tokens`, the last one, which has the usage only.

    Raises:
        HttpError: 502, ids and logprobs are of unequal length, or a logprob is no number.
    """
    small: dict[str, Any] = {"request_id": wanted.request_id, "usage": usage}
    if prompt_token_ids is not None:
        small["prompt_token_ids"] = prompt_token_ids
    pieces = [msgspec.json.encode(small)[:-1], b',"choices":[']
    if tokens is not None:
        _check([tokens], wanted.sampling)
        pieces += _choice_json(tokens, wanted.sampling)
    return b"".join((*pieces, b"]}"))


def _choice_json(tokens: Tokens, sampling: bus.SamplingParams) -> Iterator[bytes]:
    small = {
        "index": tokens.index,
        "finish_reason": tokens.finish_reason,
        "token_ids": tokens.scores.ids.tolist(),
        "sampling_mask": None,
    }
    yield msgspec.json.encode(small)[:-1] + b',"logprobs":'
    yield from _logprobs_json(tokens.scores, sampling.logprobs)
    yield b',"routed_experts":'
    if tokens.rows is None:
        yield b"null"
    else:
        yield from routed_experts_json(tokens.rows, tokens.start)
    yield b"}"


def _logprobs_json(scores: Scores, width: int | None) -> Iterator[bytes]:
    """The object `logprobs`: of each token, and of as many as were asked for, of which it is the first."""
    if width is None:
        yield b"null"
        return
    yield b'{"content":'
    yield from _list_json([_sampled(position, width) for position in block] for block in scores.blocks())
    yield b"}"


def _sampled(position: list[_Scored], width: int) -> _Sampled:
    tops = [_Top(f"token_id:{token_id}", logprob) for token_id, logprob, _ in position[: max(width, 1)]]
    return _Sampled(tops[0].token, tops[0].logprob, tops)


def _prompt_logprobs_json(scores: Scores) -> Iterator[bytes]:
    """The list `prompt_logprobs`: null for the first token, then objects by token id; ranks where they are known."""
    blocks = (
        [{token_id: _OfPrompt(logprob, rank) for token_id, logprob, rank in position} for position in block]
        for block in scores.blocks()
    )
    yield from _list_json(itertools.chain([[None]], blocks))


def _list_json(blocks: Iterable[list[Any]]) -> Iterator[bytes]:
    """A JSON array, block by block."""
    before = b"["
    for block in blocks:
        yield before + msgspec.json.encode(block)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"
