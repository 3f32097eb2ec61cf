"""Which worker's prefix cache holds the beginning of a prompt, as far as this client has sent it there.

Prompts are cut into pieces of 256 tokens. Each piece has a hash that covers all pieces before it. The hashes are
Python's own: they mean nothing outside the process, and a collision only makes a placement worse.

Invariant: a worker that holds a piece used each earlier piece of that prompt at the same time or later. So the deepest
piece that a worker holds tells how much of a prompt it has.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..fleet.presence_table import MAX_WORKERS

__all__ = ["PIECE_TOKENS", "CacheId", "PrefixIndex", "PrefixScope", "hint_hash", "piece_hashes"]

PIECE_TOKENS: Final = 256
"""Tokens of a piece: engines cache blocks of 16 to 128 tokens, and shorter pieces take too long to hash."""
MAX_PIECES: Final = 131_072
"""Pieces that are remembered: prompts of 33 million tokens, more than a fleet of ordinary size caches. About 60 MB."""
MAX_HOLDERS: Final = 4 * MAX_PIECES
"""Pairs of piece and worker that are remembered, as a prefix that all requests share is held by all workers."""


class PrefixScope(NamedTuple):
    """What an engine's prefix cache keeps apart besides the tokens."""

    lora: str | None = None
    """Name of the adapter; None: the base model."""
    lora_version: int = 0
    """Of the adapter's weights."""
    cache_salt: str | None = None
    """Of the request."""


class CacheId(NamedTuple):
    """One prefix cache, from when it was empty until it is emptied."""

    worker: str
    incarnation: str
    cache_epoch: int


def piece_hashes(token_ids: npt.NDArray[np.int32], scope: PrefixScope) -> tuple[int, ...]:
    """Return the hash of each whole piece of a prompt; each covers the scope and all tokens up to its end."""
    data = np.asarray(token_ids, np.int32).tobytes()
    chained = hash(scope)
    pieces = []
    num_bytes = PIECE_TOKENS * 4
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        chained = hash((chained, data[start : start + num_bytes]))
        pieces.append(chained)
    return tuple(pieces)


def hint_hash(kind: str, name: str, scope: PrefixScope) -> int:
    """Return what stands for a session or a group in the index: a piece of its own."""
    return hash((scope, kind, name))


class PrefixIndex:
    """The pieces that each worker's present cache should hold, bounded; those that were used least recently go first.

    Args:
        max_pieces: pieces that are remembered at most.
        max_holders: pairs of piece and worker that are remembered at most.
    """

    def __init__(self, max_pieces: int = MAX_PIECES, max_holders: int = MAX_HOLDERS) -> None:
        self._max_pieces = max_pieces
        self._max_holders = max_holders
        # By piece, least recently used first: when each worker last used it.
        self._pieces: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._num_holders = 0
        # By worker: its present cache, and since when it holds what was used.
        self._caches: dict[str, tuple[CacheId, float]] = {}

    def __len__(self) -> int:
        """Number of pieces that are remembered."""
        return len(self._pieces)

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<PrefixIndex pieces={len(self)} holders={self._num_holders} caches={len(self._caches)}>"

    def cache_of(self, worker: str) -> CacheId | None:
        """Return the present cache of a worker; None if it has announced none."""
        cache = self._caches.get(worker)
        return None if cache is None else cache[0]

    def update(self, cache: CacheId, oldest_prefix_s: float | None, now: float) -> None:
        """Handle an announcement: a new cache is empty, and a cache holds nothing used before its oldest prefix.

        Args:
            oldest_prefix_s: age of the oldest prefix that the cache still holds; None: not known.
        """
        known = self._caches.get(cache.worker)
        if known is None and len(self._caches) >= MAX_WORKERS:
            return
        since = now if known is None or known[0] != cache else known[1]
        if oldest_prefix_s is not None:
            since = max(since, now - oldest_prefix_s)
        self._caches[cache.worker] = cache, since

    def remove(self, worker: str) -> None:
        """The worker is gone, and its cache with it."""
        self._caches.pop(worker, None)

    def record(self, cache: CacheId, pieces: Sequence[int], now: float) -> None:
        """Remember that a worker uses a prompt now; without effect if it has another cache meanwhile."""
        if self.cache_of(cache.worker) != cache:
            return
        worker = cache.worker
        # The deepest piece first: when the bound is met, the end of a prompt goes before its beginning.
        for piece in reversed(pieces):
            holders = self._pieces.get(piece)
            if holders is None:
                self._pieces[piece] = {worker: now}
                self._num_holders += 1
                continue
            self._num_holders += worker not in holders
            holders[worker] = now
            self._pieces.move_to_end(piece)
        while len(self._pieces) > self._max_pieces or self._num_holders > self._max_holders:
            self._num_holders -= len(self._pieces.popitem(last=False)[1])

    def discard(self, worker: str, piece: int) -> None:
        """Forget that a worker holds a piece."""
        holders = self._pieces.get(piece)
        if holders is not None and holders.pop(worker, None) is not None:
            self._num_holders -= 1
            if not holders:
                del self._pieces[piece]

    def longest(self, pieces: Sequence[int], now: float) -> dict[str, int]:
        """Return how many tokens of a prompt each worker's cache should hold, for the workers that hold any."""
        num_known = 0
        for piece in pieces:
            if piece not in self._pieces:
                break
            num_known += 1
        found: dict[str, int] = {}
        for i in range(num_known, 0, -1):
            holders = self._pieces[pieces[i - 1]]
            for worker in holders.keys() - found.keys():
                cache = self._caches.get(worker)
                if cache is not None and cache[1] <= holders[worker] <= now:
                    found[worker] = i * PIECE_TOKENS
        return found

    def last_holder(self, piece: int) -> str | None:
        """Return the worker that used a piece last, and should still hold it."""
        holders = self._pieces.get(piece, {})
        valid = [
            (used, worker)
            for worker, used in holders.items()
            if worker in self._caches and used >= self._caches[worker][1]
        ]
        return max(valid)[1] if valid else None
