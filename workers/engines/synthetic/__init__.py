"""A deterministic engine without a model, for benches and fault tests. Nothing it says is about a real engine.

Tokens, logprobs and routing are functions of the weights and of the tokens before them, so that any split of a request
into attempts, and any exchange of weights, can be checked. Seeded sampling also depends on how many tokens this attempt
has made, as a real random generator's state does, and penalties on what this attempt has made: a resumed request
differs exactly where a real one would.
"""

from .config import SyntheticConfig, SyntheticFaults
from .engine import SyntheticEngine

__all__ = ["SyntheticConfig", "SyntheticEngine", "SyntheticFaults"]
