"""The states of a child request at its client: the transition table of `AttemptMachine`."""

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
    "UNADMITTED",
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
"""Errors of an attempt that do not predict an error of the next attempt."""
PASSED_ON: Final = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.WEIGHTS_TOO_OLD})
"""Errors with which a worker rejects a direct request that another worker may accept."""


class RequestState(enum.StrEnum):
    """The state of the current attempt of a child request at its client."""

    WAITING = "waiting"
    """The current attempt is not published. The client publishes it when a worker of the model is present and when the
    request no longer waits for the worker of its group."""
    AWAITING_PREFILL = "awaiting_prefill"
    """The request waits for room at a prefill worker. After 2 s at most, a decode worker serves it alone."""
    READY = "ready"
    """The whole request, or its decode phase, is about to go to the queue. The client asks no prefill worker any more.
    """
    HELD = "held"
    """The request may have killed an engine, and the client tries another suspect first. The client releases this
    request when the other suspect has a token or has ended."""
    PREFILL_HANDED_OVER = "prefill_handed_over"
    """The client has sent the prefill phase to one prefill worker. This worker has one second to send an offer."""
    HANDED_OVER = "handed_over"
    """The client has sent the request directly to one worker. This worker has one second to send an offer."""
    PUBLISHING = "publishing"
    """The client has sent the request to the queue. The client repeats it until the queue confirms."""
    QUEUE_MISSING = "queue_missing"
    """The queue does not exist, although workers of the model are present. The client publishes again after 0.5 s."""
    QUEUED = "queued"
    """The queue stores the request for a worker. The request survives a restart of client, workers and server."""
    PREFILLING = "prefilling"
    """A prefill worker has the prefill phase: it sent an offer, and the client accepted. The first token ends the
    phase."""
    RUNNING = "running"
    """A worker sent an offer, and the client accepted. Both own the request, and the worker acks the queue message when
    the client has acknowledged the offer."""
    ENDED = "ended"
    """The request has its terminal chunk or an error. The client counts later chunks and offers and answers with an
    abort."""


class RequestEvent(enum.StrEnum):
    """An event that changes the state of a child request."""

    PREFILL_WANTED = "prefill_wanted"
    """The request should go to a prefill worker first."""
    PREFILL_FOUND = "prefill_found"
    """A prefill worker has room, and the client sends it the prefill phase."""
    PREFILL_SKIPPED = "prefill_skipped"
    """No prefill worker can accept the request in time."""
    HANDED_OVER = "handed_over"
    """The client sends the request directly to the worker of its placement."""
    PUBLISHED = "published"
    """The client sends the request to the queue."""
    UNPUBLISHED = "unpublished"
    """The NATS connection did not accept the message."""
    STORED = "stored"
    """The queue confirmed that it stores the request."""
    UNSTORED = "unstored"
    """The queue does not exist, although workers are present."""
    WITHDRAWN = "withdrawn"
    """No worker accepted the request. The client publishes it again under the next attempt number. This does not count
    as an attempt."""
    ADMITTED = "admitted"
    """A worker offers to run the request."""
    PREFILLED = "prefilled"
    """The prefill phase has ended, and a decode worker continues."""
    LOST = "lost"
    """The worker, its frames or the queue message are lost. The next attempt begins."""
    SUSPECTED = "suspected"
    """The engine died before the request had a token. The client holds the next attempt."""
    RELEASED = "released"
    """The request is the next suspect that the client tries, or the client learned that its engine did not die."""
    FINISHED = "finished"
    """The request completed or failed, or its caller aborted it."""


UNPUBLISHED: Final = frozenset({RequestState.WAITING, RequestState.READY})
"""The client publishes the request as soon as it can."""
HANDED_TO_ONE: Final = frozenset({RequestState.PREFILL_HANDED_OVER, RequestState.HANDED_OVER})
"""The client has sent the request to one worker and waits for the answer."""
TIMED: Final = HANDED_TO_ONE | {RequestState.QUEUE_MISSING}
"""The state ends after a time, for which the machine returns `WakeAt`."""
OUT: Final = HANDED_TO_ONE | {
    RequestState.PUBLISHING,
    RequestState.QUEUE_MISSING,
    RequestState.QUEUED,
    RequestState.PREFILLING,
    RequestState.RUNNING,
}
"""The current attempt was published, so a worker may have it."""
UNADMITTED: Final = OUT - {RequestState.PREFILL_HANDED_OVER, RequestState.PREFILLING, RequestState.RUNNING}
"""The whole request, or its decode phase, was published, and no worker has offered to run it."""
OPEN: Final = frozenset(RequestState) - {RequestState.ENDED}
"""The request has not ended."""
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
        # The only worker that offered is one that the client avoids.
        (RequestState.PUBLISHING, RequestEvent.WITHDRAWN): RequestState.READY,
        (RequestState.QUEUED, RequestEvent.WITHDRAWN): RequestState.READY,
        # A worker may offer before the queue confirms the request.
        **{(state, RequestEvent.ADMITTED): RequestState.RUNNING for state in sorted(UNADMITTED)},
        (RequestState.PREFILLING, RequestEvent.PREFILLED): RequestState.READY,
        **{(state, RequestEvent.LOST): RequestState.WAITING for state in sorted(OUT)},
        **{(state, RequestEvent.SUSPECTED): RequestState.HELD for state in sorted(OUT)},
        **{(state, RequestEvent.FINISHED): RequestState.ENDED for state in sorted(OPEN)},
    },
)
