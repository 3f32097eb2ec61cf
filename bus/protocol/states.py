"""The states of requests and workers as tables: the code moves by them, and tests draw docs/protocol.md from them.

Two sides look at a request: `WORKER_REQUEST` is a worker's view of a request that it has accepted, `attempt.states` has
a client's view of a child request. `WORKER` is the lifecycle of a worker.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ...schemas.errors import LocalProtocolError
from ...schemas.presence import WorkerState

__all__ = [
    "SPEAKING",
    "WORKER",
    "WORKER_REQUEST",
    "StateMachine",
    "WorkerEvent",
    "WorkerRequestEvent",
    "WorkerRequestState",
]


class WorkerRequestState(enum.StrEnum):
    """Where a request is that a worker has taken."""

    OFFERED = "offered"
    """The engine has it, the client was told. The queue keeps it for another worker should this one vanish."""
    OWNED = "owned"
    """The client confirmed, and the queue has forgotten it. Only this worker and the client know of it."""
    ENDED = "ended"
    """Its terminal chunk is written. The frame with it is kept until the client has acknowledged it."""


class WorkerRequestEvent(enum.StrEnum):
    """What moves a request in a worker's hands."""

    CONFIRMED = "confirmed"
    """The client acknowledged the frame with the offer."""
    STOPPED = "stopped"
    """The client does not want it here: given up, or another worker has it."""
    FINISHED = "finished"
    """The engine ended it, or it failed."""


class WorkerEvent(enum.StrEnum):
    """What moves a worker."""

    READY = "ready"
    """The engine is loaded, warm and proven."""
    CHANGED = "changed"
    """Something else is desired of it, or its weights turned out not to be what they should be."""
    CAUGHT_UP = "caught_up"
    """All is as desired, and that is to serve."""
    PAUSED = "paused"
    """All is as desired, and that is to pause."""
    DRAINED = "drained"
    """Likewise, to be drained."""
    SLEPT = "slept"
    """Likewise, to sleep."""
    MISSED = "missed"
    """It could not get the desired weights, and nothing was touched."""
    SPOILT = "spoilt"
    """Its weights are half written, or not what they should be."""
    STRANDED = "stranded"
    """The desired weights cannot be had again."""
    FENCED = "fenced"
    """The lease could not be confirmed in time."""
    CONFIRMED = "confirmed"
    """The server took an announcement of the new incarnation."""
    DIED = "died"
    """The engine is gone, or makes no step any more."""
    STOPPED = "stopped"
    """The worker was told to stop."""


S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


@dataclass(frozen=True, slots=True)
class StateMachine(Generic[S, E]):
    """A table of transitions; what it does not name cannot happen."""

    name: str
    initial: S
    final: frozenset[S]
    transitions: Mapping[tuple[S, E], S]

    def next(self, state: S, event: E) -> S:
        """The state after `event`.

        Raises:
            LocalProtocolError: the table has no such transition: a bug on this side.
        """
        following = self.transitions.get((state, event))
        if following is None:
            raise LocalProtocolError(f"a {self.name} that is {state} cannot take {event}")
        return following


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
"""What an update may come to."""
SPEAKING: Final = frozenset({WorkerState.UPDATING, *_SETTLED.values()})
"""Those in which a worker may speak, as long as its lease holds."""
_ALIVE = [WorkerState.STARTING, *sorted(SPEAKING), WorkerState.FENCED]
WORKER = StateMachine(
    "worker",
    WorkerState.STARTING,
    frozenset({WorkerState.FAILED, WorkerState.STOPPED}),
    {
        (WorkerState.STARTING, WorkerEvent.READY): WorkerState.UPDATING,
        **{(WorkerState.UPDATING, event): state for event, state in _SETTLED.items()},
        **{(state, WorkerEvent.CHANGED): WorkerState.UPDATING for state in _SETTLED.values()},
        **{(state, WorkerEvent.FENCED): WorkerState.FENCED for state in sorted(SPEAKING)},
        (WorkerState.FENCED, WorkerEvent.CONFIRMED): WorkerState.UPDATING,
        **{(state, WorkerEvent.DIED): WorkerState.FAILED for state in _ALIVE},
        **{(state, WorkerEvent.STOPPED): WorkerState.STOPPED for state in _ALIVE},
    },
)
