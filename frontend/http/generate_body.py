"""The body of `POST /inference/v1/generate`, as vLLM 0.30 defines it, and what it means on the bus."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from .bad_words import BadWords
from .errors import unsupported
from .stops import StopStrings

__all__ = ["NAMES", "GenerateBody", "SamplingBody", "StreamOptions", "check_supported", "request_fields"]

NAMES: Final = {
    "prompt_token_ids": "token_ids",
    "sampling": "sampling_params",
    "sampling.extra": "sampling_params",
    "sampling.bad_words_token_ids": "sampling_params.bad_words",
    "routed_experts_prompt_start": "sampling_params.routed_experts_prompt_start",
    "return_routed_experts": "sampling_params.routed_experts_prompt_start",
    "lora": "model",
}
"""What this route calls the fields of `rollbus.GenerateRequest`."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What a stream tells beside the tokens."""

    include_usage: bool | None = False
    """One more event, before the last, with the whole usage."""
    continuous_usage_stats: bool | None = False
    """With `include_usage`: the usage so far in every event."""


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """How to sample: vLLM's names, meanings and defaults; without `max_tokens`, the rest of the model's context."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: StopStrings = None
    """Looked for in the text, which is not in the answer: the token that completes one of them is the last."""
    bad_words: BadWords = None
    """Never sampled; the tokenizer says which tokens they are."""
    skip_special_tokens: bool = True
    """They have no text in which to look."""
    include_stop_str_in_output: bool = False
    """Without effect on tokens."""
    routed_experts_prompt_start: int = 0
    """Leading prompt positions whose routing is not wanted."""

    # The engine's own, which it may refuse.
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    watermarking: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None

    # Of text, which this route does not make, and of the form in which an engine hands over results: without effect.
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: int = 0
    flat_logprobs: bool = False
    skip_clone: bool = False
    stream_interval: int | None = None

    # Refused, as something else would come out without it.
    logprob_token_ids: list[int] | None = None


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
    stream_options: StreamOptions | None = None
    """What a stream tells beside the tokens."""
    return_token_ids: bool | None = None
    """The prompt's token ids stand in the answer, too."""
    cache_salt: str | None = None
    """Prefix-cache entries are shared only between requests of the same salt."""
    priority: int = 0
    """Lower is more urgent."""

    # What vLLM's own renderer adds, which changes nothing here.
    assistant_tokens_mask: list[int] | None = None
    token_offsets: list[tuple[int, int]] | None = None

    # Refused: other inputs than tokens, and caches that travel between engines.
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


SAME_NAME: Final = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "logit_bias"),
    "allowed_token_ids",
)
"""Fields of `rollbus.SamplingParams` with vLLM's names and meanings."""
EXTRA: Final = (
    *("structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking"),
    *("skip_reading_prefix_cache", "trace_decode_token_ids", "extra_args"),
)
"""What goes into `rollbus.SamplingParams.extra`."""
NOT_SERVED: Final = {
    "features": "this service takes tokens only, no images, audio or video",
    "content_parts": "this service takes tokens only, no images, audio or video",
    "kv_transfer_params": "caches are not handed from engine to engine by clients",
    "ec_transfer_params": "caches are not handed from engine to engine by clients",
}
NOT_SAMPLED: Final = {
    "logprob_token_ids": "logprobs are of the sampled and of the most likely tokens",
}
"""Fields that are known and not served, and why."""


def check_supported(body: GenerateBody) -> None:
    """Refuse what vLLM may do and this service does not.

    Raises:
        HttpError: 400, naming the field.
    """
    for owner, prefix, reasons in ((body, "", NOT_SERVED), (body.sampling_params, "sampling_params.", NOT_SAMPLED)):
        for name, reason in reasons.items():
            if getattr(owner, name) not in (None, []):
                raise unsupported(f"{prefix}{name}", reason)
    if body.sampling_params.stop and not body.sampling_params.detokenize:
        raise unsupported("sampling_params.detokenize", "stop is looked for in text", allowed="true")
    if body.stream and body.sampling_params.prompt_logprobs is not None:
        raise unsupported("sampling_params.prompt_logprobs", "streams do not carry them")


def request_fields(body: GenerateBody) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `rollbus.SamplingParams`, and the others of `rollbus.GenerateRequest`, by their names there."""
    params = body.sampling_params
    sampling = {name: getattr(params, name) for name in SAME_NAME}
    sampling["stop_token_ids"] = params.stop_token_ids or ()
    sampling["extra"] = {name: value for name in EXTRA if (value := getattr(params, name)) is not None} or None
    others = {
        "prompt_token_ids": body.token_ids,
        "request_id": body.request_id,
        "routed_experts_prompt_start": params.routed_experts_prompt_start,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
    }
    return sampling, others
