"""Messages between `rollbus prove` and the process that runs forward passes of transformers: files of msgpack.

A pass of n tokens has n - 1 entries: entry i belongs to the input at position i, which predicts token i + 1.
"""

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

MAX_SEQUENCES: Final = 4096
MAX_TOKENS: Final = 1 << 17
"""Tokens of one sequence."""
MAX_FILE_BYTES: Final = 1 << 30
"""Size of a job or a result. A result has some hundred bytes a token and layer."""
ABOVE: Final = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
"""Probabilities of more likely tokens at which `TokenScores.above_tail` is given: usual values of top-p."""
RANKS: Final = (1, 2, 5, 8, 10, 20, 40, 50, 64, 100)
"""Ranks at which `TokenScores.rank_tail` is given: usual values of top-k."""
Dtype = Literal["float32", "bfloat16", "float16"]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class ReferenceSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence to compute."""

    token_ids: Ints
    """i4[n]: the prompt and the sampled tokens."""
    rows: Ints | None = None
    """i4[n - 1, layers, top_k]: routed experts of the engine. None: it returned none."""


class ReferenceJob(msgspec.Struct, frozen=True, kw_only=True):
    """Forward passes to run."""

    v: Literal[1] = 1
    folder: str
    """Directory of the checkpoint."""
    dtypes: Annotated[list[Dtype], Meta(min_length=1, max_length=2)]
    """The reference's dtype, and a second one that shows how much rounding changes."""
    sequences: Annotated[list[ReferenceSequence], Meta(min_length=1, max_length=MAX_SEQUENCES)]
    seconds: float
    """Seconds after which no further sequence is begun. At least one is computed."""


class TokenScores(msgspec.Struct, kw_only=True):
    """What the reference computes for the tokens of one sequence."""

    logprobs: Floats
    """f4[n - 1]: log probability of each next token."""
    ranks: Ints
    """i4[n - 1]: number of more likely tokens."""
    above: Floats
    """f4[n - 1]: probability of these tokens together."""
    above_tail: Floats
    """f4[n - 1, len(ABOVE)]: probability of all tokens whose `above` is at least this."""
    rank_tail: Floats
    """f4[n - 1, len(RANKS)]: probability of all tokens whose rank is at least this."""
    replayed: Floats | None = None
    """f4[n - 1]: log probabilities with the engine's experts. None: not computed."""
    misses: Floats | None = None
    """f4[n - 1, routers]: by how much, in the router's logits, the engine's set of experts misses the reference's. 0:
    the sets are equal."""
    others: Floats | None = None
    """f4[n - 1, routers]: the same with the engine's experts replayed in all layers, so that each router sees inputs of
    the same experts."""
    rounded: list[Floats] = []
    """f4[n - 1] each: `replayed`, if routers round their logits to bfloat16, and if they compute in bfloat16."""


class ReferencePass(msgspec.Struct, frozen=True, kw_only=True):
    """All sequences in one dtype."""

    dtype: Dtype
    device: str
    sequences: list[TokenScores]
    """The sequences that the time was enough for, in the order of the job."""


class ReferenceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job."""

    v: Literal[1] = 1
    release: str
    """Release of transformers."""
    passes: list[ReferencePass]
    layers: list[int]
    """Index in the rows of each router's layer."""
    routing_refusal: str | None = None
    """Reason why rows were not compared. None: they were, or there are none."""
    misfit: str | None = None
    """How the rows do not fit the routers, for example in the number of experts of a token. None: they fit."""
    facts: dict[str, str] = {}
    """Facts of the checkpoint's configuration that explain differences, such as a tied head."""


Message = TypeVar("Message", ReferenceJob, ReferenceResult)


def encode(message: ReferenceJob | ReferenceResult) -> bytes:
    """Return a message as msgpack. An array is its shape and its little-endian bytes."""

    def pack(array: Any) -> Any:
        return array.shape, array.astype("<i4" if array.dtype.kind in "iu" else "<f4").tobytes()

    return msgspec.msgpack.encode(message, enc_hook=pack)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Return a message.

    Raises:
        msgspec.ValidationError: it is not one of this kind, or the bytes of an array do not fit its shape.
    """

    def unpack(array: Any, value: Any) -> Any:
        shape, content = value
        return np.frombuffer(content, "<i4" if array == Ints else "<f4").reshape(shape)

    return msgspec.msgpack.decode(data, type=kind, dec_hook=unpack)
