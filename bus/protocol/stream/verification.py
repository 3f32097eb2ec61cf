"""The client's half of one attempt: verifies chunks as they arrive, by the request and by what the worker announced.

Invariant: a stream that passes to its end is complete. Chunk numbers, token totals and the row rule were verified, so
missing or duplicated data cannot pass as a result. The stream is also bounded: it never has more than the request asked
for. A worker announces the size of its vocabulary, and its versions.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from ....schemas.chunk import Chunk, End, PromptLogprobs, RoutedExperts
from ....schemas.errors import RemoteProtocolError
from ....schemas.limits import MAX_TOKEN_ID, MAX_TOKENS
from ....schemas.presence import WorkerPresence
from ....schemas.request import GenerateRequest
from ....schemas.rows import expected_rows

FEW_BYTES: Final = 64
"""Bytes of ids up to which `struct` is faster than numpy: a frame of one step of a few requests."""
_U4: Final = np.dtype("<u4")


class Announced(NamedTuple):
    """The limits of a chunk."""

    vocab_size: int
    """Token ids are below it."""
    weight_version: int
    lora_version: int
    """The version of the adapter of the request; 0: it has none."""


class ChunkVerifier:
    """Verifies the chunks of one attempt of one child request.

    Args:
        request: the request of the attempt; `sampling.n` has no effect.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._prompt_len = request.prompt_len
        self._max_tokens = MAX_TOKENS if request.sampling.max_tokens is None else request.sampling.max_tokens
        self._top_width = request.sampling.logprobs
        self._wants_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self._num_prompt_logprobs = 0
        self._needs_routing = request.return_routed_experts is True
        self._has_masks = request.return_sampling_mask
        self._next_chunk = 0
        self._row_shape: tuple[int, int] | None = None
        self._row_dtype: str | None = None
        self.start = request.routed_experts_prompt_start
        """The position of the first row."""
        self.num_tokens = 0
        self.num_rows = 0
        self.end: End | None = None
        """The end in the terminal chunk; None while the stream is open."""

    def add(self, chunk: Chunk) -> None:
        """Verify the next chunk.

        Raises:
            RemoteProtocolError: it is not the next chunk, or contradicts earlier chunks; nothing was changed.
        """
        if self.end is not None:
            raise RemoteProtocolError(f"received chunk {chunk.chunk_index} after the terminal chunk")
        if chunk.chunk_index != self._next_chunk:
            raise RemoteProtocolError(f"received chunk {chunk.chunk_index}, expected chunk {self._next_chunk}")
        self._check_logprobs(chunk)
        if chunk.routed_experts is not None:
            self._check_rows(chunk.routed_experts)
        has_masks = self._check_masks(chunk)
        num_prompt_logprobs = self._count_prompt_logprobs(chunk.prompt_logprobs)
        num_tokens = self.num_tokens + chunk.num_tokens
        num_rows = self.num_rows + (0 if chunk.routed_experts is None else chunk.routed_experts.shape[0])
        self._check_bounds(chunk, num_tokens, num_rows, num_prompt_logprobs)
        if chunk.end is not None:
            self._check_totals(chunk.end, num_tokens, num_rows)
            self._check_prompt_logprobs(chunk.end, num_tokens, num_prompt_logprobs)
        if chunk.routed_experts is not None:
            self._row_shape = chunk.routed_experts.shape[1:]
            self._row_dtype = chunk.routed_experts.dtype
        self._next_chunk += 1
        self._has_masks = has_masks
        self._num_prompt_logprobs = num_prompt_logprobs
        self.num_tokens, self.num_rows, self.end = num_tokens, num_rows, chunk.end

    def _check_bounds(self, chunk: Chunk, num_tokens: int, num_rows: int, num_prompt_logprobs: int) -> None:
        """Check that the chunk is not empty and stays within the request, so that no stream is endless."""
        max_rows = max(self._prompt_len - self.start, 0) + self._max_tokens
        if num_tokens > self._max_tokens or num_rows > max_rows:
            raise RemoteProtocolError(
                f"received {num_tokens} tokens and {num_rows} rows; allowed: {self._max_tokens} and {max_rows}"
            )
        if num_prompt_logprobs > max(self._prompt_len - 1, 0):
            raise RemoteProtocolError(
                f"received {num_prompt_logprobs} prompt logprobs for a prompt of {self._prompt_len} tokens"
            )
        is_news = (num_tokens, num_rows, num_prompt_logprobs) != (
            self.num_tokens,
            self.num_rows,
            self._num_prompt_logprobs,
        )
        if not is_news and chunk.end is None and chunk.chunk_index:
            raise RemoteProtocolError(f"chunk {chunk.chunk_index} is empty")

    def _check_logprobs(self, chunk: Chunk) -> None:
        if chunk.num_tokens and (chunk.logprobs_data is None) != (self._top_width is None):
            raise RemoteProtocolError(
                f"the request has logprobs={self._top_width}, but chunk {chunk.chunk_index} differs"
            )
        num_tops = 0 if chunk.top_logprobs is None else len(chunk.top_logprobs.token_ids)
        if num_tops != (chunk.num_tokens if self._top_width else 0):
            raise RemoteProtocolError(f"received {chunk.num_tokens} tokens with {num_tops} rows of top logprobs")

    def _check_masks(self, chunk: Chunk) -> bool | None:
        """Return True if all tokens of this attempt have sampling masks, False if none has; None: not known yet."""
        if not chunk.num_tokens:
            return self._has_masks
        has_masks = chunk.sampling_mask is not None
        if self._has_masks not in (None, has_masks):
            raise RemoteProtocolError(
                f"chunk {chunk.chunk_index} came with{'' if has_masks else 'out'} sampling masks, unlike earlier "
                "chunks or the request"
            )
        return has_masks

    def _count_prompt_logprobs(self, part: PromptLogprobs | None) -> int:
        """Return the number of prompt logprobs with those of `part`."""
        if part is None:
            return self._num_prompt_logprobs
        if not self._wants_prompt_logprobs or part.start != 1 + self._num_prompt_logprobs:
            raise RemoteProtocolError(
                f"received prompt logprobs from {part.start}, which are out of order or were not requested"
            )
        return self._num_prompt_logprobs + len(part.logprobs)

    def _check_prompt_logprobs(self, end: End, num_tokens: int, found: int) -> None:
        expected = self._prompt_len - 1 if self._wants_prompt_logprobs and num_tokens else found
        if end.error is None and found != expected:
            raise RemoteProtocolError(f"received {found} of {expected} prompt logprobs")

    def _check_rows(self, part: RoutedExperts) -> None:
        expected = self.start + self.num_rows
        if part.start != expected:
            raise RemoteProtocolError(f"received rows from position {part.start}, expected position {expected}")
        known = self._row_shape is not None
        if known and (part.shape[1:] != self._row_shape or part.dtype != self._row_dtype):
            raise RemoteProtocolError(
                f"routed experts changed from {self._row_shape} {self._row_dtype} to {part.shape[1:]} {part.dtype}"
            )

    def _check_totals(self, end: End, num_tokens: int, num_rows: int) -> None:
        if (end.num_tokens, end.num_rows) != (num_tokens, num_rows):
            raise RemoteProtocolError(
                f"received {num_tokens} tokens and {num_rows} rows of {end.num_tokens} and {end.num_rows}"
            )
        if end.error is not None:
            return
        if end.routed_experts_start is None:
            if self._needs_routing or num_rows:
                raise RemoteProtocolError("the terminal chunk has no start of routed experts")
            return
        expected = expected_rows(self._prompt_len, self.start, num_tokens)
        if end.routed_experts_start != self.start or num_rows != expected:
            raise RemoteProtocolError(
                f"received {num_rows} rows from {end.routed_experts_start} for {num_tokens} tokens after a prompt of "
                f"{self._prompt_len}; expected {expected} rows from {self.start}"
            )


