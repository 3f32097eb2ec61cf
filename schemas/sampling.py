"""How tokens are sampled: the subset of vLLM's parameters that RL needs, with vLLM's names and meanings."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from . import limits
from .checks import check_bool, check_float, check_int, check_json, check_name, check_token_ids, describe
from .errors import InvalidRequest

__all__ = ["SamplingParams"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are sampled. Checked on construction: a bad value raises `InvalidRequest` naming the field.

    Strings to stop at are not here: text is the frontend's business, the bus carries token ids.
    """

    max_tokens: int | None = 16
    """Tokens to generate at most, 1 or more; None: up to the model's context length."""
    min_tokens: int = 0
    """Tokens before which neither EOS nor `stop_token_ids` end the generation."""
    temperature: float = 1.0
    """0 (greedy) to 2."""
    top_p: float = 1.0
    """Above 0 up to 1."""
    top_k: int = 0
    """0 (or -1): all tokens."""
    min_p: float = 0.0
    """0 to 1, relative to the most likely token."""
    seed: int | None = None
    """Makes sampling repeatable; child i of n > 1 uses seed + i."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the generation; the token itself is delivered."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = 0
    """0: the log probability of each sampled token. k: those of the k most likely ones too. None: none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; turns off reading the prefix cache for this request."""
    n: int = 1
    """Samples for this prompt."""
    repetition_penalty: float = 1.0
    """Above 0 up to 100; 1 is none."""
    presence_penalty: float = 0.0
    """-2 to 2."""
    frequency_penalty: float = 0.0
    """-2 to 2."""
    logit_bias: Mapping[int, float] | None = None
    """Token id to a bias from -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """If set, only these tokens may be sampled."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Sequences of token ids that must not be generated."""
    extra: Mapping[str, Any] | None = None
    """Parameters of the engine by its own names; one that the engine does not list in its capabilities is refused."""

    def __post_init__(self) -> None:
        """Check every field and bring it to its canonical type."""
        for name, value in _checked(self).items():
            if value is not getattr(self, name):
                force_setattr(self, name, value)

    @property
    def is_continuable(self) -> bool:
        """Going on from prompt and tokens gives what one undisturbed run could have given.

        Not so where the sampler has a state of its own: a seeded generator, or what was generated so far, which
        penalties and bad words look at. Greedy sampling goes on to the same tokens, unseeded sampling to a sample of
        the same distribution.
        """
        return not self.stateful_fields

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """The set fields that give the sampler a state of its own; a grammar, for example, is in `extra`."""
        is_set = {
            "seed": self.seed is not None and self.temperature != 0.0,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "presence_penalty": self.presence_penalty != 0.0,
            "frequency_penalty": self.frequency_penalty != 0.0,
            "bad_words_token_ids": bool(self.bad_words_token_ids),
            "extra": bool(self.extra),
        }
        return tuple(name for name, value in is_set.items() if value)


def _checked(params: SamplingParams) -> dict[str, object]:
    checked: dict[str, object] = {
        "min_tokens": check_int("sampling.min_tokens", params.min_tokens, 0, limits.MAX_TOKENS),
        "temperature": check_float("sampling.temperature", params.temperature, 0, 2),
        "top_p": check_float("sampling.top_p", params.top_p, 0, 1, above=True),
        "top_k": check_int("sampling.top_k", params.top_k, -1, limits.MAX_TOKEN_ID),
        "min_p": check_float("sampling.min_p", params.min_p, 0, 1),
        "stop_token_ids": _token_ids("sampling.stop_token_ids", params.stop_token_ids, 0, limits.MAX_STOP_TOKEN_IDS),
        "ignore_eos": check_bool("sampling.ignore_eos", params.ignore_eos),
        "n": check_int("sampling.n", params.n, 1, limits.MAX_N),
        "repetition_penalty": check_float("sampling.repetition_penalty", params.repetition_penalty, 0, 100, above=True),
        "presence_penalty": check_float("sampling.presence_penalty", params.presence_penalty, -2, 2),
        "frequency_penalty": check_float("sampling.frequency_penalty", params.frequency_penalty, -2, 2),
    }
    for name, low, high in (
        ("max_tokens", 1, limits.MAX_TOKENS),
        ("seed", 0, limits.MAX_SEED),
        ("logprobs", 0, limits.MAX_LOGPROBS),
        ("prompt_logprobs", 0, limits.MAX_LOGPROBS),
    ):
        value = getattr(params, name)
        checked[name] = None if value is None else check_int(f"sampling.{name}", value, low, high)
    _check_together(checked)
    if params.logit_bias is not None:
        checked["logit_bias"] = _checked_logit_bias(params.logit_bias)
    if params.allowed_token_ids is not None:
        checked["allowed_token_ids"] = _token_ids(
            "sampling.allowed_token_ids", params.allowed_token_ids, 1, limits.MAX_ALLOWED_TOKEN_IDS
        )
    if params.bad_words_token_ids is not None:
        checked["bad_words_token_ids"] = _checked_bad_words(params.bad_words_token_ids)
    if params.extra is not None:
        checked["extra"] = _checked_extra(params.extra)
    return checked


