"""Requests built from plain JSON and msgpack values; each error names the field."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import limits
from .checks import check_token_ids, describe
from .errors import InvalidRequest
from .field_names import check_names
from .request import GenerateRequest
from .sampling import SamplingParams

__all__ = ["build_request", "decode_token_ids", "request_from_json"]


def request_from_json(fields: Mapping[str, object]) -> GenerateRequest:
    """Build a request from JSON values, as in a JSONL file. Unknown fields are rejected.

    Raises:
        InvalidRequest: a field is wrong, missing, unknown or of the wrong type.
    """
    if not isinstance(fields, Mapping):
        raise InvalidRequest(field="request", problem=f"is {describe(fields)}", allowed="a map of its fields")
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


_DIGITS = re.compile("[0-9]{1,10}")


def build_request(fields: Mapping[str, object]) -> GenerateRequest:
    """Build and validate a request from plain values. Unknown names are ignored."""
    given: dict[str, Any] = {name: fields[name] for name in GenerateRequest.__struct_fields__ if name in fields}
    if "prompt_token_ids" not in given:
        raise InvalidRequest(field="prompt_token_ids", problem="is missing", allowed="a flat list of token ids")
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
            raise InvalidRequest(
                field="prompt_token_ids", problem=f"has {len(value)} bytes", allowed="<i4: a multiple of 4 bytes"
            )
        return np.frombuffer(value, "<i4")
    return check_token_ids("prompt_token_ids", value, min_length=1, max_length=limits.MAX_PROMPT_TOKENS)
