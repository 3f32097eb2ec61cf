"""The states of requests and workers as transition tables. The code executes them, and docs/protocol.md shows them.

`WORKER_REQUEST` is a worker's view of a request that it has accepted. `attempt.states` has a client's view of a child
request. `WORKER` is the lifecycle of a worker.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ...schemas.errors import LocalProtocolError
from ...schemas.presence import WorkerState


class WorkerRequestState(enum.StrEnum):
    """The state of a request that a worker has accepted."""

    OFFERED = "offered"
    """The engine runs the request, and the worker offers it to the client. The queue still holds it."""
    OWNED = "owned"
    """The client has acknowledged the offer, and the worker has acked the queue message. Worker and client own the
    request."""
    ENDED = "ended"
    """The worker has written the terminal chunk. It keeps the frame with this chunk until the client acknowledges it.
    """


class WorkerRequestEvent(enum.StrEnum):
    """An event that changes the state of an accepted request."""

    CONFIRMED = "confirmed"
    """The client acknowledged the frame with the offer."""
    STOPPED = "stopped"
    """The client aborted the request at this worker: the call ended, or another worker has the current attempt."""
    FINISHED = "finished"
    """The engine finished the request, or the request failed."""


class WorkerEvent(enum.StrEnum):
    """An event that changes the state of a worker."""

    READY = "ready"
    """The engine is loaded and warm, and the worker has verified its weights."""
    CHANGED = "changed"
    """The desired state changed, or the worker found its weights invalid."""
    CAUGHT_UP = "caught_up"
    """The worker matches a desired state to serve."""
    PAUSED = "paused"
    """The worker matches a desired state to pause."""
    DRAINED = "drained"
    """The worker matches a desired state to be drained, or drains itself."""
    SLEPT = "slept"
    """The worker matches a desired state to sleep."""
    MISSED = "missed"
    """The worker could not get the desired weights. Its present weights are unchanged."""
    SPOILT = "spoilt"
    """The weights are partly written, or failed their verification."""
    STRANDED = "stranded"
    """The worker cannot get the desired weights again."""
    FENCED = "fenced"
    """The server did not confirm the lease in time."""
    CONFIRMED = "confirmed"
    """The server confirmed a presence message of the new incarnation."""
    DIED = "died"
    """The engine died, or it completes no steps any more."""
    STOPPED = "stopped"
    """The worker received a command or a signal to stop."""


S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


@dataclass(frozen=True, slots=True)
class StateMachine(Generic[S, E]):
    """A transition table. A transition that is not in the table is an error."""

    name: str
    initial: S
    final: frozenset[S]
    transitions: Mapping[tuple[S, E], S]

    def next(self, state: S, event: E) -> S:
        """Return the state after `event`.

        Raises:
            LocalProtocolError: the table has no such transition; this is a bug in this process.
        """
        try:
            return self.transitions[state, event]
        except KeyError:
            raise LocalProtocolError(f"event {event} is invalid for a {self.name} in state {state}") from None


WORKER_REQUEST = StateMachine(
    "held request",
    WorkerRequestState.OFFERED,
    frozenset({WorkerRequestState.ENDED}),
    {
        (WorkerRequestState.OFFERED, WorkerRequestEvent.CONFIRMED): WorkerRequestState.OWNED,
        (WorkerRequestState.OFFERED, WorkerRequestEvent.STOPPED): WorkerRequestState.ENDED,
        (WorkerRequestState.OFFERED, WorkerRequestEvent.FINISHED): WorkerRequestState.ENDED,
        (WorkerRequestState.OWNED, WorkerRequestEvent.STOPPED): WorkerRequestState.ENDED,
        (WorkerRequestState.OWNED, WorkerRequestEvent.FINISHED): WorkerRequestState.ENDED,
    },
)
_SETTLED: Final = {
    WorkerEvent.CAUGHT_UP: WorkerState.SERVING,
    WorkerEvent.PAUSED: WorkerState.PAUSED,
    WorkerEvent.DRAINED: WorkerState.DRAINED,
    WorkerEvent.SLEPT: WorkerState.ASLEEP,
    WorkerEvent.MISSED: WorkerState.OUTDATED,
    WorkerEvent.SPOILT: WorkerState.POISONED,
    WorkerEvent.STRANDED: WorkerState.WAITING_FOR_WEIGHTS,
}
"""The possible results of an update."""
SPEAKING: Final = frozenset({WorkerState.UPDATING, *_SETTLED.values()})
"""States in which a worker may publish while it holds its lease."""
_ALIVE = [WorkerState.STARTING, *sorted(SPEAKING), WorkerState.FENCED]
WORKER = StateMachine(
    "worker",
    WorkerState.STARTING,
    frozenset({WorkerState.FAILED, WorkerState.STOPPED}),
    {
        (WorkerState.STARTING, WorkerEvent.READY): WorkerState.UPDATING,
        (WorkerState.STARTING, WorkerEvent.SLEPT): WorkerState.ASLEEP,
        **{(WorkerState.UPDATING, event): state for event, state in _SETTLED.items()},
        **{(state, WorkerEvent.CHANGED): WorkerState.UPDATING for state in _SETTLED.values()},
        **{(state, WorkerEvent.FENCED): WorkerState.FENCED for state in sorted(SPEAKING)},
        (WorkerState.FENCED, WorkerEvent.CONFIRMED): WorkerState.UPDATING,
        **{(state, WorkerEvent.DIED): WorkerState.FAILED for state in _ALIVE},
        **{(state, WorkerEvent.STOPPED): WorkerState.STOPPED for state in _ALIVE},
    },
)
