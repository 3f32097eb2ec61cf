"""The result of a publication."""

import msgspec

from ...protocol.fleet.command_result import CommandResult
from ...protocol.html import as_html

__all__ = ["PublishedWeights"]


class PublishedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version."""

    version: int
    """Weight version."""
    objects: str
    """Folder of the version, `<bucket>/<prefix>`. Pass it to `update_weights` as `objects`."""
    digest: str
    """Digest of the content."""
    is_anchor: bool
    """True if the whole checkpoint was stored, False if only the changes were stored."""
    num_tensors: int
    """Number of tensors of the version."""
    num_changed: int
    """Number of tensors with any change."""
    model_bytes: int
    """Bytes of all tensors."""
    stored_bytes: int
    """Bytes of the stored objects."""
    compare_s: float
    """Seconds in which tensors were read, compared, encoded and hashed."""
    upload_s: float
    """Seconds from the first complete object until all objects were stored. It overlaps with `compare_s`."""
    seconds: float
    """Seconds from the call until the commit, or until the end of the update if there is one."""
    ledger: CommandResult | None = None
    """Result of the fleet's update. None if no update was requested, or if this is not rank 0."""

    def __repr__(self) -> str:
        """Return one line with the version, its size and the update."""
        kind = "anchor" if self.is_anchor else "delta"
        ledger = "" if self.ledger is None else f", {self.ledger!r}"
        return (
            f"<PublishedWeights version={self.version} {kind} changed={self.num_changed} of {self.num_tensors} tensors "
            f"stored={self.stored_bytes} of {self.model_bytes} bytes in {self.seconds:.2f} s{ledger}>"
        )

    def _repr_html_(self) -> str:
        rows: list[tuple[str, object]] = [
            ("stored", f"{'anchor' if self.is_anchor else 'delta'} of {self.stored_bytes:,} bytes"),
            ("model", f"{self.model_bytes:,} bytes"),
            ("changed", f"{self.num_changed} of {self.num_tensors} tensors"),
            ("seconds", f"{self.seconds:.2f}"),
            ("objects", self.objects),
        ]
        return as_html(f"Weights, version {self.version}", rows) + (
            "" if self.ledger is None else self.ledger._repr_html_()
        )
