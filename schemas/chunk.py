"""What one engine step added to one request: the unit that workers stream back.

Every struct here is `array_like`: a field's place on the wire is its place in the class, so fields are appended,
never moved, renumbered or retyped (docs/wire.md). Arrays travel as little-endian bytes; the properties without the
suffix `_data` are read-only numpy views of them.
"""

import enum
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from msgspec.structs import force_setattr

from . import limits
from .errors import ErrorCode, InvalidRequest, LocalProtocolError, RequestError, request_error
from .rows import DTYPES, RowDtype, Rows, dtype_of

if TYPE_CHECKING:
    # What is sent may be a view of an engine's array.
    Buffer = bytes | memoryview
else:
    # What is received is a copy of its own: a view would keep the whole frame alive, with every other request's chunks.
    Buffer = bytes

__all__ = [
    "Chunk",
    "ChunkError",
    "End",
    "FinishReason",
    "PromptLogprobs",
    "RoutedExperts",
    "SamplingMask",
    "TopLogprobs",
    "json_logprobs",
]

RequestId = Annotated[str, Meta(min_length=1, max_length=limits.MAX_REQUEST_ID_CHARS)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Numbers attempts, children and chunks."""
Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
Position = Annotated[int, Meta(ge=0, le=limits.MAX_POSITION)]
"""An absolute position, or a count of positions."""

ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Of an expert id, by its dtype."""
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")
MAX_IDS_BYTES = 4 * limits.MAX_CHUNK_TOKENS
JSON_MINUS_INFINITY = -9999.0
"""Stands for -inf where logprobs become JSON, which has no infinity; HTTP inference servers use this number."""


class FinishReason(enum.StrEnum):
    """Why a request ended; vLLM's words. Closed: a new one needs a new wire version."""

    STOP = "stop"
    """An end-of-sequence or stop token."""
    LENGTH = "length"
    """`max_tokens`, or the model's context, is full."""
    ABORT = "abort"
    """Aborted by its client or by a pause."""
    ERROR = "error"
    """The chunk's `error` says why."""
    REPETITION = "repetition"
    """The engine saw the output repeat itself."""


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Expert ids for a run of consecutive positions; see `rollbus.schemas.rows` for the row rule."""

    start: Position
    """Absolute position of row 0."""
    shape: tuple[Position, Position, Position]
    """(num_rows, num_layers, top_k); num_rows may be 0."""
    dtype: RowDtype
    """One per model: u1 up to 256 experts, else <u2."""
    data: Buffer
    """The ids, C-contiguous and little-endian."""

    def __post_init__(self) -> None:
        """Refuse shapes that the data does not have."""
        rows, layers, top_k = self.shape
        expected = rows * layers * top_k * ITEM_BYTES[self.dtype]
        if not 1 <= layers <= limits.MAX_LAYERS or not 1 <= top_k <= limits.MAX_TOP_K_EXPERTS:
            raise ValueError(
                f"routed experts of {layers} layers and top {top_k}; "
                f"allowed: 1 to {limits.MAX_LAYERS} and 1 to {limits.MAX_TOP_K_EXPERTS}"
            )
        if len(self.data) != expected:
            raise ValueError(
                f"routed experts of shape {self.shape} and dtype {self.dtype} take {expected} bytes, "
                f"not {len(self.data)}"
            )
        if self.start + rows > limits.MAX_POSITION:
            raise ValueError(f"routed experts up to position {self.start + rows}; allowed: {limits.MAX_POSITION}")

    @classmethod
    def from_rows(cls, rows: Rows, start: int) -> "RoutedExperts":
        """Wrap `rows`, u1 or <u2 and C-contiguous, without copying: they must not change until the chunk is sent.

        Raises:
            ValueError: rows of another dtype, dimension or memory order.
        """
        num_rows, layers, top_k = rows.shape
        if rows.dtype not in DTYPES.values() or not rows.flags.c_contiguous:
            raise ValueError(f"rows are {rows.dtype}; allowed: u1 or <u2, C-contiguous")
        return cls(start, (num_rows, layers, top_k), dtype_of(rows), rows.reshape(-1).view(np.uint8).data)

    def numpy(self) -> Rows:
        """A read-only view of `data`, u1|u2[num_rows, num_layers, top_k]."""
        view = np.frombuffer(self.data, dtype=DTYPES[self.dtype]).reshape(self.shape)
        view.flags.writeable = False
        return view


class TopLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The most likely tokens at each of several positions, best first."""

    width: Annotated[int, Meta(ge=1, le=limits.MAX_LOGPROBS)]
    """Alternatives for each position."""
    token_ids_data: bytes
    """<i4[positions, width]."""
    logprobs_data: bytes
    """<f4[positions, width]."""

    def __post_init__(self) -> None:
        """Refuse arrays of unequal size."""
        if len(self.token_ids_data) != len(self.logprobs_data) or len(self.token_ids_data) % (4 * self.width):
            raise ValueError("top logprobs: ids and logprobs are not [positions, width] both")

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i4[positions, width], read-only."""
        return np.frombuffer(self.token_ids_data, _I4).reshape(-1, self.width)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """f4[positions, width], read-only."""
        return np.frombuffer(self.logprobs_data, _F4).reshape(-1, self.width)


class SamplingMask(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """For each of several tokens, the ids that it was sampled from: those that top-k, top-p and min-p left.

    Renormalized over these, a trainer's probabilities are those that the sampler had.
    """

    counts_data: bytes
    """<i4[k]: how many ids each token has, at least 1, as the token itself is one of them."""
    token_ids_data: bytes
    """<i4[sum of the counts]: the ids of the first token, then those of the second, and so on."""

    def __post_init__(self) -> None:
        """Refuse ids that the counts do not share out among the tokens."""
        for name in ("counts_data", "token_ids_data"):
            if len(getattr(self, name)) % 4:
                raise ValueError(f"sampling mask: {name} of {len(getattr(self, name))} bytes is no <i4 array")
        counts, ids = self.counts, self.token_ids
        if len(counts) and not 1 <= counts.min() <= counts.max() <= limits.MAX_MASK_IDS:
            raise ValueError(
                f"sampling mask: tokens with {counts.min()} to {counts.max()} ids; allowed: 1 to {limits.MAX_MASK_IDS}"
            )
        if counts.sum(dtype=np.int64) != len(ids):
            raise ValueError(f"sampling mask: {len(ids)} ids, and counts for {counts.sum(dtype=np.int64)}")
        if len(ids) and ids.min() < 0:
            raise ValueError(f"sampling mask: id {ids.min()}; allowed: 0 to {limits.MAX_TOKEN_ID}")

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """i4[k], read-only."""
        return np.frombuffer(self.counts_data, _I4)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i4[sum of the counts], read-only."""
        return np.frombuffer(self.token_ids_data, _I4)


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities of prompt tokens; the first prompt token has none."""

    start: Annotated[int, Meta(ge=1, le=limits.MAX_POSITION)]
    """Absolute position of the first value."""
    logprobs_data: bytes
    """<f4[positions]."""
    top: TopLogprobs | None = None
    """The most likely tokens at the same positions; None unless `prompt_logprobs` > 0."""

    def __post_init__(self) -> None:
        """Refuse arrays whose lengths contradict each other."""
        size = len(self.logprobs_data)
        if size % 4 or size > 4 * limits.MAX_POSITION:
            raise ValueError(f"prompt logprobs of {size} bytes are no <f4 array of up to {limits.MAX_POSITION}")
        if self.top is not None and len(self.top.token_ids_data) != size * self.top.width:
            raise ValueError(f"{size // 4} prompt logprobs, but top logprobs of other positions")

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """f4[positions], read-only."""
        return np.frombuffer(self.logprobs_data, _F4)


ErrorText = Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)]


class ChunkError(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Why a request failed."""

    code: ErrorCode
    """What kind of failure it is."""
    message: ErrorText
    """One sentence for people."""
    field: ErrorText = ""
    """The offending field when `code` is `invalid_request`, dotted: `sampling.top_p`."""
    problem: ErrorText = ""
    """What is wrong with the field."""
    allowed: ErrorText = ""
    """What is allowed in the field."""

    def __post_init__(self) -> None:
        """Cut and clean the texts: one that the wire refuses would take the chunks beside it in its frame along."""
        for name in ("message", "field", "problem", "allowed"):
            text = getattr(self, name)
            force_setattr(self, name, text[: limits.MAX_ERROR_CHARS].encode(errors="replace").decode())

    @classmethod
    def of(cls, error: RequestError) -> "ChunkError":
        """What the terminal chunk says of `error`."""
        if isinstance(error, InvalidRequest):
            return cls(error.code, error.message, error.field, error.problem, error.allowed)
        return cls(error.code, error.message)

    def exception(self, request_id: str) -> RequestError:
        """Return the exception that a caller catches."""
        return request_error(
            self.code,
            self.message,
            request_id=request_id,
            field=self.field,
            problem=self.problem,
            allowed=self.allowed,
        )


class End(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What only the terminal chunk carries: the reason, and totals to check the stream against."""

    finish_reason: FinishReason
    """Why the request ended."""
    num_tokens: Position
    """Tokens in all chunks of this attempt and child."""
    num_rows: Position
    """Routing rows in all chunks of this attempt and child."""
    stop_reason: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = None
    """The id of the stop token, when one of `stop_token_ids` ended the request."""
    error: ChunkError | None = None
    """Set exactly when `finish_reason` is ERROR."""
    cached_tokens: Position | None = None
    """Prompt tokens that the engine found in its prefix cache; None: not known."""
    routed_experts_start: Position | None = None
    """The `routed_experts_prompt_start` that was applied; None: no routing was returned."""
    kv_params: Annotated[bytes, Meta(max_length=limits.MAX_KV_PARAMS_BYTES)] | None = None
    """Of a prefill leg: where its prompt's KV lies, for the `KvTransfer` of the decode leg. None: it was not kept."""

    def __post_init__(self) -> None:
        """Refuse an error without its finish reason, and the reverse."""
        if (self.error is not None) != (self.finish_reason is FinishReason.ERROR):
            raise ValueError(f"finish reason {self.finish_reason} with{'' if self.error else 'out'} an error")


class Chunk(msgspec.Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """What one engine step added to one request, with the weights that made it."""

    request_id: RequestId
    """As the client named it."""
    attempt: Index
    """0 for the first publication of the request."""
    child: Index
    """Which of n samples."""
    chunk_index: Index
    """0-based and contiguous within an attempt and child."""
    weight_version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
    """Of the weights that sampled these tokens; no chunk mixes two."""
    token_ids_data: bytes = b""
    """<i4[k], k >= 0."""
    logprobs_data: bytes | None = None
    """<f4[k]; None when `sampling.logprobs` is None."""
    routed_experts: RoutedExperts | None = None
    """Rows of the positions that this step computed: the prompt's in the first chunks, then the tokens'."""
    top_logprobs: TopLogprobs | None = None
    """The most likely tokens at each of the k positions; None unless `sampling.logprobs` > 0."""
    prompt_logprobs: PromptLogprobs | None = None
    """None unless `sampling.prompt_logprobs` is set, and once they are through."""
    end: End | None = None
    """Set in the terminal chunk only."""
    lora_version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)] | None = None
    """Of the adapter that these tokens were sampled with, no chunk mixes two; None: there was none."""
    worker_id: Name | None = None
    """Who made it. None on the wire, where the subject says so: the client that takes the chunk fills it in, and leaves
    it None in a terminal chunk that it wrote itself."""
    traceparent: Name | None = None
    """The request's W3C trace context, as the worker has it; in the first chunk of each attempt only."""
    kv_recomputed: bool | None = None
    """True: the engine computed the KV of all positions before the first of these tokens anew, with the weights and the
    adapter of this chunk, for example after a preemption. None: the chunk has no tokens, or the engine does not say."""
    sampling_mask: SamplingMask | None = None
    """Of the k tokens; None where the engine makes none, or they were declined."""

    def __post_init__(self) -> None:
        """Refuse arrays whose lengths contradict each other."""
        size = len(self.token_ids_data)
        if size % 4 or size > MAX_IDS_BYTES:
            raise ValueError(f"token ids of {size} bytes are no <i4 array of up to {limits.MAX_CHUNK_TOKENS}")
        logprobs = self.logprobs_data
        if logprobs is not None and len(logprobs) != size:
            raise ValueError(f"{size // 4} token ids but {len(logprobs) / 4:g} logprobs")
        top = self.top_logprobs
        if top is not None and len(top.token_ids_data) != size * top.width:
            raise ValueError(f"{size // 4} token ids but {len(top.token_ids_data) // (4 * top.width)} top logprobs")
        mask = self.sampling_mask
        if mask is not None and len(mask.counts_data) != size:
            raise ValueError(f"{size // 4} token ids but sampling masks of {len(mask.counts_data) // 4}")

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i4[k], read-only: the new token ids."""
        return np.frombuffer(self.token_ids_data, _I4)

    @property
    def logprobs(self) -> npt.NDArray[np.float32] | None:
        """f4[k], read-only: the sampler's log probability of each new token."""
        return None if self.logprobs_data is None else np.frombuffer(self.logprobs_data, _F4)

    @property
    def num_tokens(self) -> int:
        """k, the number of new tokens."""
        return len(self.token_ids_data) // 4

    @property
    def is_terminal(self) -> bool:
        """No chunk of this attempt and child follows."""
        return self.end is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None unless terminal."""
        return None if self.end is None else self.end.finish_reason

    @property
    def error(self) -> ChunkError | None:
        """Why the request failed; None unless terminal and failed."""
        return None if self.end is None else self.end.error


def json_logprobs(logprobs: npt.NDArray[np.float32]) -> list[float]:
    """Make logprobs fit for JSON: -inf becomes -9999.0.

    Args:
        logprobs: f4[k].

    Raises:
        LocalProtocolError: one is NaN or +inf, which no worker may send.
    """
    if not np.all(logprobs < np.inf):
        raise LocalProtocolError("a logprob is NaN or +inf")
    finite: list[float] = np.where(np.isneginf(logprobs), JSON_MINUS_INFINITY, logprobs).tolist()
    return finite
