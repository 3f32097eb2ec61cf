"""Tokens with what belongs to each of them: all of an answer, or those of one chunk."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ... import bus
from ...schemas.chunk import JSON_MINUS_INFINITY
from ...schemas.errors import ErrorCode
from ...schemas.rows import Rows, expected_rows, no_rows
from .errors import HttpError
from .request_target import RequestTarget

__all__ = ["BLOCK", "Ids", "Scored", "Scores", "Tokens", "json_logprobs", "prompt_scores", "whole_rows"]

BLOCK: Final = 1024
"""Positions whose logprobs are made into objects at a time."""
Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Array = TypeVar("Array", bound=npt.NDArray[np.generic])


class Scored(NamedTuple):
    """A token that stands at a position, or was likely there."""

    token_id: int
    logprob: float
    """-inf is -9999, as with vLLM: JSON has no infinity. NaN: there is none, which JSON shows as null."""
    rank: int | None
    """1 is the most likely one; None: not among those that were asked for."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Tokens and their log probabilities, and what was likely in their places."""

    ids: Ids
    """i4[k]."""
    logprobs: Logprobs | None = None
    """f4[k]; None: not asked for."""
    top_ids: Ids | None = None
    """i4[k, width], best first; None: not asked for."""
    top_logprobs: Logprobs | None = None
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

    def blocks(self) -> Iterator[list[list[Scored]]]:
        """What stands at each position: its own token first, the others after it, best first; some positions a time."""
        for at in range(0, len(self.ids), BLOCK):
            here = slice(at, at + BLOCK)
            ids, logprobs = self.ids[here].tolist(), json_logprobs(self.logprobs, here)
            top_ids = [()] * len(ids) if self.top_ids is None else self.top_ids[here].tolist()
            top_logprobs = json_logprobs(self.top_logprobs, here) or top_ids
            yield [_position(*each) for each in zip(ids, logprobs, top_ids, top_logprobs, strict=True)]

    def cut(self, kept: int) -> "Scores":
        """The first `kept` of them."""
        arrays = (self.ids, self.logprobs, self.top_ids, self.top_logprobs)
        return Scores(*(None if array is None else array[:kept] for array in arrays))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        """What follows each other as one."""
        names = ("logprobs", "top_ids", "top_logprobs")
        return cls(
            np.concatenate([part.ids for part in parts]),
            *(_join([getattr(part, name) for part in parts]) for name in names),
        )


def _position(own_id: int, own_logprob: float, ids: Sequence[int], logprobs: Sequence[float]) -> list[Scored]:
    own_rank = ids.index(own_id) + 1 if own_id in ids else None
    tops = map(Scored, ids, logprobs, itertools.count(1))
    return [Scored(own_id, own_logprob, own_rank), *(top for top in tops if top.token_id != own_id)]


def json_logprobs(logprobs: Logprobs | None, here: slice = slice(None)) -> list[float]:
    """Some of them as JSON has them; none, where none were asked for."""
    return [] if logprobs is None else np.maximum(logprobs[here], JSON_MINUS_INFINITY).tolist()


def _join(parts: Sequence[Array | None]) -> Array | None:
    # Chunks without tokens have none.
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


