"""Which workers' weights differ from what the others have, as their canaries tell."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from ....schemas.control import Ack, Canary
from .canary import agrees

__all__ = ["dissenters"]

MAX_CANDIDATES: Final = 32
"""Canaries that are tried as the majority's. Each is compared with all others; where there is a majority, one that
is drawn at random belongs to it with a chance of at least a half."""


def dissenters(acks: Mapping[str, Ack], dtypes: Mapping[str, str]) -> dict[str, str]:
    """Workers whose canary differs from that of the majority of their kind: why. Without a majority, all of the kind.

    Args:
        acks: by worker; those without a canary are passed over.
        dtypes: of the weights, by worker. Workers of one kind have the same engine signature and dtype.
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
    # The most frequent first: workers of the same machine mostly give the very same.
    candidates = [canary for canary, _ in Counter(canaries.values()).most_common(MAX_CANDIDATES)]
    for candidate in candidates:
        problems = {worker: _difference(candidate, canary, dtype) for worker, canary in canaries.items()}
        differing = {worker: problem for worker, problem in problems.items() if problem is not None}
        if 2 * len(differing) < len(canaries):
            return {worker: f"its canary differs from the majority's: {why}" for worker, why in differing.items()}
    return dict.fromkeys(canaries, f"the canaries of {len(canaries)} workers disagree, and no majority says which")


def _difference(reference: Canary, canary: Canary, dtype: str) -> str | None:
    return None if canary == reference else agrees(reference, canary, dtype=dtype)
