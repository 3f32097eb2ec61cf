"""The bodies of OpenAI's routes: its own fields, vLLM's extra parameters, and Dynamo's `nvext`."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ....schemas import limits
from ..errors import unsupported
from ..sampling import SamplingFields, TokenIds, check_sampling

__all__ = ["AgentHints", "ChatBody", "CommonBody", "CompletionBody", "NvExt", "OpenAIStreamOptions", "check_served"]

Priority = Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)]


class OpenAIStreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    """One more event before the end, with the usage alone."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event."""


class AgentHints(msgspec.Struct, kw_only=True, frozen=True):
    """What an agent tells of its request; other hints than these are passed over."""

    priority: Priority | None = None
    """Higher is more urgent, unlike the top level's `priority`."""


class SessionControl(msgspec.Struct, kw_only=True, frozen=True):
    """Which session a request belongs to."""

    session_id: str | None = None
    """Turns of one session are best served by the worker that holds their prefix cache."""


class NvExt(msgspec.Struct, kw_only=True, frozen=True):
    """Dynamo's extensions; other hints than these are passed over."""

    token_data: TokenIds | None = None
    """Token ids of the prompt, used as they are; messages or prompt are not looked at."""
    extra_fields: list[str] | None = None
    """What the answer's `nvext` shall hold: engine_data, completion_token_ids, token_ids (the same), prompt_token_ids,
    routed_experts, worker_id, timing, weight_version. `stop_reason` and `prompt_logprobs` stand elsewhere in it."""
    cache_salt: str | None = None
    """Prefix-cache entries are shared only between requests of the same salt."""
    agent_hints: AgentHints | None = None
    """The priority."""
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    """Leading prompt positions whose routing is not wanted."""
    session_control: SessionControl | None = None
    """The session."""
    greed_sampling: bool | None = None
    """Greedy, whatever the temperature."""


class CommonBody(SamplingFields, kw_only=True, frozen=True):
    """What both routes take; null is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: OpenAIStreamOptions | None = None
    response_format: dict[str, Any] | None = None

    # vLLM's.
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    """Lower is more urgent."""
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    """Each choice has `routed_experts`, as in `/inference/v1/generate`; each event of a stream those of its tokens."""
    vllm_xargs: dict[str, Any] | None = None
    """The same as `extra_args`."""
    kv_hints: dict[str, Any] | None = None
    """For the engine's KV connector; refused unless the engine has it."""
    timeout_s: float | None = None
    """Seconds until the request fails with 504; it comes before the header `X-Request-Timeout`."""

    # Dynamo's.
    nvext: NvExt | None = None
    tokens: TokenIds | None = None
    """The same as `nvext.token_data`."""

    # OpenAI's.
    prompt_cache_key: str | None = None
    """Requests of one key share the beginning of a prompt, and are best served by the worker that has computed it."""

    # Without effect here: what they are for is done elsewhere, or by nobody.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    length_penalty: float | None = None

    # Known and not served; `check_served` says why.
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class ChatBody(CommonBody, kw_only=True, frozen=True):
    """A chat to continue."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    """May be left out, or stand for nothing, where token ids are given."""
    max_completion_tokens: int | None = None
    """Null: the rest of the model's context."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    """Null: true, unless the last message is to be continued."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None
    """Dynamo's name of `chat_template_kwargs`."""
    reasoning_effort: str | None = None
    """A variable of the chat template."""
    tools: list[dict[str, Any]] | None = None
    """The chat template shows them to the model. With `tool_choice` other than "none", the service needs a parser."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """Null: auto where there are tools. A dict names the function that must be called."""
    parallel_tool_calls: bool | None = None
    """False: calls after the first are left out."""
    include_reasoning: bool | None = None
    """False: the reasoning's text is left out; its tokens are not."""

    # Without effect here.
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None

    # Known and not served.
    echo: bool | None = None
    chat_template: str | None = None
    documents: list[Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionBody(CommonBody, kw_only=True, frozen=True):
    """Texts or token ids to continue."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)] | None = None
    """A text, token ids, or a list of either. May be left out where `nvext` has token ids."""
    logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    """The prompt stands before its answer; with `logprobs`, so do its own. `max_tokens` may then be 0."""
    suffix: str | None = None
    prompt_embeds: Any = None


NOT_SERVED: Final = {
    "use_beam_search": "answers are sampled",
    "truncate_prompt_tokens": "prompts are used as they are",
    "truncation_side": "prompts are used as they are",
    "kv_transfer_params": "clients cannot transfer caches between engines",
    "ec_transfer_params": "clients cannot transfer caches between engines",
    "chat_template": "a template is a program; only the model's own is run",
    "documents": "use chat_template_kwargs",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "media_io_kwargs": "this service takes text and tokens only",
    "mm_processor_kwargs": "this service takes text and tokens only",
    "suffix": "there are no models that insert",
    "prompt_embeds": "this service takes text and tokens only",
}
"""Fields that are known and not served, and why."""
NOT_IN_CHATS: Final = {"echo": "answers hold what was generated"}
"""The same, of chats alone."""
NOTHING: Final[tuple[object, ...]] = ([], {}, "", "none")
"""What such a field may be, besides null and false."""


def check_served(body: CommonBody) -> None:
    """Refuse what would be passed over although it changes answers.

    Raises:
        HttpError: 400, naming the field.
    """
    refused = {**NOT_SERVED, **NOT_IN_CHATS} if isinstance(body, ChatBody) else NOT_SERVED
    for name, reason in refused.items():
        value = getattr(body, name, None)
        if value is not None and value is not False and value not in NOTHING:
            raise unsupported(name, reason)
    check_sampling(body, stream=bool(body.stream))
