"""Where weights come from, and how they are told apart."""

from typing import Annotated

import msgspec
from msgspec import Meta

from . import limits
from .errors import InvalidRequest

__all__ = ["Canary", "PublishedVersion", "Staging", "UpdateTiming", "Verified", "WeightSource"]

TokenId = Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]
Bytes = Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)]
Count = Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0)]


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's weights make of a fixed prompt, sampled greedily: two workers of the same weights agree."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=limits.MAX_CANARY_TOKENS)]
    """Generated tokens."""
    logprobs: Annotated[tuple[float, ...], Meta(max_length=limits.MAX_CANARY_TOKENS)]
    """Of these tokens: log-softmax over all logits."""
    routed_experts: str | None = None
    """Rows of prompt and generated tokens, each row's experts sorted, u1 or <u2 in C order, as base64; None without
    experts, or in an `expected_canary` whose maker does not know them."""
    shape: tuple[int, int, int] | None = None
    """Of `routed_experts`: [num_rows, num_layers, top_k]; the number of bytes says which dtype it has."""


class WeightSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint or an adapter is: exactly one of the two."""

    path: str | None = None
    """A folder on the worker's machine, below one of its allowed roots."""
    objects: str | None = None
    """`<bucket>/<prefix>` in NATS's object store: the files of the folder are the objects below the prefix."""

    def __post_init__(self) -> None:
        """Refuse none and both."""
        if (self.path is None) == (self.objects is None):
            raise InvalidRequest(
                field="source", problem="has both or none of path and objects", allowed="exactly one of them"
            )

    def __str__(self) -> str:
        """As people write it."""
        return self.path if self.path is not None else f"objects:{self.objects}"


class Verified(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker compared after it had loaded weights, in all processes of its engine together."""

    probed: Annotated[int, Meta(ge=0)] = 0
    """Modules that computed a fixed input, and gave what the loaded tensors give."""
    equal: Annotated[int, Meta(ge=0)] = 0
    """Other modules, whose parameters are the loaded tensors, bit for bit."""
    compared: Annotated[int, Meta(ge=0)] = 0
    """Parameters that are the tensors of the same name in the checkpoint's files, bit for bit."""
    unprobed: Annotated[
        tuple[Annotated[str, Meta(max_length=limits.MAX_MODULE_CHARS)], ...], Meta(max_length=limits.MAX_UNPROBED)
    ] = ()
    """Modules with weights that are neither probed nor equal, each with the reason; the first ones."""
    num_unprobed: Annotated[int, Meta(ge=0)] = 0
    """How many of them there are."""
    seconds: Seconds = 0.0
    """Seconds that all this took, in the slowest process; part of `loaded_s`. 0: not measured."""


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker is with bringing a source of weights to its machine, while it may still serve others."""

    source: Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)]
    """What is staged: a path, or `objects:<bucket>/<prefix>`."""
    stage: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
    """What the worker is doing, as `stage` of an `Ack`."""
    done_bytes: Bytes = 0
    """Bytes of this stage that are done."""
    total_bytes: Bytes = 0
    """Bytes that this stage has in all; 0: not known."""


class PublishedVersion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A published version of the weights, as the worker found it and its store when it last read a manifest."""

    version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
    """Of the weights."""
    stored_bytes: Bytes = 0
    """Bytes of the version in the store: of its delta, of its anchor, or of both."""
    model_bytes: Bytes = 0
    """Bytes of its tensors."""
    chain_length: Count = 0
    """Versions of its chain after the last anchor, itself among them; 0: it has an anchor."""
    used_bytes: Bytes = 0
    """Bytes of the model's bucket that were in use."""
    limit_bytes: Bytes = 0
    """Bytes that the bucket may have; 0: it has no limit of its own."""


class UpdateTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the time of a check or an update went, in one worker."""

    fetched_bytes: Bytes = 0
    """Bytes that came from the object store, also for checks before; 0: the source was on the machine already."""
    staged_s: Seconds = 0.0
    """Seconds to fetch, build and check the source, also for checks before; the worker may serve meanwhile."""
    waited_s: Seconds = 0.0
    """Seconds from when the worker had both the command and its source until the requests stood still."""
    paused_s: Seconds = 0.0
    """Seconds in which the engine made no step for requests: from their stop until the engine goes on, or the worker is
    paused again."""
    loaded_s: Seconds = 0.0
    """Of these: seconds in which the engine replaced its weights and compared them."""
    canary_s: Seconds = 0.0
    """Of these: seconds in which the engine computed the canary."""
