"""Sources of weights and adapters: validated folders below allowed roots, or folders fetched from the object store."""

from .progress import Report
from .sources import Staged, WeightSources

__all__ = ["Report", "Staged", "WeightSources"]
