"""Sampling parameters: the subset of vLLM's parameters that RL needs, with vLLM's names and meanings.

An unknown name is rejected with the name that its caller may mean, also if the name is that of another library.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any, Final

import msgspec

from . import limits
from .checks import FieldChecks, check_bool, check_float, check_int, check_json, check_name, check_token_ids, describe
from .decoding import nearest
from .errors import InvalidRequest

MEANT: Final[Mapping[str, str]] = {
    "prompt": "prompt_token_ids",
    "prompts": "prompt_token_ids",
    "input_ids": "prompt_token_ids",
    "token_ids": "prompt_token_ids",
    "messages": "prompt_token_ids of the rendered chat; the HTTP service renders chats",
    "stop": "stop_token_ids; the HTTP service takes stop strings",
    "stop_strings": "stop_token_ids; the HTTP service takes stop strings",
    "eos_token_id": "stop_token_ids",
    "bad_words": "bad_words_token_ids",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, which does not count the prompt",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "do_sample": "temperature, 0 for greedy",
    "structured_outputs": "extra={'structured_outputs': ...}",
    "sampling_params": "sampling",
    "timeout": "timeout_s",
    "lora_request": "lora",
    "adapter": "lora",
}
"""Names of other libraries, each with the name here."""
_kinds: list["NamedFields"] = []


class NamedFields(msgspec.StructMeta):
    """Makes the constructor of a struct reject unknown names as `InvalidRequest`, with the name that was meant."""

    def __init__(self, *args: Any, **config: Any) -> None:
        """Remember the struct, for errors about a field of another one."""
        super().__init__(*args, **config)
        _kinds.append(self)

    def __call__(self, *args: Any, **fields: Any) -> Any:
        """Create the struct.

        Raises:
            InvalidRequest: a field is unknown or has a wrong value.
            TypeError: a field is missing, or is given without its name.
        """
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            check_names("", fields, self.__struct_fields__)
            if args:
                name = self.__struct_fields__[0]
                raise TypeError(f"{self.__name__} takes its fields by name, such as {name}=...") from None
            raise


def check_names(where: str, given: Collection[Any], known: Collection[str]) -> None:
    """Check that all names are known.

    Args:
        where: begins the name of the field in the error, such as `sampling.`.

    Raises:
        InvalidRequest: a name is unknown. The error suggests the name that was meant.
    """
    for name in given:
        if name not in known:
            shown = name if isinstance(name, str) and len(name) <= limits.MAX_NAME_CHARS else describe(name)
            problem = f"is unknown{_advise(shown, known)}"
            raise InvalidRequest(f"{where}{shown}", problem, ", ".join(known))


def _advise(name: str, known: Collection[str]) -> str:
    owner = next((kind.__name__ for kind in _kinds if name in kind.__struct_fields__), None)
    if owner is not None:
        return f" (it is a field of {owner})"
    if name in MEANT:
        return f" (use {MEANT[name]})"
    return nearest(name, known)


class SamplingParams(msgspec.Struct, metaclass=NamedFields, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters.

    The constructor checks all fields: an invalid value raises `InvalidRequest` with the field's name.

    There are no stop strings: text belongs to the frontend, and the bus carries only token ids.
    """

    max_tokens: int | None = 16
    """Maximum number of generated tokens, at least 1; None: up to the model's context length."""
    min_tokens: int = 0
    """Number of tokens before which neither EOS nor `stop_token_ids` end the generation."""
    temperature: float = 1.0
    """Temperature, 0 to 2; 0: greedy."""
    top_p: float = 1.0
    """Cumulative probability of the tokens to sample from, above 0 up to 1."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1: all tokens."""
    min_p: float = 0.0
    """Minimum probability relative to the most likely token, 0 to 1."""
    seed: int | None = None
    """Seed for repeatable sampling; child request i of n > 1 uses seed + i. None: not repeatable."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the generation. The result includes the stop token."""
    ignore_eos: bool = False
    """True: continue after the model's end-of-sequence token."""
    logprobs: int | None = 0
    """Log probabilities to return. 0: of each sampled token. k: also of the k most likely tokens. None: none."""
    prompt_logprobs: int | None = None
    """Log probabilities of prompt tokens, as in `logprobs`. They disable reads of the prefix cache."""
    n: int = 1
    """Number of samples for this prompt."""
    repetition_penalty: float = 1.0
    """Repetition penalty, above 0 up to 100; 1: none."""
    presence_penalty: float = 0.0
    """Presence penalty, -2 to 2; 0: none."""
    frequency_penalty: float = 0.0
    """Frequency penalty, -2 to 2; 0: none."""
    logit_bias: Mapping[int, float] | None = None
    """Map of token ids to biases from -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Only tokens that may be sampled; None: all tokens."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Sequences of token ids that the engine must not generate."""
    extra: Mapping[str, Any] | None = None
    """Engine parameters by the engine's own names, which its capabilities must list."""

    def __post_init__(self) -> None:
        """Check every field and convert it to its canonical type."""
        _CHECKS.apply(self)
        _check_together(self)

    @property
    def is_continuable(self) -> bool:
        """True if a continuation from prompt and tokens can give the same result as one undisturbed run.

        A sampler with its own state makes this impossible: a seeded generator, or the generated tokens that penalties
        and bad words depend on. Greedy sampling continues with the same tokens. Unseeded sampling continues with a
        sample of the same distribution.
        """
        return not self.stateful_fields

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """Names of the set fields that give the sampler its own state. `extra` may hold a grammar, for example."""
        is_set = {
            "seed": self.seed is not None and self.temperature != 0.0,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "presence_penalty": self.presence_penalty != 0.0,
            "frequency_penalty": self.frequency_penalty != 0.0,
            "bad_words_token_ids": bool(self.bad_words_token_ids),
            "extra": bool(self.extra),
        }
        return tuple(compress(is_set, is_set.values()))


