"""Loads of the benches that generate tokens: a load of 64x128 is 64 requests at once, of 128 tokens each."""

from collections.abc import Mapping, Sequence
from typing import Any

Load = tuple[int, int]
"""Number of requests at once, and tokens of each request."""


def parse_loads(texts: Sequence[str]) -> list[Load]:
    """Parse the loads of a command line."""
    return [(int(text.split("x")[0]), int(text.split("x")[1])) for text in texts]


def rate(answer: Mapping[str, Any]) -> float:
    """Return the tokens per second of one measurement from its `tokens` and `seconds`."""
    return float(answer["tokens"] / answer["seconds"])
