"""What benches of tokens ask for: a load of 64x128 is 64 requests at once, of 128 tokens each."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Load", "parse_loads", "rate"]

Load = tuple[int, int]
"""Requests at once, and tokens of each."""


def parse_loads(texts: Sequence[str]) -> list[Load]:
    """Loads as they stand on a command line."""
    return [(int(text.split("x")[0]), int(text.split("x")[1])) for text in texts]


def rate(answer: Mapping[str, Any]) -> float:
    """Tokens a second of one measurement, which says its `tokens` and `seconds`."""
    return float(answer["tokens"] / answer["seconds"])
