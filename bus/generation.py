"""The finished answer to one request, as arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.chunk import FinishReason
from schemas.errors import RequestError
from schemas.rows import Rows

__all__ = ["Generation"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What one request (or one child of n > 1) produced.

    Every array is the caller's own and writable. A failed request of `complete_many` has `finish_reason` ERROR,
    `error` set, and what had arrived until then.
    """

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
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache."""
    attempts: int = 1
    """How often the request was published: once, and once more for each worker that was lost on the way."""
    exact: bool = True
    """What came is what an undisturbed run could have given; see `bus.protocol.stream`."""
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
