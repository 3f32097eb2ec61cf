"""One child request across its attempts: delivered output stays, and lost output is generated again.

Invariant: the caller receives one stream regardless of the attempts. Its chunks are numbered from 0 without a gap. No
token is duplicated or lost, each has its row, and one terminal chunk has the totals of the whole stream.

A chunk is delivered only with its rows. Rows and prompt logprobs that arrive before their tokens are held back until
the tokens arrive. So an attempt can be lost between any two chunks, and only whole steps remain.

Two workers may serve an attempt. The prefill phase is the attempt with one token only. The decode phase resumes from
there, as an attempt does after a loss. Each phase has its own number. Together they count as one attempt.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ....schemas.chunk import Chunk, ChunkError, End, FinishReason, PromptLogprobs, RoutedExperts
from ....schemas.errors import RemoteProtocolError
from ....schemas.limits import MAX_TOKEN_ID, MAX_TOKENS
from ....schemas.messages import KvTransfer
from ....schemas.presence import WorkerPresence
from ....schemas.request import GenerateRequest, rest_of, why_ended
from ....schemas.rows import expected_rows
from ....schemas.telemetry import LostAttempt
from .buffers import share_names
from .result_arrays import join_chunks, kv_arrays

FEW_BYTES: Final = 64
"""Bytes of ids up to which `struct` is faster than numpy: a frame of one step of a few requests."""
_U4: Final = np.dtype("<u4")


RowKind = tuple[int, int, str]
"""Layers, top-k and dtype of rows of routed experts."""


class Announced(NamedTuple):
    """The limits of a chunk."""

    vocab_size: int
    """Token ids are below it."""
    weight_version: int
    lora_version: int
    """The version of the adapter of the request; 0: it has none."""


@share_names
class ChunkVerifier:
    """Verifies the chunks of one attempt of one child request.

    Args:
        request: the request of the attempt; `sampling.n` has no effect.
        row_kind: shape and dtype of the rows of earlier attempts, which these rows follow; None: there are none.
    """

    num_tokens = num_rows = 0
    end: End | None = None
    """The end in the terminal chunk; None while the stream is open."""
    _next_chunk = _num_prompt_logprobs = 0

    def __init__(self, request: GenerateRequest, row_kind: RowKind | None = None) -> None:
        sampling = request.sampling
        self._prompt_len = request.prompt_len
        # Prompt and tokens together must fit the request of a later attempt.
        self._max_tokens = MAX_TOKENS - self._prompt_len if sampling.max_tokens is None else sampling.max_tokens
        self._top_width = sampling.logprobs
        self._is_without_logprobs = self._top_width is None
        self._wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self._needs_routing = request.return_routed_experts is True or row_kind is not None
        self.row_kind = row_kind
        """The argument, then that of the rows."""
        self._has_masks = request.return_sampling_mask
        self.start = request.routed_experts_prompt_start
        """The position of the first row."""
        self._prompt_rows = self._prompt_len - self.start

    def add(self, chunk: Chunk) -> None:
        """Verify the next chunk.

        Raises:
            RemoteProtocolError: it is not the next chunk, or contradicts earlier chunks; nothing was changed.
        """
        # This runs for each chunk. Most chunks have only tokens.
        index, num_new, has_masks = chunk.chunk_index, len(chunk.token_ids_data) // 4, self._has_masks
        if self.end is not None:
            raise RemoteProtocolError(f"received chunk {index} after the terminal chunk")
        if index != self._next_chunk:
            raise RemoteProtocolError(f"received chunk {index}, expected chunk {self._next_chunk}")
        num_tokens = self.num_tokens + num_new
        if num_new:
            has_masks = chunk.sampling_mask is not None
            if has_masks is not self._has_masks or (chunk.logprobs_data is None) is not self._is_without_logprobs:
                self._check_kinds(chunk, has_masks)
        if self._top_width or chunk.top_logprobs is not None:
            self._check_tops(chunk, num_new)
        if num_tokens > self._max_tokens:
            self._reject_excess(num_tokens, self.num_rows)
        if chunk.routed_experts is not None or chunk.prompt_logprobs is not None or chunk.end is not None:
            self._add_rest(chunk, num_tokens)
        elif not num_new and index:
            raise RemoteProtocolError(f"chunk {index} is empty")
        self._next_chunk, self._has_masks, self.num_tokens = index + 1, has_masks, num_tokens

    def _add_rest(self, chunk: Chunk, num_tokens: int) -> None:
        """Verify what is no token, after `num_tokens` tokens."""
        end, part, num_rows, found = chunk.end, chunk.routed_experts, self.num_rows, self._num_prompt_logprobs
        kind = self.row_kind
        if part is not None:
            kind = self._check_rows(part)
            num_rows += part.shape[0]
            # A row without its token would leave no start for the rows of the next attempt.
            if num_rows > self._prompt_rows + num_tokens:
                self._reject_excess(num_tokens, num_rows)
        if chunk.prompt_logprobs is not None:
            found = self._count_prompt_logprobs(chunk.prompt_logprobs)
        has_new = bool(chunk.token_ids_data) or (num_rows, found) != (self.num_rows, self._num_prompt_logprobs)
        if end is not None:
            self._check_totals(end, num_tokens, num_rows)
            self._check_prompt_logprobs(end, num_tokens, found)
        elif chunk.chunk_index and not has_new:
            raise RemoteProtocolError(f"chunk {chunk.chunk_index} is empty")
        self.num_rows, self._num_prompt_logprobs, self.end, self.row_kind = num_rows, found, end, kind

    def _reject_excess(self, num_tokens: int, num_rows: int) -> NoReturn:
        allowed = f"{self._max_tokens} and {self._prompt_rows + num_tokens}"
        raise RemoteProtocolError(f"received {num_tokens} tokens and {num_rows} rows; allowed: {allowed}")

    def _check_kinds(self, chunk: Chunk, has_masks: bool) -> None:
        """Check that the tokens have logprobs and masks like the request and the tokens before them."""
        if (chunk.logprobs_data is None) is not self._is_without_logprobs:
            raise RemoteProtocolError(
                f"the request has logprobs={self._top_width}, but chunk {chunk.chunk_index} differs"
            )
        if self._has_masks not in (None, has_masks):
            raise RemoteProtocolError(
                f"chunk {chunk.chunk_index} came with{'' if has_masks else 'out'} sampling masks, unlike earlier "
                "chunks or the request"
            )

    def _check_tops(self, chunk: Chunk, num_tokens: int) -> None:
        num_tops = 0 if chunk.top_logprobs is None else len(chunk.top_logprobs.token_ids)
        if num_tops != (num_tokens if self._top_width else 0):
            raise RemoteProtocolError(f"received {num_tokens} tokens with {num_tops} rows of top logprobs")

    def _count_prompt_logprobs(self, part: PromptLogprobs) -> int:
        """Return the number of prompt logprobs with those of `part`."""
        if not self._wants_prompt_logprobs or part.start != 1 + self._num_prompt_logprobs:
            raise RemoteProtocolError(
                f"received prompt logprobs from {part.start}, which are out of order or were not requested"
            )
        found = self._num_prompt_logprobs + len(part.logprobs)
        if found > max(self._prompt_len - 1, 0):
            raise RemoteProtocolError(f"received {found} prompt logprobs for a prompt of {self._prompt_len} tokens")
        return found

    def _check_prompt_logprobs(self, end: End, num_tokens: int, found: int) -> None:
        expected = self._prompt_len - 1 if self._wants_prompt_logprobs and num_tokens else found
        if end.error is None and found != expected:
            raise RemoteProtocolError(f"received {found} of {expected} prompt logprobs")

    def _check_rows(self, part: RoutedExperts) -> RowKind:
        expected = self.start + self.num_rows
        if part.start != expected:
            raise RemoteProtocolError(f"received rows from position {part.start}, expected position {expected}")
        kind = *part.shape[1:], part.dtype
        if self.row_kind not in (None, kind):
            raise RemoteProtocolError(f"routed experts changed from {self.row_kind} to {kind}")
        return kind

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
        # An abort may come between rows and their tokens.
        most = num_rows if end.finish_reason is FinishReason.ABORT else expected
        if end.routed_experts_start != self.start or not expected <= num_rows <= most:
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


@share_names
class ResponseStream:
    """The chunks of one child request, from the first attempt to the last.

    Args:
        request: the request of the child, with `sampling.n` 1.
        child: the index among n samples.
        attempt: number of the first attempt. It is above 0 if chunks of an earlier call with the same id may still
            arrive.
        keep: keep the chunks for `arrays`, and restart if a continuation would not be exact. False for callers that
            read chunks one by one and cannot return them.
    """

    phase: Literal["prefill", "decode"] | None = None
    """The phase of the current attempt; None if one worker serves all of it."""
    num_tokens = 0
    """The number of delivered tokens."""
    is_prefilled = False
    """True if the current attempt was a prefill phase that has completed. The caller must call `next_phase`."""
    handover: KvTransfer | None = None
    """The KV of the last prefill phase; None: there is none."""
    has_begun = False
    """True if a worker had an attempt or a phase before the current one."""
    is_exact = True
    """True if an undisturbed run could have given the same output."""
    end: End | None = None
    """The end of the whole stream; None while it is open."""
    _connector: str | None = None
    _num_chunks = _num_rows = _weight_version = 0
    _row_kind: RowKind | None = None
    _lora_version: int | None = None
    # The next token is the first of an attempt or phase that continues from earlier tokens. The KV of these tokens and
    # the prompt has this token's weight version.
    _is_resumed = False
    # Attempt numbers that do not count as attempts: withdrawn ones, and those of decode phases.
    _num_uncounted = 0
    # Of the current attempt. None until its first chunk: most of the open requests of a large batch wait for it.
    _verifier: ChunkVerifier | None = None
    # Chunks of the current attempt that wait for their tokens, and delivered chunks; None: there are none.
    _held: list[Chunk] | None = None
    _kept: list[Chunk] | None = None
    # The delivered tokens, <i4, if their chunks are not kept. The prompt of the next attempt ends with them.
    _token_ids: bytes | bytearray = b""
    lost: Sequence[LostAttempt] = ()
    """The lost attempts, oldest first. Their times are those that the caller passed in."""

    def __init__(self, request: GenerateRequest, *, child: int, attempt: int, keep: bool) -> None:
        self._request = request
        self._keep = keep
        self._first_attempt = attempt
        self.asked = request
        """The request of the current attempt, for both phases together."""
        self.child = child
        """The index among n samples."""
        self.attempt = attempt
        """The number of the current attempt. Chunks of other attempts do not belong to this stream."""

    @property
    def request_id(self) -> str:
        """The id of the caller's request, which is the same for every attempt."""
        return self._request.request_id

    @property
    def num_attempts(self) -> int:
        """The number of publications, without withdrawn ones. Two phases count as one."""
        return self.attempt - self._first_attempt - self._num_uncounted + 1

    @property
    def versions(self) -> tuple[int, int]:
        """The versions of the weights and of the adapter of the last delivered tokens; 0: none."""
        return self._weight_version, self._lora_version or 0

    @property
    def start(self) -> int:
        """The absolute position of the first row."""
        return self._request.routed_experts_prompt_start

    def sequence(self) -> npt.NDArray[np.int32]:
        """Return the prompt and the delivered tokens: the sequence that the last worker's cache may hold."""
        return np.concatenate([np.asarray(self._request.prompt_token_ids), self._join_tokens()])

    def add(self, chunk: Chunk) -> list[Chunk]:
        """Add the next chunk of the current attempt. Return the chunks to deliver now, numbered for the caller.

        Raises:
            RemoteProtocolError: it is not the next chunk, or contradicts earlier chunks; nothing was added.
        """
        if self._verifier is None:
            self._verifier = ChunkVerifier(self.asked, self._row_kind)
        self._verifier.add(chunk)
        end = chunk.end
        if self._held is None and (chunk.token_ids_data if end is None else self.phase != "prefill"):
            # The usual case: nothing is held back.
            return [self._deliver(chunk)]
        if self._held and chunk.finish_reason is FinishReason.ABORT and not chunk.token_ids_data:
            return [self.abort()]  # without rows whose tokens the abort has discarded
        found = self._held or []
        if end is None and not chunk.token_ids_data:
            found.append(chunk)
            self._held = found
            return []
        self._held = None
        if end is None or self.phase != "prefill" or not self._has_more_after_prefill(chunk, end):
            found.append(chunk)
        else:
            self._end_prefill(chunk, end)
            if chunk.num_tokens or chunk.routed_experts is not None:
                found.append(replace(chunk, end=None))
        return [self._deliver(each) for each in found]

    def _has_more_after_prefill(self, chunk: Chunk, end: End) -> bool:
        """Return True if the prefill phase has ended only because it is limited to one token."""
        if not end.num_tokens:
            return False
        sampling, num_tokens = self._request.sampling, self.num_tokens + chunk.num_tokens
        if sampling.max_tokens is not None and num_tokens >= sampling.max_tokens:
            return False
        # It may end at a stop token although the whole request has a higher `min_tokens`.
        is_too_early = end.finish_reason is FinishReason.STOP and num_tokens <= sampling.min_tokens
        return end.finish_reason is FinishReason.LENGTH or is_too_early

    def _end_prefill(self, chunk: Chunk, end: End) -> None:
        self.is_prefilled = True
        self.handover = None
        if end.kv_params:
            self.handover = KvTransfer(
                params=end.kv_params,
                connector=self._connector,
                weight_version=chunk.weight_version,
                lora_version=chunk.lora_version,
            )

    def _deliver(self, chunk: Chunk) -> Chunk:
        self._weight_version, self._lora_version = chunk.weight_version, chunk.lora_version
        if chunk.routed_experts is not None:
            self._num_rows += chunk.routed_experts.shape[0]
        if chunk.token_ids_data:
            self.num_tokens += len(chunk.token_ids_data) // 4
            if not self._keep:
                self._token_ids = self._token_ids or bytearray()
                self._token_ids += chunk.token_ids_data
            if self._is_resumed:
                self._is_resumed = False
                if chunk.kv_recomputed is not None:
                    chunk = replace(chunk, kv_recomputed=True)
        if chunk.end is not None:
            self.end = self._total_end(chunk.end, chunk.token_ids_data)
        if chunk.chunk_index != self._num_chunks or chunk.end is not self.end:
            chunk = replace(chunk, chunk_index=self._num_chunks, end=self.end)
        self._num_chunks += 1
        if self._keep:
            self._kept = self._kept or []
            self._kept.append(chunk)
        return chunk

    def _total_end(self, end: End, last: bytes) -> End:
        """Return the end of an attempt, whose terminal chunk has the tokens `last`, as the end of the stream."""
        if end.finish_reason is FinishReason.ABORT and (reached := self._find_reached_end(last)):
            # The abort came after the last token, so nothing is left to generate.
            end = replace(end, finish_reason=reached[0], stop_reason=reached[1])
        if not self.has_begun and self.phase is None:
            return end
        return replace(
            end,
            num_tokens=self.num_tokens,
            num_rows=self._num_rows,
            # A later attempt found mostly tokens of the earlier attempts in the cache.
            cached_tokens=end.cached_tokens if self.num_attempts == 1 else None,
            routed_experts_start=None if end.routed_experts_start is None else self.start,
            kv_params=None,
        )

    def next_attempt(self, worker: str = "", reason: str = "", now: float = 0.0) -> GenerateRequest | Chunk:
        """End the lost current attempt. Return the request of the next attempt, or the terminal chunk.

        Delivered tokens are not generated again if a continuation gives the output of an undisturbed run. Otherwise
        (`SamplingParams.is_continuable`) a kept stream restarts. A stream whose chunks were already read continues with
        another seed and is no longer exact.

        Args:
            worker: the worker that had the lost attempt; empty: none had accepted it.
            reason: error code of the loss.
            now: time of the loss.
        """
        request = self._request
        if self.num_tokens and self._keep and not request.sampling.is_continuable:
            self._start_over()
        lost = LostAttempt(attempt=self.attempt, worker=worker, at=now, tokens=self.num_tokens, reason=reason)
        self.lost = [*self.lost, lost]
        self.attempt += 1
        self.has_begun = True
        if not self.num_tokens:
            return self._start_attempt(request)
        reached = self._find_reached_end()
        if reached is not None:
            return self._finish(*reached)
        return self._start_attempt(self._make_continuation())

    def _start_attempt(self, request: GenerateRequest, phase: Literal["decode"] | None = None) -> GenerateRequest:
        self.asked, self.phase = request, phase
        self._is_resumed = self.num_tokens > 0
        if self._verifier is not None:
            self._row_kind = self._verifier.row_kind if self._num_rows else None
        self._verifier = self._held = None
        self.is_prefilled = False
        return request

    def withdraw(self) -> GenerateRequest:
        """Continue under the next attempt number because no worker accepted the current one. This is not a new attempt.

        Returns:
            The request to publish; that of the whole attempt if a prefill phase was withdrawn.
        """
        self.attempt += 1
        self._num_uncounted += 1
        return self._start_attempt(self.asked, "decode" if self.phase == "decode" else None)

    def cut_to_prefill(self, connector: str | None) -> GenerateRequest:
        """Make the current attempt, which is not published yet, a prefill phase. Return its request.

        Args:
            connector: the KV connector of the prefill worker that gets the request.
        """
        sampling = self.asked.sampling
        self.phase, self._connector = "prefill", connector
        request = replace(self.asked, sampling=replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1)))
        self._verifier = ChunkVerifier(request, self._row_kind)
        return request

    def next_phase(self) -> GenerateRequest:
        """Continue after a completed prefill phase. Return the request of the decode phase."""
        self.attempt += 1
        self._num_uncounted += 1
        self.has_begun = True
        return self._start_attempt(self._make_continuation(), "decode")

    def abort(self) -> Chunk:
        """End the stream, which must be open, at its present position. Return the terminal chunk.

        The finish reason is abort, unless the tokens are already complete.
        """
        self._held = None
        return self._finish(*(self._find_reached_end() or (FinishReason.ABORT, None)))

    def fail(self, error: ChunkError) -> Chunk:
        """End the stream, which must be open, with an error. Return the terminal chunk."""
        return self._finish(FinishReason.ERROR, None, error)

    def _start_over(self) -> None:
        self._kept = None
        self._num_chunks = self.num_tokens = self._num_rows = 0

    def _make_continuation(self) -> GenerateRequest:
        if not self._request.sampling.is_continuable:
            self.is_exact = False
        return rest_of(self._request, self._join_tokens(), self._num_rows)

    def _join_tokens(self, last: bytes = b"") -> npt.NDArray[np.int32]:
        kept = self._kept or ()
        parts = [*(chunk.token_ids_data for chunk in kept), last] if self._keep else [self._token_ids]
        return np.frombuffer(b"".join(parts), "<i4")

    def _find_reached_end(self, last: bytes = b"") -> tuple[FinishReason, int | None] | None:
        """Return the finish reason if the delivered tokens, and `last`, are complete without an end, else None."""
        token_ids = self._join_tokens(last)
        reason = why_ended(self._request.sampling, token_ids)
        return None if reason is None else (reason, int(token_ids[-1]) if reason is FinishReason.STOP else None)

    def _finish(self, reason: FinishReason, stop_reason: int | None, error: ChunkError | None = None) -> Chunk:
        return self._deliver(
            Chunk(
                request_id=self._request.request_id,
                attempt=self.attempt,
                child=self.child,
                chunk_index=self._num_chunks,
                weight_version=self._weight_version,
                end=End(
                    finish_reason=reason,
                    num_tokens=self.num_tokens,
                    num_rows=self._num_rows,
                    stop_reason=stop_reason,
                    error=error,
                    routed_experts_start=self.start if self._num_rows else None,
                ),
                lora_version=self._lora_version,
            )
        )

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of a `Generation` by their field names. This needs `keep`."""
        kept = self._kept or ()
        return join_chunks(kept) | kv_arrays(kept, self._request.prompt_len)
