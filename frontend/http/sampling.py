"""How to sample: the fields that all routes for tokens share, and what they are on the bus."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ...schemas import limits
from ..tokenization import Tokenizer
from .bad_words import BadWords, bad_words_ids
from .errors import invalid, unsupported
from .stops import StopStrings

__all__ = ["SamplingFields", "TokenIds", "bus_sampling", "check_sampling", "sampling_names"]

TokenIds = list[Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]]


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """How to sample: vLLM's names, meanings and defaults. Null is the same as leaving a field out."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    """Of the prompt's tokens, with so many alternatives of each; not in streams."""
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    """Leading prompt positions whose routing is not wanted."""

    stop: StopStrings = None
    """Looked for in the text: the token that completes one of them is the last."""
    bad_words: BadWords = None
    """Never sampled; the tokenizer says which tokens they are."""
    bad_words_token_ids: list[TokenIds] | None = None
    """The same as token ids, which need no tokenizer."""
    detokenize: bool | None = None
    """False: the answer's text is empty, and no tokenizer is needed for it."""
    skip_special_tokens: bool | None = None
    """Null: true; they are no part of the text."""
    include_stop_str_in_output: bool | None = None
    """The text ends with the stop string instead of before it; the tokens are the same."""

    # The engine's own, which it may not have: what its worker does not list in its capabilities is refused.
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    watermarking: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: TokenIds | None = None
    extra_args: dict[str, Any] | None = None
    prompt_logprob_token_ids: list[Any] | None = None
    prompt_logprob_start: int | None = None

    # Of the form in which an engine hands over results, which the bus has decided: without effect.
    spaces_between_special_tokens: bool | None = None
    output_kind: int | None = None
    flat_logprobs: bool | None = None
    skip_clone: bool | None = None
    stream_interval: int | None = None

    # Refused, as something else would come out without it.
    logprob_token_ids: list[int] | None = None


SAME_NAME: Final = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "allowed_token_ids"),
    "prompt_logprobs",
)
"""Fields of `rollbus.SamplingParams` with the same names and meanings."""
EXTRA: Final = (
    *("structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking", "extra_args"),
    *("skip_reading_prefix_cache", "trace_decode_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
)
"""What goes into `rollbus.SamplingParams.extra`."""
NOT_SERVED: Final = {"logprob_token_ids": "logprobs are of the sampled and of the most likely tokens"}
"""Fields that are known and not served, and why."""


def check_sampling(body: SamplingFields, *, stream: bool, prefix: str = "") -> None:
    """Refuse what would be passed over although it changes answers.

    Args:
        prefix: of the fields' names, for people: `sampling_params.`.

    Raises:
        HttpError: 400, naming the field.
    """
    for name, reason in NOT_SERVED.items():
        if getattr(body, name) not in (None, []):
            raise unsupported(f"{prefix}{name}", reason)
    if body.stop and body.detokenize is False:
        raise invalid(f"{prefix}detokenize", "is false, and stop is looked for in text", "true with stop")
    if body.prompt_logprobs is not None and stream:
        raise invalid(f"{prefix}prompt_logprobs", "is given with stream", "null, as streams do not carry them")


def bus_sampling(body: SamplingFields, tokenizer: Tokenizer | None, prefix: str = "") -> dict[str, Any]:
    """Fields of `rollbus.SamplingParams` that the body sets.

    Args:
        tokenizer: of the model; needed for `bad_words` only.
        prefix: as for `check_sampling`.

    Raises:
        HttpError: 400, a bad word has no tokens.
    """
    fields = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    bad_words = list(body.bad_words_token_ids or ())
    if body.bad_words and tokenizer is not None:
        bad_words += bad_words_ids(body.bad_words, tokenizer, f"{prefix}bad_words")
    if bad_words:
        fields["bad_words_token_ids"] = bad_words
    extra = {name: value for name in EXTRA if (value := getattr(body, name)) is not None}
    return {**fields, "extra": extra or None}


def sampling_names(body: SamplingFields, prefix: str = "") -> dict[str, str]:
    """What a body calls the bus's fields that say how to sample, for `named_errors`."""
    owner = prefix.removesuffix(".")
    names = {"sampling": owner, "sampling.extra": owner}
    if not body.bad_words_token_ids:
        names["sampling.bad_words_token_ids"] = f"{prefix}bad_words"
    return names
