"""The states of requests and workers as tables: the code moves by them, and docs/protocol.md is drawn from them.

Two sides look at a request: `REQUEST` is a client's view of one child's current attempt, `HELD` a worker's view of what
it has in its hands. `WORKER` is the life of a worker.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from schemas.errors import LocalProtocolError
from schemas.presence import WorkerState

__all__ = [
    "HELD",
    "REQUEST",
    "SPEAKING",
    "WORKER",
    "HeldEvent",
    "HeldState",
    "Machine",
    "RequestEvent",
    "RequestState",
    "WorkerEvent",
]


class RequestState(enum.StrEnum):
    """Where the current attempt of a child is, as its client knows."""

    PUBLISHING = "publishing"
    """Sent to the queue, which has not confirmed it. It is sent again until the queue answers."""
    QUEUED = "queued"
    """The queue holds it for a worker. It outlives client, workers and a restart of the server there."""
    RUNNING = "running"
    """A worker offered it and the client agreed. The two own it: the queue has forgotten it, or will."""
    WAITING = "waiting"
    """The last attempt is lost, or was a prefill leg. The next is published as soon as a worker of the model is there.
    """
    ENDED = "ended"
    """The terminal chunk is there, or an error. Whatever still arrives is late: counted and answered by an abort."""


class RequestEvent(enum.StrEnum):
    """What moves a child's attempt."""

    STORED = "stored"
    """The queue confirmed that it holds the request."""
    ADMITTED = "admitted"
    """A worker offers to run it."""
    LOST = "lost"
    """The worker, its frames or the queue's entry are gone."""
    PREFILLED = "prefilled"
    """Its prefill leg has ended, and another worker is to go on."""
    PUBLISHED = "published"
    """The next attempt was sent to the queue."""
    FINISHED = "finished"
    """It ended, well or not, or nobody wants it any more."""


class HeldState(enum.StrEnum):
    """Where a request is that a worker has taken."""

    OFFERED = "offered"
    """The engine has it, the client was told. The queue keeps it for another worker should this one vanish."""
    OWNED = "owned"
    """The client confirmed, and the queue has forgotten it. Only this worker and the client know of it."""
    ENDED = "ended"
    """Its terminal chunk is written. The frame with it is kept until the client has acknowledged it."""


class HeldEvent(enum.StrEnum):
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
class Machine(Generic[S, E]):
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

    def diagram(self) -> str:
        """The table as a Mermaid state diagram."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial}"]
        lines += [f"    {state} --> {after}: {event}" for (state, event), after in self.transitions.items()]
        lines += [f"    {state} --> [*]" for state in sorted(self.final)]
        return "\n".join(lines)


REQUEST = Machine(
    "request",
    RequestState.PUBLISHING,
    frozenset({RequestState.ENDED}),
    {
        (RequestState.PUBLISHING, RequestEvent.STORED): RequestState.QUEUED,
        # A worker may be quicker than the queue's own confirmation.
        (RequestState.PUBLISHING, RequestEvent.ADMITTED): RequestState.RUNNING,
        (RequestState.PUBLISHING, RequestEvent.LOST): RequestState.WAITING,
        (RequestState.PUBLISHING, RequestEvent.FINISHED): RequestState.ENDED,
        (RequestState.QUEUED, RequestEvent.ADMITTED): RequestState.RUNNING,
        (RequestState.QUEUED, RequestEvent.LOST): RequestState.WAITING,
        (RequestState.QUEUED, RequestEvent.FINISHED): RequestState.ENDED,
        (RequestState.RUNNING, RequestEvent.LOST): RequestState.WAITING,
        (RequestState.RUNNING, RequestEvent.PREFILLED): RequestState.WAITING,
        (RequestState.RUNNING, RequestEvent.FINISHED): RequestState.ENDED,
        (RequestState.WAITING, RequestEvent.PUBLISHED): RequestState.PUBLISHING,
        (RequestState.WAITING, RequestEvent.FINISHED): RequestState.ENDED,
    },
)
HELD = Machine(
    "held request",
    HeldState.OFFERED,
    frozenset({HeldState.ENDED}),
    {
        (HeldState.OFFERED, HeldEvent.CONFIRMED): HeldState.OWNED,
        (HeldState.OFFERED, HeldEvent.STOPPED): HeldState.ENDED,
        (HeldState.OFFERED, HeldEvent.FINISHED): HeldState.ENDED,
        (HeldState.OWNED, HeldEvent.STOPPED): HeldState.ENDED,
        (HeldState.OWNED, HeldEvent.FINISHED): HeldState.ENDED,
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
WORKER = Machine(
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
