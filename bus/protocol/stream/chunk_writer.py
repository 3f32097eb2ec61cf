"""The worker's half of a stream: turns the steps of a request into numbered chunks that fit a message.

The writer adds each completed step, and hands out chunks when the link has credit. It merges steps that are buffered
meanwhile. A chunk gets its number when it is handed out, so buffered output can still be merged or discarded.

Invariant: the chunks of one attempt and child are numbered from 0 without a gap. They have every token and every row
once and in order. Only the last chunk has an `End`, with the totals of all chunks. No row is ahead of the tokens of its
chunk, so the stream can be resumed after a chunk with tokens.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ....schemas.chunk import (
    Chunk,
    ChunkError,
    End,
    FinishReason,
    PromptLogprobs,
    RoutedExperts,
    SamplingMask,
    TopLogprobs,
)
from ....schemas.errors import LocalProtocolError
from ....schemas.messages import RequestKey
from ....schemas.presence import RoutedExpertsInfo
from ....schemas.rows import DTYPES, Rows, expected_rows
from .engine_step import RequestStep

_I4 = np.dtype("<i4")
_F4 = np.dtype("<f4")
KEPT_BYTES = 16 * 1024
"""Rows of one step of at least this size are not copied: those of a prompt, not of a token."""
MAX_KEPT_SHARE = 2
"""An array is still copied if it is a view of an array this many times as large: a slow client would keep it alive."""


Buffer = bytes | bytearray
"""Bytes in order. One part is kept as it came, so that the usual single token of a step is not copied."""


def append(buffer: Buffer, data: bytes) -> Buffer:
    """Return the buffer with `data` at its end. It may be the same object."""
    if not buffer:
        return data
    if isinstance(buffer, bytes):
        buffer = bytearray(buffer)
    buffer += data
    return buffer


def pop_front(buffer: Buffer, size: int) -> tuple[bytes, Buffer]:
    """Return the first `size` bytes, and the buffer without them, which may be the same object."""
    if size == len(buffer):
        return bytes(buffer), b""
    data = bytes(buffer[:size])
    if isinstance(buffer, bytes):
        return data, buffer[size:]
    del buffer[:size]
    return data, buffer


def check_mask(mask: SamplingMask, num_tokens: int, max_bytes: int) -> None:
    """Check that the masks are those of `num_tokens` tokens, and that the mask of each token fits a chunk.

    Raises:
        LocalProtocolError: one of these checks fails.
    """
    counts = mask.counts
    if len(counts) != num_tokens:
        raise LocalProtocolError(f"the engine returned {num_tokens} tokens but sampling masks of {len(counts)}")
    if num_tokens and 4 * int(counts.max()) > max_bytes:
        raise LocalProtocolError(
            f"the engine returned a sampling mask of {counts.max()} ids; a message has room for {max_bytes // 4}. "
            "Use a lower top_k, or return_sampling_mask=False"
        )


class TokenBuffer:
    """Tokens that may share a chunk: the same weights and adapter, and the same kinds of data for each token.

    Args:
        kind: (weight version, adapter version or None, whether there are logprobs, width of the top logprobs or 0,
            whether there are sampling masks).
    """

    def __init__(self, kind: tuple[int, int | None, bool, int, bool]) -> None:
        self.kind = kind
        self.weight_version, self.lora_version, self.has_logprobs, self._width, self.has_masks = kind
        self.token_bytes = 4 + 4 * self.has_logprobs + 8 * self._width + 4 * self.has_masks
        """The bytes of one token with all its data, except the ids of its mask."""
        self.num_tokens = 0
        self.kv_recomputed = False
        """True if the KV of all positions before the first token of this buffer was recomputed."""
        self._ids: Buffer = b""
        self._logprobs: Buffer = b""
        self._top_ids: Buffer = b""
        self._top_logprobs: Buffer = b""
        self._mask_counts: Buffer = b""
        self._mask_ids: Buffer = b""

    def add(self, token_ids: bytes, logprobs: bytes | None) -> None:
        """Append tokens of this kind, <i4[k] and <f4[k]."""
        self.num_tokens += len(token_ids) // 4
        self._ids = append(self._ids, token_ids)
        if logprobs is not None:
            self._logprobs = append(self._logprobs, logprobs)

    def add_extras(self, top: TopLogprobs | None, mask: SamplingMask | None) -> None:
        """Append the top logprobs and masks of the tokens that were added last."""
        if top is not None:
            self._top_ids = append(self._top_ids, top.token_ids_data)
            self._top_logprobs = append(self._top_logprobs, top.logprobs_data)
        if mask is not None:
            self._mask_counts = append(self._mask_counts, mask.counts_data)
            self._mask_ids = append(self._mask_ids, mask.token_ids_data)

    def num_bytes(self, count: int) -> int:
        """Return the bytes of the first `count` tokens."""
        size = count * self.token_bytes
        return size + 4 * int(self._num_ids(count).sum()) if self.has_masks else size

    def num_fitting(self, num_bytes: int, row_bytes: int) -> int:
        """Return how many tokens fit, at least one. Each token except the last comes with a row of `row_bytes`."""
        if not self.has_masks:
            room = max(num_bytes - self.token_bytes, 0)
            return min(self.num_tokens, 1 + room // (self.token_bytes + row_bytes))
        # Each token needs at least `token_bytes`, so only this many need a check.
        sizes = 4 * self._num_ids(min(self.num_tokens, 1 + max(num_bytes, 0) // self.token_bytes))
        sizes += self.token_bytes + row_bytes
        return max(int(np.searchsorted(sizes.cumsum() - row_bytes, num_bytes, "right")), 1)

    def _num_ids(self, count: int) -> npt.NDArray[np.int64]:
        """Return the number of ids in the masks of the first `count` tokens, i8[count]."""
        # A copy, because a view of the buffer would prevent it from growing.
        return np.frombuffer(bytes(self._mask_counts[: 4 * count]), _I4).astype(np.int64)

    def pop(self, count: int) -> tuple[bytes, bytes | None, TopLogprobs | None, SamplingMask | None]:
        """Remove the first `count` tokens, at least one.

        Return ids, logprobs, top logprobs and masks in wire format.
        """
        self.kv_recomputed = False
        logprobs, top, mask = None, None, None
        if self._width:
            size = 4 * self._width * count
            top_ids, self._top_ids = pop_front(self._top_ids, size)
            top_logprobs, self._top_logprobs = pop_front(self._top_logprobs, size)
            top = TopLogprobs(self._width, top_ids, top_logprobs)
        if self.has_masks:
            size = 4 * int(self._num_ids(count).sum())
            counts, self._mask_counts = pop_front(self._mask_counts, 4 * count)
            mask_ids, self._mask_ids = pop_front(self._mask_ids, size)
            mask = SamplingMask(counts, mask_ids)
        if self.has_logprobs:
            logprobs, self._logprobs = pop_front(self._logprobs, 4 * count)
        ids, self._ids = pop_front(self._ids, 4 * count)
        self.num_tokens -= count
        return ids, logprobs, top, mask


class RowBuffer:
    """The bytes of rows, in order.

    The buffer merges small steps at once, and cuts large arrays without a copy.
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        # No part is empty. Only the last may grow.
        self._parts: deque[Buffer | memoryview] = deque()

    def add(self, rows: Rows) -> None:
        """Append C-contiguous `rows`. Large ones must not change any more."""
        if rows.nbytes >= KEPT_BYTES and _keeps_little_else(rows):
            self._parts.append(rows.reshape(-1).view(np.uint8).data)
        else:
            self.add_bytes(rows.tobytes())

    def add_bytes(self, rows: bytes) -> None:
        """Append the bytes of rows."""
        if self._parts and not isinstance(last := self._parts[-1], memoryview):
            self._parts[-1] = append(last, rows)
        else:
            self._parts.append(rows)

    def pop(self, size: int) -> bytes | memoryview:
        """Remove and return the first `size` bytes, which must exist."""
        if size and size <= len(self._parts[0]):
            return self._pop_first(size)
        taken = bytearray()
        while len(taken) < size:
            taken += self._pop_first(min(size - len(taken), len(self._parts[0])))
        return bytes(taken)

    def _pop_first(self, size: int) -> bytes | memoryview:
        first = self._parts[0]
        if isinstance(first, memoryview):
            data, rest = first[:size], first[size:]
        else:
            data, rest = pop_front(first, size)
        if rest:
            self._parts[0] = rest
        else:
            self._parts.popleft()
        return data

    def clear(self) -> None:
        """Remove all rows."""
        self._parts.clear()


