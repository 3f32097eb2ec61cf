"""Rendezvous hashing: clients agree on a worker without talking to each other.

A worker that comes or goes moves only the keys that it gains or leaves.
"""

from collections.abc import Iterable
from hashlib import blake2b

__all__ = ["rendezvous"]


def rendezvous(key: str, workers: Iterable[str]) -> str:
    """The worker of highest weight for this key, such as a session, the same wherever it is asked.

    Raises:
        ValueError: there are no workers.
    """
    return max(workers, key=lambda worker: (blake2b(f"{worker} {key}".encode(), digest_size=8).digest(), worker))