def _broken(message: str) -> HttpError:
    return HttpError(502, message, code=ErrorCode.PROTOCOL_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Some tokens of one answer, or all of them."""

    scores: Scores
    """Token ids and their log probabilities."""
    weight_versions: Ids
    """i4[k]."""
    rows: Rows | None = None
    """u1|u2[rows, layers, top_k]."""
    start: int = 0
    """Absolute position of the first row."""
    masks: bus.TokenMasks | None = None
    """What each of the tokens was sampled from."""
    of_prompt: Scores | None = None
    """Of tokens of the prompt, which has no logprob for its first one."""
    finish_reason: bus.FinishReason | None = None
    """None: there will be more."""
    stop_token: int | None = None
    """Which of `stop_token_ids` ended the answer."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache, where that is known."""
    first_worker: str | None = None
    """Who made the first of the tokens, where that is known."""
    worker: str | None = None
    """Who made the last of them, likewise: another one where prefill is apart, or a worker was lost."""

    @property
    def ids(self) -> Ids:
        """i4[k]."""
        return self.scores.ids

    @classmethod
    def of_generation(cls, generation: bus.Generation, request: bus.GenerateRequest) -> "Tokens":
        """All of an answer."""
        of_prompt = None
        if generation.prompt_logprobs is not None:
            of_prompt = Scores(
                _prompt_ids(request)[1:],
                generation.prompt_logprobs,
                generation.prompt_top_token_ids,
                generation.prompt_top_logprobs,
            )
        return cls(
            scores=Scores(generation.token_ids, generation.logprobs, generation.top_token_ids, generation.top_logprobs),
            weight_versions=generation.weight_versions,
            rows=generation.routed_experts,
            start=generation.start,
            masks=generation.sampling_mask,
            of_prompt=of_prompt,
            finish_reason=generation.finish_reason,
            stop_token=generation.stop_reason,
            cached_tokens=generation.cached_tokens,
            first_worker=generation.worker_ids[0] if generation.worker_ids else None,
            worker=generation.worker_ids[-1] if generation.worker_ids else None,
        )

    @classmethod
    def of_chunk(cls, chunk: bus.Chunk, request: bus.GenerateRequest) -> "Tokens":
        """What one chunk added."""
        top, end, rows, prompt = chunk.top_logprobs, chunk.end, chunk.routed_experts, chunk.prompt_logprobs
        of_prompt = None
        if prompt is not None:
            ids = _prompt_ids(request)[prompt.start : prompt.start + len(prompt.logprobs)]
            tops = (None, None) if prompt.top is None else (prompt.top.token_ids, prompt.top.logprobs)
            of_prompt = Scores(ids, prompt.logprobs, *tops)
        return cls(
            scores=Scores(
                chunk.token_ids,
                chunk.logprobs,
                None if top is None else top.token_ids,
                None if top is None else top.logprobs,
            ),
            weight_versions=np.full(chunk.num_tokens, chunk.weight_version, "i4"),
            rows=None if rows is None else rows.numpy(),
            start=request.routed_experts_prompt_start if rows is None else rows.start,
            masks=None if chunk.sampling_mask is None else bus.TokenMasks.joined([chunk.sampling_mask]),
            of_prompt=of_prompt,
            finish_reason=chunk.finish_reason,
            stop_token=None if end is None else end.stop_reason,
            cached_tokens=None if end is None else end.cached_tokens,
            first_worker=chunk.worker_id,
            worker=chunk.worker_id,
        )

    @classmethod
    def joined(cls, parts: Sequence["Tokens"]) -> "Tokens":
        """What follows each other as one; the last one says how it ended."""
        if len(parts) == 1:
            return parts[0]
        of_prompt = [part.of_prompt for part in parts if part.of_prompt is not None]
        return replace(
            parts[-1],
            scores=Scores.joined([part.scores for part in parts]),
            weight_versions=np.concatenate([part.weight_versions for part in parts]),
            rows=_join([part.rows for part in parts]),
            start=next((part.start for part in parts if part.rows is not None), parts[-1].start),
            masks=bus.TokenMasks.joined_of_all([part.masks for part in parts if len(part.ids)]),
            of_prompt=Scores.joined(of_prompt) if of_prompt else None,
            first_worker=parts[0].first_worker,
        )

    def cut(self, kept: int, past: int) -> "Tokens":
        """The first `kept` tokens, and the rows of positions before `past`."""
        if kept == len(self.ids):
            return self
        return replace(
            self,
            scores=self.scores.cut(kept),
            weight_versions=self.weight_versions[:kept],
            rows=None if self.rows is None else self.rows[: max(past - self.start, 0)],
            masks=None if self.masks is None else self.masks.cut(kept),
        )


def _prompt_ids(request: bus.GenerateRequest) -> Ids:
    return np.asarray(request.prompt_token_ids, "i4")


def whole_rows(request: bus.GenerateRequest, target: RequestTarget, tokens: Tokens) -> Rows | None:
    """The rows of a whole answer; None where its model has no experts.

    Raises:
        HttpError: 502, some are missing.
    """
    routing, rows = target.capabilities.routed_experts, tokens.rows
    if rows is None:
        if routing is None:
            return None
        rows = no_rows(routing.num_layers, routing.top_k, routing.dtype)
    expected = expected_rows(request.prompt_len, request.routed_experts_prompt_start, len(tokens.ids))
    if len(rows) < expected:
        raise _broken(f"{len(tokens.ids)} tokens came with {len(rows)} rows of routing, not {expected}")
    return rows[:expected]


def prompt_scores(request: bus.GenerateRequest, tokens: Tokens) -> Scores | None:
    """Of all tokens of the prompt but the first; None: not asked for, or aborted before they were there.

    Raises:
        HttpError: 502, some are missing, or one is no number.
    """
    width = request.sampling.prompt_logprobs
    if width is None or not len(tokens.ids):
        return None
    found = tokens.of_prompt
    if found is None or len(found.ids) != request.prompt_len - 1:
        if request.prompt_len == 1:
            return Scores(np.empty(0, "i4"))
        raise _broken(f"{request.prompt_len - 1} tokens of the prompt came without logprobs")
    if len(found.ids):
        found.check(width, "tokens of the prompt")
    return found
