"""A request to generate tokens, as the caller creates it and as the wire carries it."""

import uuid
from collections.abc import Mapping
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
    check_token_ids,
    describe,
)
from .continuation import Inexact, StoppedAnswer, rest_of_answer
from .errors import InvalidRequest
from .field_names import NamedFields, check_names
from .request_ids import check_given_id, wire_id
from .sampling import SamplingParams
from .trace_context import check_traceparent, check_tracestate

if TYPE_CHECKING:
    from collections.abc import Sequence

    # Callers may pass any sequence of integers; after construction it is a read-only i4 array.
    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
else:
    # msgspec calls the hooks in rollbus.schemas.messages to encode and decode a type that it does not know.
    TokenIds = np.ndarray

__all__ = ["GenerateRequest", "Lane", "TokenIds", "as_request", "expand_children", "lane_of"]

Lane = Literal["resume", "high", "normal", "low"]
"""Lanes of the queue. `resume` is for later attempts and decode phases only."""


class GenerateRequest(msgspec.Struct, metaclass=NamedFields, frozen=True, kw_only=True, omit_defaults=True, eq=False):
    """One prompt to continue.

    The constructor checks all fields: an invalid value raises `InvalidRequest` with the field's name.

    Requests compare by identity, because numpy arrays have no single truth value of equality.
    """

    prompt_token_ids: TokenIds
    """Token ids of the prompt, at least one; stored as a read-only i4[Lp] array."""
    sampling: SamplingParams = SamplingParams()
    """Sampling parameters."""
    request_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the request, unique among the open requests of one client; random by default. Up to 512 printable
    characters. On the wire it is `wire_id`."""
    model: str | None = None
    """Served model name; None: the model of the client's first request without a name, which was the only known one."""
    return_routed_experts: bool | None = None
    """Whether to return routed experts. None: return them if the model has experts. True: reject the request if the
    model has none. False: do not return them."""
    routed_experts_prompt_start: int = 0
    """Number of leading prompt positions without routed experts in the result, 0 to Lp, for example the positions of
    earlier turns."""
    cache_salt: str | None = None
    """Salt of the prefix cache: only requests with the same salt share cache entries."""
    priority: int = 0
    """Priority of the request; a lower number is more urgent, as in vLLM. It selects the queue lane, and the order in
    the engine's queue if the engine supports it."""
    session_id: str | None = None
    """Session of the request, for example a conversation. A client may place its turns at the worker that has their
    common prefix in its cache."""
    lora: str | None = None
    """Name of a loaded LoRA adapter; None: the base model."""
    timeout_s: float | None = None
    """Seconds from now until the request fails with `timeout`; None: `DEFAULT_TIMEOUT_S`."""
    min_weight_version: int | None = None
    """Minimum weight version: workers with older weights do not serve the request."""
    max_weight_lag: int | None = None
    """Maximum number of versions by which the weights may advance before the request starts. If they advance further,
    the request fails with `too_stale`."""
    traceparent: str | None = None
    """W3C trace context. Every attempt carries it to its worker and engine, and the first chunk of the attempt returns
    it."""
    return_sampling_mask: bool | None = None
    """Whether to return the ids from which each token was sampled. None: return them if the engine makes them. True:
    reject the request if the engine makes none. False: do not return them."""
    group_id: str | None = None
    """Group of requests that share a prompt. A client may place them at one worker, which computes the prompt once."""
    tracestate: str | None = None
    """Vendor data of tracing systems for `traceparent`. The engine receives both; without `traceparent`, it is not
    sent."""
    id_scope: str | None = None
    """Scope of `request_id`, for example a user of a service: equal ids of two scopes are different requests. Only its
    hash is sent, as part of the wire's id."""

    def __post_init__(self) -> None:
        """Check every field and convert it to its canonical type."""
        for name, value in _checked(self).items():
            if value is not getattr(self, name):
                force_setattr(self, name, value)

    @property
    def wire_id(self) -> str:
        """Id of the request on the wire, see `rollbus.schemas.request_ids.wire_id`."""
        return wire_id(self.request_id, self.id_scope)

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens, Lp."""
        return len(self.prompt_token_ids)

    def on_wire(self) -> "GenerateRequest":
        """Return the request as messages carry it: its id is the `wire_id`, and it has no `id_scope`."""
        name = self.wire_id
        if name == self.request_id:
            return self
        sent = copy(self)
        force_setattr(sent, "request_id", name)
        force_setattr(sent, "id_scope", None)
        return sent

    def in_trace(self, traceparent: str, tracestate: str | None) -> "GenerateRequest":
        """Return this request as part of a trace. The values must be valid; this method does not check them."""
        traced = copy(self)
        force_setattr(traced, "traceparent", traceparent)
        force_setattr(traced, "tracestate", tracestate)
        return traced

    def continuing(self, generation: StoppedAnswer, *, inexact: Inexact = "refuse") -> "GenerateRequest":
        """Return a new request for the rest of `generation`, which belongs to this request and did not end normally.

        The prompt of the new request is this prompt plus the tokens of `generation`. `routed_experts_prompt_start` is
        the first missing row. `max_tokens` and `min_tokens` are reduced by the number of generated tokens. The new
        request asks for no prompt logprobs. It is for one sample, names the model of `generation`, and has its own id.
        Its `timeout_s` starts again.
        `Generation.joined` joins both parts. A generation without tokens gives a request for the same prompt.

        Args:
            inexact: handling of a sampler state that is lost: a seed, penalties, bad words, or engine parameters such
                as a grammar. `refuse`: raise. `continue`: continue with another seed; penalties and the rest treat the
                tokens so far as a prompt, and the joined generation is not `exact`.

        Raises:
            InvalidRequest: `generation` belongs to another request, ended normally, or the sampler's state is lost.
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
        "request_id": check_given_id("request_id", request.request_id),
        "routed_experts_prompt_start": check_int(
            "routed_experts_prompt_start", request.routed_experts_prompt_start, 0, len(token_ids)
        ),
        "priority": check_int("priority", request.priority, -limits.MAX_PRIORITY, limits.MAX_PRIORITY),
    }
    for name in ("return_routed_experts", "return_sampling_mask"):
        value = getattr(request, name)
        if value is not None:
            checked[name] = check_bool(name, value)
    for name in ("model", "session_id", "lora", "group_id", "id_scope"):
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


