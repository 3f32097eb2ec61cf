"""What `rollbus demo` shows, step by step."""

from frontend.cli.tour.tour import Tour

__all__ = ["Tour"]
