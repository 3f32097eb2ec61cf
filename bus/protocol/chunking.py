"""The worker's half of a stream: what engine steps add to a request becomes numbered chunks that fit a message.

Invariant: the chunks of one attempt and child are numbered from 0 without a gap, hold every token and every row
once and in order, and exactly one of them, the last, has an `End` whose totals are theirs.
"""

from collections.abc import Iterator

import numpy as np

from bus.protocol.step import RequestStep
from schemas.chunk import Chunk, ChunkError, End, FinishReason, PromptLogprobs, RoutedExperts, TopLogprobs
from schemas.errors import ErrorCode, LocalProtocolError
from schemas.messages import RequestKey
from schemas.presence import RoutedExpertsInfo
from schemas.rows import DTYPES, Rows, expected_rows, no_rows

__all__ = ["ChunkWriter", "chunk_bytes"]

CHUNK_OVERHEAD_BYTES = 256
"""More than msgpack needs for the numbers, headers and nil fields of one chunk."""


def chunk_bytes(chunk: Chunk) -> int:
    """An upper bound of the encoded size of `chunk`, in bytes."""
    size = CHUNK_OVERHEAD_BYTES + len(chunk.request_id.encode()) + len(chunk.token_ids_data)
    size += len(chunk.logprobs_data or b"") + _top_bytes(chunk.top_logprobs)
    if chunk.routed_experts is not None:
        size += len(chunk.routed_experts.data)
    if chunk.prompt_logprobs is not None:
        size += len(chunk.prompt_logprobs.logprobs_data) + _top_bytes(chunk.prompt_logprobs.top)
    if chunk.error is not None:
        error = chunk.error
        size += sum(len(text.encode()) for text in (error.message, error.field, error.problem, error.allowed))
    return size


def _top_bytes(top: TopLogprobs | None) -> int:
    return 0 if top is None else len(top.token_ids_data) + len(top.logprobs_data)


