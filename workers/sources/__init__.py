"""Sources of weights and adapters: validated folders below allowed roots, or folders fetched from the object store."""

from .sources import Report, Staged, WeightSources

__all__ = ["Report", "Staged", "WeightSources"]
