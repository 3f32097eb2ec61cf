"""The new output of one engine step for one request: the unit that workers stream back.

Every struct here is `array_like`: the position of a field in the class is its position on the wire. Fields are
therefore only appended, never moved, renumbered or retyped (docs/wire.md). Arrays are encoded as little-endian bytes.
Each property without the suffix `_data` is a read-only numpy view of those bytes.
"""

import enum
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import force_setattr

from . import limits
from .errors import ErrorCode, InvalidRequest, LocalProtocolError, RequestError, request_error
from .limits import ErrorText, Name, Version
from .rows import DTYPES, Float32s, Int32s, RowDtype, Rows, dtype_of

if TYPE_CHECKING:
    # A sender may pass a view of an engine's array.
    Buffer = bytes | memoryview
else:
    # A receiver gets a copy: a view would keep the whole frame in memory, with the chunks of all other requests.
    Buffer = bytes


RequestId = Annotated[str, Meta(min_length=1, max_length=limits.MAX_REQUEST_ID_CHARS)]
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Number of an attempt, child request or chunk."""
Position = Annotated[int, Meta(ge=0, le=limits.MAX_POSITION)]
"""Absolute position, or a count of positions."""

ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Bytes of an expert id, by dtype."""
_I4, _F4 = np.dtype("<i4"), np.dtype("<f4")
MAX_IDS_BYTES = 4 * limits.MAX_CHUNK_TOKENS
JSON_MINUS_INFINITY = -9999.0
"""Value for -inf in logprobs as JSON, because JSON has no infinity. HTTP inference servers use the same number."""


class FinishReason(enum.StrEnum):
    """The reason why a request ended, in vLLM's terms. Closed: a new reason needs a new wire version."""

    STOP = "stop"
    """The model generated an end-of-sequence token or a stop token."""
    LENGTH = "length"
    """The request reached `max_tokens` or the model's context length."""
    ABORT = "abort"
    """The client or a pause aborted the request."""
    ERROR = "error"
    """The request failed; `error` gives the reason."""
    REPETITION = "repetition"
    """The engine detected repetition in the output."""


class RoutedExperts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Expert ids of consecutive positions; see `rollbus.schemas.rows` for the row rule."""

    start: Position
    """Absolute position of row 0."""
    shape: tuple[Position, Position, Position]
    """(num_rows, num_layers, top_k); num_rows may be 0."""
    dtype: RowDtype
    """Dtype of the ids: u1 up to 256 experts, else <u2."""
    data: Buffer
    """Expert ids, C-contiguous and little-endian."""

    def __post_init__(self) -> None:
        """Check that shape, dtype and data match."""
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
        """Wrap `rows` without a copy: u1 or <u2, C-contiguous.

        The caller must not change the rows until the chunk is sent.

        Raises:
            ValueError: the rows have another dtype, dimension or memory order.
        """
        num_rows, layers, top_k = rows.shape
        if rows.dtype not in DTYPES.values() or not rows.flags.c_contiguous:
            raise ValueError(f"rows are {rows.dtype}; allowed: u1 or <u2, C-contiguous")
        return cls(start, (num_rows, layers, top_k), dtype_of(rows), rows.reshape(-1).view(np.uint8).data)

    def numpy(self) -> Rows:
        """Return a read-only view of `data`, u1|u2[num_rows, num_layers, top_k]."""
        view = np.frombuffer(self.data, dtype=DTYPES[self.dtype]).reshape(self.shape)
        view.flags.writeable = False
        return view


class TopLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The most likely tokens at each of several positions, most likely first."""

    width: Annotated[int, Meta(ge=1, le=limits.MAX_LOGPROBS)]
    """Number of tokens at each position."""
    token_ids_data: bytes
    """<i4[positions, width]."""
    logprobs_data: bytes
    """<f4[positions, width]."""

    def __post_init__(self) -> None:
        """Check that both arrays have the shape [positions, width]."""
        if len(self.token_ids_data) != len(self.logprobs_data) or len(self.token_ids_data) % (4 * self.width):
            raise ValueError("top logprobs: token ids and logprobs must both have the shape [positions, width]")

    @property
    def token_ids(self) -> Int32s:
        """Token ids, i4[positions, width], read-only."""
        return np.frombuffer(self.token_ids_data, _I4).reshape(-1, self.width)

    @property
    def logprobs(self) -> Float32s:
        """Log probabilities, f4[positions, width], read-only."""
        return np.frombuffer(self.logprobs_data, _F4).reshape(-1, self.width)


