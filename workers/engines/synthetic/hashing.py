"""Mixes the bits of 64-bit numbers."""

import numpy as np
import numpy.typing as npt

__all__ = ["MASK", "MULTIPLIER", "mix", "mix_one"]

MULTIPLIER = 0x9E3779B97F4A7C15
"""An odd number, so that its powers are never 0 modulo 2**64."""
MASK = 2**64 - 1


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finalizer of splitmix64 for each value: every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mix_one(value: int) -> int:
    """Return `mix` of one number modulo 2**64."""
    return int(mix(np.array([value & MASK], np.uint64))[0])
