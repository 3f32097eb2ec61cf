"""Conversion of a body to the fields of the bus request and to the contents of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....schemas.checks import describe
from ....schemas.explain import nearest
from ...tokenization import Tokenizer
from ..errors import invalid
from ..request_target import RequestTarget
from ..routing_json import RowsJson, rows_json
from ..sampling import bus_sampling, check_stream_options, sampling_names
from ..settings import Settings
from ..stops import stop_strings
from .body import ChatBody, CommonBody, CompletionBody, NvExt
from .prompts import one_of

__all__ = ["Options", "bus_fields", "bus_names", "read_options", "sampling_fields"]

EXTRA_FIELDS: Final = frozenset(
    {
        "completion_token_ids",
        "engine_data",
        "prompt_token_ids",
        "routed_experts",
        "timing",
        "token_ids",
        "weight_version",
        "worker_id",
    }
)
"""Fields that an answer's `nvext` can have."""
ELSEWHERE: Final = frozenset({"prompt_logprobs", "stop_reason"})
"""Dynamo's names for fields that the answer or its choices have, instead of `nvext`."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""Default of `max_tokens` for /v1/completions, as in OpenAI and vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The contents of an answer."""

    text: bool
    """True if the answer has text. Without text, there are no stop strings and the answer needs no tokenizer."""
    stops: Sequence[str]
    include_stop: bool
    skip_special_tokens: bool
    top_logprobs: int | None
    """Number of alternatives to each token; None: no logprobs."""
    token_ids: bool
    """True if the answer has token ids, as with vLLM's `return_token_ids`."""
    as_token_ids: bool
    """True if the logprobs name each token `token_id:N`."""
    extra: frozenset[str]
    """Fields of the answer's `nvext`."""
    routed_experts: bool
    """True if each choice has its routed experts."""
    as_json: RowsJson
    """Format of the routed experts of a choice."""
    usage: bool
    """True if a stream ends with the usage."""
    continuous_usage: bool
    """True if each event of a stream has the usage so far."""

    @property
    def routing(self) -> bool:
        """True if the answer needs routed experts, provided that the model has experts."""
        return self.routed_experts or not self.extra.isdisjoint({"engine_data", "routed_experts"})


def read_options(body: ChatBody | CompletionBody, target: RequestTarget, settings: Settings) -> Options:
    """Return the contents of the answer.

    Raises:
        HttpError: 400, an option contradicts another option or the model.
    """
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "is given without logprobs", "logprobs true")
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        top_logprobs = body.logprobs
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise invalid("best_of", f"is {body.best_of}", "the same as n")
    check_stream_options(body.stream_options, body.stream)
    for name in ("return_routed_experts", "routed_experts_format"):
        if getattr(body, name) and target.capabilities.routed_experts is None:
            raise invalid(name, f"is {describe(getattr(body, name))}", "null: this model returns no routed experts")
    with_rows = body.return_routed_experts
    if with_rows is None:
        has_rows = settings.routed_experts_npy and target.capabilities.routed_experts is not None
        with_rows = body.routed_experts_format is not None or has_rows
    if settings.returns_tokens and top_logprobs is None:
        top_logprobs = 0
    stream = body.stream_options
    return Options(
        text=body.detokenize is not False,
        stops=stop_strings(body.stop),
        include_stop=body.include_stop_str_in_output is True,
        skip_special_tokens=body.skip_special_tokens is not False,
        top_logprobs=top_logprobs,
        token_ids=settings.returns_tokens or bool(body.return_token_ids),
        as_token_ids=bool(body.return_tokens_as_token_ids),
        extra=_extra_fields(body, target),
        routed_experts=with_rows,
        as_json=rows_json(body.routed_experts_format, npy=settings.routed_experts_npy),
        usage=stream is not None and bool(stream.include_usage),
        continuous_usage=stream is not None and bool(stream.include_usage and stream.continuous_usage_stats),
    )


def _extra_fields(body: CommonBody, target: RequestTarget) -> frozenset[str]:
    asked = () if body.nvext is None else body.nvext.extra_fields or ()
    extra = EXTRA_FIELDS.intersection(asked)
    for index, name in enumerate(asked):
        if name not in EXTRA_FIELDS | ELSEWHERE:
            problem = f"is {describe(name)}{nearest(name, EXTRA_FIELDS)}, which is unknown"
            raise invalid(f"nvext.extra_fields[{index}]", problem, ", ".join(sorted(EXTRA_FIELDS | ELSEWHERE)))
    if extra and (body.n or 1) > 1:
        raise invalid("n", f"is {body.n}", "1 with nvext.extra_fields, which describe one answer")
    if "routed_experts" in extra and target.capabilities.routed_experts is None:
        raise invalid(
            "nvext.extra_fields", "asks for routed_experts", "other fields: this model returns no routed experts"
        )
    return extra


