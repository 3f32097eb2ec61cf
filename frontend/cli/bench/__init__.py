"""`rollbus bench`: measures the throughput and latency of a fleet as a trainer sees them."""

from .bench import Bench, BenchOptions
from .rounds import ConcurrencyResult

__all__ = ["Bench", "BenchOptions", "ConcurrencyResult"]
