"""The steps of `rollbus demo`."""

from .tour import Tour

__all__ = ["Tour"]
