"""Converts the chunks of a stream to the arrays of its result. Each array is allocated once and written once.

An engine computes the KV of the prompt when it samples the first token. It computes the KV of generated token i when it
samples token i + 1. So the versions of the tokens are also those of the KV, unless the engine recomputed it. In that
case, all KV up to there has the version of the next token.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import Chunk, RoutedExperts, SamplingMask
from ....schemas.rows import DTYPES, Rows

Spans = tuple[tuple[int, int], ...]
"""(first position, version) of each span, in order. A span ends where the next begins."""
NO_LORA = -1
_pack_version = struct.Struct("<i").pack


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """For each token, the ids that top-k, top-p and min-p left, including the token itself.

    With logits f[G, vocabulary], `logits[masks.positions, masks.token_ids]` has the candidates of each token, one token
    after another. The sampler used the softmax of the candidates of each token.
    """

    counts: npt.NDArray[np.int32]
    """i4[G]: the number of ids of each token, at least 1."""
    token_ids: npt.NDArray[np.int32]
    """i4[sum of the counts]: the ids of the first token, then those of the second, and so on."""

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        return f"<TokenMasks tokens={len(self.counts)} ids={len(self.token_ids)}>"

    @classmethod
    def joined(cls, parts: Sequence["SamplingMask | TokenMasks"]) -> "TokenMasks":
        """Join consecutive masks. The result has its own arrays."""
        return cls(np.concatenate([part.counts for part in parts]), np.concatenate([part.token_ids for part in parts]))

    @classmethod
    def joined_of_all(cls, parts: Sequence["SamplingMask | TokenMasks | None"]) -> "TokenMasks | None":
        """Join the masks of parts that have tokens; None unless all parts have masks.

        An earlier or later attempt may have run on an engine that returns no masks.
        """
        found = [part for part in parts if part is not None]
        return cls.joined(found) if found and len(found) == len(parts) else None

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """i8[sum of the counts]: the index of the token of each of `token_ids`, from 0 on."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def split(self) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each token as views."""
        return np.split(self.token_ids, np.cumsum(self.counts)[:-1]) if len(self.counts) else []

    def cut(self, kept: int) -> "TokenMasks":
        """Return the masks of the first `kept` tokens as views."""
        counts = self.counts[:kept]
        return TokenMasks(counts, self.token_ids[: counts.sum(dtype=np.int64)])


