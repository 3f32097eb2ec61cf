"""Checked options of publications."""

from dataclasses import dataclass

from ....schemas.control import LoadLora, UpdateWeights
from ...control.ack_collector import OnAck

__all__ = ["AdapterOptions", "PublishOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Options of one publication."""

    command: UpdateWeights
    """Command that is sent after the commit. Its source is set then."""
    updates: bool
    """True if the fleet loads the version. False: the version is only stored."""
    min_staged: int | None = None
    ranks_timeout_s: float = 600.0
    """Seconds that rank 0 waits for the tensors of the other ranks, and that they wait for rank 0 to begin and to
    commit."""
    on_ack: OnAck | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Options of the publication of an adapter."""

    command: LoadLora
    """Command that is sent after the commit. Its source is set then."""
    updates: bool
    """True if the fleet loads the adapter. False: the adapter is only stored."""
    on_ack: OnAck | None = None
