"""The finished answer to one request, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...schemas.chunk import FinishReason
from ...schemas.continuation import num_kept_rows
from ...schemas.errors import InvalidRequest, RequestError
from ...schemas.request import GenerateRequest
from ...schemas.rows import Rows
from ..protocol.stream.kv_versions import Spans
from ..protocol.stream.response_stream import ResponseStream
from ..protocol.stream.token_masks import TokenMasks

__all__ = ["ChildResult", "Generation", "join_samples"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What one request (or one child of n > 1) produced.

    Every array is the caller's own and writable. A failed request of `complete_many` has `finish_reason` ERROR,
    `error` set, and what had arrived until then.
    """

    request: GenerateRequest
    """As the caller gave it; the same object, for siblings too. So a result that is kept keeps its prompt."""
    request_id: str
    child: int
    """Which of n samples."""
    prompt_len: int
    """Lp."""
    token_ids: npt.NDArray[np.int32]
    """i4[G]."""
    logprobs: npt.NDArray[np.float32] | None
    """f4[G], the sampler's; None when `sampling.logprobs` was None."""
    weight_versions: npt.NDArray[np.int32]
    """i4[G]: the weights that sampled each token."""
    routed_experts: Rows | None
    """u1|u2[Lp - start + G - 1, num_layers, top_k]; row i belongs to position `start + i`; None without routing."""
    start: int
    """The `routed_experts_prompt_start` that was applied."""
    finish_reason: FinishReason
    stop_reason: int | None = None
    """The stop token id that ended the request, when one of `stop_token_ids` did."""
    lora_versions: npt.NDArray[np.int32] | None = None
    """i4[G]: of the adapter that each token was sampled with; None without an adapter."""
    kv_version_spans: Spans | None = None
    """(first position, weight version) of each span of the KV at the end: of which weights it is. The KV of positions 0
    to Lp + G - 2 is there; a preemption, a forced flush or another attempt computes all KV before it anew. None: a
    worker did not say when it computed KV anew, or there are no tokens."""
    kv_lora_version_spans: Spans | None = None
    """The same for the versions of the adapter; None also without an adapter."""
    kv_mixed: npt.NDArray[np.bool_] | None = None
    """bool[G]: when this token was sampled, KV before it was of other weights, or of another version of the adapter,
    than the token's own. None: a worker did not say when it computed KV anew."""
    top_token_ids: npt.NDArray[np.int32] | None = None
    """i4[G, k]: the k most likely tokens at each position, best first; None unless `sampling.logprobs` > 0."""
    top_logprobs: npt.NDArray[np.float32] | None = None
    """f4[G, k]: their log probabilities."""
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    """f4[Lp - 1]: of prompt tokens 1 to Lp - 1; None unless asked for."""
    prompt_top_token_ids: npt.NDArray[np.int32] | None = None
    """i4[Lp - 1, k]; None unless `sampling.prompt_logprobs` > 0."""
    prompt_top_logprobs: npt.NDArray[np.float32] | None = None
    """f4[Lp - 1, k]."""
    sampling_mask: TokenMasks | None = None
    """The ids that each of the G tokens was sampled from; None where a worker that served it makes no masks, or they
    were declined."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache, or had from a prefill worker."""
    attempts: int = 1
    """How often the request was published: once, and once more for each worker that was lost on the way. Where a
    prefill and a decode worker served it together, that is once."""
    exact: bool = True
    """What came is what an undisturbed run could have given; see `rollbus.bus.protocol.stream.response_stream`."""
    worker_ids: tuple[str, ...] = ()
    """The workers that served it, in order."""
    parts: int = 1
    """Requests that it was made by: more than one if it was stopped and continued."""
    siblings: tuple["Generation", ...] = ()
    """For n > 1, on child 0: the other children, in order."""
    error: RequestError | None = None
    """Why it failed; None unless `finish_reason` is ERROR."""

    def __repr__(self) -> str:
        """One line with sizes, no contents."""
        rows = "none" if self.routed_experts is None else "x".join(map(str, self.routed_experts.shape))
        return (
            f"<Generation {self.request_id}/{self.child} {self.finish_reason} tokens={len(self.token_ids)} "
            f"rows={rows} start={self.start} attempts={self.attempts}>"
        )

    def joined(self, rest: "Generation") -> "Generation":
        """Return this generation, which was stopped, and the rest of it as one.

        `rest` is the result of `generation.request.continuing(generation)`. Each token keeps its version, and each
        row of routed experts is of the part that sampled its token: none is replaced by one that `rest` computed
        again. Prompt, `start`, siblings, `cached_tokens` and prompt logprobs are those of this part.

        Raises:
            InvalidRequest: `rest` is of another prompt, or its rows do not follow.
        """
        sequence = np.concatenate([np.asarray(self.request.prompt_token_ids), self.token_ids])
        if rest.prompt_len != len(sequence) or not np.array_equal(rest.request.prompt_token_ids, sequence):
            raise _unfit(f"has another prompt, of {rest.prompt_len} tokens", f"the {len(sequence)} of both parts")
        parts = [part for part in (self, rest) if len(part.token_ids)] or [rest]
        first, last = parts[0], parts[-1]
        arrays: dict[str, Any] = {name: _concatenated([getattr(part, name) for part in parts]) for name in _BY_TOKEN}
        return replace(
            rest,
            request=self.request,
            request_id=self.request_id,
            child=self.child,
            prompt_len=self.prompt_len,
            start=self.start,
            siblings=self.siblings,
            routed_experts=_joined_rows(self, rest),
            kv_version_spans=last.kv_version_spans,
            kv_lora_version_spans=last.kv_lora_version_spans,
            sampling_mask=TokenMasks.joined_of_all([part.sampling_mask for part in parts]),
            attempts=self.attempts + rest.attempts,
            parts=self.parts + rest.parts,
            exact=self.exact and rest.exact and (first is rest or self.request.sampling.is_continuable),
            worker_ids=self.worker_ids + rest.worker_ids,
            **{name: getattr(first, name) for name in _OF_PROMPT},
            **arrays,
        )