class SamplingMask(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """For each of several tokens, the ids that the sampler chose from: those that top-k, top-p and min-p kept.

    A trainer that renormalizes its probabilities over these ids gets the sampler's probabilities.
    """

    counts_data: bytes
    """<i4[k]: number of ids of each token, including the token itself."""
    token_ids_data: bytes
    """<i4[sum of the counts]: ids of the first token, of the second, and so on."""

    def __post_init__(self) -> None:
        """Check that the counts are in range and add up to the number of ids."""
        for name in ("counts_data", "token_ids_data"):
            if len(getattr(self, name)) % 4:
                raise ValueError(f"sampling mask: {name} of {len(getattr(self, name))} bytes is not an <i4 array")
        counts, ids = self.counts, self.token_ids
        if len(counts) and not 1 <= counts.min() <= counts.max() <= limits.MAX_MASK_IDS:
            raise ValueError(
                f"sampling mask: tokens with {counts.min()} to {counts.max()} ids; allowed: 1 to {limits.MAX_MASK_IDS}"
            )
        if counts.sum(dtype=np.int64) != len(ids):
            raise ValueError(f"sampling mask: {len(ids)} ids, but the counts add up to {counts.sum(dtype=np.int64)}")
        if len(ids) and ids.min() < 0:
            raise ValueError(f"sampling mask: id {ids.min()}; allowed: 0 to {limits.MAX_TOKEN_ID}")

    @property
    def counts(self) -> Int32s:
        """Number of ids of each token, i4[k], read-only."""
        return np.frombuffer(self.counts_data, _I4)

    @property
    def token_ids(self) -> Int32s:
        """Ids of all tokens, i4[sum of the counts], read-only."""
        return np.frombuffer(self.token_ids_data, _I4)


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probabilities of prompt tokens; the first prompt token has none."""

    start: Annotated[int, Meta(ge=1, le=limits.MAX_POSITION)]
    """Absolute position of the first value."""
    logprobs_data: bytes
    """<f4[positions]: log probabilities."""
    top: TopLogprobs | None = None
    """Most likely tokens there; None unless `prompt_logprobs` > 0."""

    def __post_init__(self) -> None:
        """Check that the lengths of the arrays match."""
        size = len(self.logprobs_data)
        if size % 4 or size > 4 * limits.MAX_POSITION:
            raise ValueError(
                f"prompt logprobs of {size} bytes are not an <f4 array of up to {limits.MAX_POSITION} values"
            )
        if self.top is not None and len(self.top.token_ids_data) != size * self.top.width:
            raise ValueError(f"{size // 4} prompt logprobs, but top logprobs of other positions")

    @property
    def logprobs(self) -> Float32s:
        """Log probabilities, f4[positions], read-only."""
        return np.frombuffer(self.logprobs_data, _F4)


class ChunkError(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The reason why a request failed."""

    code: ErrorCode
    """Error code for programs."""
    message: ErrorText
    """Error text for people, one sentence."""
    field: ErrorText = ""
    """With `invalid_request`: name of the wrong field, such as `sampling.top_p`."""
    problem: ErrorText = ""
    """Problem of the field."""
    allowed: ErrorText = ""
    """Allowed values of the field."""

    def __post_init__(self) -> None:
        """Shorten the texts and replace lone surrogates.

        A text that cannot be encoded would fail the whole frame and its other chunks.
        """
        for name in ("message", "field", "problem", "allowed"):
            text = getattr(self, name)
            force_setattr(self, name, text[: limits.MAX_ERROR_CHARS].encode(errors="replace").decode())

    @classmethod
    def of(cls, error: RequestError) -> "ChunkError":
        """Return the terminal chunk's form of `error`."""
        if isinstance(error, InvalidRequest):
            return cls(error.code, error.message, error.field, error.problem, error.allowed)
        return cls(error.code, error.message)

    def exception(self, request_id: str) -> RequestError:
        """Return the exception that the caller of the request receives."""
        return request_error(
            self.code, self.message, request_id=request_id, field=self.field, problem=self.problem, allowed=self.allowed
        )


class End(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Fields that only the terminal chunk has: the finish reason, and totals that verify the response stream."""

    finish_reason: FinishReason
    """Reason why the request ended."""
    num_tokens: Position
    """Number of tokens in all chunks of this attempt and child."""
    num_rows: Position
    """Number of rows of routed experts in them."""
    stop_reason: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)] | None = None
    """Id of the stop token, if one of `stop_token_ids` ended the request."""
    error: ChunkError | None = None
    """Reason of the failure; set exactly with the finish reason `error`."""
    cached_tokens: Position | None = None
    """Prompt tokens that the engine found in its prefix cache; None: unknown."""
    routed_experts_start: Position | None = None
    """Applied `routed_experts_prompt_start`; None: the engine returned no routed experts."""
    kv_params: Annotated[bytes, Meta(max_length=limits.MAX_KV_PARAMS_BYTES)] | None = None
    """After a prefill phase: `KvTransfer.params` of the decode phase; None: no KV is kept."""

    def __post_init__(self) -> None:
        """Check that the error and the finish reason ERROR occur only together."""
        if (self.error is not None) != (self.finish_reason is FinishReason.ERROR):
            raise ValueError(f"finish reason {self.finish_reason} with{'' if self.error else 'out'} an error")


class Chunk(msgspec.Struct, array_like=True, frozen=True, gc=False, kw_only=True):
    """New output of one request: tokens of one engine step or of several, all sampled from one weight version."""

    request_id: RequestId
    """Id of the request, chosen by the client."""
    attempt: Index
    """Number of the attempt, from 0."""
    child: Index
    """Number of the sample, 0 to n - 1."""
    chunk_index: Index
    """Number of the chunk, contiguous from 0 in this attempt and child."""
    weight_version: Version
    """Version of the weights that sampled these tokens, never two."""
    token_ids_data: bytes = b""
    """<i4[k], k >= 0: new token ids."""
    logprobs_data: bytes | None = None
    """<f4[k]: log probabilities of the new tokens; None if `sampling.logprobs` is None."""
    routed_experts: RoutedExperts | None = None
    """Rows of the positions that this step computed: prompt positions in the first chunks, then generated tokens."""
    top_logprobs: TopLogprobs | None = None
    """Most likely tokens at each of the k positions; None unless `sampling.logprobs` > 0."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of prompt tokens, if `sampling.prompt_logprobs` is set; None after the last prompt position."""
    end: End | None = None
    """Finish reason and totals; set only in the terminal chunk."""
    lora_version: Version | None = None
    """Version of the adapter that sampled these tokens, never two; None: no adapter."""
    worker_id: Name | None = None
    """Id of the worker that made the chunk. None on the wire, where the subject names it, and in terminal chunks that
    the client makes."""
    traceparent: Name | None = None
    """W3C trace context of the request at the worker; only in the first chunk of each attempt."""
    kv_recomputed: bool | None = None
    """True: the engine recomputed the KV cache of all earlier positions with the weights and the adapter of this chunk.
    None: no tokens, or not reported."""
    sampling_mask: SamplingMask | None = None
    """Sampling masks of the k tokens; None: the engine makes none, or the request declined them."""

    def __post_init__(self) -> None:
        """Check that the lengths of the arrays match."""
        size = len(self.token_ids_data)
        if size % 4 or size > MAX_IDS_BYTES:
            raise ValueError(f"token ids of {size} bytes are not an <i4 array of up to {limits.MAX_CHUNK_TOKENS} ids")
        logprobs = self.logprobs_data
        if logprobs is not None and len(logprobs) != size:
            raise ValueError(f"{size // 4} token ids but {len(logprobs) / 4:g} logprobs")
        top = self.top_logprobs
        if top is not None and len(top.token_ids_data) != size * top.width:
            raise ValueError(f"{size // 4} token ids but {len(top.token_ids_data) // (4 * top.width)} top logprobs")
        mask = self.sampling_mask
        if mask is not None and len(mask.counts_data) != size:
            raise ValueError(f"{size // 4} token ids but {len(mask.counts_data) // 4} sampling masks")

    @property
    def token_ids(self) -> Int32s:
        """New token ids, i4[k], read-only."""
        return np.frombuffer(self.token_ids_data, _I4)

    @property
    def logprobs(self) -> Float32s | None:
        """The sampler's log probability of each new token, f4[k], read-only."""
        return None if self.logprobs_data is None else np.frombuffer(self.logprobs_data, _F4)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, k."""
        return len(self.token_ids_data) // 4

    @property
    def is_terminal(self) -> bool:
        """True if no chunk of this attempt and child request follows."""
        return self.end is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the request ended; None unless the chunk is terminal."""
        return None if self.end is None else self.end.finish_reason

    @property
    def error(self) -> ChunkError | None:
        """Reason why the request failed; None unless the chunk is terminal and the request failed."""
        return None if self.end is None else self.end.error


def json_logprobs(logprobs: Float32s) -> list[float]:
    """Convert logprobs to a list for JSON: -inf becomes -9999.0.

    Args:
        logprobs: f4[k].

    Raises:
        LocalProtocolError: a value is NaN or +inf, which no worker may send.
    """
    if not np.all(logprobs < np.inf):
        raise LocalProtocolError("a logprob is NaN or +inf")
    finite: list[float] = np.where(np.isneginf(logprobs), JSON_MINUS_INFINITY, logprobs).tolist()
    return finite
