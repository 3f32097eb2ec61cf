"""The states of a child request as its client sees it: the table by which `AttemptMachine` moves."""

import enum
from typing import Final

from ....schemas.errors import ErrorCode
from ..states import StateMachine

__all__ = [
    "HANDED_TO_ONE",
    "OPEN",
    "OUT",
    "PASSED_ON",
    "REQUEST",
    "RETRIED",
    "TIMED",
    "UNPUBLISHED",
    "RequestEvent",
    "RequestState",
]


RETRIED: Final = frozenset(
    {
        ErrorCode.WORKER_LOST,
        ErrorCode.WORKER_STOPPED,
        ErrorCode.WORKER_FENCED,
        ErrorCode.CLIENT_LOST,
        ErrorCode.OVER_BUDGET,
        ErrorCode.FRAMES_LOST,
        ErrorCode.ENGINE_DEAD,
        ErrorCode.KV_TRANSFER_FAILED,
    }
)
"""Failures of an attempt that say nothing about the next one."""
PASSED_ON: Final = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.WEIGHTS_TOO_OLD})
"""What a worker says of a request that was handed to it past the queue, and that another may take."""


class RequestState(enum.StrEnum):
    """Where the current attempt of a child request is, as its client knows."""

    WAITING = "waiting"
    """Nothing of the current attempt was published. The client publishes it when a worker of the model is there, and
    when it waits no longer for the worker of its group."""
    AWAITING_PREFILL = "awaiting_prefill"
    """The request waits for room at a prefill worker. After 2 s at most, a decode worker serves it alone."""
    READY = "ready"
    """Whole requests or the decode phase go to the queue from here. No prefill worker is asked any more."""
    HELD = "held"
    """The request may have killed an engine, and the client tries another such request first. Its turn comes when that
    request has a token or has ended."""
    PREFILL_HANDED_OVER = "prefill_handed_over"
    """The client has handed the prefill phase to one prefill worker. That worker has one second to offer to run it."""
    HANDED_OVER = "handed_over"
    """The client has handed the request to one worker, past the queue. That worker has one second to offer to run it.
    """
    PUBLISHING = "publishing"
    """Sent to the queue, which has not confirmed it. It is sent again until the queue answers."""
    QUEUE_MISSING = "queue_missing"
    """The queue was deleted, although workers of the model are there. The client publishes again after half a second.
    """
    QUEUED = "queued"
    """The queue holds it for a worker. It outlives client, workers and a restart of the server there."""
    PREFILLING = "prefilling"
    """A prefill worker offered it and the client agreed. Its first token ends the prefill phase."""
    RUNNING = "running"
    """A worker offered it and the client agreed. The two own it: the queue has forgotten it, or will."""
    ENDED = "ended"
    """The terminal chunk is there, or an error. A late chunk or offer is counted and answered by an abort."""


class RequestEvent(enum.StrEnum):
    """What moves a child request."""

    PREFILL_WANTED = "prefill_wanted"
    """A prefill worker is to serve it first."""
    PREFILL_FOUND = "prefill_found"
    """A prefill worker has room, and the client hands it the prefill phase."""
    PREFILL_SKIPPED = "prefill_skipped"
    """No prefill worker can take it in time."""
    HANDED_OVER = "handed_over"
    """The client hands it to the worker at which it is placed."""
    PUBLISHED = "published"
    """The client sends it to the queue."""
    UNPUBLISHED = "unpublished"
    """The connection to NATS did not take it."""
    STORED = "stored"
    """The queue confirmed that it holds the request."""
    UNSTORED = "unstored"
    """There is no queue, although there are workers."""
    WITHDRAWN = "withdrawn"
    """No worker took it. It goes out again under the next attempt number, which does not count as an attempt."""
    ADMITTED = "admitted"
    """A worker offers to run it."""
    PREFILLED = "prefilled"
    """The prefill phase has ended, and another worker is to go on."""
    LOST = "lost"
    """The worker, its frames or the queue's entry are gone. The next attempt begins."""
    SUSPECTED = "suspected"
    """Its engine died before it had a token. The next attempt is held back."""
    RELEASED = "released"
    """It is the next suspect to be tried, or its engine had not died."""
    FINISHED = "finished"
    """It ended, well or not, or its caller does not want it any more."""