def as_request(prompt: "GenerateRequest | TokenIds | None", fields: Mapping[str, Any]) -> GenerateRequest:
    """Return `prompt` if it is a request. If it is token ids, return the request with these fields.

    Args:
        prompt: None: `fields` have the prompt.
        fields: fields of `GenerateRequest` and of `SamplingParams`, for token ids.

    Raises:
        InvalidRequest: a field is wrong or unknown, or is given beside a request or beside `sampling`.
    """
    if isinstance(prompt, GenerateRequest):
        for name in fields:
            raise InvalidRequest(field=name, problem="is given beside a request", allowed="fields of the request")
        return prompt
    if isinstance(prompt, str | bytes):
        raise InvalidRequest(
            field="prompt_token_ids",
            problem="is text",
            allowed="token ids, such as tokenizer.encode(text); the HTTP service takes text",
        )
    check_names("", fields, (*SamplingParams.__struct_fields__, *GenerateRequest.__struct_fields__))
    params = {name: fields[name] for name in fields if name in SamplingParams.__struct_fields__}
    others = {name: fields[name] for name in fields if name not in params}
    if prompt is not None:
        others["prompt_token_ids"] = prompt
    if params and "sampling" in others:
        raise InvalidRequest(field=next(iter(params)), problem="is given beside sampling", allowed="one of them")
    if params:
        others["sampling"] = SamplingParams(**params)
    return GenerateRequest(**others)


def lane_of(priority: int) -> Lane:
    """Return the queue lane of a priority: below 0 is `high`, 0 is `normal`, above 0 is `low`."""
    if priority < 0:
        return "high"
    return "normal" if priority == 0 else "low"


def expand_children(request: GenerateRequest) -> list[GenerateRequest]:
    """Split a request for n samples into n requests for one sample each; child i uses seed + i.

    Prompt logprobs and the prompt's routed experts are equal for all child requests. Each child request carries its own
    copy.
    """
    if request.sampling.n == 1:
        return [request]
    seed = request.sampling.seed
    return [
        replace(request, sampling=replace(request.sampling, n=1, seed=None if seed is None else seed + child))
        for child in range(request.sampling.n)
    ]
