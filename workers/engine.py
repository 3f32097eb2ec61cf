"""The seam between a worker and the engine inside it.

An engine is shaped by steps: it takes requests one at a time and hands over what one step produced for
all of them. The worker above owns identity, admission and transport; the engine owns scheduling and sampling.
Every request that `add` accepted ends with exactly one `RequestStep` that has `finish_reason` or `error` set,
unless the engine dies, which `steps` reports by raising `EngineDead`.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from schemas.chunk import FinishReason, PromptLogprobs, TopLogprobs
from schemas.presence import Capabilities
from schemas.request import GenerateRequest

__all__ = ["Engine", "RequestStep"]


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
    routed_experts: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None = None
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


class Engine(Protocol):
    """One inference engine. All methods are called from one event loop."""

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; valid once `start` has returned."""

    async def start(self) -> None:
        """Load the model and warm up, so that the first real request is as fast as the others.

        Raises:
            EngineDead: the engine could not be started; the message says why.
        """

    async def add(self, key: str, request: GenerateRequest) -> None:
        """Submit `request`, whose `sampling.n` is 1, under the engine-unique `key`.

        `request` has passed the worker's checks against `capabilities`.

        Raises:
            InvalidRequest: a parameter that this engine refuses; nothing was submitted.
            EngineDead: the engine is gone.
        """

    async def abort(self, keys: Sequence[str]) -> None:
        """End these requests with a `RequestStep` of finish reason ABORT each; unknown keys are ignored."""

    def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Yield what each engine step produced; called once.

        Raises:
            EngineDead: the engine died; every open request is lost.
        """

    async def close(self) -> None:
        """Stop the engine and every process it started; safe to call twice and after a failed `start`."""
