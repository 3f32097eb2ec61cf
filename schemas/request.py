"""A request to generate tokens, as a caller states it and as it crosses the wire."""

import uuid
from copy import copy
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr, replace

from . import limits
from .checks import (
    check_bool,
    check_float,
    check_int,
    check_name,
    check_request_id,
    check_token_ids,
    describe,
)
from .continuation import Inexact, StoppedAnswer, rest_of_answer
from .errors import InvalidRequest
from .sampling import SamplingParams
from .trace_context import check_traceparent, check_tracestate

if TYPE_CHECKING:
    from collections.abc import Sequence

    # Callers may pass any sequence of integers; after construction it is a read-only i4 array.
    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
else:
    # msgspec calls the hooks in rollbus.schemas.messages for a type it does not know, on both ways.
    TokenIds = np.ndarray

__all__ = ["GenerateRequest", "Lane", "TokenIds", "expand_children", "lane_of"]

Lane = Literal["resume", "high", "normal", "low"]
"""Lanes of the queue, in the order in which workers pull from them; `resume` is kept for later attempts."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, eq=False):
    """One prompt to continue. Checked on construction: a bad value raises `InvalidRequest` naming the field.

    Compared by identity, as numpy arrays have no single truth of equality.
    """

    prompt_token_ids: TokenIds
    """Token ids of the prompt, at least one; kept as a read-only i4[Lp] array."""
    sampling: SamplingParams = SamplingParams()
    """How to sample."""
    request_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Unique among the live requests of one client; drawn at random when left out."""
    model: str | None = None
    """Served model name; None: the fleet's only model."""
    return_routed_experts: bool | None = None
    """None: if the model has experts. True: refuse if it has none. False: spare the bytes."""
    routed_experts_prompt_start: int = 0
    """Leading prompt positions whose routing is not wanted, 0 to Lp: those of earlier turns, for example."""
    cache_salt: str | None = None
    """Prefix-cache entries are shared only between requests of the same salt."""
    priority: int = 0
    """vLLM's sign: lower is more urgent. Chooses the queue lane, and orders the engine's queue where enabled."""
    session_id: str | None = None
    """A hint: turns of one session are best served by the worker that holds their prefix cache."""
    lora: str | None = None
    """Name of a loaded LoRA adapter; None: the base model."""
    timeout_s: float | None = None
    """Seconds from now until the request fails with `timeout`; None: `DEFAULT_TIMEOUT_S`."""
    min_weight_version: int | None = None
    """Refuse weights older than this version."""
    max_weight_lag: int | None = None
    """Drop the request if the weights move on by more than this before it starts."""
    traceparent: str | None = None
    """W3C trace context: every attempt takes it to its worker and engine, and its first chunk brings it back."""
    return_sampling_mask: bool | None = None
    """Ids that each token was sampled from. None: if the engine makes them. True: refuse if not. False: spare the
    bytes."""
    group_id: str | None = None
    """A hint: requests of one group share a prompt, and are best served by the worker that has computed it."""
    tracestate: str | None = None
    """What tracing systems add to `traceparent`; it goes to the engine with that, and without that nowhere."""

    def __post_init__(self) -> None:
        """Check every field and bring it to its canonical type."""
        for name, value in _checked(self).items():
            if value is not getattr(self, name):
                force_setattr(self, name, value)

    @property
    def prompt_len(self) -> int:
        """Lp, the number of prompt tokens."""
        return len(self.prompt_token_ids)

    def in_trace(self, traceparent: str, tracestate: str | None) -> "GenerateRequest":
        """Return this request as part of a trace. The values must be valid; nothing is checked again."""
        traced = copy(self)
        force_setattr(traced, "traceparent", traceparent)
        force_setattr(traced, "tracestate", tracestate)
        return traced

    def continuing(self, generation: StoppedAnswer, *, inexact: Inexact = "refuse") -> "GenerateRequest":
        """Return a new request for the rest of `generation`, which is of this request and has not ended by itself.

        Its prompt is this prompt and the tokens of `generation`, `routed_experts_prompt_start` is the first missing
        row, and `max_tokens` and `min_tokens` are less what was generated. Prompt logprobs are not asked for again.
        It is for one sample, has an id of its own, and `timeout_s` counts anew. `Generation.joined` makes both parts
        one. A generation without tokens gives a request for the same prompt.

        Args:
            inexact: what to do where the sampler had a state that is lost: a seed, penalties, bad words, or parameters
                of the engine, as a grammar is. `refuse`: raise. `continue`: go on, with another seed; penalties and the
                rest see the tokens so far as a prompt. The joined generation is then not `exact`.

        Raises:
            InvalidRequest: `generation` is of another request or has ended by itself, or the sampler's state is lost.
        """
        return rest_of_answer(self, generation, inexact=inexact, request_id=uuid.uuid4().hex)


def _checked(request: GenerateRequest) -> dict[str, object]:
    token_ids = check_token_ids(
        "prompt_token_ids", request.prompt_token_ids, min_length=1, max_length=limits.MAX_PROMPT_TOKENS
    )
    if not isinstance(request.sampling, SamplingParams):
        raise InvalidRequest(
            field="sampling", problem=f"is {describe(request.sampling)}", allowed="SamplingParams, or a map of them"
        )
    checked: dict[str, object] = {
        "prompt_token_ids": token_ids,
        "request_id": check_request_id("request_id", request.request_id),
        "routed_experts_prompt_start": check_int(
            "routed_experts_prompt_start", request.routed_experts_prompt_start, 0, len(token_ids)
        ),
        "priority": check_int("priority", request.priority, -limits.MAX_PRIORITY, limits.MAX_PRIORITY),
    }
    for name in ("return_routed_experts", "return_sampling_mask"):
        value = getattr(request, name)
        if value is not None:
            checked[name] = check_bool(name, value)
    for name in ("model", "session_id", "lora", "group_id"):
        value = getattr(request, name)
        if value is not None:
            checked[name] = check_name(name, value)
    if request.cache_salt is not None:
        checked["cache_salt"] = check_name("cache_salt", request.cache_salt, limits.MAX_CACHE_SALT_CHARS)
    if request.timeout_s is not None:
        checked["timeout_s"] = check_float("timeout_s", request.timeout_s, 0, limits.MAX_TIMEOUT_S, above=True)
    for name in ("min_weight_version", "max_weight_lag"):
        value = getattr(request, name)
        if value is not None:
            checked[name] = check_int(name, value, 0, limits.MAX_WEIGHT_VERSION)
    if request.traceparent is not None:
        checked["traceparent"] = check_traceparent("traceparent", request.traceparent)
    if request.tracestate is not None:
        checked["tracestate"] = check_tracestate("tracestate", request.tracestate)
    return checked


def lane_of(priority: int) -> Lane:
    """The queue lane of a priority: below 0 is `high`, 0 is `normal`, above 0 is `low`."""
    if priority < 0:
        return "high"
    return "normal" if priority == 0 else "low"


def expand_children(request: GenerateRequest) -> list[GenerateRequest]:
    """Split a request for n samples into n requests for one each; child i samples with seed + i.

    Prompt logprobs and the prompt's routing rows are the same for every child; each carries its own.
    """
    if request.sampling.n == 1:
        return [request]
    seed = request.sampling.seed
    return [
        replace(request, sampling=replace(request.sampling, n=1, seed=None if seed is None else seed + child))
        for child in range(request.sampling.n)
    ]
