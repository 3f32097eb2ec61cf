"""The state of a fleet at one moment."""

import msgspec

from ...schemas.desired import DesiredState
from ...schemas.presence import WorkerPresence
from ..queue.streams import QueueDepth

__all__ = ["FleetState"]


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    fleet: str
    """Name of the fleet."""
    workers: tuple[WorkerPresence, ...]
    """Live workers, sorted by id. Empty if there are none."""
    queues: tuple[QueueDepth, ...] = ()
    """Waiting requests by model and lane. Empty if the server has no queue for the workers' models."""
    queue_problems: dict[str, str] = {}
    """Why a queue does not answer, by model. For example, a queue without a leader delivers no requests."""
    desired: dict[str, DesiredState] = {}
    """Desired state of the workers by model. Models without a recorded command are left out."""
