"""What an engine step added to its requests, before it becomes chunks."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ....schemas.chunk import FinishReason, PromptLogprobs, SamplingMask, TopLogprobs
from ....schemas.errors import ErrorCode
from ....schemas.rows import Rows

__all__ = ["RequestStep", "TokenBatch", "split"]


class RequestStep(msgspec.Struct, kw_only=True, gc=False):
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
    kv_recomputed: bool = False
    """Before these tokens, which are not the first, the engine computed the KV of all positions anew; only of engines
    that report it (`Engine.reports_recomputed_kv`)."""
    kv_params: bytes | None = None
    """Where the KV of the prompt lies: only in the last step of a prefill leg, and where the engine has kept it."""
    sampling_mask: SamplingMask | None = None
    """Of each of the k tokens; None where the engine makes none, or they were declined."""


class TokenBatch(msgspec.Struct, kw_only=True, gc=False):
    """One token for each of several requests, of one engine step that neither began nor ended any of them.

    It says what a `RequestStep` for each would say, without an object for each. All of its requests want the same:
    logprobs or none, routing or none. Tokens with sampling masks come as a `RequestStep` each.
    """

    keys: Sequence[str]
    """The keys under which the requests were added, each once."""
    token_ids: npt.NDArray[np.int32]
    """i4[len(keys)]: the token of each."""
    logprobs: npt.NDArray[np.float32] | None = None
    """f4[len(keys)], the sampler's log probability of each token; None when `sampling.logprobs` is None."""
    routed_experts: Rows | None = None
    """u1|u2[len(keys), num_layers, top_k]: one row for each; None without routing."""
    routed_experts_starts: npt.NDArray[np.int64] | None = None
    """i8[len(keys)]: the absolute position of each one's row; None without routing."""

    def __len__(self) -> int:
        return len(self.keys)

    def pick(self, indices: Sequence[int]) -> "TokenBatch":
        """The part of it that concerns the requests at `indices`, in their order."""
        return TokenBatch(
            keys=[self.keys[i] for i in indices],
            token_ids=self.token_ids[indices],
            logprobs=None if self.logprobs is None else self.logprobs[indices],
            routed_experts=None if self.routed_experts is None else self.routed_experts[indices],
            routed_experts_starts=None if self.routed_experts_starts is None else self.routed_experts_starts[indices],
        )

    def split(self) -> list[RequestStep]:
        """The same as a `RequestStep` for each request; their arrays are views."""
        return [
            RequestStep(
                key=key,
                token_ids=self.token_ids[i : i + 1],
                logprobs=None if self.logprobs is None else self.logprobs[i : i + 1],
                routed_experts=None if self.routed_experts is None else self.routed_experts[i : i + 1],
                routed_experts_start=0 if self.routed_experts_starts is None else int(self.routed_experts_starts[i]),
            )
            for i, key in enumerate(self.keys)
        ]


def split(steps: Iterable[RequestStep | TokenBatch]) -> list[RequestStep]:
    """The same steps, with each batch taken apart."""
    return [one for step in steps for one in (step.split() if isinstance(step, TokenBatch) else [step])]
