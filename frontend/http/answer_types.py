"""What the routes for tokens answer, for the OpenAPI document.

Small parts of answers are made of these structs. Long answers are written piece by piece: the tests hold them against
these structs.
"""

from typing import Literal

import msgspec

__all__ = [
    "CachedTokens",
    "ChatAnswer",
    "CompletionAnswer",
    "GenerateAnswer",
    "Message",
    "OfPrompt",
    "SampledToken",
    "TopToken",
    "Usage",
]


class CachedTokens(msgspec.Struct):
    """Of which `prompt_tokens` consist."""

    cached_tokens: int
    """Found in the engine's prefix cache."""


class Usage(msgspec.Struct):
    """How many tokens there were."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None
    """Null where the engine does not say."""


class RoutedExpertsJson(msgspec.Struct):
    """Which experts the router chose: `shape[0]` rows of positions, of `shape[1]` layers, of `shape[2]` experts."""

    data: str
    """base64 of the raw rows, little-endian."""
    shape: tuple[int, int, int]
    start: int
    """Absolute position of the first row."""
    dtype: Literal["uint8", "uint16"]


class OfPrompt(msgspec.Struct, gc=False):
    """A token of the prompt, or one that was likely in its place."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, OfPrompt] | None] | None
"""By position, and there by token id; null for the first one."""


class TopToken(msgspec.Struct, gc=False):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int] | None


class SampledToken(TopToken):
    """A token of the answer."""

    top_logprobs: list[TopToken]


class ContentLogprobs(msgspec.Struct):
    """Of the tokens of an answer."""

    content: list[SampledToken]
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    """OpenAI's; always null."""


class GenerateChoice(msgspec.Struct):
    """One sample."""

    index: int
    finish_reason: str
    token_ids: list[int]
    weight_versions: list[int]
    """Of the weights that made each of the tokens."""
    logprobs: ContentLogprobs | None
    routed_experts: RoutedExpertsJson | None
    """Null from a model without experts."""
    sampling_mask: list[list[int]] | None


class GenerateAnswer(msgspec.Struct):
    """Tokens that continue the prompt."""

    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int] | None
    """With `return_token_ids`."""
    mm_placeholders: None
    kv_transfer_params: None
    ec_transfer_params: None


class EngineData(msgspec.Struct):
    """What the engine made, as it made it."""

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    completion_logprobs: list[float]
    completion_weight_versions: list[int]
    routed_experts: RoutedExpertsJson | msgspec.UnsetType = msgspec.UNSET


class NvExtAnswer(msgspec.Struct):
    """What `nvext.extra_fields` asked for."""

    engine_data: EngineData | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    completion_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """The same."""
    routed_experts: RoutedExpertsJson | msgspec.UnsetType = msgspec.UNSET
    worker_id: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    timing: dict[str, float | None] | msgspec.UnsetType = msgspec.UNSET
    weight_version: int | msgspec.UnsetType | None = msgspec.UNSET


class CalledFunction(msgspec.Struct):
    """Which function, and with what."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(msgspec.Struct):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    """Null where there are other parts and no content."""
    refusal: None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """With `--reasoning-parser`, where there is some."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The same."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    """With `--tool-call-parser`, where there are some."""


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: Message
    finish_reason: str
    stop_reason: int | str | None
    logprobs: ContentLogprobs | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: RoutedExpertsJson | msgspec.UnsetType | None = msgspec.UNSET
    """With `return_routed_experts`."""


class ChatAnswer(msgspec.Struct):
    """Answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    nvext: NvExtAnswer | msgspec.UnsetType = msgspec.UNSET


class TextLogprobs(msgspec.Struct):
    """Of the tokens of an answer, in columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Both are null for the first token of a prompt, which stands there with `echo`."""
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One answer."""

    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: TextLogprobs | None
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: RoutedExpertsJson | msgspec.UnsetType | None = msgspec.UNSET
    """With `return_routed_experts`."""


class CompletionAnswer(msgspec.Struct):
    """Texts that continue the prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    nvext: NvExtAnswer | msgspec.UnsetType = msgspec.UNSET
