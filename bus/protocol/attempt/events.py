"""The events that `AttemptMachine` handles, and the instructions that it returns."""

from collections.abc import Sequence

import msgspec

from ....schemas.chunk import Chunk
from ....schemas.errors import RequestError
from ....schemas.messages import KvTransfer, RequestKey
from ..queue.prefill_queue import PrefillFallback


class Event(msgspec.Struct, frozen=True):
    """An event of a child request. An event with an attempt number has no effect on another attempt."""


class Instruction(msgspec.Struct, frozen=True):
    """An action that the client must execute for a child request."""


class PublishingPossible(Event, frozen=True):
    """The client is connected and may publish: it has room for another request that the queue has not confirmed."""

    max_bytes: int
    """The largest message in bytes."""
    is_served: bool
    """True if a worker of the model serves."""
    is_target_known: bool = True
    """True if the version from which `max_weight_lag` counts is known, or if the request has no such limit."""
    direct_to: str | None = None
    """The worker that should get the first attempt; None: any worker may run it."""
    num_prefill_workers: int | None = None
    """The number of serving prefill workers; None: no decode worker of the model can read their KV."""
    prefill_min_tokens: int = 1
    """The length of the shortest prompt that goes to a prefill worker."""


class PrefillDecided(Event, frozen=True):
    """The request has left the prefill queue, for this worker of this KV connector or (None) for the queue."""

    worker: str | None
    connector: str | None = None


class PublishFailed(Event, frozen=True):
    """The NATS connection did not accept the message."""

    attempt: int


class Oversized(Event, frozen=True):
    """The client did not send the message of the current attempt, because it is larger than `max_bytes`."""

    num_bytes: int
    max_bytes: int


class Stored(Event, frozen=True):
    """The queue has confirmed that it stores the request."""

    attempt: int


class NotStored(Event, frozen=True):
    """The queue has rejected the request. `may_come` is true if a worker may come that creates the queue."""

    attempt: int
    error: RequestError
    may_come: bool


class Offered(Event, frozen=True):
    """A worker offers to run the current attempt."""

    worker: str
    incarnation: str


class WorkerSilent(Event, frozen=True):
    """The worker to which the client handed the current attempt is lost, or its frames do not decode.

    Or the client avoids the worker that took the attempt from the queue.
    """

    error: RequestError


class Lost(Event, frozen=True):
    """The worker of the current attempt, its frames or the queue message are lost."""

    error: RequestError
    is_over: bool = False
    """The worker itself has ended the attempt. It needs no abort."""
    is_suspect: bool = False
    """The next attempt must not be published before `SuspectReleased`."""
    unreadable_at: str | None = None
    """The worker whose frame did not decode, if a chunk of this request may be the cause."""


class SuspectReleased(Event, frozen=True):
    """The client may publish a request that it held back."""


class TimePassed(Event, frozen=True):
    """The time of `WakeAt` has passed."""


class Failed(Event, frozen=True):
    """The client cannot serve the request. If `is_over`, its worker has ended it and needs no abort."""

    error: RequestError
    is_over: bool = False


class Stopped(Event, frozen=True):
    """The call has ended, or its caller has abandoned it."""


class Aborted(Event, frozen=True):
    """The caller aborts the request and keeps the tokens that it has."""


class Schedule(Instruction, frozen=True):
    """Report `PublishingPossible` as soon as publishing is possible."""


class JoinPrefillQueue(Instruction, frozen=True):
    """Put the request into the prefill queue. Report `PrefillDecided` at this time at the latest."""

    until: float


class CountFallback(Instruction, frozen=True):
    """Count that a decode worker serves the request alone, although the fleet has or should have prefill workers."""

    reason: PrefillFallback


class Publish(Instruction, frozen=True):
    """Send the current attempt to this worker, or to the queue (None)."""

    worker: str | None
    kv: KvTransfer | None


class WakeAt(Instruction, frozen=True):
    """Report `TimePassed` at this time."""

    time: float


class RecordAdmission(Instruction, frozen=True):
    """Record the admission. The seconds count from the first publication since a worker last had the request."""

    waited_s: float


class Retract(Instruction, frozen=True):
    """Stop waiting for answers to the published attempt. `refusal` is the reason if no worker accepted it."""

    refusal: RequestError | None = None


class AbortAttempt(Instruction, frozen=True):
    """Send this worker an abort of this attempt."""

    worker: str
    key: RequestKey


class CountLoss(Instruction, frozen=True):
    """Count a lost attempt, and whether another attempt follows."""

    is_retried: bool


class Deliver(Instruction, frozen=True):
    """Deliver these chunks to the caller."""

    chunks: Sequence[Chunk]


class ClearSuspicion(Instruction, frozen=True):
    """Clear the suspicion. The last worker has generated a token, so the request does not kill engines at its start."""


class Complete(Instruction, frozen=True):
    """End the request after its terminal chunk was delivered."""


class Fail(Instruction, frozen=True):
    """End the request and its call with this error."""

    error: RequestError
