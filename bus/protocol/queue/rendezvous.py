"""Rendezvous hashing: clients choose the same worker without communication.

A worker that joins or leaves moves only the keys that it gains or loses.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from ..fleet.presence_table import MAX_WORKERS

__all__ = ["rendezvous"]

MASK: Final = (1 << 64) - 1


def rendezvous(key: str, workers: Iterable[str]) -> str:
    """Return the worker with the highest weight for this key, for example a session. All callers get the same result.

    Raises:
        ValueError: there are no workers.
    """
    # A multiplication by an odd number reorders the hashes of workers. To hash each worker with the key takes ten times
    # as long.
    factor = _hash(key) | 1
    return max((_worker_hash(worker) * factor & MASK, worker) for worker in workers)[1]


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


_worker_hash = lru_cache(maxsize=MAX_WORKERS)(_hash)
