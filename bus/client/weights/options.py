"""What publications are asked for, checked."""

from dataclasses import dataclass

from ....schemas.control import LoadLora, UpdateWeights
from ...control.ack_collector import OnAck

__all__ = ["AdapterOptions", "PublishOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """What one publication is asked for."""

    command: UpdateWeights
    """Carried out after the commit; its source is set then."""
    updates: bool
    """False: the version is only stored."""
    min_staged: int | None = None
    ranks_timeout_s: float = 600.0
    """For the other ranks to give what they have, and for rank 0 to begin and to commit."""
    on_ack: OnAck | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """What the publication of an adapter is asked for."""

    command: LoadLora
    """Carried out after the commit; its source is set then."""
    updates: bool
    """False: the adapter is only stored."""
    on_ack: OnAck | None = None