class ChunkWriter:
    """Writes the chunks of one attempt and child.

    Args:
        key: which attempt and child.
        prompt_len: Lp, for the row rule.
        routing: the shape of the model's routing; None when none is returned.
        start: the `routed_experts_prompt_start` applied.
        part_bytes: rows and prompt logprobs larger than this are split into several chunks.
    """

    def __init__(
        self, key: RequestKey, *, prompt_len: int, routing: RoutedExpertsInfo | None, start: int, part_bytes: int
    ) -> None:
        self._key = key
        self._prompt_len = prompt_len
        self._routing = routing
        self._start = start
        self._part_bytes = part_bytes
        self._num_chunks = 0
        self._num_tokens = 0
        self._num_rows = 0
        self._cached_tokens: int | None = None

    def write(self, step: RequestStep, weight_version: int) -> list[Chunk]:
        """Chunk what one step added: large prompt logprobs and rows go ahead in parts, the tokens come last.

        Raises:
            LocalProtocolError: the step's arrays contradict each other or the row rule; nothing of it was written.
        """
        before = self._num_chunks, self._num_tokens, self._num_rows
        try:
            return self._write(step, weight_version)
        except (LocalProtocolError, ValueError) as exc:
            # `fail` goes on from the last chunk that was sent.
            self._num_chunks, self._num_tokens, self._num_rows = before
            raise LocalProtocolError(str(exc)) from exc

    def _write(self, step: RequestStep, weight_version: int) -> list[Chunk]:
        ahead = list(_prompt_parts(step.prompt_logprobs, self._part_bytes))
        prompt_logprobs = ahead.pop() if len(ahead) == 1 else None
        rows = list(self._row_parts(step))
        last_rows = rows.pop() if rows else None
        self._num_tokens += len(step.token_ids)
        if step.cached_tokens is not None:
            self._cached_tokens = step.cached_tokens
        chunks = [self._chunk(weight_version, prompt_logprobs=part) for part in ahead]
        chunks += [self._chunk(weight_version, routed_experts=part) for part in rows]
        end = self._end(step)
        if end is not None and last_rows is None and self._routing is not None and not self._num_rows:
            # The receiver learns the shape even where there is no row.
            routing = self._routing
            last_rows = self._wrap(no_rows(routing.num_layers, routing.top_k, routing.dtype))
        chunks.append(
            self._chunk(weight_version, step, prompt_logprobs=prompt_logprobs, routed_experts=last_rows, end=end)
        )
        return chunks

    def fail(self, error: ChunkError, weight_version: int) -> Chunk:
        """The terminal chunk of a request that failed; totals are those of the chunks before it."""
        return self._chunk(weight_version, end=self._totals(FinishReason.ERROR, error=error))

    def _row_parts(self, step: RequestStep) -> Iterator[RoutedExperts]:
        rows = step.routed_experts
        if rows is None or self._routing is None or not len(rows):
            return
        position = self._start + self._num_rows
        wanted = (self._routing.num_layers, self._routing.top_k)
        if rows.shape[1:] != wanted or rows.dtype != DTYPES[self._routing.dtype]:
            raise LocalProtocolError(
                f"the engine gave rows of {rows.shape[1:]} {rows.dtype}; its model has {wanted} {self._routing.dtype}"
            )
        if step.routed_experts_start != position:
            raise LocalProtocolError(f"the engine gave rows from {step.routed_experts_start}; {position} comes next")
        per_part = max(self._part_bytes // max(rows[0].nbytes, 1), 1)
        for first in range(0, len(rows), per_part):
            part = rows[first : first + per_part]
            yield self._wrap(part)
            self._num_rows += len(part)

    def _wrap(self, rows: Rows) -> RoutedExperts:
        return RoutedExperts.from_rows(np.ascontiguousarray(rows), self._start + self._num_rows)

    def _end(self, step: RequestStep) -> End | None:
        if step.finish_reason is None:
            return None
        # A failed request may lack rows of tokens that it did deliver: nobody takes it for a result.
        if self._routing is not None and step.error is None:
            expected = expected_rows(self._prompt_len, self._start, self._num_tokens)
            if self._num_rows != expected:
                raise LocalProtocolError(
                    f"the engine gave {self._num_rows} rows for {self._num_tokens} tokens "
                    f"after a prompt of {self._prompt_len} from {self._start}; {expected} belong to them"
                )
        error = None if step.error is None else ChunkError(ErrorCode.ENGINE_ERROR, step.error)
        return self._totals(step.finish_reason, error=error, stop_reason=step.stop_reason)

    def _totals(
        self, finish_reason: FinishReason, *, error: ChunkError | None = None, stop_reason: int | None = None
    ) -> End:
        return End(
            finish_reason=finish_reason,
            num_tokens=self._num_tokens,
            num_rows=self._num_rows,
            stop_reason=stop_reason,
            error=error,
            cached_tokens=self._cached_tokens,
            routed_experts_start=None if self._routing is None else self._start,
        )

    def _chunk(
        self,
        weight_version: int,
        step: RequestStep | None = None,
        *,
        prompt_logprobs: PromptLogprobs | None = None,
        routed_experts: RoutedExperts | None = None,
        end: End | None = None,
    ) -> Chunk:
        """The next chunk, with the tokens of `step` when given."""
        logprobs = None if step is None else step.logprobs
        chunk = Chunk(
            request_id=self._key.request_id,
            attempt=self._key.attempt,
            child=self._key.child,
            chunk_index=self._num_chunks,
            weight_version=weight_version,
            token_ids_data=b"" if step is None else step.token_ids.astype("<i4", copy=False).tobytes(),
            logprobs_data=None if logprobs is None else logprobs.astype("<f4", copy=False).tobytes(),
            routed_experts=routed_experts,
            top_logprobs=None if step is None else step.top_logprobs,
            prompt_logprobs=prompt_logprobs,
            end=end,
        )
        self._num_chunks += 1
        return chunk


def _prompt_parts(prompt_logprobs: PromptLogprobs | None, part_bytes: int) -> Iterator[PromptLogprobs]:
    if prompt_logprobs is None:
        return
    top = prompt_logprobs.top
    width = 0 if top is None else top.width
    per_part = max(part_bytes // (4 + 8 * width), 1)
    # Without a value, as for a prompt of one token, still one part: the receiver learns that there are none.
    for first in range(0, max(len(prompt_logprobs.logprobs_data) // 4, 1), per_part):
        past = first + per_part
        yield PromptLogprobs(
            start=prompt_logprobs.start + first,
            logprobs_data=prompt_logprobs.logprobs_data[4 * first : 4 * past],
            top=None
            if top is None
            else TopLogprobs(
                width,
                top.token_ids_data[4 * width * first : 4 * width * past],
                top.logprobs_data[4 * width * first : 4 * width * past],
            ),
        )
