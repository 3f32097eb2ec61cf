"""Invalid values for each field of a request, with the expected error."""

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollbus.schemas import limits
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams

NAN, INF = math.nan, math.inf
HUGE = 10**5000


class Bad(NamedTuple):
    """An invalid value, its field, and the expected parts of the error."""

    name: str
    value: Any
    field: str
    problem: str
    allowed: str


def ints(name: str, low: int, high: int) -> list[Bad]:
    """Return values that no integer field accepts, and the first values outside its range."""
    allowed = f"an integer from {low} to {high}"
    return [
        Bad(name, value, name, problem, allowed)
        for value, problem in (
            (low - 1, f"is {low - 1}"),
            (high + 1, f"is {high + 1}"),
            (-(2**63), f"is {-(2**63)}"),
            (2**64 - 1, f"is {2**64 - 1}"),
            (2**64, f"is {2**64}"),
            (HUGE, "is an integer of 16610 bits"),
            (True, "is the bool True"),
            (np.False_, "is the bool False"),
            (1.0, "is 1.0, not an integer"),
            (NAN, "is nan, not an integer"),
            (np.float32(2), "is np.float32(2.0), not an integer"),
            ("1", "is '1', not an integer"),
            ("", "is '', not an integer"),
            ("x" * 10**6, "is 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…, not an integer"),
            (b"1", "is a bytes of length 1, not an integer"),
            ([1], "is a list of length 1, not an integer"),
            ({"a": 1}, "is a dict of length 1, not an integer"),
            (np.array([1]), "is an array of shape (1,) and type int64, not an integer"),
            (np.array(1.5), "is an array of shape () and type float64, not an integer"),
            (object(), "is a object, not an integer"),
        )
    ]


def numbers(name: str, low: float, high: float, *, above: bool = False) -> list[Bad]:
    """Return values that no float field accepts, and the first values outside its range."""
    allowed = f"a number above {low:g} up to {high:g}" if above else f"a number from {low:g} to {high:g}"
    below = low if above else math.nextafter(low, -INF)
    return [
        Bad(name, value, name, problem, allowed)
        for value, problem in (
            (below, f"is {below!r}"),
            (math.nextafter(high, INF), f"is {math.nextafter(high, INF)!r}"),
            (NAN, "is nan"),
            (INF, "is inf"),
            (-INF, "is -inf"),
            (np.float32(NAN), "is np.float32(nan)"),
            (1e308, "is 1e+308"),
            (2**63, "is 9"),
            (HUGE, "is an integer of 16610 bits"),
            (True, "is True, not a number"),
            (np.True_, "is np.True_, not a number"),
            ("0.5", "is '0.5', not a number"),
            (b"", "is a bytes of length 0, not a number"),
            ([0.5], "is a list of length 1, not a number"),
            (np.array([0.5]), "is an array of shape (1,) and type float64, not a number"),
            (1j, "is a complex, not a number"),
        )
    ]


def strings(name: str, max_chars: int) -> list[Bad]:
    """Return values that no name accepts."""
    allowed = f"1 to {max_chars} characters, none a control character"
    return [
        Bad(name, value, name, problem, allowed)
        for value, problem in (
            ("", "is '' of 0 characters"),
            ("x" * (max_chars + 1), f"… of {max_chars + 1} characters"),
            ("a\nb", r"is 'a\nb'"),
            ("a\x00", r"is 'a\x00'"),
            ("\x85", r"is '\x85'"),
            ("\ud800", r"is '\ud800'"),
            (5, "is 5"),
            (True, "is True"),
            (b"model", "is a bytes of length 5"),
            (["model"], "is a list of length 1"),
        )
    ]


def token_lists(name: str, low: int, high: int) -> list[Bad]:
    """Return values that no list of token ids accepts. Another test covers lists that are too long."""
    whole = f"a flat list of {low} to {high} token ids from 0 to {limits.MAX_TOKEN_ID}"
    each = f"an integer from 0 to {limits.MAX_TOKEN_ID}"
    cases = [
        Bad(name, value, name + at, problem, allowed)
        for value, at, problem, allowed in (
            ("text", "", "is 'text'", whole),
            (5, "", "is 5", whole),
            (True, "", "is True", whole),
            ({"a": 1}, "", "is a dict of length 1", whole),
            ({1, 2}, "", "is a set of length 2", whole),
            (memoryview(b"abcd"), "", "is a memoryview", whole),
            (iter([1]), "", "is a list_iterator", whole),
            (np.array([[1, 2]]), "", "is an array of shape (1, 2) and type int64", whole),
            (np.array([1.0]), "", "is an array of shape (1,) and type float64", whole),
            (np.array([True]), "", "is an array of shape (1,) and type bool", whole),
            (np.array(5), "", "is an array of shape () and type int64", whole),
            (np.array([0, -1]), "[1]", "is -1", whole),
            (np.array([2**31], "u8"), "[0]", "is 2147483648", whole),
            ([0, -1], "[1]", "is -1", whole),
            ([2**31], "[0]", "is 2147483648", whole),
            ([1, 2**64], "[1]", "is 18446744073709551616", each),
            ([HUGE], "[0]", "is an integer of 16610 bits", each),
            ([1, True], "[1]", "is the bool True", each),
            ([1, 2.0], "[1]", "is 2.0, not an integer", each),
            ([1, NAN], "[1]", "is nan, not an integer", each),
            ([1, "2"], "[1]", "is '2', not an integer", each),
            ([1, None], "[1]", "is None, not an integer", each),
            ([[1, 2]], "[0]", "is a list of length 2, not an integer", each),
            ([1, [2]], "[1]", "is a list of length 1, not an integer", each),
        )
    ]
    return cases + ([Bad(name, [], name, "has 0 entries", whole)] if low else [])


