"""The `nvext` object of an answer, in Dynamo's format."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from .... import bus
from ....schemas.rows import Rows
from ..request_target import RequestTarget
from ..routing_json import routed_experts_json
from ..tokens import Tokens, json_logprobs, whole_rows

__all__ = ["RequestClock", "nvext_json"]


class RequestClock:
    """Measures the times of one HTTP request."""

    def __init__(self) -> None:
        self._received_ms = round(time.time() * 1000)
        self._begun = time.perf_counter()
        self._first: float | None = None

    def token(self) -> None:
        """Record that tokens have arrived. Only the first call has an effect."""
        if self._first is None:
            self._first = time.perf_counter()

    def timing(self) -> dict[str, Any]:
        """Return Dynamo's `timing`. The time to the first token is null if the answer was not streamed."""
        first = self._first
        return {
            "request_received_ms": self._received_ms,
            "ttft_ms": None if first is None else (first - self._begun) * 1000,
            "total_time_ms": (time.perf_counter() - self._begun) * 1000,
        }


def nvext_json(
    extra: frozenset[str], request: bus.GenerateRequest, target: RequestTarget, tokens: Tokens, clock: RequestClock
) -> Iterator[bytes]:
    """Return the object in pieces. All errors are raised before the first piece.

    The object has the routed experts once: in `engine_data`, or beside it if `extra` has `routed_experts`.

    Args:
        tokens: all tokens of the answer.

    Raises:
        HttpError: 502, rows of routed experts are missing.
    """
    prompt_ids = np.asarray(request.prompt_token_ids).tolist()
    completion_ids = tokens.ids.tolist()
    fields: dict[str, Any] = {}
    if "prompt_token_ids" in extra:
        fields["prompt_token_ids"] = prompt_ids
    for name in {"completion_token_ids", "token_ids"} & extra:
        fields[name] = completion_ids
    if "worker_id" in extra and tokens.worker is not None:
        fields["worker_id"] = {"prefill_worker_id": tokens.first_worker, "decode_worker_id": tokens.worker}
    if "timing" in extra:
        fields["timing"] = clock.timing()
    if "weight_version" in extra:
        # The version of the last token; null if there are no tokens.
        fields["weight_version"] = int(tokens.weight_versions[-1]) if completion_ids else None
    engine: dict[str, Any] | None = None
    if "engine_data" in extra:
        engine = {"prompt_token_ids": prompt_ids, "completion_token_ids": completion_ids}
        engine["completion_logprobs"] = json_logprobs(tokens.scores.logprobs)
        engine["completion_weight_versions"] = tokens.weight_versions.tolist()
    rows = whole_rows(request, target, tokens) if extra & {"engine_data", "routed_experts"} else None
    in_engine = engine is not None and "routed_experts" not in extra
    return _joined(fields, engine, rows, request.routed_experts_prompt_start, in_engine=in_engine)


def _joined(
    fields: dict[str, Any], engine: dict[str, Any] | None, rows: Rows | None, start: int, *, in_engine: bool
) -> Iterator[bytes]:
    if rows is None:
        # Without rows, the object is small enough for one piece.
        yield msgspec.json.encode(fields if engine is None else {**fields, "engine_data": engine})
        return
    outer = fields if engine is None or in_engine else {**fields, "engine_data": engine}
    yield msgspec.json.encode(outer)[:-1] + (b"," if outer else b"")
    if in_engine:
        yield b'"engine_data":' + msgspec.json.encode(engine)[:-1] + b","
    yield b'"routed_experts":'
    yield from routed_experts_json(rows, start)
    yield b"}}" if in_engine else b"}"
