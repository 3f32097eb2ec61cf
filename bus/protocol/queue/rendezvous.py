"""Rendezvous hashing: clients agree on a worker without talking to each other.

A worker that comes or goes moves only the keys that it gains or leaves.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from ..fleet.presence_table import MAX_WORKERS

__all__ = ["rendezvous"]

MASK: Final = (1 << 64) - 1


def rendezvous(key: str, workers: Iterable[str]) -> str:
    """The worker of highest weight for this key, such as a session, the same wherever it is asked.

    Raises:
        ValueError: there are no workers.
    """
    # Multiplied by an odd number, the hashes of workers are ordered anew. To hash each with the key takes ten times as
    # long.
    factor = _hash(key) | 1
    return max((_worker_hash(worker) * factor & MASK, worker) for worker in workers)[1]


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


_worker_hash = lru_cache(maxsize=MAX_WORKERS)(_hash)
