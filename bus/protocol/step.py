"""What an engine step added to one request, before it becomes chunks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.chunk import FinishReason, PromptLogprobs, TopLogprobs
from schemas.errors import ErrorCode
from schemas.rows import Rows

__all__ = ["RequestStep"]


@dataclass(slots=True, kw_only=True)
class RequestStep:
    """What one engine step added to one request."""

    key: str
    """The key under which the request was added."""
    token_ids: npt.NDArray[np.int32]
    """i4[k], k >= 0: the tokens sampled in this step."""
    logprobs: npt.NDArray[np.float32] | None = None
    """f4[k], the sampler's log probability of each token; None when `sampling.logprobs` is None."""
    top_logprobs: TopLogprobs | None = None
    """The most likely alternatives at each of the k positions; None unless `sampling.logprobs` > 0."""
    prompt_logprobs: PromptLogprobs | None = None
    """Only in a request's first step, and only when asked for."""
    routed_experts: Rows | None = None
    """u1|u2[rows, num_layers, top_k], C-contiguous; None when routing was declined or the model has no experts."""
    routed_experts_start: int = 0
    """Absolute position of `routed_experts[0]` in prompt + generated tokens."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; only in a request's first step."""
    finish_reason: FinishReason | None = None
    """Set in the last step of a request."""
    stop_reason: int | None = None
    """The stop token id that ended the request, when one of `stop_token_ids` did."""
    error: str | None = None
    """Set, with `finish_reason` ERROR, when the engine failed this request alone."""
    error_code: ErrorCode = ErrorCode.ENGINE_ERROR
    """What kind of failure `error` is: also KV_TRANSFER_FAILED."""
    kv_params: bytes | None = None
    """Where the KV of the prompt lies: only in the last step of a prefill leg, and where the engine has kept it."""
