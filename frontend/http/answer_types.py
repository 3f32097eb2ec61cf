"""Answer types of the token routes, for the OpenAPI document.

The code builds small parts of answers from these structs. It writes long answers piece by piece. Tests compare these
answers with the structs.
"""

from typing import Literal

import msgspec

__all__ = [
    "CachedTokens",
    "ChatAnswer",
    "CompletionAnswer",
    "GenerateAnswer",
    "GenerateChoice",
    "Message",
    "OfPrompt",
    "SampledToken",
    "TopToken",
    "Usage",
]


class CachedTokens(msgspec.Struct):
    """Composition of `prompt_tokens`."""

    cached_tokens: int
    """Number of prompt tokens that the engine found in its prefix cache."""


class Usage(msgspec.Struct):
    """Token counts of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None
    """Null if the engine does not report it."""


class RoutedExpertsJson(msgspec.Struct):
    """Routed experts: an array of `shape[0]` positions, `shape[1]` layers and `shape[2]` experts."""

    data: str
    """base64 of the raw rows, little-endian."""
    shape: tuple[int, int, int]
    start: int
    """Absolute position of the first row."""
    dtype: Literal["uint8", "uint16"]


class OfPrompt(msgspec.Struct, gc=False):
    """Log probability of a prompt token, or of a likely alternative at the same position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, OfPrompt] | None] | None
"""By position, then by token id. The first position is null."""


class TopToken(msgspec.Struct, gc=False):
    """A likely token at a position, with its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class SampledToken(TopToken):
    """A token of the answer, with its log probability."""

    top_logprobs: list[TopToken]


class ContentLogprobs(msgspec.Struct):
    """Log probabilities of the answer's tokens."""

    content: list[SampledToken]
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    """OpenAI's field; always null."""


class GenerateChoice(msgspec.Struct):
    """One sample."""

    index: int
    finish_reason: str
    token_ids: list[int]
    weight_versions: list[int]
    """The weight version that generated each token."""
    logprobs: ContentLogprobs | None
    routed_experts: RoutedExpertsJson | None
    """Null if the model has no experts."""
    sampling_mask: list[list[int]] | None


class GenerateAnswer(msgspec.Struct):
    """Tokens that continue the prompt."""

    request_id: str
    model: str
    """Name of the model, or of the adapter if the request named one."""
    lora: str | None
    """Name of the adapter. Null without an adapter."""
    created: int
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int] | None
    """Set if the request has `return_token_ids`."""
    mm_placeholders: None
    kv_transfer_params: None
    ec_transfer_params: None


class EngineData(msgspec.Struct):
    """Token ids and related data exactly as the engine generated them."""

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    completion_logprobs: list[float]
    completion_weight_versions: list[int]
    routed_experts: RoutedExpertsJson | msgspec.UnsetType = msgspec.UNSET


class NvExtAnswer(msgspec.Struct):
    """The fields that `nvext.extra_fields` requested."""

    engine_data: EngineData | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    completion_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Same value as the token ids above."""
    routed_experts: RoutedExpertsJson | msgspec.UnsetType = msgspec.UNSET
    worker_id: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    timing: dict[str, float | None] | msgspec.UnsetType = msgspec.UNSET
    weight_version: int | msgspec.UnsetType | None = msgspec.UNSET


class CalledFunction(msgspec.Struct):
    """Function of a tool call, with its arguments."""

    name: str
    arguments: str
    """JSON text as the model generated it."""


class ToolCall(msgspec.Struct):
    """A tool call that the model requests."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(msgspec.Struct):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | None
    """Null if the message has other parts and no content."""
    refusal: None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """Set if the service runs with `--reasoning-parser` and the model generated reasoning."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """Same value as `reasoning`."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    """Set if the service runs with `--tool-call-parser` and the model generated tool calls."""


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: Message
    finish_reason: str
    stop_reason: int | str | None
    logprobs: ContentLogprobs | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: RoutedExpertsJson | msgspec.UnsetType | None = msgspec.UNSET
    """Set if the request has `return_routed_experts`."""


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
    """Log probabilities of the answer's tokens, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """`token_logprobs` and `top_logprobs` are null for the first token of a prompt, which `echo` includes."""
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
    """Set if the request has `return_routed_experts`."""


class CompletionAnswer(msgspec.Struct):
    """Texts that continue the prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    nvext: NvExtAnswer | msgspec.UnsetType = msgspec.UNSET