def announced_by(workers: Iterable[WorkerPresence], lora: str | None = None) -> Announced:
    """Return what any of these workers announced. If none announced a vocabulary, each valid id is below it.

    Args:
        lora: the adapter of the request; None: the base model.
    """
    known = list(workers)
    return Announced(
        max(
            (each.capabilities.vocab_size for each in known if each.capabilities is not None), default=MAX_TOKEN_ID + 1
        ),
        max((each.weight_version for each in known), default=0),
        max((info.version for each in known for info in each.loras if info.name == lora), default=0),
    )


def are_within(chunks: Sequence[Chunk], presence: WorkerPresence) -> bool:
    """Return True if chunks agree with the presence of their worker. It is called for each frame.

    The ids of all chunks are compared together. A presence without capabilities announced no vocabulary: False.
    """
    if presence.capabilities is None:
        return False
    version, lora_version = presence.weight_version, None
    ids = []
    for chunk in chunks:
        if chunk.weight_version > version:
            return False
        if chunk.lora_version is not None:
            if lora_version is None:
                lora_version = max((info.version for info in presence.loras), default=0)
            if chunk.lora_version > lora_version:
                return False
        ids.append(chunk.token_ids_data)
        if chunk.top_logprobs is not None or chunk.sampling_mask is not None or chunk.prompt_logprobs is not None:
            ids += _collect_other_ids(chunk)
    return _find_greatest(b"".join(ids)) < presence.capabilities.vocab_size


def problem_of(chunk: Chunk, announced: Announced) -> str | None:
    """Return how a chunk exceeds these limits; None: it does not."""
    greatest = _find_greatest(b"".join((chunk.token_ids_data, *_collect_other_ids(chunk))))
    if greatest >= announced.vocab_size:
        return f"token id {greatest}; allowed by its vocabulary: 0 to {announced.vocab_size - 1}"
    if chunk.weight_version > announced.weight_version:
        return f"weight version {chunk.weight_version}; announced and recorded: {announced.weight_version}"
    if chunk.lora_version is not None and chunk.lora_version > announced.lora_version:
        return f"adapter version {chunk.lora_version}; announced and recorded: {announced.lora_version}"
    return None


def _collect_other_ids(chunk: Chunk) -> list[bytes]:
    """Return the ids of tokens that were not sampled."""
    prompt = chunk.prompt_logprobs
    tops = (chunk.top_logprobs, None if prompt is None else prompt.top, chunk.sampling_mask)
    return [each.token_ids_data for each in tops if each is not None]


def _find_greatest(ids: bytes) -> int:
    """Return the greatest of <i4 ids. A negative id, which is invalid, is above all others; 0 if there is none."""
    if len(ids) > FEW_BYTES:
        return int(np.maximum.reduce(np.frombuffer(ids, _U4)))
    return max(struct.unpack(f"<{len(ids) // 4}I", ids), default=0)