def _keeps_little_else(rows: Rows) -> bool:
    """Return True if the memory that `rows` keeps alive is mostly its own; False if this is not known."""
    owner: object = rows.base
    if owner is None:
        return True
    num_bytes = getattr(owner, "nbytes", None)
    return num_bytes is not None and num_bytes <= rows.nbytes * MAX_KEPT_SHARE


CHUNK_OVERHEAD_BYTES = 256
"""More than msgpack needs for the numbers, headers and nil fields of one chunk."""
SEGMENT_BYTES = 256 * 1024
"""Bytes of rows or prompt logprobs in one chunk. A segment delays the tokens of other requests for a millisecond."""


class _ChunkPlan(NamedTuple):
    """The contents of the next chunk."""

    num_bytes: int
    """Upper bound of its encoded size in bytes."""
    num_tokens: int
    num_rows: int
    is_terminal: bool
    prompt_logprobs: PromptLogprobs | None = None


class ChunkWriter:
    """Writes the chunks of one attempt and child.

    Args:
        key: the attempt and child.
        prompt_len: the length Lp of the prompt, for the row rule.
        routing: the shape of the model's routed experts; None if none are returned.
        start: the `routed_experts_prompt_start` that applies.
        segment_bytes: the maximum bytes of arrays in one chunk, unless a single token or row is larger.
        traceparent: the trace context of the request, which the first chunk returns.

    Attributes:
        key: the argument.
        segment_bytes: the argument; the caller may change it before the first step is added.
        max_mask_bytes: the maximum bytes of ids in one token's sampling mask. The caller may set it before the first
            step is added.
        reports_kv: True if the engine reports recomputed KV. The caller may set it before the first step is added.
        taken_tokens: the number of added tokens, whether or not a chunk with them was returned.
        unsent_bytes: the bytes that were added and that no returned chunk contains.
        last_bytes: an upper bound of the encoded size of the last returned chunk.
        is_ended: True if the last step was added or the request failed. No other step may follow.
        has_left: True if the terminal chunk was returned.
    """

    def __init__(
        self,
        key: RequestKey,
        *,
        prompt_len: int,
        routing: RoutedExpertsInfo | None,
        start: int,
        segment_bytes: int,
        traceparent: str | None = None,
    ) -> None:
        self.key = key
        self._prompt_len = prompt_len
        self._routing = routing
        self._start = start
        self.segment_bytes = segment_bytes
        self.max_mask_bytes = SEGMENT_BYTES
        self.reports_kv = False
        self._traceparent = traceparent
        self._chunk_overhead = CHUNK_OVERHEAD_BYTES + text_bytes(key.request_id) + text_bytes(traceparent or "")
        self._row_bytes = 0 if routing is None else routing.row_bytes
        # Counts of the chunks that were handed out.
        self._num_chunks = self._num_tokens = self._num_rows = 0
        # Counts of all added output, handed out or not.
        self.taken_tokens = self._taken_rows = 0
        self._cached_tokens: int | None = None
        # Of the last step, or of the failure or abort.
        self._weight_version = 0
        self._lora_version: int | None = None
        # Output that was not handed out.
        self._prompt_logprobs: deque[PromptLogprobs] = deque()
        self._runs: deque[TokenBuffer] = deque()
        # The last run, after its tokens have left: most tokens are of the same kind as those before.
        self._empty_run: TokenBuffer | None = None
        self._rows = RowBuffer()
        # The end of the terminal chunk, without its totals.
        self._ending: End | None = None
        self.unsent_bytes = 0
        self.last_bytes = 0
        self.is_ended = False
        self.has_left = False

    @property
    def has_unsent(self) -> bool:
        """True if there is a next chunk."""
        return self.unsent_bytes > 0 or (self.is_ended and not self.has_left)

    def append_step(self, step: RequestStep, weight_version: int, lora_version: int | None = None) -> None:
        """Add the output of one step. Its arrays are copied, except a prompt's rows, which must not change any more.

        Args:
            weight_version: version of the weights that sampled the step's tokens.
            lora_version: version of the adapter that the request uses; None: it uses none.

        Raises:
            LocalProtocolError: the step's arrays contradict each other or the row rule; nothing was added.
        """
        num_tokens = len(step.token_ids)
        rows = step.routed_experts if self._routing is not None else None
        num_rows = 0 if rows is None else len(rows)
        self._check(step, num_tokens)
        if rows is not None and num_rows:
            self._check_rows(rows, step.routed_experts_start)
        self._check_row_rule(step, self.taken_tokens + num_tokens, self._taken_rows + num_rows)
        if step.prompt_logprobs is not None:
            for part in _split_prompt(step.prompt_logprobs, self.segment_bytes):
                self._prompt_logprobs.append(part)
                self.unsent_bytes += _count_prompt_bytes(part)
        if num_tokens:
            logprobs, mask = step.logprobs, step.sampling_mask
            width = 0 if step.top_logprobs is None else step.top_logprobs.width
            run = self._find_run(
                (weight_version, lora_version, logprobs is not None, width, mask is not None), step.kv_recomputed
            )
            ids = step.token_ids.astype(_I4, copy=False).tobytes()
            run.add(ids, None if logprobs is None else logprobs.astype(_F4, copy=False).tobytes())
            run.add_extras(step.top_logprobs, mask)
            self.unsent_bytes += num_tokens * run.token_bytes + (0 if mask is None else len(mask.token_ids_data))
        if rows is not None and num_rows:
            self._rows.add(rows)
            self.unsent_bytes += num_rows * self._row_bytes
        self.taken_tokens += num_tokens
        self._taken_rows += num_rows
        self._weight_version, self._lora_version = weight_version, lora_version
        if step.cached_tokens is not None:
            self._cached_tokens = step.cached_tokens
        if step.finish_reason is not None:
            error = None if step.error is None else ChunkError(step.error_code, step.error)
            self._ending = End(
                step.finish_reason, 0, 0, stop_reason=step.stop_reason, error=error, kv_params=step.kv_params
            )
            self.is_ended = True

    def append_token(
        self,
        token_id: bytes,
        logprob: bytes | None,
        row: bytes | None,
        row_start: int,
        weight_version: int,
        lora_version: int | None,
    ) -> None:
        """Add one token, as `append_step` does for a step with nothing else. This runs for each streamed token.

        Args:
            token_id: <i4.
            logprob: <f4.
            row: the routed experts of one position; None: the engine or the request has none.
            row_start: the position of the row.

        Raises:
            LocalProtocolError: as `append_step`; nothing was added.
        """
        self._check_open()
        if row is not None and self._routing is not None:
            most = self._prompt_len - self._start + self.taken_tokens + 1
            if len(row) != self._row_bytes or row_start != self._start + self._taken_rows or self._taken_rows >= most:
                raise LocalProtocolError(
                    f"the engine returned a row of {len(row)} bytes at position {row_start}; expected "
                    f"{self._row_bytes} at {self._start + self._taken_rows}, below {self._start + most}"
                )
            self._rows.add_bytes(row)
            self.unsent_bytes += self._row_bytes
            self._taken_rows += 1
        run = self._find_run((weight_version, lora_version, logprob is not None, 0, False), False)
        run.add(token_id, logprob)
        self.unsent_bytes += run.token_bytes
        self.taken_tokens += 1
        self._weight_version, self._lora_version = weight_version, lora_version

    def _find_run(self, kind: tuple[int, int | None, bool, int, bool], kv_recomputed: bool) -> TokenBuffer:
        """Return the run that takes tokens of this kind."""
        if not kv_recomputed:
            if self._runs and self._runs[-1].kind == kind:
                return self._runs[-1]
            if not self._runs and self._empty_run is not None and self._empty_run.kind == kind:
                self._runs.append(self._empty_run)
                return self._empty_run
        run = TokenBuffer(kind)
        run.kv_recomputed = kv_recomputed
        self._runs.append(run)
        return run

    def _check_open(self) -> None:
        if self.is_ended:
            raise LocalProtocolError("the engine returned a step after the request's last step")

    def _check(self, step: RequestStep, num_tokens: int) -> None:
        self._check_open()
        if step.logprobs is not None and len(step.logprobs) != num_tokens:
            raise LocalProtocolError(f"the engine returned {num_tokens} tokens but {len(step.logprobs)} logprobs")
        top = step.top_logprobs
        if top is not None and len(top.token_ids_data) != 4 * top.width * num_tokens:
            raise LocalProtocolError(f"the engine returned {num_tokens} tokens but another number of top logprobs")
        if step.sampling_mask is not None:
            check_mask(step.sampling_mask, num_tokens, self.max_mask_bytes)
        if (step.error is not None) != (step.finish_reason is FinishReason.ERROR):
            raise LocalProtocolError(f"the engine returned finish reason {step.finish_reason} and error {step.error!r}")
        if step.kv_params is not None and step.finish_reason is None:
            raise LocalProtocolError("the engine returned KV parameters before the request's last step")

    def _check_rows(self, rows: Rows, start: int) -> None:
        routing = self._routing
        position = self._start + self._taken_rows
        if routing is None:
            return
        wanted = (routing.num_layers, routing.top_k)
        if rows.shape[1:] != wanted or rows.dtype != DTYPES[routing.dtype]:
            raise LocalProtocolError(
                f"the engine returned rows of {rows.shape[1:]} {rows.dtype}; its model has {wanted} {routing.dtype}"
            )
        if start != position:
            raise LocalProtocolError(f"the engine returned rows from position {start}, expected {position}")

    def _check_row_rule(self, step: RequestStep, num_tokens: int, num_rows: int) -> None:
        """Check that each row has an existing position and, at the end, that the number of rows is correct."""
        if self._routing is None:
            return
        most = self._prompt_len - self._start + num_tokens
        if num_rows > most:
            raise LocalProtocolError(f"the engine returned {num_rows} rows for at most {most} positions")
        # A failed request may lack rows of delivered tokens, because it is not a result.
        if step.finish_reason is None or step.error is not None:
            return
        expected = expected_rows(self._prompt_len, self._start, num_tokens)
        if num_rows != expected:
            raise LocalProtocolError(
                f"the engine returned {num_rows} rows for {num_tokens} tokens "
                f"after a prompt of {self._prompt_len} from {self._start}; expected {expected}"
            )

    @property
    def next_bytes(self) -> int:
        """An upper bound of the encoded size of the next chunk; 0 if there is none."""
        return self._plan().num_bytes if self.has_unsent else 0

    def next_chunk(self, max_bytes: int | None = None) -> Chunk | None:
        """Hand out the next chunk, with as much buffered output as fits one chunk.

        Args:
            max_bytes: the maximum size of the encoded chunk.

        Returns:
            None if nothing is unsent or `next_bytes` exceeds `max_bytes`.
        """
        if not self.has_unsent:
            return None
        num_bytes = self._chunk_overhead + self.unsent_bytes
        if (
            len(self._runs) == 1
            and self._ending is None
            and not self._prompt_logprobs
            and self._taken_rows < self._prompt_len - self._start + self.taken_tokens
            and self.unsent_bytes <= self.segment_bytes
            and (max_bytes is None or num_bytes <= max_bytes)
        ):
            # The usual case, without a plan: all output fits, and each row has its token.
            return self._cut(num_bytes, self._runs[0].num_tokens, self._taken_rows - self._num_rows, False)
        plan = self._plan()
        if max_bytes is not None and plan.num_bytes > max_bytes:
            return None
        return self._cut(*plan)

    def _plan(self) -> _ChunkPlan:
        if self._prompt_logprobs:
            part = self._prompt_logprobs[0]
            return _ChunkPlan(self._chunk_overhead + _count_prompt_bytes(part), 0, 0, False, part)
        num_tokens, num_rows = self._count_next()
        run = self._runs[0] if self._runs else None
        num_bytes = self._chunk_overhead + num_rows * self._row_bytes
        if run is not None:
            num_bytes += run.num_bytes(num_tokens)
        is_terminal = (
            self._ending is not None
            and self._num_rows + num_rows == self._taken_rows
            and self._num_tokens + num_tokens == self.taken_tokens
        )
        if self._ending is not None:
            num_bytes += error_bytes(self._ending.error)
        if is_terminal and self._ending is not None and self._ending.kv_params:
            num_kv_bytes = len(self._ending.kv_params)
            # KV parameters may be as large as a segment. Then they go alone, after all other output.
            is_terminal = num_bytes + num_kv_bytes <= self.segment_bytes or not (num_tokens or num_rows)
            num_bytes += num_kv_bytes if is_terminal else 0
        return _ChunkPlan(num_bytes, num_tokens, num_rows, is_terminal)

    def _count_next(self) -> tuple[int, int]:
        """Return how many tokens and rows go into one chunk: as many as fit, with the rows that the tokens need."""
        unsent_rows = self._taken_rows - self._num_rows
        # Rows before the next token's own row may go before the token, because it must follow.
        due = self._prompt_len - self._start + self._num_tokens - self._num_rows
        if len(self._runs) == 1 and self.unsent_bytes <= self.segment_bytes:
            # The usual case: all output fits.
            num_tokens = self._runs[0].num_tokens
            return num_tokens, min(unsent_rows, due + num_tokens - 1)
        ahead = min(unsent_rows, due)
        if not self._runs:
            return 0, min(ahead, self._count_rows_per_part())
        run = self._runs[0]
        room = self.segment_bytes - ahead * self._row_bytes
        if ahead and room < run.num_bytes(1):
            return 0, min(ahead, self._count_rows_per_part())
        num_tokens = run.num_fitting(room, self._row_bytes if unsent_rows > ahead else 0)
        return num_tokens, min(unsent_rows, due + num_tokens - 1)

    def _count_rows_per_part(self) -> int:
        return max(self.segment_bytes // max(self._row_bytes, 1), 1)

    def _cut(
        self,
        num_bytes: int,
        num_tokens: int,
        num_rows: int,
        is_terminal: bool,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Chunk:
        self.last_bytes = num_bytes
        weight_version, lora_version = self._weight_version, self._lora_version
        token_ids, logprobs, top, mask, kv_recomputed = b"", None, None, None, None
        if prompt_logprobs is not None:
            self._prompt_logprobs.popleft()
            self.unsent_bytes -= _count_prompt_bytes(prompt_logprobs)
        if self._runs:
            run = self._runs[0]
            weight_version, lora_version = run.weight_version, run.lora_version
            if num_tokens:
                kv_recomputed = run.kv_recomputed if self.reports_kv else None
                self.unsent_bytes -= run.num_bytes(num_tokens)
                token_ids, logprobs, top, mask = run.pop(num_tokens)
                self._num_tokens += num_tokens
                if not run.num_tokens:
                    self._empty_run = self._runs.popleft()
        chunk = Chunk(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            child=self.key.child,
            chunk_index=self._num_chunks,
            weight_version=weight_version,
            token_ids_data=token_ids,
            logprobs_data=logprobs,
            routed_experts=None if self._routing is None else self._pop_rows(self._routing, num_rows, is_terminal),
            top_logprobs=top,
            prompt_logprobs=prompt_logprobs,
            end=self._make_end(self._ending) if is_terminal and self._ending is not None else None,
            lora_version=lora_version,
            traceparent=None if self._num_chunks else self._traceparent,
            kv_recomputed=kv_recomputed,
            sampling_mask=mask,
        )
        self._num_chunks += 1
        return chunk

    def _pop_rows(self, routing: RoutedExpertsInfo, count: int, is_terminal: bool) -> RoutedExperts | None:
        # If there is no row at all, the receiver still gets the shape.
        if not (count or (is_terminal and not self._num_rows)):
            return None
        shape = (count, routing.num_layers, routing.top_k)
        data = self._rows.pop(count * self._row_bytes)
        part = RoutedExperts(self._start + self._num_rows, shape, routing.dtype, data)
        self.unsent_bytes -= len(data)
        self._num_rows += count
        return part

    def _make_end(self, ending: End) -> End:
        self.has_left = True
        return replace(
            ending,
            num_tokens=self._num_tokens,
            num_rows=self._num_rows,
            cached_tokens=self._cached_tokens,
            routed_experts_start=None if self._routing is None else self._start,
        )

    def fail(self, error: ChunkError, weight_version: int) -> Chunk:
        """End the request with `error`. Return the terminal chunk, with the totals of the chunks that were handed out.

        Unsent output is discarded.

        Raises:
            LocalProtocolError: the terminal chunk was handed out before.
        """
        return self._cut_short(End(FinishReason.ERROR, 0, 0, error=error), weight_version)

    def abort(self, weight_version: int) -> Chunk:
        """End the request as `fail` does, with the finish reason `abort`, because its client aborted it.

        The number of its rows may differ from the row rule.

        Raises:
            LocalProtocolError: the terminal chunk was handed out before.
        """
        return self._cut_short(End(FinishReason.ABORT, 0, 0), weight_version)

    def _cut_short(self, ending: End, weight_version: int) -> Chunk:
        if self.has_left:
            raise LocalProtocolError("the request cannot end again after its terminal chunk")
        self._prompt_logprobs.clear()
        self._runs.clear()
        self._rows.clear()
        self.unsent_bytes = 0
        self.is_ended = True
        self._weight_version = weight_version
        self._ending = ending
        return self._cut(0, 0, 0, True)


def chunk_bytes(chunk: Chunk) -> int:
    """Return an upper bound of the encoded size of `chunk` in bytes."""
    # This runs for every chunk. Most chunks have none of the conditional fields.
    size = CHUNK_OVERHEAD_BYTES + text_bytes(chunk.request_id) + len(chunk.token_ids_data)
    if chunk.logprobs_data is not None:
        size += len(chunk.logprobs_data)
    if chunk.routed_experts is not None:
        size += len(chunk.routed_experts.data)
    if chunk.top_logprobs is not None:
        size += top_bytes(chunk.top_logprobs)
    if chunk.sampling_mask is not None:
        size += len(chunk.sampling_mask.counts_data) + len(chunk.sampling_mask.token_ids_data)
    if chunk.prompt_logprobs is not None:
        size += len(chunk.prompt_logprobs.logprobs_data) + top_bytes(chunk.prompt_logprobs.top)
    if chunk.traceparent is not None:
        size += text_bytes(chunk.traceparent)
    if chunk.end is not None:
        size += error_bytes(chunk.end.error) + len(chunk.end.kv_params or b"")
    return size


def text_bytes(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def top_bytes(top: TopLogprobs | None) -> int:
    """Return the size of the arrays of top logprobs."""
    return 0 if top is None else len(top.token_ids_data) + len(top.logprobs_data)


def error_bytes(error: ChunkError | None) -> int:
    """Return the size of the texts of an error."""
    if error is None:
        return 0
    return sum(text_bytes(text) for text in (error.message, error.field, error.problem, error.allowed))


def _count_prompt_bytes(part: PromptLogprobs) -> int:
    # Never 0: a segment without a value must be sent too.
    return CHUNK_OVERHEAD_BYTES + len(part.logprobs_data) + top_bytes(part.top)


def _split_prompt(prompt_logprobs: PromptLogprobs, segment_bytes: int) -> Iterator[PromptLogprobs]:
    top = prompt_logprobs.top
    width = 0 if top is None else top.width
    per_part = max(segment_bytes // (4 + 8 * width), 1)
    # Without a value, for example with a prompt of one token, send one segment: it shows that there are none.
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
