"""The output of an engine step for its requests, before it becomes chunks, and its batches."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ....schemas.chunk import FinishReason, PromptLogprobs, SamplingMask, TopLogprobs
from ....schemas.errors import ErrorCode, LocalProtocolError
from ....schemas.presence import RoutedExpertsInfo
from ....schemas.rows import DTYPES, Rows

MAX_RUN_BYTES: Final = 8 * 1024
"""The maximum bytes of one request's tokens and rows. So a run stays a small chunk, which shares a frame with others.
"""
MAX_RUN_TOKENS: Final = 128
"""The maximum tokens of one request. More tokens gain nothing, because enough tokens share the cost of a chunk."""
FIRST_SLOTS: Final = 64


class RequestStep(msgspec.Struct, kw_only=True, gc=False):
    """The output of one engine step for one request."""

    key: str
    """The key under which the request was added."""
    token_ids: npt.NDArray[np.int32]
    """i4[k], k >= 0: the tokens sampled in this step."""
    logprobs: npt.NDArray[np.float32] | None = None
    """f4[k], the sampler's log probability of each token; None when `sampling.logprobs` is None."""
    top_logprobs: TopLogprobs | None = None
    """The most likely alternatives at each of the k positions; None unless `sampling.logprobs` > 0."""
    prompt_logprobs: PromptLogprobs | None = None
    """Only in the first step of a request that asks for them."""
    routed_experts: Rows | None = None
    """u1|u2[rows, num_layers, top_k], C-contiguous; None if the request declines routed experts or the model has none.
    """
    routed_experts_start: int = 0
    """Absolute position of `routed_experts[0]` in prompt + generated tokens."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; only in a request's first step."""
    finish_reason: FinishReason | None = None
    """Set in the last step of a request."""
    stop_reason: int | None = None
    """The stop token id that ended the request, if it was one of `stop_token_ids`."""
    error: str | None = None
    """Set, with `finish_reason` ERROR, if the engine failed this request only."""
    error_code: ErrorCode = ErrorCode.ENGINE_ERROR
    """The code of `error`, for example KV_TRANSFER_FAILED."""
    kv_recomputed: bool = False
    """True if the engine recomputed the KV of all positions before these tokens, which are not the first tokens. Only
    of engines that report it (`Engine.reports_recomputed_kv`).
    """
    kv_params: bytes | None = None
    """The KV transfer parameters: only in the last step of a prefill phase whose KV the engine has kept."""
    sampling_mask: SamplingMask | None = None
    """The masks of the k tokens; None if the engine returns none, or the request declines them."""


class TokenBatch(msgspec.Struct, kw_only=True, gc=False):
    """One token for each of several requests, of one engine step that neither began nor ended any of them.

    It is equal to one `RequestStep` for each request, without an object for each. All of its requests have the same
    options: logprobs or none, routed experts or none. Tokens with sampling masks come as one `RequestStep` each.
    """

    keys: Sequence[str]
    """The keys under which the requests were added, each once."""
    token_ids: npt.NDArray[np.int32]
    """i4[len(keys)]: the token of each request."""
    logprobs: npt.NDArray[np.float32] | None = None
    """f4[len(keys)], the sampler's log probability of each token; None when `sampling.logprobs` is None."""
    routed_experts: Rows | None = None
    """u1|u2[len(keys), num_layers, top_k]: one row for each request; None without routed experts."""
    routed_experts_starts: npt.NDArray[np.int64] | None = None
    """i8[len(keys)]: the absolute position of each request's row; None without routed experts."""

    def __len__(self) -> int:
        return len(self.keys)

    def pick(self, indices: Sequence[int]) -> "TokenBatch":
        """Return the batch of the requests at `indices`, in their order."""
        keys, at = self.keys, np.array(indices, np.intp)
        return TokenBatch(
            keys=[keys[i] for i in indices],
            token_ids=self.token_ids[at],
            logprobs=None if self.logprobs is None else self.logprobs[at],
            routed_experts=None if self.routed_experts is None else self.routed_experts[at],
            routed_experts_starts=None if self.routed_experts_starts is None else self.routed_experts_starts[at],
        )

    def split(self) -> list[RequestStep]:
        """Return a `RequestStep` for each request. The arrays are views."""
        return [
            RequestStep(
                key=key,
                token_ids=self.token_ids[i : i + 1],
                logprobs=None if self.logprobs is None else self.logprobs[i : i + 1],
                routed_experts=None if self.routed_experts is None else self.routed_experts[i : i + 1],
                routed_experts_start=0 if self.routed_experts_starts is None else int(self.routed_experts_starts[i]),
            )
            for i, key in enumerate(self.keys)
        ]


