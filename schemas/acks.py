"""What workers answer to commands: JSON, readable with `nats sub`."""

import enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_int, check_request_id, check_subject_token
from .errors import ControlCode
from .telemetry import ExpertLoad, RequestTimeline
from .weights import Canary, Staging, UpdateTiming, Verified

__all__ = ["Ack", "AckError", "AckStatus"]

Version = Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]


class AckStatus(enum.StrEnum):
    """How far a worker is with a command. Append-only."""

    ACCEPTED = "accepted"
    """It will see to it."""
    PROGRESS = "progress"
    """It is at it; `stage` says where."""
    APPLIED = "applied"
    """Done. Final."""
    FAILED = "failed"
    """Not done; `error` says why, and the worker's state what holds now. Final."""
    UNSUPPORTED = "unsupported"
    """The engine cannot do it. Final."""
    STALE = "stale"
    """A later command has taken its place. Final."""
    UNKNOWN = "unknown"
    """Never sent: how this side reads a status that a newer worker appended."""

    @classmethod
    def _missing_(cls, value: object) -> "AckStatus":
        return cls.UNKNOWN

    @property
    def is_final(self) -> bool:
        """Nothing follows."""
        return self in _FINAL


_FINAL = frozenset({AckStatus.APPLIED, AckStatus.FAILED, AckStatus.UNSUPPORTED, AckStatus.STALE})


class AckError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker did not carry out a command."""

    code: ControlCode
    """For programs."""
    message: Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)]
    """For people: names the field or file, what is wrong with it and what is allowed."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker's word on one command."""

    v: Literal[1] = 1
    """Wire version."""
    id: str
    """Of the command."""
    command: Name
    """Its name."""
    worker: str
    """Who answers."""
    incarnation: Name
    """Which life of it."""
    model: Name
    """Which model it serves."""
    status: AckStatus
    """How far it is."""
    epoch: int | None = None
    """Of the desired state that the answer is about; None for events."""
    stage: Name | None = None
    """With `progress`: what it is doing: fetching, checking, pausing, loading, verifying, flushing, resuming."""
    error: AckError | None = None
    """With `failed`, `unsupported` and `stale`."""
    weight_version: Version = 0
    """Of the weights that the worker has now."""
    in_flight: Annotated[int, Meta(ge=0)] = 0
    """Requests in flight now."""
    seconds: float = 0.0
    """From accepted to this answer."""
    canary: Canary | None = None
    """After an update: what the new weights give."""
    signature: Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)] | None = None
    """Of the engine: canaries are compared between workers of the same."""
    frames: Annotated[dict[str, int], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)] | None = None
    """After a pause or an update: by `<client>/<incarnation>`, how many frames that link had sent. Later ones may still
    bring tokens of before, which waited for credit."""
    request_ids: Annotated[tuple[str, ...], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)] | None = None
    """After an abort: those that were in flight here."""
    state: Any | None = None
    """After `state`: the worker's presence, as a map."""
    verified: Verified | None = None
    """After an update: what of the new weights was compared; None: the engine does not say, or nothing was loaded."""
    timing: UpdateTiming | None = None
    """After a check or an update: where its time went; None: it does not say."""
    progress: Staging | None = None
    """With `progress`: how far it is with staging; None: it does not say."""
    experts: ExpertLoad | None = None
    """After `read_experts`; None: no expert was counted, since the engine returns no routing."""
    timelines: Annotated[tuple[RequestTimeline, ...], Meta(max_length=limits.MAX_TIMELINES)] | None = None
    """After `read_request`: the attempts of its samples here, in the order in which they came; empty: none is known."""
    timelines_left_out: Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)] = 0
    """Earlier attempts and samples of that request, which the answer has no room for."""

    def __post_init__(self) -> None:
        """Refuse ids that no command has, and names that no worker has."""
        check_request_id("id", self.id)
        check_subject_token("worker", self.worker)
        if self.epoch is not None:
            check_int("epoch", self.epoch, 0, 2**53)