UNPUBLISHED: Final = frozenset({RequestState.WAITING, RequestState.READY})
"""The client publishes as soon as it can."""
HANDED_TO_ONE: Final = frozenset({RequestState.PREFILL_HANDED_OVER, RequestState.HANDED_OVER})
"""One worker was asked, and the client waits for its answer."""
TIMED: Final = HANDED_TO_ONE | {RequestState.QUEUE_MISSING}
"""The state ends after a time, which `WakeAt` asks for."""
OUT: Final = HANDED_TO_ONE | {
    RequestState.PUBLISHING,
    RequestState.QUEUE_MISSING,
    RequestState.QUEUED,
    RequestState.PREFILLING,
    RequestState.RUNNING,
}
"""The current attempt was published: a worker may have it."""
_UNADMITTED = OUT - {RequestState.PREFILL_HANDED_OVER, RequestState.PREFILLING, RequestState.RUNNING}
OPEN: Final = frozenset(RequestState) - {RequestState.ENDED}
"""More is to come."""
REQUEST = StateMachine(
    "request",
    RequestState.WAITING,
    frozenset({RequestState.ENDED}),
    {
        (RequestState.WAITING, RequestEvent.PREFILL_WANTED): RequestState.AWAITING_PREFILL,
        (RequestState.WAITING, RequestEvent.HANDED_OVER): RequestState.HANDED_OVER,
        (RequestState.WAITING, RequestEvent.PUBLISHED): RequestState.PUBLISHING,
        (RequestState.AWAITING_PREFILL, RequestEvent.PREFILL_FOUND): RequestState.PREFILL_HANDED_OVER,
        (RequestState.AWAITING_PREFILL, RequestEvent.PREFILL_SKIPPED): RequestState.READY,
        (RequestState.READY, RequestEvent.HANDED_OVER): RequestState.HANDED_OVER,
        (RequestState.READY, RequestEvent.PUBLISHED): RequestState.PUBLISHING,
        (RequestState.HELD, RequestEvent.RELEASED): RequestState.WAITING,
        (RequestState.PREFILL_HANDED_OVER, RequestEvent.WITHDRAWN): RequestState.WAITING,
        (RequestState.PREFILL_HANDED_OVER, RequestEvent.ADMITTED): RequestState.PREFILLING,
        (RequestState.HANDED_OVER, RequestEvent.WITHDRAWN): RequestState.READY,
        (RequestState.RUNNING, RequestEvent.WITHDRAWN): RequestState.READY,
        (RequestState.HANDED_OVER, RequestEvent.UNPUBLISHED): RequestState.READY,
        (RequestState.PUBLISHING, RequestEvent.UNPUBLISHED): RequestState.READY,
        (RequestState.PUBLISHING, RequestEvent.STORED): RequestState.QUEUED,
        (RequestState.PUBLISHING, RequestEvent.UNSTORED): RequestState.QUEUE_MISSING,
        (RequestState.QUEUE_MISSING, RequestEvent.WITHDRAWN): RequestState.READY,
        # A worker may be quicker than the queue's own confirmation.
        **{(state, RequestEvent.ADMITTED): RequestState.RUNNING for state in sorted(_UNADMITTED)},
        (RequestState.PREFILLING, RequestEvent.PREFILLED): RequestState.READY,
        **{(state, RequestEvent.LOST): RequestState.WAITING for state in sorted(OUT)},
        **{(state, RequestEvent.SUSPECTED): RequestState.HELD for state in sorted(OUT)},
        **{(state, RequestEvent.FINISHED): RequestState.ENDED for state in sorted(OPEN)},
    },
)
