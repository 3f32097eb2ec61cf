"""Where weights and adapters come from: checked folders below allowed roots, or fetched from the object store."""

from workers.sources.sources import Sources

__all__ = ["Sources"]