_OF_PROMPT = ("prompt_logprobs", "prompt_top_token_ids", "prompt_top_logprobs", "cached_tokens")
_BY_TOKEN = (
    "token_ids",
    "logprobs",
    "weight_versions",
    "lora_versions",
    "kv_mixed",
    "top_token_ids",
    "top_logprobs",
)


def _concatenated(arrays: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    known = [array for array in arrays if array is not None]
    return np.concatenate(known) if len(known) == len(arrays) else None


def _joined_rows(first: Generation, rest: Generation) -> Rows | None:
    """The rows of the tokens of both; what came ahead of its token is left out."""
    kept = num_kept_rows(first)
    if rest.start != first.start + kept:
        raise _unfit(
            f"has routed experts from position {rest.start} on", f"{first.start + kept}, the first missing row"
        )
    pieces = [
        part.routed_experts[: num_kept_rows(part)]
        for part in (first, rest)
        if part.routed_experts is not None and len(part.token_ids)
    ]
    if not pieces:
        return None
    if any(piece.shape[1:] != pieces[0].shape[1:] for piece in pieces) or (
        rest.routed_experts is None and len(rest.token_ids)
    ):
        shape = None if rest.routed_experts is None else rest.routed_experts.shape
        raise _unfit(f"has routed experts of shape {shape}", f"layers and top-k as in {pieces[0].shape}")
    return np.concatenate(pieces)


def _unfit(problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(field="rest", problem=problem, allowed=allowed)


@dataclass(frozen=True, slots=True)
class ChildResult:
    """What came of one child of a request."""

    child: int
    stream: ResponseStream
    """Kept, and not touched by anybody else any more."""
    workers: tuple[str, ...] = ()
    """Who served its attempts, in order."""


def join_samples(request: GenerateRequest, samples: Sequence[ChildResult], error: RequestError | None) -> Generation:
    """The result of `request`: its first sample, with the others as siblings; without `samples`, empty ones."""
    if not samples:
        samples = [
            ChildResult(i, ResponseStream(request, child=i, attempt=0, keep=True)) for i in range(request.sampling.n)
        ]
    first, *others = samples
    return _join(request, first, error, tuple(_join(request, sample, error) for sample in others))


def _join(
    request: GenerateRequest, sample: ChildResult, error: RequestError | None, siblings: tuple[Generation, ...] = ()
) -> Generation:
    stream, end = sample.stream, sample.stream.end
    return Generation(
        request=request,
        request_id=request.request_id,
        child=sample.child,
        prompt_len=request.prompt_len,
        start=stream.start,
        finish_reason=FinishReason.ERROR if end is None or error is not None else end.finish_reason,
        stop_reason=None if end is None else end.stop_reason,
        cached_tokens=None if end is None else end.cached_tokens,
        attempts=stream.num_attempts,
        worker_ids=sample.workers,
        exact=stream.is_exact,
        siblings=siblings,
        error=error,
        **stream.arrays(),
    )
