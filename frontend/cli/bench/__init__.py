"""`rollbus bench`: how fast a fleet is, as its trainers see it."""

from .bench import Bench, BenchOptions
from .rounds import ConcurrencyResult

__all__ = ["Bench", "BenchOptions", "ConcurrencyResult"]
