"""`rollbus bench`: how fast a fleet is, as its trainers see it."""

from frontend.cli.bench.bench import Bench, Wanted
from frontend.cli.bench.rounds import Outcome

__all__ = ["Bench", "Outcome", "Wanted"]
