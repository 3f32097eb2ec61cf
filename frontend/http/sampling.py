"""Sampling fields that all token routes share, and their conversion to sampling parameters of the bus.

The bus carries only token ids, so `bad_words` is converted into token ids here.
"""

from collections.abc import Sequence
from functools import cache
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from ...schemas import limits
from ...schemas.decoding import JsonObject
from ...schemas.sampling import SamplingParams
from ..tokenization import Tokenizer
from .errors import invalid, unsupported
from .text import StopString, StopStrings

MAX_BAD_WORDS: Final = 1024

BadWords: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None
"""The type of the field in request bodies."""


def bad_words_ids(words: Sequence[str], tokenizer: Tokenizer, field: str) -> list[list[int]]:
    """Return the token ids of each word, as vLLM does.

    Each word is encoded as at the start of a text. It is also encoded after a blank if that gives another single token.

    Raises:
        HttpError: 400, a word has no tokens.
    """
    found: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise invalid(field, "contains a word without tokens", "words that the tokenizer knows")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found


TokenIds = list[Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]]


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Sampling fields with vLLM's names, meanings and defaults. A null field counts as absent."""

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
    """Return log probabilities of the prompt's tokens, with this number of alternatives for each; not in streams."""
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    """Number of leading prompt positions whose routed experts are not returned."""

    stop: StopStrings = None
    """Stop strings, searched in the text. The token that completes a stop string is the last token."""
    bad_words: BadWords = None
    """Words that are never sampled. The tokenizer converts them to token ids."""
    bad_words_token_ids: list[TokenIds] | None = None
    """Bad words as token ids, which need no tokenizer."""
    detokenize: bool | None = None
    """If false, the answer's text is empty and needs no tokenizer."""
    skip_special_tokens: bool | None = None
    """If true or null, the text has no special tokens."""
    include_stop_str_in_output: bool | None = None
    """If true, the text includes the stop string at its end. The tokens are the same."""

    # Parameters of the engine. A request fails if the worker's capabilities do not list its parameters.
    structured_outputs: JsonObject | None = None
    thinking_token_budget: int | None = None
    repetition_detection: JsonObject | None = None
    watermarking: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: TokenIds | None = None
    extra_args: JsonObject | None = None
    prompt_logprob_token_ids: list[Any] | None = None
    prompt_logprob_start: int | None = None

    # Without effect: these select the form in which an engine returns results, which the bus has fixed.
    spaces_between_special_tokens: bool | None = None
    output_kind: int | None = None
    flat_logprobs: bool | None = None
    skip_clone: bool | None = None
    stream_interval: int | None = None

    # Rejected, because the results would differ without it.
    logprob_token_ids: list[int] | None = None


_reader = cache(lambda names: (attrgetter(*names), (None,) * len(names)))
"""Returns what reads several fields, and what it returns if all are null."""


def given_fields(struct: msgspec.Struct, names: tuple[str, ...]) -> JsonObject:
    """Return those of several fields of a struct that are not null, by name. Few are, so C code skips the others."""
    read, nothing = _reader(names)
    if (values := read(struct)) == nothing:
        return {}
    return dict(compress(zip(names, values, strict=True), map(is_not, values, repeat(None))))


SAME_NAME: Final = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.__struct_fields__ and name != "bad_words_token_ids"
)
"""Fields of `rollbus.SamplingParams` with the same names and meanings."""
NO_SEED: Final = -1
"""vLLM's number for no seed."""
EXTRA: Final = (
    *("structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking", "extra_args"),
    *("skip_reading_prefix_cache", "trace_decode_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
)
"""Fields that go into `rollbus.SamplingParams.extra`."""
NOT_SERVED: Final = {"logprob_token_ids": "the service returns logprobs only of the sampled and the most likely tokens"}
"""Known fields that are rejected, with the reason."""


def check_sampling(body: SamplingFields, *, stream: bool, prefix: str = "") -> None:
    """Reject fields that change answers and that the service would ignore.

    Args:
        prefix: prefix of the fields' names in messages, for example `sampling_params.`.

    Raises:
        HttpError: 400, with the name of the field.
    """
    for name, reason in NOT_SERVED.items():
        if getattr(body, name) not in (None, []):
            raise unsupported(f"{prefix}{name}", reason)
    if body.stop and body.detokenize is False:
        raise invalid(f"{prefix}detokenize", "is false, but stop needs the text", "true with stop")
    if body.prompt_logprobs is not None and stream:
        raise invalid(f"{prefix}prompt_logprobs", "is given with stream", "null, because streams do not return them")


def check_stream_options(options: msgspec.Struct | None, stream: bool | None) -> None:
    """Reject options of a stream without a stream. As in vLLM, an empty object is allowed.

    Raises:
        HttpError: 400.
    """
    if options is not None and options != type(options)() and not stream:
        raise invalid("stream_options", "is given without stream", "stream true")


def count_samples(body: SamplingFields) -> int:
    """Return the number of answers to each prompt of a body that is not checked yet."""
    return min(max(body.n or 1, 1), limits.MAX_N)


def bus_sampling(body: SamplingFields, tokenizer: Tokenizer | None, prefix: str = "") -> JsonObject:
    """Return the fields of `rollbus.SamplingParams` that the body sets.

    Args:
        tokenizer: the model's tokenizer; needed for `bad_words` only.
        prefix: as for `check_sampling`.

    Raises:
        HttpError: 400, a bad word has no tokens.
    """
    fields = given_fields(body, SAME_NAME)
    if body.seed == NO_SEED:
        del fields["seed"]
    bad_words = list(body.bad_words_token_ids or ())
    if body.bad_words and tokenizer is not None:
        bad_words += bad_words_ids(body.bad_words, tokenizer, f"{prefix}bad_words")
    if bad_words:
        fields["bad_words_token_ids"] = bad_words
    return {**fields, "extra": given_fields(body, EXTRA) or None}


def sampling_names(body: SamplingFields, prefix: str = "") -> dict[str, str]:
    """Return the body's names of the bus's sampling fields, for `named_errors`."""
    owner = prefix.removesuffix(".")
    names = {"sampling": owner, "sampling.extra": owner}
    if not body.bad_words_token_ids:
        names["sampling.bad_words_token_ids"] = f"{prefix}bad_words"
    return names
