"""Counters of what a worker received."""

from dataclasses import dataclass, field

from ...bus.protocol.placement.policy import PlacementReason

__all__ = ["IntakeStats"]


@dataclass(slots=True)
class IntakeStats:
    """Counters since the worker was started."""

    taken: int = 0
    """Messages received, each with one request or with siblings."""
    bad: int = 0
    """Without a usable client or request id to answer."""
    gone: int = 0
    """Of clients that are dead."""
    returned: int = 0
    """Returned to the queue, because this worker accepts none now or too many wait."""
    too_new: int = 0
    """Returned to the queue, for workers with later weights, or with an adapter that this one lacks."""
    placed: int = 0
    """Direct ones that were offered to their clients."""
    placed_for: dict[str, int] = field(
        default_factory=lambda: {str(reason): 0 for reason in PlacementReason if reason is not PlacementReason.QUEUED}
    )
    """Of these, how many came for each reason that their clients named."""
    refused: int = 0
    """Direct ones for which there was no free slot, also after a wait, or whose slot belongs to the queue or to another
    client."""
    not_serving: int = 0
    """Received while this worker could not publish: the queue, or the client, gives them to another worker."""
    poison: int = 0
    """Delivered too often."""
    kv_unused: int = 0
    """Decode phases with KV of other weights, or of a connector that the engine lacks: it is computed again."""

    def count_placed(self, count: int, reason: str) -> None:
        """Count direct requests that were offered; a reason of a later release is none of the known ones."""
        self.placed += count
        if reason in self.placed_for:
            self.placed_for[reason] += count
