"""The bodies of the OpenAI routes: OpenAI's fields, vLLM's extra parameters, and Dynamo's `nvext`."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ....schemas import limits
from ....schemas.decoding import JsonObject
from ..body import NO_TEXT, STRICT
from ..errors import invalid, unsupported
from ..sampling import SamplingFields, TokenIds, check_sampling, given_fields
from ..tokens import RowsFormat

Priority = Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)]


class OpenAIStreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Additional content of a stream."""

    include_usage: bool | None = None
    """True: the stream has one more event before its end, which contains only the usage."""
    continuous_usage_stats: bool | None = None
    """True: every event contains the usage so far. This needs `include_usage`."""


class AgentHints(msgspec.Struct, kw_only=True, frozen=True):
    """An agent's hints about its request. Unknown hints are ignored."""

    priority: Priority | None = None
    """A higher number is more urgent, in contrast to `priority` of the body."""


class SessionControl(msgspec.Struct, kw_only=True, frozen=True):
    """The session of a request."""

    session_id: str | None = None
    """Id of the session. If possible, the worker with the prefix cache of earlier turns serves the next turn."""


class NvExt(msgspec.Struct, kw_only=True, frozen=True):
    """Dynamo's extensions. Unknown fields are ignored."""

    token_data: TokenIds | None = None
    """Token ids of the prompt, which the engine gets unchanged. `messages` and `prompt` are then ignored."""
    extra_fields: list[str] | None = None
    """Fields of the answer's `nvext`: engine_data, completion_token_ids, token_ids (the same), prompt_token_ids,
    routed_experts, worker_id, timing, weight_version. `stop_reason` and `prompt_logprobs` are also allowed, but the
    answer has them outside of `nvext`."""
    cache_salt: str | None = None
    """Only requests with the same salt share entries of the prefix cache."""
    agent_hints: AgentHints | None = None
    """Hints with the priority."""
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    """Number of leading prompt positions without routed experts in the answer."""
    session_control: SessionControl | None = None
    """Session of the request."""
    greed_sampling: bool | None = None
    """True: sample greedily, regardless of the temperature."""


class CommonBody(SamplingFields, kw_only=True, frozen=True):
    """Fields that both routes accept. Null has the effect of an omitted field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: OpenAIStreamOptions | None = None
    response_format: JsonObject | None = None

    # vLLM's fields.
    thinking_token_budget: Annotated[int, STRICT] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS), NO_TEXT] | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    """A lower number is more urgent."""
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    """True: each choice has `routed_experts`, as in `/inference/v1/generate`. Each event of a stream has the rows of
    its tokens."""
    routed_experts_format: RowsFormat | None = None
    """`npy`: the rows are the base64 of a `.npy` file, as in vLLM's server. A format without `return_routed_experts`
    asks for the rows too. Null: the format of the service."""
    vllm_xargs: JsonObject | None = None
    """Same as `extra_args`."""
    kv_hints: JsonObject | None = None
    """Hints for the engine's KV connector. They are rejected if the engine does not support them."""
    extra_body: JsonObject | None = None
    """Copies of fields of the body, as rllm-model-gateway sends them. A field that the body lacks is rejected: the
    argument `extra_body` of OpenAI's client puts its fields into the body itself."""
    timeout_s: float | None = None
    """Seconds until the request fails with 504. This field overrides the header `X-Request-Timeout`."""

    # Dynamo's fields.
    nvext: NvExt | None = None
    tokens: TokenIds | None = None
    """Same as `nvext.token_data`."""

    # OpenAI's fields.
    prompt_cache_key: str | None = None
    """Key of requests whose prompts have the same beginning. If possible, the worker that has computed this beginning
    serves them."""

    # Accepted without effect: the service has no function for these fields, or another component has it.
    user: str | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    length_penalty: float | None = None

    # Known but not supported. `check_served` rejects these fields with a reason.
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None


