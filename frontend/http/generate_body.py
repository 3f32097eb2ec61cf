"""The body of `POST /inference/v1/generate`, as vLLM 0.30 defines it, and what it means on the bus."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ..tokenization import Tokenizer
from .errors import unsupported
from .sampling import SamplingFields, bus_sampling, check_sampling, sampling_names

__all__ = [
    "PREFIX",
    "GenerateBody",
    "GenerateStreamOptions",
    "SamplingBody",
    "body_names",
    "check_supported",
    "request_fields",
]


class GenerateStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What a stream tells beside the tokens."""

    include_usage: bool | None = False
    """One more event, before the last, with the whole usage."""
    continuous_usage_stats: bool | None = False
    """With `include_usage`: the usage so far in every event."""


class SamplingBody(SamplingFields, kw_only=True, frozen=True):
    """How to sample; without `max_tokens`, the rest of the model's context."""

    logprobs: int | None = None
    """0: the log probability of each sampled token. k: those of the k most likely ones too. Null: none."""

    # What trainers' clients give for vLLM's other routes, among the rest: without effect.
    reasoning_effort: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Token ids to continue."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    """Of the prompt."""
    sampling_params: SamplingBody
    """How to sample."""
    request_id: str | None = None
    """Drawn at random when left out; the header `X-Request-Id` comes first."""
    model: str | None = None
    """Of a model or of an adapter; None: the fleet's only model."""
    stream: bool | None = False
    """Server-sent events, as tokens come."""
    stream_options: GenerateStreamOptions | None = None
    """What a stream tells beside the tokens."""
    return_token_ids: bool | None = None
    """The prompt's token ids stand in the answer, too."""
    cache_salt: str | None = None
    """Prefix-cache entries are shared only between requests of the same salt."""
    priority: int = 0
    """Lower is more urgent."""
    kv_hints: dict[str, Any] | None = None
    """For the engine's KV connector; refused unless the engine has it."""
    timeout_s: float | None = None
    """Seconds until the request fails with 504; it comes before the header `X-Request-Timeout`."""

    # What vLLM's own renderer adds, which changes nothing here.
    assistant_tokens_mask: list[int] | None = None
    token_offsets: list[tuple[int, int]] | None = None

    # Refused: other inputs than tokens, and caches that travel between engines.
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


NOT_SERVED: Final = {
    "features": "this service takes tokens only, no images, audio or video",
    "content_parts": "this service takes tokens only, no images, audio or video",
    "kv_transfer_params": "caches are not handed from engine to engine by clients",
    "ec_transfer_params": "caches are not handed from engine to engine by clients",
}
"""Fields that are known and not served, and why."""
PREFIX: Final = "sampling_params."


def check_supported(body: GenerateBody) -> None:
    """Refuse what vLLM may do and this service does not.

    Raises:
        HttpError: 400, naming the field.
    """
    for name, reason in NOT_SERVED.items():
        if getattr(body, name) not in (None, []):
            raise unsupported(name, reason)
    check_sampling(body.sampling_params, stream=bool(body.stream), prefix=PREFIX)


def request_fields(
    body: GenerateBody, tokenizer: Tokenizer | None, room: int, *, returns_tokens: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `rollbus.SamplingParams`, and the others of `rollbus.GenerateRequest`, by their names there.

    Args:
        tokenizer: needed for `bad_words` only.
        room: tokens that fit behind the prompt. A larger `max_tokens` ends there, as with vLLM: a client of several
            turns asks for the same number in each.
        returns_tokens: logprobs, also if the body does not ask for them.

    Raises:
        HttpError: 400, a bad word has no tokens.
    """
    params = body.sampling_params
    sampling = bus_sampling(params, tokenizer, PREFIX)
    if body.kv_hints is not None:
        sampling["extra"] = {**(sampling["extra"] or {}), "kv_hints": body.kv_hints}
    others = {
        "prompt_token_ids": body.token_ids,
        "request_id": body.request_id,
        "routed_experts_prompt_start": params.routed_experts_prompt_start or 0,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "timeout_s": body.timeout_s,
    }
    logprobs = 0 if params.logprobs is None and returns_tokens else params.logprobs
    max_tokens = None if params.max_tokens is None else min(params.max_tokens, room)
    return {**sampling, "logprobs": logprobs, "max_tokens": max_tokens}, others


def body_names(body: GenerateBody) -> dict[str, str]:
    """What this route calls the bus's fields, for `named_errors`."""
    return {
        **sampling_names(body.sampling_params, PREFIX),
        "prompt_token_ids": "token_ids",
        "sampling.extra.kv_hints": "kv_hints",
        "routed_experts_prompt_start": "sampling_params.routed_experts_prompt_start",
        "return_routed_experts": "sampling_params.routed_experts_prompt_start",
        "lora": "model",
    }
