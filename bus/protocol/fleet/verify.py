"""Finds the workers whose weights differ from those of the other workers, by their canaries."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from ....schemas.acks import Ack
from ....schemas.weights import Canary
from .canary import agrees

__all__ = ["dissenters"]

MAX_CANDIDATES: Final = 32
"""Canaries that are tried as the majority's canary. Each is compared with all others. If there is a majority, a random
canary belongs to it with a probability of at least one half.
"""


def dissenters(acks: Mapping[str, Ack], dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return workers whose canary differs from the majority of their kind, with the reason; without a majority, all.

    Args:
        acks: the acks by worker; acks without a canary are ignored.
        dtypes: the dtypes of the weights, by worker. Workers of one kind have the same engine signature and dtype.
    """
    kinds: dict[tuple[str | None, str], dict[str, Canary]] = {}
    for worker, ack in sorted(acks.items()):
        if ack.canary is not None:
            kinds.setdefault((ack.signature, dtypes.get(worker, "")), {})[worker] = ack.canary
    found: dict[str, str] = {}
    for (_, dtype), canaries in kinds.items():
        found |= _minority(canaries, dtype)
    return found


def _minority(canaries: Mapping[str, Canary], dtype: str) -> dict[str, str]:
    # The most frequent first: workers on the same machine mostly have identical canaries.
    candidates = [canary for canary, _ in Counter(canaries.values()).most_common(MAX_CANDIDATES)]
    for candidate in candidates:
        problems = {worker: _difference(candidate, canary, dtype) for worker, canary in canaries.items()}
        differing = {worker: problem for worker, problem in problems.items() if problem is not None}
        if 2 * len(differing) < len(canaries):
            return {worker: f"its canary differs from the majority's: {why}" for worker, why in differing.items()}
    return dict.fromkeys(canaries, f"the canaries of {len(canaries)} workers disagree, and there is no majority")


def _difference(reference: Canary, canary: Canary, dtype: str) -> str | None:
    return None if canary == reference else agrees(reference, canary, dtype=dtype)
