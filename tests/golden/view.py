"""Readable views of messages: fields by name, arrays by dtype and values."""

import json
from typing import Any

import msgspec
import numpy as np

from rollbus.schemas.chunk import RoutedExperts
from rollbus.schemas.messages import RequestMessage, decode_request, encode_json

DTYPES = {"token_ids_data": "<i4", "logprobs_data": "<f4", "counts_data": "<i4"}


def as_json(value: object) -> bytes:
    """Return a view in the format of its file: indented JSON that ends in a newline."""
    return (json.dumps(view(value), indent=2, ensure_ascii=False) + "\n").encode()


def view(value: Any) -> Any:
    """Return a message or a value in it as JSON types. Arrays become strings, so that they stay on one line."""
    if isinstance(value, RequestMessage):
        request = msgspec.json.decode(encode_json(decode_request(value.request)))
        request["prompt_token_ids"] = f"<i4 {json.dumps(request['prompt_token_ids'])}"
        envelope = {name: view(getattr(value, name)) for name in value.__struct_fields__ if name != "request"}
        return envelope | {"request": request}
    if isinstance(value, RoutedExperts):
        rows = json.dumps(value.numpy().tolist())
        return {"start": value.start, "shape": list(value.shape), "dtype": value.dtype, "rows": f"{value.dtype} {rows}"}
    if isinstance(value, msgspec.Struct):
        return {
            name.removesuffix("_data"): array_view(getattr(value, name), DTYPES[name])
            if name in DTYPES
            else view(getattr(value, name))
            for name in value.__struct_fields__
        }
    if isinstance(value, (list, tuple)):
        return [view(item) for item in value]
    if isinstance(value, dict):
        return {name: view(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return f"hex {value.hex()}"
    return value


def array_view(data: bytes | None, dtype: str) -> str | None:
    """Return the values of an array that was sent as bytes."""
    return None if data is None else f"{dtype} {json.dumps(np.frombuffer(data, dtype).tolist())}"
