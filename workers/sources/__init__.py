"""Where weights and adapters come from: checked folders below allowed roots, or fetched from the object store."""

from .sources import Report, Staged, WeightSources

__all__ = ["Report", "Staged", "WeightSources"]
