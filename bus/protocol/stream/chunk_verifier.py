"""The client's half of one attempt: chunks are checked as they come.

Invariant: whatever passes to its end is complete: chunk numbers, token totals and the row rule have been checked, so
that nothing missing or doubled can be mistaken for a result. And it ends: no more passes than what was asked for.
"""

from ....schemas.chunk import Chunk, End, PromptLogprobs, RoutedExperts
from ....schemas.errors import RemoteProtocolError
from ....schemas.limits import MAX_TOKENS
from ....schemas.request import GenerateRequest
from ....schemas.rows import expected_rows

__all__ = ["ChunkVerifier"]


class ChunkVerifier:
    """One attempt of one child, as far as it has come.

    Args:
        request: what was asked for; `sampling.n` does not matter.
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
        has_masks = self._checked_masks(chunk)
        num_prompt_logprobs = self._checked_prompt_logprobs(chunk.prompt_logprobs)
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
        """Refuse more than was asked for, and chunks that bring nothing: either could go on for ever."""
        max_rows = max(self._prompt_len - self.start, 0) + self._max_tokens
        if num_tokens > self._max_tokens or num_rows > max_rows:
            raise RemoteProtocolError(
                f"{num_tokens} tokens and {num_rows} rows came; allowed: {self._max_tokens} and {max_rows}"
            )
        if num_prompt_logprobs > max(self._prompt_len - 1, 0):
            raise RemoteProtocolError(f"{num_prompt_logprobs} prompt logprobs came for a prompt of {self._prompt_len}")
        is_news = (num_tokens, num_rows, num_prompt_logprobs) != (
            self.num_tokens,
            self.num_rows,
            self._num_prompt_logprobs,
        )
        if not is_news and chunk.end is None and chunk.chunk_index:
            raise RemoteProtocolError(f"chunk {chunk.chunk_index} brings nothing")

    def _check_logprobs(self, chunk: Chunk) -> None:
        if chunk.num_tokens and (chunk.logprobs_data is None) != (self._top_width is None):
            raise RemoteProtocolError(
                f"logprobs={self._top_width} was asked for, and chunk {chunk.chunk_index} differs"
            )
        num_tops = 0 if chunk.top_logprobs is None else len(chunk.top_logprobs.token_ids)
        if num_tops != (chunk.num_tokens if self._top_width else 0):
            raise RemoteProtocolError(f"{chunk.num_tokens} tokens came with {num_tops} rows of top logprobs")

    def _checked_masks(self, chunk: Chunk) -> bool | None:
        """Whether all tokens of this attempt have sampling masks, or none has; None: not known yet."""
        if not chunk.num_tokens:
            return self._has_masks
        has_masks = chunk.sampling_mask is not None
        if self._has_masks not in (None, has_masks):
            raise RemoteProtocolError(
                f"chunk {chunk.chunk_index} came with{'' if has_masks else 'out'} sampling masks, unlike those before "
                "or what was asked for"
            )
        return has_masks

    def _checked_prompt_logprobs(self, part: PromptLogprobs | None) -> int:
        """How many there are with `part`."""
        if part is None:
            return self._num_prompt_logprobs
        if not self._wants_prompt_logprobs or part.start != 1 + self._num_prompt_logprobs:
            raise RemoteProtocolError(f"prompt logprobs from {part.start} came uncalled for or out of order")
        return self._num_prompt_logprobs + len(part.logprobs)

    def _check_prompt_logprobs(self, end: End, num_tokens: int, found: int) -> None:
        expected = self._prompt_len - 1 if self._wants_prompt_logprobs and num_tokens else found
        if end.error is None and found != expected:
            raise RemoteProtocolError(f"{found} of {expected} prompt logprobs came")

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
