"""What `rollbus demo` shows, step by step."""

from .tour import Tour

__all__ = ["Tour"]