def join_chunks(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Return the arrays of a `Generation` by their field names, writable and owned by the caller.

    The chunks must follow each other without a gap, as `rollbus.bus.protocol.stream.response_stream` delivers them.
    Fields that few results have may be missing.
    """
    token_ids, logprobs, versions, rows, has_more = [], [], [], list[RoutedExperts](), False
    # The caller's loop runs this for each result, so the usual fields need a single pass.
    for chunk in chunks:
        if chunk.token_ids_data:
            token_ids.append(chunk.token_ids_data)
            versions.append(_pack_version(chunk.weight_version) * (len(chunk.token_ids_data) // 4))
            if chunk.logprobs_data is not None:
                logprobs.append(chunk.logprobs_data)
        if chunk.routed_experts is not None:
            rows.append(chunk.routed_experts)
        if chunk.lora_version is not None or chunk.top_logprobs or chunk.prompt_logprobs or chunk.sampling_mask:
            has_more = True
    arrays = {
        "token_ids": _own(token_ids, "<i4"),
        "logprobs": _own(logprobs, "<f4") if logprobs else None,
        "weight_versions": _own(versions, "<i4"),
        "routed_experts": _join_rows(rows) if rows else None,
    }
    return arrays | _join_rare(chunks) if has_more else arrays


def _join_rare(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Return the other arrays of a `Generation` by their field names."""
    made = [chunk for chunk in chunks if chunk.token_ids_data]
    loras = [_pack_version(chunk.lora_version) * chunk.num_tokens for chunk in made if chunk.lora_version is not None]
    tops = [chunk.top_logprobs for chunk in made if chunk.top_logprobs is not None]
    prompts = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    prompt_tops = [prompt.top for prompt in prompts if prompt.top is not None]
    return {
        "lora_versions": _own(loras, "<i4") if loras and len(loras) == len(made) else None,
        "top_token_ids": np.concatenate([top.token_ids for top in tops]) if tops else None,
        "top_logprobs": np.concatenate([top.logprobs for top in tops]) if tops else None,
        "prompt_logprobs": np.concatenate([prompt.logprobs for prompt in prompts]) if prompts else None,
        "prompt_top_token_ids": np.concatenate([top.token_ids for top in prompt_tops]) if prompt_tops else None,
        "prompt_top_logprobs": np.concatenate([top.logprobs for top in prompt_tops]) if prompt_tops else None,
        "sampling_mask": TokenMasks.joined_of_all([chunk.sampling_mask for chunk in made]),
    }


def _own(parts: Sequence[bytes], dtype: str) -> npt.NDArray[Any]:
    """Return a writable array with its own copy of the parts."""
    return np.frombuffer(bytearray().join(parts), dtype)


def kv_arrays(chunks: Sequence[Chunk], prompt_len: int) -> dict[str, Any]:
    """Return the KV fields of a `Generation` by their names.

    Args:
        chunks: the chunks that `rollbus.bus.protocol.stream.response_stream` delivers.
        prompt_len: Lp of the whole request.
    """
    # The numbers of the tokens before which the KV was recomputed. The first is 0: a prompt is always computed.
    recomputed, num_tokens, versions = [0], 0, set()
    # Is a recomputation missing after the last of them, and is one missing at all?
    is_known = is_all_known = True
    made = [chunk for chunk in chunks if chunk.token_ids_data]
    for chunk in made:
        versions.add((chunk.weight_version, chunk.lora_version))
        if chunk.kv_recomputed is None:
            is_known = is_all_known = False
        elif chunk.kv_recomputed:
            is_known = True
            if num_tokens:
                recomputed.append(num_tokens)
        num_tokens += len(chunk.token_ids_data) // 4
    if len(versions) == 1:
        # The usual case: no array needs to be computed.
        [(version, lora)] = versions
        return {
            "kv_version_spans": ((0, version),) if is_known else None,
            "kv_lora_version_spans": ((0, lora),) if is_known and lora is not None else None,
            "kv_mixed": np.zeros(num_tokens, np.bool_) if is_all_known else None,
        }
    sizes = [chunk.num_tokens for chunk in made]
    weights = np.repeat(np.array([chunk.weight_version for chunk in made], "i4"), sizes)
    lora_versions = [NO_LORA if chunk.lora_version is None else chunk.lora_version for chunk in made]
    loras = np.repeat(np.array(lora_versions, "i4"), sizes)
    is_known = is_known and bool(made)
    has_lora = is_known and bool((loras != NO_LORA).all())
    return {
        "kv_version_spans": find_spans(weights, recomputed[-1], prompt_len) if is_known else None,
        "kv_lora_version_spans": find_spans(loras, recomputed[-1], prompt_len) if has_lora else None,
        "kv_mixed": _find_mixed(weights, loras, recomputed) if is_all_known else None,
    }


def find_spans(versions: npt.NDArray[np.int32], recomputed: int, prompt_len: int) -> Spans:
    """Return the spans of the final KV, which was all recomputed before token `recomputed` and extended from there."""
    since = versions[recomputed:]
    changes = np.flatnonzero(np.diff(since))
    rest = [(prompt_len + recomputed + int(i), int(since[i + 1])) for i in changes]
    return ((0, int(since[0])), *rest)


def _find_mixed(
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


def _join_rows(parts: Sequence[RoutedExperts]) -> Rows:
    rows = np.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), DTYPES[parts[0].dtype])
    at = 0
    for part in parts:
        rows[at : at + part.shape[0]] = part.numpy()
        at += part.shape[0]
    return rows
