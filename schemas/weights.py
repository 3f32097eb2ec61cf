"""Sources of weights, and the data that verify and identify loaded weights."""

import os
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_bool, describe
from .errors import InvalidRequest
from .limits import Count, ErrorText, Name, Seconds, Version

TokenId = Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""Digest of weights or of an adapter, as `tensors_digest` of the manifest computes it."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a worker's weights for a fixed prompt, sampled greedily.

    Two workers with the same weights give the same result.
    """

    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=limits.MAX_CANARY_TOKENS)]
    """Generated tokens."""
    logprobs: Annotated[tuple[float, ...], Meta(max_length=limits.MAX_CANARY_TOKENS)]
    """Log probabilities of these tokens: log-softmax over all logits."""
    routed_experts: str | None = None
    """Rows of prompt and generated tokens as base64, u1 or <u2 in C order, each row sorted. None
    without experts, or in an `expected_canary` whose creator does not know them."""
    shape: tuple[int, int, int] | None = None
    """Shape of `routed_experts`: [num_rows, num_layers, top_k]. The number of bytes gives the dtype."""


class WeightSource(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a checkpoint or an adapter: exactly one of the two fields."""

    path: str | None = None
    """Folder on the worker's machine, below one of the worker's allowed roots."""
    objects: str | None = None
    """`<bucket>/<prefix>` in NATS's object store. The files of the folder are the objects below the prefix."""

    def __post_init__(self) -> None:
        """Check that exactly one field is set."""
        if (self.path is None) == (self.objects is None):
            raise InvalidRequest("source", "has both path and objects, or neither", "exactly one of them")

    def __str__(self) -> str:
        """Return the source in the notation of the command line."""
        return self.path if self.path is not None else f"objects:{self.objects}"


class Verified(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of a worker's comparison after it loaded weights, over all processes of its engine."""

    probed: Annotated[int, Meta(ge=0)] = 0
    """Modules whose output for a fixed input matches the loaded tensors."""
    equal: Annotated[int, Meta(ge=0)] = 0
    """Other modules whose parameters equal the loaded tensors, bit for bit."""
    compared: Annotated[int, Meta(ge=0)] = 0
    """Parameters that equal the tensors of the same name in the checkpoint's files, bit for bit."""
    unprobed: Annotated[
        tuple[Annotated[str, Meta(max_length=limits.MAX_MODULE_CHARS)], ...], Meta(max_length=limits.MAX_UNPROBED)
    ] = ()
    """First modules that are neither probed nor equal, each with the reason."""
    num_unprobed: Annotated[int, Meta(ge=0)] = 0
    """Number of all such modules."""
    seconds: Seconds = 0.0
    """Seconds of the comparison in the slowest process; part of `loaded_s`. 0: not measured."""


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a worker that brings a source of weights to its machine; it may serve requests meanwhile."""

    source: ErrorText
    """Source: a path, or `objects:<bucket>/<prefix>`."""
    stage: Name
    """Current step, as `stage` of an `Ack`."""
    done_bytes: Count = 0
    """Completed bytes of this step."""
    total_bytes: Count = 0
    """Total bytes of this step; 0: unknown."""


class OpenTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer of weights into a worker's engine that has started and not ended. The worker serves nothing."""

    id: Name
    """Id of the transfer: the id of its `start_weight_update`."""
    by: Name
    """Its owner: a client of the bus, or `http:` and a user of the HTTP service."""
    age_s: Seconds = 0.0
    """Seconds since its start."""
    left_s: Seconds = 0.0
    """Seconds until it ends, unless a command arrives before. 0 while a command is in progress."""
    chunks: Count = 0
    """Parts of the weights that it has received."""

    def __str__(self) -> str:
        """Return one phrase that names the transfer, its owner and its age."""
        return f"the transfer {self.id} of {self.by}, opened {self.age_s:.0f} s ago, with {self.chunks} chunks"


class PublishedVersion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A published version of the weights, as of the last manifest that the worker read."""

    version: Version
    """Version of the weights."""
    stored_bytes: Count = 0
    """Bytes of its delta, its anchor, or both in the store."""
    model_bytes: Count = 0
    """Bytes of its tensors."""
    chain_length: Count = 0
    """Versions since the last anchor, including this one; 0: it has an anchor."""
    used_bytes: Count = 0
    """Used bytes of the model's bucket."""
    limit_bytes: Count = 0
    """Maximum bytes of the bucket; 0: no limit of its own."""


class UpdateTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The durations of a check or an update in one worker."""

    fetched_bytes: Count = 0
    """Bytes fetched from the object store, including earlier checks. 0: the source was already on the machine."""
    staged_s: Seconds = 0.0
    """Seconds to fetch, build and check the source, including earlier checks. The worker may serve requests
    meanwhile."""
    waited_s: Seconds = 0.0
    """Seconds from when the worker had both the command and its source until the requests were paused."""
    paused_s: Seconds = 0.0
    """Seconds in which the engine ran no step for requests. They last from the requests' pause until the engine resumes
    or the worker is paused again."""
    loaded_s: Seconds = 0.0
    """Part of `paused_s` in which the engine replaced and compared its weights."""
    canary_s: Seconds = 0.0
    """Part of `paused_s` in which the engine computed the canary."""


def pop_source(path: str | os.PathLike[str] | None, fields: dict[str, Any]) -> tuple[WeightSource, bool]:
    """Return the source, and True if it must be uploaded. Remove both options from `fields`."""
    objects = fields.pop("objects", None)
    upload = check_bool("upload", fields.pop("upload", False))
    source = source_of(path, objects)
    if upload and source.path is None:
        raise InvalidRequest("upload", "is set without a path", "a path, or upload=False")
    return source, upload


def source_of(path: object, objects: str | None) -> WeightSource:
    """Return the source that these arguments name.

    Raises:
        InvalidRequest: `path` is no path.
    """
    if path is None:
        return WeightSource(objects=objects)
    folder: object = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder:
        raise InvalidRequest("path", f"is {describe(path)}", "the path of a folder")
    return WeightSource(path=folder, objects=objects)