def split(steps: Iterable[RequestStep | TokenBatch]) -> list[RequestStep]:
    """Return the same steps, with each batch split."""
    return [one for step in steps for one in (step.split() if isinstance(step, TokenBatch) else [step])]


class TokenRun(NamedTuple):
    """Tokens of one request in wire format. The same weights sampled all of them."""

    token_ids: bytes
    """<i4[k]."""
    logprobs: bytes | None
    """<f4[k]."""
    rows: Rows | None
    """One row for each token, or None without routed experts. A view, which the next batch may change."""
    start: int
    """Position of the first row."""
    last_at: float
    """Monotonic time of the last token."""


class TokenBatcher:
    """The open runs, in columns. Each request has a slot from its first batch until its end.

    Memory is bounded by `MAX_RUN_BYTES` for each request that an engine runs.

    It batches tokens of many requests, which arrive one at a time: a step costs only a few array operations. This is
    for requests that are not streamed, so no client waits for the tokens.

    Invariant: the tokens of a request leave once, in order, as one run of tokens that the same weights sampled.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._room = 0
        self.weight_version = 0
        """The version of the weights that sampled all batched tokens."""
        # Number of batches since the first token of the present ones. No run has more tokens.
        self._num_batches = 0
        # The places of all slots, `_room` for each. Created for the first batch, which shows the data of a token.
        self._token_ids: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._logprobs: npt.NDArray[np.float32] | None = None
        self._rows: Rows | None = None
        # By slot: its first and its next place, the difference between the position of a row and its place, and the
        # time of its last token.
        self._first: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._next: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._offsets: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._last_at: npt.NDArray[np.float64] = np.empty(0, np.float64)

    def __len__(self) -> int:
        """Return the number of requests with batched tokens."""
        return int(np.count_nonzero(self._next - self._first))

    @property
    def keys(self) -> list[str]:
        """The keys of the requests with batched tokens."""
        has_tokens = (self._next > self._first).tolist()
        return [key for key, slot in self._slots.items() if has_tokens[slot]]

    def find_slots(self, keys: Sequence[str]) -> npt.NDArray[np.intp]:
        """Return the slot of each request; -1: it has none."""
        return np.fromiter(map(self._slots.get, keys, repeat(-1)), np.intp, len(keys))

    def open(self, key: str, last_at: float) -> int:
        """Return a new slot for a request without one.

        Args:
            last_at: monotonic time of its last token.
        """
        if not self._free:
            self._grow()
        slot = self._slots[key] = self._free.pop()
        self._last_at[slot] = last_at
        return slot

    def close(self, key: str) -> None:
        """Remove the slot of a request that has ended, with its batched tokens. Ignore a request without a slot."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._next[slot] = self._first[slot]
            self._free.append(slot)

    def takes(self, batch: TokenBatch, weight_version: int) -> bool:
        """Return True if a batch fits the batched tokens: the same weights, and the same data for each token.

        If nothing is batched, the next tokens are of these weights and have this data.
        """
        if weight_version == self.weight_version and self._is_alike(batch):
            return True
        if len(self):
            return False
        self.weight_version, self._num_batches = weight_version, 0
        self._make_columns(batch)
        return True

    def _is_alike(self, batch: TokenBatch) -> bool:
        if not self._room or (batch.logprobs is None) != (self._logprobs is None):
            return False
        if batch.routed_experts is None or self._rows is None:
            return batch.routed_experts is None and self._rows is None
        shape, dtype = self._rows.shape[1:], self._rows.dtype
        return batch.routed_experts.shape[1:] == shape and batch.routed_experts.dtype == dtype

    def add(self, batch: TokenBatch, slots: npt.NDArray[np.intp], now: float) -> tuple[list[str], float]:
        """Add a batch for which `takes` is true, of the requests in `slots`. Its arrays are copied.

        Returns:
            Keys of requests that have no room for another token: their runs must be popped before the next batch. And
            the sum of the seconds between the last tokens of these requests and `now`.

        Raises:
            LocalProtocolError: its arrays contradict each other, or rows do not follow earlier rows; nothing was added.
        """
        check_batch(batch)
        places = self._next[slots]
        if self._rows is not None and batch.routed_experts is not None and batch.routed_experts_starts is not None:
            starts = batch.routed_experts_starts
            offsets = np.where(places == self._first[slots], starts - places, self._offsets[slots])
            if np.count_nonzero(offsets + places != starts):
                raise LocalProtocolError("the engine returned rows that do not follow the earlier rows")
            self._offsets[slots] = offsets
            self._rows[places] = batch.routed_experts
        self._token_ids[places] = batch.token_ids
        if self._logprobs is not None and batch.logprobs is not None:
            self._logprobs[places] = batch.logprobs
        places += 1
        self._next[slots] = places
        seconds = len(slots) * now - float(self._last_at[slots].sum())
        self._last_at[slots] = now
        self._num_batches += 1
        if self._num_batches < self._room:
            return [], seconds
        self._num_batches = int((self._next - self._first).max())
        return [batch.keys[i] for i in np.flatnonzero(places == self._first[slots] + self._room)], seconds

    def _make_columns(self, batch: TokenBatch) -> None:
        """Make columns for tokens with the data of this batch. Nothing is batched."""
        rows, num_slots = batch.routed_experts, len(self._first)
        token_bytes = 4 + (0 if batch.logprobs is None else 4) + (0 if rows is None else rows[:1].nbytes)
        self._room = max(min(MAX_RUN_BYTES // token_bytes, MAX_RUN_TOKENS), 1)
        size = num_slots * self._room
        self._token_ids = np.empty(size, np.int32)
        self._logprobs = None if batch.logprobs is None else np.empty(size, np.float32)
        self._rows = None if rows is None else np.empty((size, *rows.shape[1:]), rows.dtype)
        self._first = np.arange(num_slots) * self._room
        self._next = self._first.copy()

    def _grow(self) -> None:
        """Double the number of slots. Present slots keep their numbers."""
        old = len(self._first)
        new = max(2 * old, FIRST_SLOTS)
        self._free = list(range(new - 1, old - 1, -1))
        self._token_ids = _grow_column(self._token_ids, new * self._room)
        self._logprobs = None if self._logprobs is None else _grow_column(self._logprobs, new * self._room)
        self._rows = None if self._rows is None else _grow_column(self._rows, new * self._room)
        self._first = np.arange(new) * self._room
        self._next = np.concatenate([self._next, self._first[old:]])
        self._offsets, self._last_at = _grow_column(self._offsets, new), _grow_column(self._last_at, new)

    def pop(self, key: str) -> TokenRun | None:
        """Remove and return a request's run; None if the request has no batched tokens."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        first, past = int(self._first[slot]), int(self._next[slot])
        if first == past:
            return None
        self._next[slot] = first
        return TokenRun(
            self._token_ids[first:past].astype("<i4", copy=False).tobytes(),
            None if self._logprobs is None else self._logprobs[first:past].astype("<f4", copy=False).tobytes(),
            None if self._rows is None else self._rows[first:past],
            0 if self._rows is None else int(self._offsets[slot]) + first,
            float(self._last_at[slot]),
        )

    def clear(self) -> None:
        """Remove all runs and slots."""
        self._free.extend(self._slots.values())
        self._slots.clear()
        self._next[:] = self._first


def _grow_column(column: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    grown = np.empty((size, *column.shape[1:]), column.dtype)
    grown[: len(column)] = column
    return grown


def check_batch(batch: TokenBatch) -> None:
    """Check that all arrays have the data of as many requests.

    Raises:
        LocalProtocolError: they do not.
    """
    count, rows, starts = len(batch.keys), batch.routed_experts, batch.routed_experts_starts
    if (
        len(batch.token_ids) != count
        or (batch.logprobs is not None and len(batch.logprobs) != count)
        or (rows is not None and (len(rows) != count or starts is None or len(starts) != count))
    ):
        raise LocalProtocolError(f"the engine returned a batch of {count} requests with arrays of other lengths")


def check_row_kind(rows: Rows, routing: RoutedExpertsInfo | None) -> None:
    """Check the shape and dtype of rows.

    Args:
        routing: the routed experts of the model; None: the rows are not used.

    Raises:
        LocalProtocolError: they are of another model.
    """
    if routing is None:
        return
    wanted = (routing.num_layers, routing.top_k)
    if rows.shape[1:] != wanted or rows.dtype != DTYPES[routing.dtype]:
        raise LocalProtocolError(
            f"the engine returned rows of {rows.shape[1:]} {rows.dtype}; its model has {wanted} {routing.dtype}"
        )
