"""What a publication came to."""

import msgspec

from ...protocol.fleet.command_result import CommandResult

__all__ = ["PublishedWeights"]


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version."""

    version: int
    objects: str
    """Its folder, `<bucket>/<prefix>`: what `update_weights` takes as `objects`."""
    digest: str
    """Of its content."""
    is_anchor: bool
    """The whole checkpoint was stored; False: only what changed."""
    num_tensors: int
    num_changed: int
    """Tensors of which anything changed."""
    model_bytes: int
    """Of all tensors."""
    stored_bytes: int
    """Of the objects that were stored."""
    compare_s: float
    """Seconds in which tensors were read, compared, encoded and hashed."""
    upload_s: float
    """Seconds from the first object that was ready until all were stored; it overlaps with `compare_s`."""
    seconds: float
    """From the call until the commit; with an update, until its end."""
    ledger: CommandResult | None = None
    """Of the fleet's update; None: it was not asked for, or this is not rank 0."""
