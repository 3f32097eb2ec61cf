"""Where weights and adapters come from: checked folders below allowed roots, or fetched from the object store."""

from .sources import Report, Sources, Staged

__all__ = ["Report", "Sources", "Staged"]
