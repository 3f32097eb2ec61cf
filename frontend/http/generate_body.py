"""The body of `POST /inference/v1/generate`, as in vLLM 0.30, and its conversion to a request of the bus."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ..tokenization import Tokenizer
from .errors import unsupported
from .routing_json import RowsFormat
from .sampling import SamplingFields, bus_sampling, check_sampling, check_stream_options, sampling_names

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
    """Additional data in a stream."""

    include_usage: bool | None = None
    """Add one event with the total usage before the end of the stream."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every event has the usage so far."""


class SamplingBody(SamplingFields, kw_only=True, frozen=True):
    """Sampling parameters. Without `max_tokens`, the limit is the rest of the model's context."""

    logprobs: int | None = None
    """0: the log probability of each sampled token. k: also those of the k most likely tokens. Null: none."""

    # Trainers' clients send these fields of vLLM's other routes too. They have no effect.
    reasoning_effort: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Token ids to continue."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    """Token ids of the prompt."""
    sampling_params: SamplingBody
    """Sampling parameters."""
    request_id: str | None = None
    """Random if omitted. The header `X-Request-Id` has precedence."""
    model: str | None = None
    """Name of a model or adapter. None: the fleet's only model."""
    stream: bool | None = False
    """Stream server-sent events while tokens are generated."""
    stream_options: GenerateStreamOptions | None = None
    """Additional data in a stream."""
    return_token_ids: bool | None = None
    """Include the prompt's token ids in the answer."""
    cache_salt: str | None = None
    """Requests share prefix-cache entries only with requests of the same salt."""
    priority: int = 0
    """Lower is more urgent."""
    kv_hints: dict[str, Any] | None = None
    """Hints for the engine's KV connector. The field is rejected if the engine has no connector."""
    routed_experts_format: RowsFormat | None = None
    """`npy`: each choice has its routed experts as in vLLM's server, the base64 of a `.npy` file. Null: the format of
    the service, which is an object unless it was started with `--routed-experts-npy`."""
    timeout_s: float | None = None
    """Seconds until the request fails with 504. The field has precedence over the header `X-Request-Timeout`."""

    # vLLM's own renderer adds these fields. They have no effect here.
    assistant_tokens_mask: list[int] | None = None
    token_offsets: list[tuple[int, int]] | None = None

    # Rejected fields: inputs other than tokens, and KV transfers between engines by clients.
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


NOT_SERVED: Final = {
    "features": "this service accepts tokens only, no images, audio or video",
    "content_parts": "this service accepts tokens only, no images, audio or video",
    "kv_transfer_params": "clients cannot transfer caches between engines",
    "ec_transfer_params": "clients cannot transfer caches between engines",
}
"""Known fields that the service does not support, with the reason."""
PREFIX: Final = "sampling_params."


def check_supported(body: GenerateBody) -> None:
    """Reject fields that vLLM supports and this service does not.

    Raises:
        HttpError: 400, naming the field.
    """
    for name, reason in NOT_SERVED.items():
        if getattr(body, name) not in (None, []):
            raise unsupported(name, reason)
    check_stream_options(body.stream_options, body.stream)
    check_sampling(body.sampling_params, stream=bool(body.stream), prefix=PREFIX)


def request_fields(
    body: GenerateBody, tokenizer: Tokenizer | None, room: int, *, returns_tokens: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sampling fields and the other fields of a request, by their names on the bus.

    The first mapping has fields of `rollbus.SamplingParams`, the second those of `rollbus.GenerateRequest`.

    Args:
        tokenizer: needed for `bad_words` only.
        room: tokens that fit after the prompt. A larger `max_tokens` is reduced to it, as in vLLM: a client of several
            turns sends the same number in each turn.
        returns_tokens: if True, return log probabilities even if the body does not ask for them.

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
    """Return this route's names for the bus's fields, for `named_errors`."""
    return {
        **sampling_names(body.sampling_params, PREFIX),
        "prompt_token_ids": "token_ids",
        "sampling.extra.kv_hints": "kv_hints",
        "routed_experts_prompt_start": "sampling_params.routed_experts_prompt_start",
        "return_routed_experts": "sampling_params.routed_experts_prompt_start",
        "lora": "model",
    }
