"""Counters of the requests that a worker received."""

from dataclasses import dataclass, field

from ...bus.protocol.placement.policy import PlacementReason

__all__ = ["IntakeStats"]


@dataclass(slots=True)
class IntakeStats:
    """Counters since the worker was started."""

    taken: int = 0
    """Messages received, each with one request or with siblings."""
    bad: int = 0
    """Messages without a usable client or request id to answer."""
    gone: int = 0
    """Requests of dead clients."""
    returned: int = 0
    """Requests returned to the queue because this worker accepts no requests now, or too many requests wait."""
    too_new: int = 0
    """Requests returned to the queue for workers with later weights, or with an adapter that this worker lacks."""
    placed: int = 0
    """Direct requests that were offered to their clients."""
    placed_for: dict[str, int] = field(
        default_factory=lambda: {str(reason): 0 for reason in PlacementReason if reason is not PlacementReason.QUEUED}
    )
    """Direct requests by the reason that their clients named."""
    refused: int = 0
    """Direct requests rejected because no slot became free for them, or because the slot belongs to the queue or to
    another client."""
    not_serving: int = 0
    """Requests received while this worker could not publish. The queue or the client sends them to another worker."""
    poison: int = 0
    """Requests that the queue delivered too often."""
    kv_unused: int = 0
    """Decode phases whose KV came from other weights or an unknown connector. The engine computes this KV again."""

    def count_placed(self, count: int, reason: str) -> None:
        """Count offered direct requests. An unknown reason, from a later release, only counts in the total."""
        self.placed += count
        if reason in self.placed_for:
            self.placed_for[reason] += count
