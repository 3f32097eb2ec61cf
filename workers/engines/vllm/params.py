"""Converts a `GenerateRequest` to vLLM's sampling parameters, and rejects values that vLLM would silently change."""

from typing import TYPE_CHECKING, Any

import msgspec

from ....schemas.errors import InvalidRequest
from ....schemas.request import GenerateRequest
from ....schemas.request_fields import check_room
from ....schemas.sampling import SamplingParams
from .kv.config import EXTRA_ARG, is_decode_phase

if TYPE_CHECKING:
    import vllm


MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature above 0 to this value (sampling_params.py: __post_init__)."""

AS_GIVEN = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "logprobs"),
    *("prompt_logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
)
"""Fields of `SamplingParams` that vLLM's has too, with the same meaning."""
STRUCTURED = "structured_outputs"
"""Name in `sampling.extra` of vLLM's parameters for a grammar."""
NOT_EXTRA = {
    "rollbus has its own field for it": {
        *SamplingParams.__struct_fields__,
        "routed_experts_prompt_start",
    },
    "the frontend handles text": {
        "bad_words",
        "detokenize",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
    },
    "it sets the form of the results, on which this adapter relies": {
        "flat_logprobs",
        "logprob_token_ids",
        "output_kind",
        "skip_clone",
        "stream_interval",
    },
    "the wire format has no field for its result": {"prompt_logprob_start", "prompt_logprob_token_ids"},
    "vLLM computes it": {"output_text_buffer_length"},
}
"""Fields of vLLM's `SamplingParams` that `sampling.extra` may not set, by reason. It may also not set names that begin
with an underscore, which are internal to vLLM in every release."""


def extra_names(model_config: Any) -> tuple[str, ...]:
    """Return the names that `sampling.extra` may set with this engine."""
    from vllm import SamplingParams as VllmSamplingParams

    refused = set().union(*NOT_EXTRA.values())
    if not getattr(model_config, "enable_trace_replay", False):
        refused.add("trace_decode_token_ids")
    names = {name for name in VllmSamplingParams.__struct_fields__ if not name.startswith("_")}
    return tuple(sorted(names - refused))


def to_vllm(
    request: GenerateRequest, *, max_model_len: int, returns_rows: bool, kv: dict[str, Any] | None = None
) -> "vllm.SamplingParams":
    """Convert the sampling parameters of a request.

    Args:
        kv: the request's `kv_transfer_params`.

    Raises:
        InvalidRequest: vLLM rejects a value, or would accept and change it.
    """
    from vllm import SamplingParams as VllmSamplingParams

    sampling = request.sampling
    _check_unchanged(request, max_model_len)
    fields: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in AS_GIVEN},
        "stop_token_ids": list(sampling.stop_token_ids),
        "allowed_token_ids": None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
        # If the request wants no routed experts, the engine need not read and send the rows of the prompt.
        "routed_experts_prompt_start": request.routed_experts_prompt_start if returns_rows else request.prompt_len,
        "detokenize": False,
        # The object is for one request only, so vLLM need not copy it before it sets the remaining fields.
        "skip_clone": True,
    }
    if sampling.bad_words_token_ids:
        # vLLM fills this field from the text in `bad_words`. It is set directly, because there is no text here.
        fields["_bad_words_token_ids"] = [list(word) for word in sampling.bad_words_token_ids]
    for name, value in (sampling.extra or {}).items():
        fields[name] = _convert(VllmSamplingParams, name, value)
    _check_extra_args(fields.get("extra_args"))
    if kv is not None:
        fields["extra_args"] = {**(fields.get("extra_args") or {}), EXTRA_ARG: kv}
    try:
        params = VllmSamplingParams(**fields)
    except (_validation_error(), ValueError, TypeError) as exc:
        raise refusal(exc, sampling) from exc
    if params.prompt_logprobs is not None and (not params.skip_reading_prefix_cache or is_decode_phase(params)):
        # vLLM would return memory that it has not written for the tokens that it does not compute.
        problem = "is set for a prompt whose KV may come from the cache or from another worker"
        raise InvalidRequest("sampling.prompt_logprobs", problem, "null, or true in extra.skip_reading_prefix_cache")
    return params


def refusal(exc: Exception, sampling: SamplingParams) -> InvalidRequest:
    """Convert vLLM's error about a request to an `InvalidRequest` that names the field of rollbus."""
    parameter = getattr(exc, "parameter", None)
    allowed = "see vLLM's message"
    if parameter is None and STRUCTURED in (sampling.extra or {}):
        # vLLM's checks of grammars name no parameter.
        field = f"sampling.extra.{STRUCTURED}"
        allowed += f"; the worker's engine argument '{STRUCTURED}_config' sets the grammar backend"
    elif parameter is None:
        field = "sampling"
    elif sampling.extra and parameter in sampling.extra:
        field = f"sampling.extra.{parameter}"
    elif parameter in GenerateRequest.__struct_fields__:
        field = parameter
    else:
        field = f"sampling.{parameter}"
    # str() of vLLM's error includes the value, which may be a long list of token ids. Its first argument does not.
    problem = str(exc.args[0]) if exc.args else type(exc).__name__
    return InvalidRequest(field, f"was rejected by vLLM: {problem}", allowed)


def no_token_left(sampling: SamplingParams) -> InvalidRequest | None:
    """Return the error of parameters that may leave no token to sample, so that the engine computes NaN; else None.

    Checks before the engine find most of them. They do not know the model's end token and the tokens that complete a
    bad word.
    """
    if sampling.allowed_token_ids is None or not (sampling.bad_words_token_ids or sampling.min_tokens):
        return None
    problem = "allows no token that bad words and min_tokens leave"
    allowed = "a list with at least one such token at each position"
    return InvalidRequest("sampling.allowed_token_ids", problem, allowed)


def _check_extra_args(extra_args: dict[str, Any] | None) -> None:
    for name in (EXTRA_ARG, "ec_transfer_params"):
        if name in (extra_args or {}):
            # These parameters name the KV of other requests, and machines to which the engine connects.
            raise InvalidRequest(f"sampling.extra.extra_args.{name}", "is reserved for rollbus", "other names")


def _check_unchanged(request: GenerateRequest, max_model_len: int) -> None:
    """Reject values that vLLM would accept and then change."""
    sampling = request.sampling
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            "sampling.temperature", f"is {sampling.temperature:g}", f"0 (greedy), or {MIN_TEMPERATURE:g} to 2 with vLLM"
        )
    check_room(request, max_model_len)


def _convert(params_class: type, name: str, value: object) -> Any:
    """Convert a JSON value to the type of vLLM's field `name`."""
    types = {field.name: field.type for field in msgspec.structs.fields(params_class)}
    try:
        return msgspec.convert(value, types[name])
    except (msgspec.ValidationError, _validation_error(), ValueError, TypeError) as exc:
        raise InvalidRequest(f"sampling.extra.{name}", f"cannot be used: {exc}", "the type of vLLM's field") from exc


def _validation_error() -> type[Exception]:
    from vllm.exceptions import VLLMValidationError

    # For a type checker, the type of vLLM's class is Any.
    kind: type[Exception] = VLLMValidationError
    return kind
