"""One child of a request across its attempts: what was delivered stays, what was lost is made again.

Invariant: what leaves here is one stream, whatever happened underneath: chunks numbered from 0 without a gap, no token
twice and none lost, each with its rows, and one terminal chunk whose totals are those of the whole.

A chunk is delivered only with its rows. Rows and prompt logprobs that came ahead of their tokens are held back until
the tokens are there, so that an attempt can be given up between any two chunks and only whole steps remain.

Two workers may serve an attempt. The prefill phase is the attempt cut down to one token; the decode phase resumes from
there as an attempt does after a loss. Each phase has a number of its own. Together they count as one attempt.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ....schemas.chunk import Chunk, End, FinishReason
from ....schemas.continuation import rest_of, why_ended
from ....schemas.messages import KvTransfer
from ....schemas.request import GenerateRequest
from .chunk_verifier import ChunkVerifier
from .kv_versions import kv_arrays
from .result_arrays import join_chunks

__all__ = ["ResponseStream"]


class ResponseStream:
    """One child's chunks, from the first attempt to the last.

    Args:
        request: the child's, with `sampling.n` 1.
        child: which of n samples.
        attempt: number of the first attempt: above 0 when chunks of an earlier call of the same id may be on their way.
        keep: hold the chunks for `arrays`, and start over where going on would not be exact; False for callers that
            take chunks one by one and cannot give them back.
    """

    def __init__(self, request: GenerateRequest, *, child: int, attempt: int, keep: bool) -> None:
        self._request = request
        self._keep = keep
        self._first_attempt = attempt
        self.asked = request
        """What the current attempt asks for, both phases together."""
        self._verifier = ChunkVerifier(request)
        self.phase: Literal["prefill", "decode"] | None = None
        """Of the current attempt; None if one worker is to serve all of it."""
        self._connector: str | None = None
        # Of the current attempt, waiting for the tokens that they belong to.
        self._held: list[Chunk] = []
        self._kept: list[Chunk] = []
        # The tokens delivered, <i4; the next attempt's prompt ends with them.
        self._token_ids: list[bytes] = []
        self._num_chunks = 0
        self._num_tokens = 0
        self._num_rows = 0
        self._weight_version = 0
        self._lora_version: int | None = None
        # The next token is the first of an attempt or leg that goes on from tokens of another: their KV, and the
        # prompt's, is of this token's weights.
        self._is_resumed = False
        # Numbers that are no attempts of their own: withdrawn, or of a decode leg.
        self._num_uncounted = 0
        self.child = child
        """Which of n samples."""
        self.attempt = attempt
        """Number of the current attempt; chunks of others are not for this stream."""
        self.is_prefilled = False
        """The current attempt was a prefill leg, which has ended well: `next_phase` is due."""
        self.handover: KvTransfer | None = None
        """The KV that the last prefill leg has left; None: it has left none."""
        self.is_exact = True
        """What was delivered is what an undisturbed run could have given."""
        self.end: End | None = None
        """Of the whole stream; None while it is open."""

    def __repr__(self) -> str:
        """One line with counts."""
        state = "open" if self.end is None else self.end.finish_reason
        return f"<ResponseStream {state} attempt={self.attempt} tokens={self._num_tokens} rows={self._num_rows}>"

    @property
    def request_id(self) -> str:
        """Of the caller's request; the same for every attempt."""
        return self._request.request_id

    @property
    def num_attempts(self) -> int:
        """How often the request was published, without what was withdrawn; two legs count as one."""
        return self.attempt - self._first_attempt - self._num_uncounted + 1

    @property
    def num_tokens(self) -> int:
        """Tokens that were delivered."""
        return self._num_tokens

    @property
    def has_begun(self) -> bool:
        """A worker was given an attempt or a leg before the current one."""
        return self.num_attempts > 1 or self.phase == "decode"

    @property
    def start(self) -> int:
        """Absolute position of the first row."""
        return self._request.routed_experts_prompt_start

    def sequence(self) -> npt.NDArray[np.int32]:
        """The prompt of the request and the tokens that were delivered: what the last worker's cache may hold."""
        return np.concatenate([np.asarray(self._request.prompt_token_ids), self._tokens()])

    def add(self, chunk: Chunk) -> list[Chunk]:
        """Take the current attempt's next chunk; returns what may be delivered now, numbered for the caller.

        Raises:
            RemoteProtocolError: it is not the next one, or contradicts what came before; nothing was taken.
        """
        self._verifier.add(chunk)
        if chunk.end is None:
            if not chunk.token_ids_data:
                self._held.append(chunk)
                return []
            if not self._held:
                # As mostly: a step's tokens, and nothing ahead of them.
                return [self._deliver(chunk)]
            self._held.append(chunk)
        elif not self._has_more_after_prefill(chunk, chunk.end):
            self._held.append(chunk)
        else:
            self._end_prefill(chunk, chunk.end)
            if chunk.num_tokens or chunk.routed_experts is not None:
                self._held.append(replace(chunk, end=None))
        held, self._held = self._held, []
        return [self._deliver(held_chunk) for held_chunk in held]

    def _has_more_after_prefill(self, chunk: Chunk, end: End) -> bool:
        """A prefill leg has ended because it was one, and the whole has not."""
        if self.phase != "prefill" or not end.num_tokens:
            return False
        sampling, num_tokens = self._request.sampling, self._num_tokens + chunk.num_tokens
        if sampling.max_tokens is not None and num_tokens >= sampling.max_tokens:
            return False
        # It may end at a token at which the whole, of more `min_tokens`, does not.
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
        self._num_tokens += chunk.num_tokens
        self._num_rows += 0 if chunk.routed_experts is None else chunk.routed_experts.shape[0]
        self._weight_version, self._lora_version = chunk.weight_version, chunk.lora_version
        if chunk.num_tokens:
            self._token_ids.append(chunk.token_ids_data)
            if self._is_resumed:
                self._is_resumed = False
                if chunk.kv_recomputed is not None:
                    chunk = replace(chunk, kv_recomputed=True)
        if chunk.end is not None:
            self.end = self._whole(chunk.end)
        if chunk.chunk_index != self._num_chunks or chunk.end is not self.end:
            chunk = replace(chunk, chunk_index=self._num_chunks, end=self.end)
        self._num_chunks += 1
        if self._keep:
            self._kept.append(chunk)
        return chunk

    def _whole(self, end: End) -> End:
        """The end of an attempt as that of the stream."""
        if self.num_attempts == 1 and self.phase is None:
            return end
        return replace(
            end,
            num_tokens=self._num_tokens,
            num_rows=self._num_rows,
            # What a later attempt found in the cache were mostly the tokens of the attempts before.
            cached_tokens=end.cached_tokens if self.num_attempts == 1 else None,
            routed_experts_start=None if end.routed_experts_start is None else self.start,
            kv_params=None,
        )

    def next_attempt(self) -> GenerateRequest | Chunk:
        """Give up the current attempt; returns the request to publish for the next, or the terminal chunk.

        Tokens that were delivered are not generated again, where going on from them gives what an undisturbed run
        could have given. Elsewhere (`SamplingParams.is_continuable`) a kept stream starts over, and one whose chunks
        were handed out goes on with another seed and is no longer exact.
        """
        self._held = []
        self.attempt += 1
        request = self._request
        if self._num_tokens and self._keep and not request.sampling.is_continuable:
            self._start_over()
        if not self._num_tokens:
            return self._start_attempt(request)
        reason = self._reached()
        if reason is not None:
            return self._finish(*reason)
        return self._start_attempt(self._continuation())

    def _start_attempt(self, request: GenerateRequest, phase: Literal["decode"] | None = None) -> GenerateRequest:
        self.asked, self.phase = request, phase
        self._is_resumed = self._num_tokens > 0
        self._verifier = ChunkVerifier(request)
        self.is_prefilled = False
        return request

    def withdraw(self) -> GenerateRequest:
        """Go on under the next attempt number because nobody took the current one: it does not count as an attempt.

        Returns:
            The request to publish; that of the whole attempt where a prefill leg was withdrawn.
        """
        self.attempt += 1
        self._num_uncounted += 1
        return self._start_attempt(self.asked, "decode" if self.phase == "decode" else None)

    def cut_to_prefill(self, connector: str | None) -> GenerateRequest:
        """Make the current attempt, of which nothing was published, a prefill leg; returns its request.

        Args:
            connector: of the worker that it goes to, and so that of its handover.
        """
        sampling = self.asked.sampling
        self.phase, self._connector = "prefill", connector
        request = replace(self.asked, sampling=replace(sampling, max_tokens=1, min_tokens=min(sampling.min_tokens, 1)))
        self._verifier = ChunkVerifier(request)
        return request

    def next_phase(self) -> GenerateRequest:
        """Go on after a prefill leg that has ended; returns the request of the decode leg."""
        self.attempt += 1
        self._num_uncounted += 1
        return self._start_attempt(self._continuation(), "decode")

    def abort(self) -> Chunk:
        """End the stream, which must be open, where it stands; returns the terminal chunk.

        It is aborted, unless its tokens are all there will be.
        """
        self._held = []
        return self._finish(*(self._reached() or (FinishReason.ABORT, None)))

    def _start_over(self) -> None:
        self._kept, self._token_ids = [], []
        self._num_chunks = self._num_tokens = self._num_rows = 0

    def _continuation(self) -> GenerateRequest:
        if not self._request.sampling.is_continuable:
            self.is_exact = False
        return rest_of(self._request, self._tokens(), self._num_rows)

    def _tokens(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(b"".join(self._token_ids), "<i4")

    def _reached(self) -> tuple[FinishReason, int | None] | None:
        """Why the tokens delivered are all there will be, where their terminal chunk was lost; None: more will come."""
        token_ids = self._tokens()
        reason = why_ended(self._request.sampling, token_ids)
        return None if reason is None else (reason, int(token_ids[-1]) if reason is FinishReason.STOP else None)

    def _finish(self, reason: FinishReason, stop_reason: int | None) -> Chunk:
        return self._deliver(
            Chunk(
                request_id=self._request.request_id,
                attempt=self.attempt,
                child=self.child,
                chunk_index=self._num_chunks,
                weight_version=self._weight_version,
                end=End(
                    finish_reason=reason,
                    num_tokens=self._num_tokens,
                    num_rows=self._num_rows,
                    stop_reason=stop_reason,
                    routed_experts_start=self.start if self._num_rows else None,
                ),
                lora_version=self._lora_version,
            )
        )

    def arrays(self) -> dict[str, Any]:
        """The arrays of a `Generation` by their field names; needs `keep`."""
        return join_chunks(self._kept) | kv_arrays(self._kept, self._request.prompt_len)