def _check_together(checked: Mapping[str, Any]) -> None:
    """Check what binds two fields; takes checked values, since sums of numpy's integers wrap around."""
    min_tokens, max_tokens, seed, n = (checked[name] for name in ("min_tokens", "max_tokens", "seed", "n"))
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            field="sampling.min_tokens", problem=f"is {min_tokens}", allowed=f"0 to max_tokens={max_tokens}"
        )
    if seed is not None and seed + n - 1 > limits.MAX_SEED:
        raise InvalidRequest(
            field="sampling.seed",
            problem=f"is {seed} and leaves no room for seed + n - 1 with n={n}",
            allowed=f"an integer from 0 to {limits.MAX_SEED - n + 1}",
        )


def _token_ids(field: str, value: object, min_length: int, max_length: int) -> tuple[int, ...]:
    if type(value) is tuple and not value and not min_length:
        return ()
    return tuple(check_token_ids(field, value, min_length=min_length, max_length=max_length).tolist())


def _checked_logit_bias(value: object) -> dict[int, float]:
    allowed = f"up to {limits.MAX_LOGIT_BIAS} token ids, each with a bias from -100 to 100"
    if not isinstance(value, Mapping) or len(value) > limits.MAX_LOGIT_BIAS:
        raise InvalidRequest(field="sampling.logit_bias", problem=f"is {describe(value)}", allowed=allowed)
    return {
        check_int("sampling.logit_bias (a key)", token_id, 0, limits.MAX_TOKEN_ID): check_float(
            f"sampling.logit_bias[{describe(token_id)}]", bias, -100, 100
        )
        for token_id, bias in value.items()
    }


def _checked_bad_words(value: object) -> tuple[tuple[int, ...], ...]:
    allowed = f"up to {limits.MAX_BAD_WORDS} lists of 1 to {limits.MAX_BAD_WORDS} token ids"
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) > limits.MAX_BAD_WORDS:
        raise InvalidRequest(field="sampling.bad_words_token_ids", problem=f"is {describe(value)}", allowed=allowed)
    return tuple(
        _token_ids(f"sampling.bad_words_token_ids[{i}]", word, 1, limits.MAX_BAD_WORDS) for i, word in enumerate(value)
    )


def _checked_extra(value: object) -> dict[str, object]:
    allowed = f"up to {limits.MAX_EXTRA_FIELDS} named values of JSON's types, {limits.MAX_EXTRA_BYTES} bytes as JSON"
    if not isinstance(value, Mapping) or len(value) > limits.MAX_EXTRA_FIELDS:
        raise InvalidRequest(field="sampling.extra", problem=f"is {describe(value)}", allowed=allowed)
    extra: dict[str, object] = {}
    for key, item in value.items():
        name = check_name("sampling.extra (a name)", key)
        extra[name] = check_json(f"sampling.extra.{name}", item)
    size = len(msgspec.json.encode(extra))
    if size > limits.MAX_EXTRA_BYTES:
        raise InvalidRequest(field="sampling.extra", problem=f"takes {size} bytes as JSON", allowed=allowed)
    return extra