def sampling_fields(body: ChatBody | CompletionBody, options: Options, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the fields of `rollbus.SamplingParams` that the request sets.

    Raises:
        HttpError: 400, a field of the body is invalid, or two fields contradict each other.
    """
    fields = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **bus_sampling(body, tokenizer)}
    if isinstance(body, ChatBody):
        fields["max_tokens"] = one_of(max_completion_tokens=body.max_completion_tokens, max_tokens=body.max_tokens)
    elif body.echo:
        # As in vLLM, the engine generates at least one token, even if the client asks only for the prompt.
        fields["max_tokens"] = fields["max_tokens"] or 1
        fields.setdefault("prompt_logprobs", options.top_logprobs)
    if body.nvext is not None and body.nvext.greed_sampling:
        fields["temperature"] = 0.0
    # Logprobs of only the sampled token cost little, and `engine_data` always has them.
    fields["logprobs"] = 0 if options.top_logprobs is None and "engine_data" in options.extra else options.top_logprobs
    return {**fields, "extra": {**(fields["extra"] or {}), **_more_extra(body)} or None}


def _more_extra(body: CommonBody) -> dict[str, Any]:
    """Return entries of `extra` that the body has under other names or in another format."""
    structure = _structure(body.response_format)
    if structure is not None and body.structured_outputs:
        raise invalid("structured_outputs", "is given with response_format", "one of the two")
    extra = {
        "structured_outputs": structure,
        "extra_args": one_of(vllm_xargs=body.vllm_xargs, extra_args=body.extra_args),
        "kv_hints": body.kv_hints,
    }
    return {name: value for name, value in extra.items() if value is not None}


def _structure(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return vLLM's `structured_outputs` for OpenAI's `response_format`; None: no constraint."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = response_format.get("json_schema")
    if kind == "json_schema" and isinstance(described, dict) and isinstance(described.get("schema"), dict):
        return {"json": described["schema"]}
    raise invalid(
        "response_format", "is unknown or incomplete", "type text, type json_object, or type json_schema with a schema"
    )


def bus_fields(body: CommonBody, options: Options) -> dict[str, Any]:
    """Return the fields of `rollbus.GenerateRequest` except the prompt and the sampling parameters.

    Raises:
        HttpError: 400, two fields of the body contradict each other.
    """
    nvext = body.nvext or NvExt()
    hinted = None if nvext.agent_hints is None else nvext.agent_hints.priority
    session = None if nvext.session_control is None else nvext.session_control.session_id
    fields = {
        "request_id": body.request_id,
        "timeout_s": body.timeout_s,
        "cache_salt": one_of(nvext__cache_salt=nvext.cache_salt, cache_salt=body.cache_salt),
        # In Dynamo a higher number is more urgent, on the bus a lower number.
        "priority": one_of(nvext__agent_hints__priority=None if hinted is None else -hinted, priority=body.priority)
        or 0,
        "routed_experts_prompt_start": one_of(
            nvext__routed_experts_prompt_start=nvext.routed_experts_prompt_start,
            routed_experts_prompt_start=body.routed_experts_prompt_start,
        )
        or 0,
        "return_routed_experts": None if options.routing else False,
        # The OpenAI routes have no field for sampling masks.
        "return_sampling_mask": False,
    }
    session_id = one_of(nvext__session_control__session_id=session, session_id=body.session_id)
    # If the body has no value, the value of the header counts.
    hints = {"session_id": session_id, "group_id": body.prompt_cache_key}
    return fields | {name: value for name, value in hints.items() if value is not None}


def bus_names(body: ChatBody | CompletionBody, prompt_field: str) -> dict[str, str]:
    """Return this body's names for fields of the bus request, for `named_errors`."""
    nvext = body.nvext or NvExt()
    names = {
        "prompt_token_ids": prompt_field,
        **sampling_names(body),
        "lora": "model",
    }
    if body.vllm_xargs is not None:
        names["sampling.extra.extra_args"] = "vllm_xargs"
    if body.response_format is not None:
        names["sampling.extra.structured_outputs"] = "response_format"
    if isinstance(body, ChatBody):
        if body.tools and body.tool_choice != "none":
            names["sampling.extra.structured_outputs"] = "tools"
        names["sampling.logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            names["sampling.max_tokens"] = "max_completion_tokens"
    elif body.echo and body.prompt_logprobs is None:
        names["sampling.prompt_logprobs"] = "logprobs"
    for name in ("cache_salt", "routed_experts_prompt_start"):
        if getattr(nvext, name) is not None:
            names[name] = f"nvext.{name}"
    if body.prompt_cache_key is not None:
        names["group_id"] = "prompt_cache_key"
    if body.session_id is not None:
        names["session_id"] = "session_id"
    elif nvext.session_control is not None:
        names["session_id"] = "nvext.session_control.session_id"
    return names
