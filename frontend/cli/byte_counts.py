"""Formats numbers of bytes."""

from ...schemas.weights import Staging

__all__ = ["gib", "size", "staging_text"]


def gib(num_bytes: float) -> str:
    """Return a size in GiB as text."""
    return f"{num_bytes / 1024**3:.1f} GiB"


def size(num_bytes: float) -> str:
    """Return a size in GiB, MiB or KiB as text."""
    if num_bytes >= 1024**3:
        return gib(num_bytes)
    if num_bytes >= 1024**2:
        return f"{num_bytes / 1024**2:.0f} MiB"
    return f"{num_bytes / 1024:.0f} KiB"


def staging_text(staging: Staging) -> str:
    """Return for example `fetching 45 % of 1.2 GiB`, or only the stage if its bytes are unknown."""
    if not staging.total_bytes:
        return staging.stage
    share = 100 * min(staging.done_bytes, staging.total_bytes) // staging.total_bytes
    return f"{staging.stage} {share} % of {size(staging.total_bytes)}"
