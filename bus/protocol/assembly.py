"""The client's half of a stream: chunks are checked as they come and put together.

Invariant: whatever leaves here as finished is complete: chunk numbers, token totals and the row rule have been
checked, so that nothing missing or doubled can be mistaken for a result.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.chunk import Chunk, End, RoutedExperts
from schemas.errors import RemoteProtocolError
from schemas.request import GenerateRequest
from schemas.rows import DTYPES, Rows, expected_rows

__all__ = ["Assembly"]


class Assembly:
    """One attempt of one child, as far as it has come.

    Args:
        request: what was asked for; `sampling.n` does not matter.
        keep: hold the chunks for `arrays`; False for callers that take them one by one.
    """

    def __init__(self, request: GenerateRequest, *, keep: bool) -> None:
        self._prompt_len = request.prompt_len
        self._top_width = request.sampling.logprobs
        self._needs_routing = request.return_routed_experts is True
        self._keep = keep
        self._chunks: list[Chunk] = []
        self._next_chunk = 0
        self._row_shape: tuple[int, int] | None = None
        self._row_dtype: str | None = None
        self.start = request.routed_experts_prompt_start
        """Position of the first row."""
        self.num_tokens = 0
        self.num_rows = 0
        self.end: End | None = None
        """The terminal chunk's; None while the stream is open."""

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk.

        Raises:
            RemoteProtocolError: it is not the next one, or contradicts what came before; nothing was taken.
        """
        if self.end is not None:
            raise RemoteProtocolError(f"chunk {chunk.chunk_index} after the terminal chunk")
        if chunk.chunk_index != self._next_chunk:
            raise RemoteProtocolError(f"chunk {chunk.chunk_index} came where {self._next_chunk} is next")
        self._check_logprobs(chunk)
        if chunk.routed_experts is not None:
            self._check_rows(chunk.routed_experts)
        num_tokens = self.num_tokens + chunk.num_tokens
        num_rows = self.num_rows + (0 if chunk.routed_experts is None else chunk.routed_experts.shape[0])
        if chunk.end is not None:
            self._check_totals(chunk.end, num_tokens, num_rows)
        if chunk.routed_experts is not None:
            self._row_shape = chunk.routed_experts.shape[1:]
            self._row_dtype = chunk.routed_experts.dtype
        self._next_chunk += 1
        self.num_tokens, self.num_rows, self.end = num_tokens, num_rows, chunk.end
        if self._keep:
            self._chunks.append(chunk)

    def _check_logprobs(self, chunk: Chunk) -> None:
        if chunk.num_tokens and (chunk.logprobs_data is None) != (self._top_width is None):
            raise RemoteProtocolError(
                f"logprobs={self._top_width} was asked for, and chunk {chunk.chunk_index} differs"
            )
        num_tops = 0 if chunk.top_logprobs is None else len(chunk.top_logprobs.token_ids)
        if num_tops != (chunk.num_tokens if self._top_width else 0):
            raise RemoteProtocolError(f"{chunk.num_tokens} tokens came with {num_tops} rows of top logprobs")

    def _check_rows(self, part: RoutedExperts) -> None:
        expected = self.start + self.num_rows
        if part.start != expected:
            raise RemoteProtocolError(f"routing rows from {part.start} came where {expected} is next")
        known = self._row_shape is not None
        if known and (part.shape[1:] != self._row_shape or part.dtype != self._row_dtype):
            raise RemoteProtocolError(
                f"routing changed from {self._row_shape} {self._row_dtype} to {part.shape[1:]} {part.dtype}"
            )

    def _check_totals(self, end: End, num_tokens: int, num_rows: int) -> None:
        if (end.num_tokens, end.num_rows) != (num_tokens, num_rows):
            raise RemoteProtocolError(
                f"{num_tokens} tokens and {num_rows} rows came of {end.num_tokens} and {end.num_rows}"
            )
        if end.error is not None:
            return
        if end.routed_experts_start is None:
            if self._needs_routing or num_rows:
                raise RemoteProtocolError("the terminal chunk speaks of no routing")
            return
        expected = expected_rows(self._prompt_len, self.start, num_tokens)
        if end.routed_experts_start != self.start or num_rows != expected:
            raise RemoteProtocolError(
                f"{num_rows} routing rows from {end.routed_experts_start} for {num_tokens} tokens after a prompt of "
                f"{self._prompt_len}; {expected} rows from {self.start} were to come"
            )

    def arrays(self) -> dict[str, Any]:
        """The arrays of a `Generation` by their field names, each copied once out of the frames; needs `keep`."""
        chunks = self._chunks
        sizes = [chunk.num_tokens for chunk in chunks]
        tops = [chunk.top_logprobs for chunk in chunks if chunk.top_logprobs is not None]
        prompts = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
        prompt_tops = [prompt.top for prompt in prompts if prompt.top is not None]
        has_logprobs = any(chunk.logprobs_data is not None for chunk in chunks if chunk.num_tokens)
        return {
            "token_ids": _join([chunk.token_ids for chunk in chunks], "i4"),
            "logprobs": _join([chunk.logprobs for chunk in chunks if chunk.logprobs is not None], "f4")
            if has_logprobs
            else None,
            "weight_versions": np.repeat(np.array([chunk.weight_version for chunk in chunks], "i4"), sizes),
            "routed_experts": self._rows(),
            "top_token_ids": _join([top.token_ids for top in tops], "i4") if tops else None,
            "top_logprobs": _join([top.logprobs for top in tops], "f4") if tops else None,
            "prompt_logprobs": _join([prompt.logprobs for prompt in prompts], "f4") if prompts else None,
            "prompt_top_token_ids": _join([top.token_ids for top in prompt_tops], "i4") if prompt_tops else None,
            "prompt_top_logprobs": _join([top.logprobs for top in prompt_tops], "f4") if prompt_tops else None,
        }

    def _rows(self) -> Rows | None:
        if self._row_shape is None or self._row_dtype is None:
            return None
        rows = np.empty((self.num_rows, *self._row_shape), DTYPES[self._row_dtype])
        at = 0
        for chunk in self._chunks:
            if chunk.routed_experts is not None:
                part = chunk.routed_experts.numpy()
                rows[at : at + len(part)] = part
                at += len(part)
        return rows


def _join(parts: list[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    """Concatenate into a writable array of the caller's own."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
