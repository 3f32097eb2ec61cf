"""Acks that workers send for commands: JSON, readable with `nats sub`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_int, check_request_id, check_subject_token
from .errors import ControlCode, OpenEnum
from .limits import Count, ErrorText, Name, Version
from .telemetry import ExpertLoad, RequestTimeline
from .weights import Canary, Digest, Staging, UpdateTiming, Verified


class AckStatus(OpenEnum):
    """The progress of a worker with a command. Append-only."""

    ACCEPTED = "accepted"
    """The worker will execute the command."""
    PROGRESS = "progress"
    """The worker executes the command; `stage` names the step."""
    APPLIED = "applied"
    """The worker executed the command. Final."""
    FAILED = "failed"
    """The worker did not complete the command. `error` gives the reason, and the worker's state shows the present
    condition. Final."""
    UNSUPPORTED = "unsupported"
    """The engine cannot execute the command. Final."""
    STALE = "stale"
    """A later command replaced this command. Final."""
    UNKNOWN = "unknown"
    """Never sent: the value for a newer worker's status."""

    @property
    def is_final(self) -> bool:
        """True if no further ack follows."""
        return self in _FINAL


_FINAL = frozenset({AckStatus.APPLIED, AckStatus.FAILED, AckStatus.UNSUPPORTED, AckStatus.STALE})


class AckError(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a worker did not execute a command."""

    code: ControlCode
    """Error code for programs."""
    message: ErrorText
    """Error text for people."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ack of one worker for one command."""

    v: Literal[1] = 1
    """Wire version."""
    id: str
    """Id of the command."""
    command: Name
    """Name of the command."""
    worker: str
    """Id of the worker."""
    incarnation: Name
    """Incarnation of the worker."""
    model: Name
    """Served model name."""
    status: AckStatus
    """Progress of the worker with the command."""
    epoch: int | None = None
    """Epoch of the desired state that contains the command; None for one-off commands."""
    stage: Name | None = None
    """With `progress`, the current step: fetching, checking, pausing, loading, verifying, flushing, resuming."""
    error: AckError | None = None
    """Reason, with `failed`, `unsupported` and `stale`."""
    weight_version: Version = 0
    """Version of the weights now."""
    in_flight: Annotated[int, Meta(ge=0)] = 0
    """Requests in flight now."""
    seconds: float = 0.0
    """Seconds from `accepted` to this ack."""
    canary: Canary | None = None
    """After an update: result of the canary."""
    signature: ErrorText | None = None
    """Signature of the engine. Canaries are comparable only between workers with equal signatures."""
    frames: Annotated[dict[str, int], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)] | None = None
    """After a pause or an update: the number of frames sent on each link, by `<client>/<incarnation>`. Later frames may
    still carry earlier tokens that waited for credit."""
    request_ids: Annotated[tuple[str, ...], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)] | None = None
    """After an abort: ids of the requests that were in flight at this worker."""
    state: Any | None = None
    """After `state`: the worker's presence, as a map."""
    verified: Verified | None = None
    """After an update: comparison of the weights with the loaded tensors. None: the engine reports none, or
    nothing was loaded."""
    timing: UpdateTiming | None = None
    """After a check or an update: durations of its steps. None: the worker reports none."""
    progress: Staging | None = None
    """With `progress`: progress of staging. None: the worker reports none."""
    experts: ExpertLoad | None = None
    """After `read_experts`: counts of the chosen experts. None: the worker counted none, because the engine returns no
    routed experts."""
    timelines: Annotated[tuple[RequestTimeline, ...], Meta(max_length=limits.MAX_TIMELINES)] | None = None
    """After `read_request`: timelines in order of arrival. Empty: the worker knows none."""
    timelines_left_out: Count = 0
    """Number of earlier timelines that did not fit into the ack."""

    digest: Digest | None = None
    """After a check: digest of the content at the source. None: the worker computes none."""
    path: ErrorText | None = None
    """After the check of a path: its real path, without symlinks."""

    def __post_init__(self) -> None:
        """Check that the ids, the worker name and the epoch are valid."""
        check_request_id("id", self.id)
        check_subject_token("worker", self.worker)
        if self.epoch is not None:
            check_int("epoch", self.epoch, 0, 2**53)
