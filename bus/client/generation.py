"""The finished answer to one request, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...schemas.chunk import FinishReason
from ...schemas.errors import RequestError
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
