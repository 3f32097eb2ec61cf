"""Sources of weights and adapters: validated folders below allowed roots, or folders fetched from the object store."""

from .sources import Staged, WeightSources
from .threads import Report

__all__ = ["Report", "Staged", "WeightSources"]
