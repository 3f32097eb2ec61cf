"""The worker's half of a stream: turns the steps of a request into numbered chunks that fit a message.

The writer adds each completed step, and hands out chunks when the link has credit. It merges steps that are buffered
meanwhile. A chunk gets its number when it is handed out, so buffered output can still be merged or discarded.

Invariant: the chunks of one attempt and child are numbered from 0 without a gap. They have every token and every row
once and in order. Only the last chunk has an `End`, with the totals of all chunks. No row is ahead of the tokens of its
chunk, so the stream can be resumed after a chunk with tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy as np
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
from ....schemas.rows import Rows, expected_rows
from .buffers import RowBuffer, TokenBuffer, share_names
from .engine_step import RequestStep, check_row_kind

_I4 = np.dtype("<i4")
_F4 = np.dtype("<f4")


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


SMALL_STEP_BYTES = 4096
"""Bytes of tokens and rows up to which copying them again for each further step costs less than a buffer."""
_Kind = tuple[int, int | None, bool, int, bool]
"""As in `TokenBuffer`."""
_TokenStep = tuple[_Kind, bytes, bytes, bytes]
"""Tokens with nothing else but a row each: their kind, ids, logprobs and rows. Empty: they have none."""


@share_names
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
        routing: the argument.
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

    # What a new writer has, which makes each of them smaller and faster to create.
    max_mask_bytes = SEGMENT_BYTES
    reports_kv = False
    # Counts of the chunks that were handed out.
    _num_chunks = _num_tokens = _num_rows = 0
    # Counts of all added output, handed out or not.
    taken_tokens = _taken_rows = 0
    _cached_tokens: int | None = None
    # Of the last step, or of the failure or abort.
    _weight_version = 0
    _lora_version: int | None = None
    # The usual streamed token: all output that was not handed out. It is in no buffer.
    _step: _TokenStep | None = None
    # The other output that was not handed out; None: there was none. Lists are short; an empty deque has 600 bytes.
    _prompt_logprobs: list[PromptLogprobs] | None = None
    _runs: list[TokenBuffer] | None = None
    _rows: RowBuffer | None = None
    # The end of the terminal chunk, without its totals.
    _ending: End | None = None
    unsent_bytes = last_bytes = 0
    is_ended = has_left = False

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
        self.routing = routing
        self._start = start
        self.segment_bytes = segment_bytes
        self._traceparent = traceparent
        self._chunk_overhead = CHUNK_OVERHEAD_BYTES + text_bytes(key.request_id + (traceparent or ""))
        self._row_bytes = 0 if routing is None else routing.row_bytes

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
        num_tokens, rows, num_rows = len(step.token_ids), None, 0
        self._check(step, num_tokens)
        if self.routing is not None:
            rows = step.routed_experts
            num_rows = 0 if rows is None else len(rows)
            if rows is not None and num_rows:
                self._check_rows(rows, step.routed_experts_start)
            self._check_row_rule(step, self.taken_tokens + num_tokens, self._taken_rows + num_rows)
        if step.prompt_logprobs is not None:
            self._buffer_step()
            parts = list(_split_prompt(step.prompt_logprobs, self.segment_bytes))
            self._prompt_logprobs = (self._prompt_logprobs or []) + parts
            self.unsent_bytes += sum(map(_count_prompt_bytes, parts))
        if num_tokens:
            top, mask = step.top_logprobs, step.sampling_mask
            ids = step.token_ids.astype(_I4, copy=False).tobytes()
            logprobs = b"" if step.logprobs is None else step.logprobs.astype(_F4, copy=False).tobytes()
            width = 0 if top is None else top.width
            kind = (weight_version, lora_version, step.logprobs is not None, width, mask is not None)
            if num_rows or width or mask is not None or step.kv_recomputed:
                self._buffer_step()
                run = self._find_run(kind, step.kv_recomputed)
                run.add(ids, None if step.logprobs is None else logprobs)
                run.add_extras(top, mask)
                self.unsent_bytes += num_tokens * run.token_bytes + (0 if mask is None else len(mask.token_ids_data))
            else:
                self._add((kind, ids, logprobs, b""))
                self.unsent_bytes += len(ids) + len(logprobs)
        if rows is not None and num_rows:
            self._buffer_step()
            self._open_rows().add(rows)
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

    def append_tokens(
        self,
        token_ids: bytes,
        logprobs: bytes | None,
        rows: bytes | None,
        start: int,
        weight_version: int,
        lora_version: int | None,
    ) -> int:
        """Add tokens as `append_step` does for a step with nothing else, and return their bytes.

        This runs for each streamed token.

        Args:
            token_ids: <i4[k].
            logprobs: <f4[k].
            rows: the routed experts of k positions; None: the engine or the request has none.
            start: the position of the first row.

        Raises:
            LocalProtocolError: as `append_step`; nothing was added.
        """
        if self.is_ended:
            self._reject_step()
        num_tokens, data, is_ahead = len(token_ids) // 4, logprobs or b"", False
        if rows is None or self.routing is None:
            rows = b""
        else:
            is_ahead = self._count_rows(len(rows), start, num_tokens)
        num_bytes = len(token_ids) + len(data) + len(rows)
        kind = (weight_version, lora_version, logprobs is not None, 0, False)
        self._add((kind, token_ids, data, rows), is_ahead=is_ahead)
        self.unsent_bytes += num_bytes
        self.taken_tokens += num_tokens
        self._weight_version, self._lora_version = weight_version, lora_version
        return num_bytes

    def _count_rows(self, num_bytes: int, start: int, num_tokens: int) -> bool:
        """Check and count one row for each token. Return True if the last of them is ahead of its token."""
        expected = self._start + self._taken_rows
        most = self._prompt_len + self.taken_tokens + num_tokens
        if num_bytes != num_tokens * self._row_bytes or start != expected or expected + num_tokens > most:
            raise LocalProtocolError(
                f"the engine returned {num_bytes} bytes of rows from position {start}; expected "
                f"{num_tokens} x {self._row_bytes} from {expected}, below {most}"
            )
        self._taken_rows += num_tokens
        return expected + num_tokens == most

    def _add(self, added: _TokenStep, *, is_ahead: bool = False) -> None:
        """Add tokens to the step that is in no buffer if it is small and of their kind, otherwise to the buffers."""
        if not (self.unsent_bytes or is_ahead):
            self._step = added
            return
        if self._step is not None and not is_ahead and self.unsent_bytes <= SMALL_STEP_BYTES:
            kind, token_ids, logprobs, rows = self._step
            if kind == added[0] and (not rows) is (not added[3]):
                self._step = kind, token_ids + added[1], logprobs + added[2], rows + added[3]
                return
        self._buffer_step()
        self._buffer(added)

    def _buffer_step(self) -> None:
        """Move the output that is in no buffer to the buffers, which are empty."""
        if self._step is not None:
            step, self._step = self._step, None
            self._buffer(step)

    def _buffer(self, step: _TokenStep) -> None:
        kind, token_ids, logprobs, rows = step
        if rows:
            self._open_rows().add_bytes(rows)
        self._find_run(kind, False).add(token_ids, logprobs if kind[2] else None)

    def _open_rows(self) -> RowBuffer:
        self._rows = self._rows or RowBuffer()
        return self._rows

    def _find_run(self, kind: _Kind, kv_recomputed: bool) -> TokenBuffer:
        """Return the run that takes tokens of this kind."""
        if not kv_recomputed and self._runs and self._runs[-1].kind == kind:
            return self._runs[-1]
        run = TokenBuffer(kind)
        run.kv_recomputed = kv_recomputed
        self._runs = [*(self._runs or ()), run]
        return run

    def _reject_step(self) -> NoReturn:
        raise LocalProtocolError("the engine returned a step after the request's last step")

    def _check(self, step: RequestStep, num_tokens: int) -> None:
        if self.is_ended:
            self._reject_step()
        if step.logprobs is not None and len(step.logprobs) != num_tokens:
            raise LocalProtocolError(f"the engine returned {num_tokens} tokens but {len(step.logprobs)} logprobs")
        top = step.top_logprobs
        if top is not None and len(top.token_ids_data) != 4 * top.width * num_tokens:
            raise LocalProtocolError(f"the engine returned {num_tokens} tokens but another number of top logprobs")
        if step.sampling_mask is not None:
            check_mask(step.sampling_mask, num_tokens, self.max_mask_bytes)
        reason = step.finish_reason
        if (step.error is not None) is not (reason is FinishReason.ERROR):
            raise LocalProtocolError(f"the engine returned finish reason {reason} and error {step.error!r}")
        if reason is None and step.kv_params is not None:
            raise LocalProtocolError("the engine returned KV parameters before the request's last step")

    def _check_rows(self, rows: Rows, start: int) -> None:
        check_row_kind(rows, self.routing)
        position = self._start + self._taken_rows
        if start != position:
            raise LocalProtocolError(f"the engine returned rows from position {start}, expected {position}")

    def _check_row_rule(self, step: RequestStep, num_tokens: int, num_rows: int) -> None:
        """Check that each row has an existing position and, at the end, that the number of rows is correct."""
        if self.routing is None:
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
        self._buffer_step()
        return self._plan().num_bytes if self.has_unsent else 0

    def next_chunk(self, max_bytes: int | None = None) -> Chunk | None:
        """Hand out the next chunk, with as much buffered output as fits one chunk.

        Args:
            max_bytes: the maximum size of the encoded chunk.

        Returns:
            None if nothing is unsent or `next_bytes` exceeds `max_bytes`.
        """
        step, ending, num_bytes = self._step, self._ending, self._chunk_overhead + self.unsent_bytes
        if step is not None:
            if self.unsent_bytes <= self.segment_bytes and (ending is None or self._fits_step(ending)):
                return None if max_bytes is not None and num_bytes > max_bytes else self._cut_step(step, num_bytes)
            self._buffer_step()
        if not self.has_unsent:
            return None
        plan = self._plan()
        if max_bytes is not None and plan.num_bytes > max_bytes:
            return None
        return self._cut(*plan)

    def _fits_step(self, ending: End) -> bool:
        """Return True if the terminal chunk has nothing else. Without any row it has the shape of rows."""
        has_shape = self.routing is not None and not self._taken_rows
        return not has_shape and ending.error is None and ending.kv_params is None

    def _cut_step(self, step: _TokenStep, num_bytes: int) -> Chunk:
        """Hand out all output, which is this step."""
        (weight_version, lora_version, has_logprobs, *_), token_ids, logprobs, rows = step
        index, part = self._num_chunks, None
        if rows and self.routing is not None:
            shape = (len(token_ids) // 4, self.routing.num_layers, self.routing.top_k)
            part = RoutedExperts(self._start + self._num_rows, shape, self.routing.dtype, rows)
        self._step = None
        self.last_bytes, self.unsent_bytes = num_bytes, 0
        self._num_chunks, self._num_tokens, self._num_rows = index + 1, self.taken_tokens, self._taken_rows
        return Chunk(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            child=self.key.child,
            chunk_index=index,
            weight_version=weight_version,
            token_ids_data=token_ids,
            logprobs_data=logprobs if has_logprobs else None,
            routed_experts=part,
            end=None if self._ending is None else self._make_end(self._ending),
            lora_version=lora_version,
            traceparent=None if index else self._traceparent,
            kv_recomputed=False if self.reports_kv else None,
        )

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
        if self._prompt_logprobs and prompt_logprobs is not None:
            del self._prompt_logprobs[0]
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
                    del self._runs[0]
        chunk = Chunk(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            child=self.key.child,
            chunk_index=self._num_chunks,
            weight_version=weight_version,
            token_ids_data=token_ids,
            logprobs_data=logprobs,
            routed_experts=None if self.routing is None else self._pop_rows(self.routing, num_rows, is_terminal),
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
        data = self._open_rows().pop(count * self._row_bytes)
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
            routed_experts_start=None if self.routing is None else self._start,
        )

    def fail(self, error: ChunkError, weight_version: int) -> Chunk:
        """End the request with `error`. Return the terminal chunk, with the totals of the chunks that were handed out.

        Unsent output is discarded.

        Raises:
            LocalProtocolError: the terminal chunk was handed out before.
        """
        return self._cut_short(End(FinishReason.ERROR, 0, 0, error=error), weight_version)

    def abort(self, weight_version: int, *, keeps: bool = False) -> Chunk:
        """End the request as `fail` does, with the finish reason `abort`, because its client aborted it.

        The number of its rows may differ from the row rule. With `keeps`, the terminal chunk has the unsent output, if
        it fits one chunk. If the engine has ended the request and no output is lost, its own finish reason stays:
        otherwise its client would continue a complete answer.

        Raises:
            LocalProtocolError: the terminal chunk was handed out before.
        """
        if not self.has_left and (keeps or self._ending is not None):
            self._buffer_step()
            end = End(FinishReason.ABORT, 0, 0) if self._ending is None else replace(self._ending, kv_params=None)
            self._ending, self.is_ended = end, True
            plan = self._plan()
            if plan.is_terminal and (keeps or not (plan.num_tokens or plan.num_rows)):
                return self._cut(*plan)
        return self._cut_short(End(FinishReason.ABORT, 0, 0), weight_version)

    def _cut_short(self, ending: End, weight_version: int) -> Chunk:
        if self.has_left:
            raise LocalProtocolError("the request cannot end again after its terminal chunk")
        self._step = self._prompt_logprobs = self._runs = self._rows = None
        self.unsent_bytes = 0
        self.is_ended = True
        self._weight_version = weight_version
        self._ending = ending
        return self._cut(0, 0, 0, True)


def chunk_bytes(chunk: Chunk) -> int:
    """Return an upper bound of the encoded size of `chunk` in bytes."""
    # This runs for every chunk. Most chunks have none of the conditional fields.
    size = CHUNK_OVERHEAD_BYTES + len(chunk.request_id) + len(chunk.token_ids_data)
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
