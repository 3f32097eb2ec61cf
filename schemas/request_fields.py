"""Requests built from plain JSON and msgpack values, and checked against the limits of a model and its engine.

Each error names the field.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from . import limits
from .checks import check_token_ids, describe
from .errors import InvalidRequest
from .presence import Capabilities, SamplingLimits
from .request import GenerateRequest
from .sampling import SamplingParams, check_names

_DIGITS = re.compile("[0-9]{1,10}")


def request_from_json(fields: Mapping[str, object]) -> GenerateRequest:
    """Build a request from JSON values, as in a JSONL file. Unknown fields are rejected.

    Raises:
        InvalidRequest: a field is wrong, missing, unknown or of the wrong type.
    """
    if not isinstance(fields, Mapping):
        raise InvalidRequest("request", f"is {describe(fields)}", "a map of its fields")
    check_names("", fields, GenerateRequest.__struct_fields__)
    sampling = fields.get("sampling")
    if isinstance(sampling, Mapping):
        check_names("sampling.", sampling, SamplingParams.__struct_fields__)
        bias = sampling.get("logit_bias")
        if isinstance(bias, Mapping):
            # JSON has only string keys.
            bias = {int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key: bias[key] for key in bias}
            fields = {**fields, "sampling": {**sampling, "logit_bias": bias}}
    return build_request(fields)


def build_request(fields: Mapping[str, object]) -> GenerateRequest:
    """Build and validate a request from plain values. Unknown names are ignored."""
    given: dict[str, Any] = {name: fields[name] for name in GenerateRequest.__struct_fields__ if name in fields}
    if "prompt_token_ids" not in given:
        raise InvalidRequest("prompt_token_ids", "is missing", "a flat list of token ids")
    sampling = given.get("sampling")
    if isinstance(sampling, Mapping):
        params = {name: sampling[name] for name in SamplingParams.__struct_fields__ if name in sampling}
        given["sampling"] = SamplingParams(**params)
    prompt = given["prompt_token_ids"]
    if isinstance(prompt, bytes):
        given["prompt_token_ids"] = decode_token_ids(prompt)
    return GenerateRequest(**given)


def decode_token_ids(value: object) -> object:
    """Decode a prompt from its `<i4` bytes, or from a plain list of integers, into an array.

    Raises:
        InvalidRequest: the bytes are not a whole number of token ids, or the list has other values.
    """
    if isinstance(value, bytes):
        if len(value) % 4:
            raise InvalidRequest("prompt_token_ids", f"has {len(value)} bytes", "<i4: a multiple of 4 bytes")
        return np.frombuffer(value, "<i4")
    return check_token_ids("prompt_token_ids", value, min_length=1, max_length=limits.MAX_PROMPT_TOKENS)


def check_fits(request: GenerateRequest, capabilities: Capabilities) -> None:
    """Check before publication that the model knows the tokens of the prompt, and that they and the answer fit into it.

    Raises:
        InvalidRequest: the request exceeds a limit; the error names the field and the allowed range.
    """
    check_prompt(request, capabilities)
    check_room(request, capabilities.max_model_len)


def check_prompt(request: GenerateRequest, capabilities: Capabilities) -> None:
    """Check that the prompt leaves room for one token and has only tokens of the model's vocabulary.

    Raises:
        InvalidRequest: `prompt_token_ids` is wrong; the error names the position of a wrong token.
    """
    ids = np.asarray(request.prompt_token_ids)
    if len(ids) >= capabilities.max_model_len:
        raise InvalidRequest(
            "prompt_token_ids",
            f"has {len(ids)} tokens",
            f"1 to {capabilities.max_model_len - 1}, so that one of the model's "
            f"{capabilities.max_model_len} positions is left to generate",
        )
    if np.maximum.reduce(ids) >= capabilities.vocab_size:
        at = int(np.flatnonzero(ids >= capabilities.vocab_size)[0])
        raise InvalidRequest(f"prompt_token_ids[{at}]", f"is {int(ids[at])}", _show_range(capabilities))


def check_room(request: GenerateRequest, max_model_len: int) -> None:
    """Check that the tokens to generate fit into the model beside the prompt.

    Raises:
        InvalidRequest: `sampling.max_tokens` or `sampling.min_tokens` is too large.
    """
    room = max_model_len - request.prompt_len
    for name, allowed in (
        ("max_tokens", f"1 to {room}, or null for the most that fit"),
        ("min_tokens", f"0 to {room}"),
    ):
        value = getattr(request.sampling, name)
        if value is not None and value > room:
            raise InvalidRequest(
                f"sampling.{name}",
                f"is {value} after a prompt of {request.prompt_len} tokens",
                f"{allowed}, because the model has {max_model_len} positions",
            )


def check_sampling(sampling: SamplingParams, capabilities: Capabilities) -> None:
    """Check logprobs, lengths, token ids and the names of extras against what the engine and its model support.

    Raises:
        InvalidRequest: a parameter is not supported; the error names the field and the allowed values.
    """
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and value > capabilities.max_logprobs:
            raise InvalidRequest(f"sampling.{name}", f"is {value}", f"0 to {capabilities.max_logprobs}")
    named = sampling.stop_token_ids or sampling.allowed_token_ids or sampling.logit_bias or sampling.bad_words_token_ids
    if named and capabilities.sampling_limits is not None:
        _check_lengths(sampling, capabilities.sampling_limits)
    for field, token_ids in _walk_token_ids(sampling) if named else ():
        for token_id in token_ids:
            if token_id >= capabilities.vocab_size:
                raise InvalidRequest(field, f"names token {token_id}", _show_range(capabilities))
    for name in sampling.extra or ():
        if name not in capabilities.extra:
            raise InvalidRequest(
                f"sampling.extra.{name}",
                f"is unknown to {capabilities.engine} {capabilities.engine_version}",
                ", ".join(capabilities.extra) or "nothing",
            )


def _check_lengths(sampling: SamplingParams, most: SamplingLimits) -> None:
    words = sampling.bad_words_token_ids or ()
    for name, what, length, limit in (
        ("allowed_token_ids", "entries", len(sampling.allowed_token_ids or ()), most.allowed_token_ids),
        ("logit_bias", "entries", len(sampling.logit_bias or ()), most.logit_bias),
        (
            "stop_token_ids",
            "different ids together with min_tokens",
            len(set(sampling.stop_token_ids)) if sampling.min_tokens else 0,
            most.min_tokens_stop_ids,
        ),
        ("bad_words_token_ids", "entries", len(words), most.bad_words),
        ("bad_words_token_ids", "tokens in all entries", sum(map(len, words)), most.bad_words_tokens),
    ):
        if length > limit:
            raise InvalidRequest(
                f"sampling.{name}", f"has {length} {what}", f"at most {limit}, a limit of this engine's sampler"
            )


def _walk_token_ids(sampling: SamplingParams) -> Iterator[tuple[str, Iterable[int]]]:
    yield "sampling.stop_token_ids", sampling.stop_token_ids
    yield "sampling.allowed_token_ids", sampling.allowed_token_ids or ()
    yield "sampling.logit_bias", sampling.logit_bias or ()
    for index, word in enumerate(sampling.bad_words_token_ids or ()):
        yield f"sampling.bad_words_token_ids[{index}]", word


def _show_range(capabilities: Capabilities) -> str:
    return f"token ids from 0 to {capabilities.vocab_size - 1}"