def bools(name: str) -> list[Bad]:
    """Return values that no bool accepts."""
    return [
        Bad(name, value, name, f"is {shown}, not a bool", "true or false")
        for value, shown in ((0, "0"), (1, "1"), ("true", "'true'"), (0.0, "0.0"), ([True], "a list of length 1"))
    ]


BIAS = f"up to {limits.MAX_LOGIT_BIAS} token ids, each with a bias from -100 to 100"
WORDS = f"up to {limits.MAX_BAD_WORDS} lists of 1 to {limits.MAX_BAD_WORDS} token ids"
WORD = f"a flat list of 1 to {limits.MAX_BAD_WORDS} token ids from 0 to {limits.MAX_TOKEN_ID}"
EXTRA = f"up to {limits.MAX_EXTRA_FIELDS} named values of JSON's types, {limits.MAX_EXTRA_BYTES} bytes as JSON"
KEY = f"an integer from 0 to {limits.MAX_TOKEN_ID}"
DEEP: Any = []
DEEP.append(DEEP)

SAMPLING = [
    *ints("max_tokens", 1, limits.MAX_TOKENS),
    *ints("min_tokens", 0, limits.MAX_TOKENS),
    *numbers("temperature", 0, 2),
    *numbers("top_p", 0, 1, above=True),
    *ints("top_k", -1, limits.MAX_TOKEN_ID),
    *numbers("min_p", 0, 1),
    *ints("seed", 0, limits.MAX_SEED),
    *token_lists("stop_token_ids", 0, limits.MAX_STOP_TOKEN_IDS),
    *bools("ignore_eos"),
    *ints("logprobs", 0, limits.MAX_LOGPROBS),
    *ints("prompt_logprobs", 0, limits.MAX_LOGPROBS),
    *ints("n", 1, limits.MAX_N),
    *numbers("repetition_penalty", 0, 100, above=True),
    *numbers("presence_penalty", -2, 2),
    *numbers("frequency_penalty", -2, 2),
    Bad("logit_bias", [1], "logit_bias", "is a list of length 1", BIAS),
    Bad("logit_bias", "text", "logit_bias", "is 'text'", BIAS),
    Bad("logit_bias", dict.fromkeys(range(4097), 0), "logit_bias", "is a dict of length 4097", BIAS),
    Bad("logit_bias", {-1: 0}, "logit_bias (a key)", "is -1", KEY),
    Bad("logit_bias", {2**31: 0}, "logit_bias (a key)", "is 2147483648", KEY),
    Bad("logit_bias", {"x": 0}, "logit_bias (a key)", "is 'x', not an integer", KEY),
    Bad("logit_bias", {5: 100.5}, "logit_bias[5]", "is 100.5", "a number from -100 to 100"),
    Bad("logit_bias", {5: NAN}, "logit_bias[5]", "is nan", "a number from -100 to 100"),
    Bad("logit_bias", {5: True}, "logit_bias[5]", "is True", "a number from -100 to 100"),
    *token_lists("allowed_token_ids", 1, limits.MAX_ALLOWED_TOKEN_IDS),
    Bad("bad_words_token_ids", "text", "bad_words_token_ids", "is 'text'", WORDS),
    Bad("bad_words_token_ids", {"a": [1]}, "bad_words_token_ids", "is a dict of length 1", WORDS),
    Bad("bad_words_token_ids", [[1]] * 4097, "bad_words_token_ids", "is a list of length 4097", WORDS),
    Bad("bad_words_token_ids", [5], "bad_words_token_ids[0]", "is 5", WORD),
    Bad("bad_words_token_ids", [[1], []], "bad_words_token_ids[1]", "has 0 entries", WORD),
    Bad("bad_words_token_ids", [[1] * 4097], "bad_words_token_ids[0]", "has 4097 entries", WORD),
    Bad("bad_words_token_ids", [[-1]], "bad_words_token_ids[0][0]", "is -1", WORD),
    Bad("bad_words_token_ids", [[1, [2]]], "bad_words_token_ids[0][1]", "is a list of length 1", KEY),
    Bad("extra", [1], "extra", "is a list of length 1", EXTRA),
    Bad("extra", {str(i): i for i in range(65)}, "extra", "is a dict of length 65", EXTRA),
    Bad("extra", {"a": "x" * 65_536}, "extra", "takes 65544 bytes as JSON", EXTRA),
    Bad("extra", {"": 1}, "extra (a name)", "is ''", "1 to 256 characters, none a control character"),
    Bad("extra", {5: 1}, "extra (a name)", "is 5", "1 to 256 characters, none a control character"),
    Bad("extra", {"a": {"": 1}}, "extra.a (a name)", "is ''", "1 to 256 characters, none a control character"),
    Bad("extra", {"a": NAN}, "extra.a", "is nan", "a finite number"),
    Bad("extra", {"a": [1, {"b": INF}]}, "extra.a[1].b", "is inf", "a finite number"),
    Bad("extra", {"a": 2**64}, "extra.a", "is 18446744073709551616", f"an integer from {-(2**63)} to {2**64 - 1}"),
    Bad("extra", {"a": "\ud800"}, "extra.a", r"is '\ud800'", "a string that UTF-8 can carry: no lone surrogates"),
    Bad("extra", {"a": b"raw"}, "extra.a", "is a bytes of length 3", "a value of JSON's types"),
    Bad("extra", {"a": {1, 2}}, "extra.a", "is a set of length 2", "a value of JSON's types"),
    Bad("extra", {"a": np.array([1])}, "extra.a", "is an array of shape (1,)", "a value of JSON's types"),
    Bad("extra", {"a": DEEP}, "extra.a" + "[0]" * 16, "is nested too deeply", "values nested 16 deep at most"),
]
ID = f"1 to {limits.MAX_GIVEN_ID_CHARS} printable characters without a space at either end"
TRACE = "a W3C traceparent, 55 lower-case characters"
STATE = "a W3C tracestate: up to 32 different members key=value with commas between them, 512 characters together"
REQUEST = [
    *token_lists("prompt_token_ids", 1, limits.MAX_PROMPT_TOKENS),
    *(
        Bad("request_id", value, "request_id", problem, ID)
        for value, problem in (
            ("", "is ''"),
            ("r" * 513, "is 'rrr"),
            ("a ", "is 'a '"),
            ("a\n", r"is 'a\n'"),
            ("a\u00a0b", r"is 'a\xa0b'"),
            (5, "is 5"),
            (b"r", "is a bytes of length 1"),
            (None, "is None"),
        )
    ),
    *strings("model", limits.MAX_NAME_CHARS),
    *bools("return_routed_experts"),
    *bools("return_sampling_mask"),
    *ints("routed_experts_prompt_start", 0, 3),
    *strings("cache_salt", limits.MAX_CACHE_SALT_CHARS),
    *ints("priority", -limits.MAX_PRIORITY, limits.MAX_PRIORITY),
    *strings("session_id", limits.MAX_NAME_CHARS),
    *strings("id_scope", limits.MAX_NAME_CHARS),
    *strings("lora", limits.MAX_NAME_CHARS),
    *strings("group_id", limits.MAX_NAME_CHARS),
    *numbers("timeout_s", 0, limits.MAX_TIMEOUT_S, above=True),
    *ints("min_weight_version", 0, limits.MAX_WEIGHT_VERSION),
    *ints("max_weight_lag", 0, limits.MAX_WEIGHT_VERSION),
    Bad("traceparent", "", "traceparent", "is ''", TRACE),
    Bad("traceparent", "00-" + "0A" * 16 + "-" + "1b" * 8 + "-01", "traceparent", "is '00-0A", TRACE),
    *(
        Bad("traceparent", f"{version}-{trace}-{parent}-01", "traceparent", f"is '{version}-", TRACE)
        for version, trace, parent in (
            ("ff", "0a" * 16, "1b" * 8),
            ("00", "00" * 16, "1b" * 8),
            ("00", "0a" * 16, "00" * 8),
            ("00", "0a" * 16, "1b" * 8 + "-01"),
        )
    ),
    Bad("traceparent", 5, "traceparent", "is 5", TRACE),
    Bad("tracestate", "", "tracestate", "is ''", STATE),
    Bad("tracestate", 5, "tracestate", "is 5", STATE),
    Bad("tracestate", "a=\n", "tracestate", r"is 'a=\n'", STATE),
    Bad("tracestate", "a=" + "b" * 511, "tracestate", "has 513 characters", STATE),
    *(
        Bad("tracestate", text, "tracestate", "is malformed", STATE)
        for text in (",", "a", "A=1", "a=1,a=2", "a=1=2", "=1", "a=", ",".join(f"k{i}=1" for i in range(33)))
    ),
    Bad("sampling", {"n": 0}, "sampling.n", "is 0", f"an integer from 1 to {limits.MAX_N}"),
    Bad("sampling", None, "sampling", "is None", "SamplingParams, or a map of them"),
    Bad("sampling", [1], "sampling", "is a list of length 1", "SamplingParams, or a map of them"),
    Bad("sampling", "greedy", "sampling", "is 'greedy'", "SamplingParams, or a map of them"),
]
ALL = [bad._replace(field=f"sampling.{bad.field}") for bad in SAMPLING] + REQUEST
NULLABLE = {field.name for kind in (SamplingParams, GenerateRequest) for field in msgspec.structs.fields(kind)} - {
    *("prompt_token_ids", "sampling", "request_id", "routed_experts_prompt_start", "priority"),
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