class ChatBody(CommonBody, kw_only=True, frozen=True):
    """The body of a chat completion."""

    messages: Annotated[list[JsonObject], Meta(min_length=1)] | None = None
    """Messages of the chat. With token ids, the field is optional and ignored."""
    max_completion_tokens: int | None = None
    """Maximum number of generated tokens; null: the rest of the model's context."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS), NO_TEXT] | None = None
    add_generation_prompt: bool | None = None
    """Null: true unless `continue_final_message` is true."""
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    chat_template_args: JsonObject | None = None
    """Dynamo's name for `chat_template_kwargs`."""
    reasoning_effort: str | None = None
    """Variable of the chat template."""
    tools: list[JsonObject] | None = None
    """Tools that the chat template shows to the model. Unless `tool_choice` is "none", the service needs a parser."""
    tool_choice: Literal["none", "auto", "required"] | JsonObject | None = None
    """Null: auto if there are tools. A dict names the function that the model must call."""
    parallel_tool_calls: bool | None = None
    """False: the answer omits all calls after the first."""
    include_reasoning: bool | None = None
    """False: the answer omits the text of the reasoning. It still has the tokens of the reasoning."""

    # Accepted without effect.
    modalities: list[Literal["text"]] | None = None
    prediction: JsonObject | None = None

    # Known but not supported.
    echo: bool | None = None
    chat_template: str | None = None
    documents: list[Any] | None = None
    functions: list[Any] | None = None
    function_call: str | JsonObject | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None


class CompletionBody(CommonBody, kw_only=True, frozen=True):
    """The body of a completion."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)] | None = None
    """A text, token ids, or a list of texts or of token id lists. Optional if `tokens` or `nvext` has token ids."""
    logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS), NO_TEXT] | None = None
    """Number of alternatives to each token. As in vLLM, `true` is 1 and `false` is 0."""
    best_of: int | None = None
    echo: bool | None = None
    """True: the prompt precedes its answer; with `logprobs`, the log probabilities of the prompt precede those of the
    answer. `max_tokens` may then be 0."""
    suffix: str | None = None
    prompt_embeds: Any = None


NOT_SERVED: Final = {
    "use_beam_search": "the engine only samples answers",
    "truncate_prompt_tokens": "the service never truncates prompts",
    "truncation_side": "the service never truncates prompts",
    "kv_transfer_params": "clients cannot transfer caches between engines",
    "ec_transfer_params": "clients cannot transfer caches between engines",
    "chat_template": "a template is a program, and the service runs only the template of the model",
    "documents": "use chat_template_kwargs",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "media_io_kwargs": "this service accepts text and tokens only",
    "mm_processor_kwargs": "this service accepts text and tokens only",
    "suffix": "no model of the fleet inserts text before a suffix",
    "prompt_embeds": "this service accepts text and tokens only",
}
"""Known fields that the service does not support, with the reason."""
NOT_IN_CHATS: Final = {"echo": "chat answers contain only generated text"}
"""More fields of this kind, for chats only."""
NOTHING: Final[tuple[object, ...]] = ([], {}, "", "none")
"""Values of an unsupported field that are allowed, in addition to null and false, because they request nothing."""


_REFUSED: Final = {
    kind: tuple(name for name in refused if name in kind.__struct_fields__)
    for kind, refused in ((ChatBody, (*NOT_SERVED, *NOT_IN_CHATS)), (CompletionBody, (*NOT_SERVED,)))
}


def check_served(body: ChatBody | CompletionBody) -> None:
    """Reject fields that the service does not support and that would change answers.

    Raises:
        HttpError: 400; the error names the field.
    """
    for name, value in given_fields(body, _REFUSED[type(body)]).items():
        if value is not False and value not in NOTHING:
            raise unsupported(name, NOT_SERVED.get(name) or NOT_IN_CHATS[name])
    for name, value in (body.extra_body or {}).items():
        if name not in body.__struct_fields__ or getattr(body, name) != value:
            allowed = f"{name} as a field of the body itself"
            raise invalid(f"extra_body.{name}", "is not also a field of the body with this value", allowed)
    check_sampling(body, stream=bool(body.stream))
