"""The output of an engine step for its requests, before it becomes chunks."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ....schemas.chunk import FinishReason, PromptLogprobs, SamplingMask, TopLogprobs
from ....schemas.errors import ErrorCode
from ....schemas.rows import Rows

__all__ = ["RequestStep", "TokenBatch", "split"]


class RequestStep(msgspec.Struct, kw_only=True, gc=False):
    """The output of one engine step for one request."""

    key: str
    """The key under which the request was added."""
    token_ids: npt.NDArray[np.int32]
    """i4[k], k >= 0: the tokens sampled in this step."""
    logprobs: npt.NDArray[np.float32] | None = None
    """f4[k], the sampler's log probability of each token; None when `sampling.logprobs` is None."""
    top_logprobs: TopLogprobs | None = None
    """The most likely alternatives at each of the k positions; None unless `sampling.logprobs` > 0."""
    prompt_logprobs: PromptLogprobs | None = None
    """Only in the first step of a request that asks for them."""
    routed_experts: Rows | None = None
    """u1|u2[rows, num_layers, top_k], C-contiguous; None if the request declines routed experts or the model has none.
    """
    routed_experts_start: int = 0
    """Absolute position of `routed_experts[0]` in prompt + generated tokens."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; only in a request's first step."""
    finish_reason: FinishReason | None = None
    """Set in the last step of a request."""
    stop_reason: int | None = None
    """The stop token id that ended the request, if it was one of `stop_token_ids`."""
    error: str | None = None
    """Set, with `finish_reason` ERROR, if the engine failed this request only."""
    error_code: ErrorCode = ErrorCode.ENGINE_ERROR
    """The code of `error`, for example KV_TRANSFER_FAILED."""
    kv_recomputed: bool = False
    """True if the engine recomputed the KV of all positions before these tokens, which are not the first tokens. Only
    of engines that report it (`Engine.reports_recomputed_kv`).
    """
    kv_params: bytes | None = None
    """The KV transfer parameters: only in the last step of a prefill phase whose KV the engine has kept."""
    sampling_mask: SamplingMask | None = None
    """The masks of the k tokens; None if the engine returns none, or the request declines them."""


class TokenBatch(msgspec.Struct, kw_only=True, gc=False):
    """One token for each of several requests, of one engine step that neither began nor ended any of them.

    It is equal to one `RequestStep` for each request, without an object for each. All of its requests have the same
    options: logprobs or none, routed experts or none. Tokens with sampling masks come as one `RequestStep` each.
    """

    keys: Sequence[str]
    """The keys under which the requests were added, each once."""
    token_ids: npt.NDArray[np.int32]
    """i4[len(keys)]: the token of each request."""
    logprobs: npt.NDArray[np.float32] | None = None
    """f4[len(keys)], the sampler's log probability of each token; None when `sampling.logprobs` is None."""
    routed_experts: Rows | None = None
    """u1|u2[len(keys), num_layers, top_k]: one row for each request; None without routed experts."""
    routed_experts_starts: npt.NDArray[np.int64] | None = None
    """i8[len(keys)]: the absolute position of each request's row; None without routed experts."""

    def __len__(self) -> int:
        return len(self.keys)

    def pick(self, indices: Sequence[int]) -> "TokenBatch":
        """Return the batch of the requests at `indices`, in their order."""
        return TokenBatch(
            keys=[self.keys[i] for i in indices],
            token_ids=self.token_ids[indices],
            logprobs=None if self.logprobs is None else self.logprobs[indices],
            routed_experts=None if self.routed_experts is None else self.routed_experts[indices],
            routed_experts_starts=None if self.routed_experts_starts is None else self.routed_experts_starts[indices],
        )

    def split(self) -> list[RequestStep]:
        """Return a `RequestStep` for each request. The arrays are views."""
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
    """Return the same steps, with each batch split."""
    return [one for step in steps for one in (step.split() if isinstance(step, TokenBatch) else [step])]
