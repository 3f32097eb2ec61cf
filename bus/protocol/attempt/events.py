"""The events that `AttemptMachine` handles, and the instructions that it returns."""

from collections.abc import Sequence

import msgspec

from ....schemas.chunk import Chunk
from ....schemas.errors import RequestError
from ....schemas.messages import KvTransfer, RequestKey
from ..queue.prefill_queue import PrefillFallback


class Event(msgspec.Struct, frozen=True):
    """What happened to a child request. An event with the number of an attempt means nothing for another attempt."""


class Instruction(msgspec.Struct, frozen=True):
    """What the client must do for a child request."""


class PublishingPossible(Event, frozen=True):
    """The client is connected, and has room for another request that waits for the queue's answer."""

    max_bytes: int
    """Of a message."""
    is_served: bool
    """A worker of the model serves."""
    is_target_known: bool = True
    """The version from which `max_weight_lag` counts is known, or the request has no such limit."""
    direct_to: str | None = None
    """The worker that should get the first attempt; None: any worker may take it."""
    num_prefill_workers: int | None = None
    """Prefill workers that serve; None: no decode worker of the model could use what they do."""
    prefill_min_tokens: int = 1
    """Length of a prompt that a prefill worker computes at all."""


class PrefillDecided(Event, frozen=True):
    """The request has left the prefill queue for this worker of this KV connector, or (None) for the queue."""

    worker: str | None
    connector: str | None = None


class PublishFailed(Event, frozen=True):
    """The connection to NATS did not take the message."""

    attempt: int


class Oversized(Event, frozen=True):
    """The message of the current attempt was not sent, because it is larger than `max_bytes`."""

    num_bytes: int
    max_bytes: int


class Stored(Event, frozen=True):
    """The queue has confirmed that it holds the request."""

    attempt: int


class NotStored(Event, frozen=True):
    """The queue has refused the request; `is_served` if a worker is there to create the queue anew."""

    attempt: int
    error: RequestError
    is_served: bool


class Offered(Event, frozen=True):
    """A worker offers to run the current attempt."""

    worker: str
    incarnation: str


class WorkerSilent(Event, frozen=True):
    """The one worker to which the current attempt was handed is gone, or its frames do not decode."""

    error: RequestError


class Lost(Event, frozen=True):
    """The worker of the current attempt is gone, or its frames are, or the queue's entry."""

    error: RequestError
    is_over: bool = False
    """The worker itself has ended it, and needs no abort."""
    is_suspect: bool = False
    """The next attempt must not be published before `SuspectReleased`."""
    unreadable_at: str | None = None
    """The worker whose frame did not decode, if this request's chunk may be the cause."""


class SuspectReleased(Event, frozen=True):
    """A request that was held back may be published."""


class TimePassed(Event, frozen=True):
    """The time of `WakeAt` has come."""


class Failed(Event, frozen=True):
    """The client cannot serve the request. If `is_over`, its worker has ended it, and needs no abort."""

    error: RequestError
    is_over: bool = False


class Stopped(Event, frozen=True):
    """The call has ended, or its caller has left it."""


class Aborted(Event, frozen=True):
    """The caller wants the request to end where it stands."""


class Schedule(Instruction, frozen=True):
    """Report `PublishingPossible` as soon as that is so."""


class JoinPrefillQueue(Instruction, frozen=True):
    """Put the request into the prefill queue, and report `PrefillDecided` at this time at the latest."""

    until: float


class CountFallback(Instruction, frozen=True):
    """Count that a decode worker serves the request alone, although the fleet has prefill workers or should."""

    reason: PrefillFallback


class Publish(Instruction, frozen=True):
    """Send the current attempt to this worker, or to the queue (None)."""

    worker: str | None
    kv: KvTransfer | None


class WakeAt(Instruction, frozen=True):
    """Report `TimePassed` at this time."""

    time: float


class RecordAdmission(Instruction, frozen=True):
    """A worker has the current attempt, so many seconds after it was first published since a worker last had it."""

    waited_s: float


class Retract(Instruction, frozen=True):
    """Expect nothing any more of what was published; `refusal` says why no worker took it, if that is the reason."""

    refusal: RequestError | None = None


class AbortAttempt(Instruction, frozen=True):
    """Have this worker stop this attempt."""

    worker: str
    key: RequestKey


class CountLoss(Instruction, frozen=True):
    """Count an attempt that was given up, and whether another follows."""

    is_retried: bool


class Deliver(Instruction, frozen=True):
    """Give these chunks to the caller."""

    chunks: Sequence[Chunk]


class ClearSuspicion(Instruction, frozen=True):
    """The worker that is to finish the request has made a token: it does not kill engines at its start."""


class Complete(Instruction, frozen=True):
    """The terminal chunk was delivered: the request has ended."""


class Fail(Instruction, frozen=True):
    """The request has ended with this error, and so has its call."""

    error: RequestError