def _check_together(params: SamplingParams) -> None:
    """Check conditions on several fields.

    The values must be checked Python integers, because sums of numpy integers can overflow.
    """
    min_tokens, max_tokens, seed, n = params.min_tokens, params.max_tokens, params.seed, params.n
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest("sampling.min_tokens", f"is {min_tokens}", f"0 to max_tokens={max_tokens}")
    if seed is not None and seed + n - 1 > limits.MAX_SEED:
        raise InvalidRequest(
            "sampling.seed",
            f"is {seed} and seed + n - 1 exceeds {limits.MAX_SEED} with n={n}",
            f"an integer from 0 to {limits.MAX_SEED - n + 1}",
        )
    if params.allowed_token_ids is not None:
        _check_allowed(params, params.allowed_token_ids)


def _check_allowed(params: SamplingParams, allowed: Sequence[int]) -> None:
    """Check that a token is left to sample. Without one, an engine computes NaN."""
    forbidden = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids)
    if forbidden.issuperset(allowed):
        raise InvalidRequest(
            "sampling.allowed_token_ids",
            "allows only tokens that bad_words_token_ids, or stop_token_ids with min_tokens, forbid",
            "a list with at least one other token",
        )


def _check_ids(field: str, value: object, min_length: int, max_length: int) -> tuple[int, ...]:
    if type(value) is tuple and not value and not min_length:
        return ()
    return tuple(check_token_ids(field, value, min_length=min_length, max_length=max_length).tolist())


def _check_int_or_none(field: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else check_int(field, value, low, high)


def _check_logit_bias(field: str, value: object) -> dict[int, float]:
    allowed = f"up to {limits.MAX_LOGIT_BIAS} token ids, each with a bias from -100 to 100"
    if not isinstance(value, Mapping) or len(value) > limits.MAX_LOGIT_BIAS:
        raise InvalidRequest(field, f"is {describe(value)}", allowed)
    return {
        check_int(f"{field} (a key)", token_id, 0, limits.MAX_TOKEN_ID): check_float(
            f"{field}[{describe(token_id)}]", bias, -100, 100
        )
        for token_id, bias in value.items()
    }


def _check_bad_words(field: str, value: object) -> tuple[tuple[int, ...], ...]:
    allowed = f"up to {limits.MAX_BAD_WORDS} lists of 1 to {limits.MAX_BAD_WORDS} token ids"
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or len(value) > limits.MAX_BAD_WORDS:
        raise InvalidRequest(field, f"is {describe(value)}", allowed)
    return tuple(_check_ids(f"{field}[{i}]", word, 1, limits.MAX_BAD_WORDS) for i, word in enumerate(value))


def _check_extra(field: str, value: object) -> dict[str, object]:
    allowed = f"up to {limits.MAX_EXTRA_FIELDS} named values of JSON's types, {limits.MAX_EXTRA_BYTES} bytes as JSON"
    if not isinstance(value, Mapping) or len(value) > limits.MAX_EXTRA_FIELDS:
        raise InvalidRequest(field, f"is {describe(value)}", allowed)
    extra: dict[str, object] = {}
    for key, item in value.items():
        name = check_name(f"{field} (a name)", key)
        extra[name] = check_json(f"{field}.{name}", item)
    size = len(msgspec.json.encode(extra))
    if size > limits.MAX_EXTRA_BYTES:
        raise InvalidRequest(field, f"takes {size} bytes as JSON", allowed)
    return extra


_CHECKS: Final = FieldChecks(
    SamplingParams,
    "sampling.",
    {
        "max_tokens": partial(_check_int_or_none, low=1, high=limits.MAX_TOKENS),
        "min_tokens": partial(check_int, low=0, high=limits.MAX_TOKENS),
        "temperature": partial(check_float, low=0, high=2),
        "top_p": partial(check_float, low=0, high=1, above=True),
        "top_k": partial(check_int, low=-1, high=limits.MAX_TOKEN_ID),
        "min_p": partial(check_float, low=0, high=1),
        "seed": partial(check_int, low=0, high=limits.MAX_SEED),
        "stop_token_ids": partial(_check_ids, min_length=0, max_length=limits.MAX_STOP_TOKEN_IDS),
        "ignore_eos": check_bool,
        "logprobs": partial(_check_int_or_none, low=0, high=limits.MAX_LOGPROBS),
        "prompt_logprobs": partial(check_int, low=0, high=limits.MAX_LOGPROBS),
        "n": partial(check_int, low=1, high=limits.MAX_N),
        "repetition_penalty": partial(check_float, low=0, high=100, above=True),
        "presence_penalty": partial(check_float, low=-2, high=2),
        "frequency_penalty": partial(check_float, low=-2, high=2),
        "logit_bias": _check_logit_bias,
        "allowed_token_ids": partial(_check_ids, min_length=1, max_length=limits.MAX_ALLOWED_TOKEN_IDS),
        "bad_words_token_ids": _check_bad_words,
        "extra": _check_extra,
    },
)
