"""The weight versions that computed the KV of a sequence: at its end, and when each token was sampled.

An engine computes the KV of the prompt when it samples the first token. It computes the KV of generated token i when it
samples token i + 1. So the versions of the tokens are also those of the KV, unless the engine recomputed it. In that
case, all KV up to there has the version of the next token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import Chunk

__all__ = ["Spans", "kv_arrays"]

Spans = tuple[tuple[int, int], ...]
"""(first position, version) of each span, in order. A span ends where the next begins."""


NO_LORA = -1


class _Recomputed(NamedTuple):
    """The places where the KV was recomputed."""

    tokens: list[int]
    """The numbers of the tokens before which this happened. The first is 0, because a prompt is always computed."""
    is_end_known: bool
    """True if no recomputation after the last of them is missing."""
    is_all_known: bool
    """True if no recomputation is missing."""


def kv_arrays(chunks: Sequence[Chunk], prompt_len: int) -> dict[str, Any]:
    """Return the KV fields of a `Generation` by their names.

    Args:
        chunks: the chunks that `rollbus.bus.protocol.stream.response_stream` delivers.
        prompt_len: Lp of the whole request.
    """
    chunks = [chunk for chunk in chunks if chunk.num_tokens]
    found = _recomputed(chunks)
    sizes = [chunk.num_tokens for chunk in chunks]
    is_known = bool(chunks) and found.is_end_known
    if len(versions := {(chunk.weight_version, chunk.lora_version) for chunk in chunks}) == 1:
        # The usual case: no array needs to be computed.
        [(version, lora)] = versions
        return {
            "kv_version_spans": ((0, version),) if is_known else None,
            "kv_lora_version_spans": ((0, lora),) if is_known and lora is not None else None,
            "kv_mixed": np.zeros(sum(sizes), np.bool_) if found.is_all_known else None,
        }
    weights = np.repeat(np.array([chunk.weight_version for chunk in chunks], "i4"), sizes)
    lora_versions = [NO_LORA if chunk.lora_version is None else chunk.lora_version for chunk in chunks]
    loras = np.repeat(np.array(lora_versions, "i4"), sizes)
    has_lora = is_known and bool((loras != NO_LORA).all())
    return {
        "kv_version_spans": _spans(weights, found.tokens[-1], prompt_len) if is_known else None,
        "kv_lora_version_spans": _spans(loras, found.tokens[-1], prompt_len) if has_lora else None,
        "kv_mixed": _mixed(weights, loras, found.tokens) if found.is_all_known else None,
    }


def _recomputed(chunks: Sequence[Chunk]) -> _Recomputed:
    tokens, num_tokens, is_end_known, is_all_known = [0], 0, True, True
    for chunk in chunks:
        if chunk.kv_recomputed is None:
            is_end_known = is_all_known = False
        elif chunk.kv_recomputed:
            is_end_known = True
            if num_tokens:
                tokens.append(num_tokens)
        num_tokens += chunk.num_tokens
    return _Recomputed(tokens, is_end_known, is_all_known)


def _spans(versions: npt.NDArray[np.int32], recomputed: int, prompt_len: int) -> Spans:
    """Return the spans of the final KV, which was all recomputed before token `recomputed` and extended from there."""
    since = versions[recomputed:]
    changes = np.flatnonzero(np.diff(since))
    rest = [(prompt_len + recomputed + int(i), int(since[i + 1])) for i in changes]
    return ((0, int(since[0])), *rest)


def _mixed(
    weights: npt.NDArray[np.int32], loras: npt.NDArray[np.int32], recomputed: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return for each token whether the versions have changed since all KV before it was computed."""
    is_change = np.zeros(len(weights), np.int64)
    is_change[1:] = (np.diff(weights) != 0) | (np.diff(loras) != 0)
    num_changes = np.cumsum(is_change)
    if not len(weights):
        return np.zeros(0, np.bool_)
    sizes = np.diff([*recomputed, len(weights)])
    mixed: npt.NDArray[np.bool_] = num_changes != np.repeat(num_changes[list(recomputed)], sizes)
    return mixed
