"""The beginnings of prompts in each worker's prefix cache, as far as this client knows from its own requests.

The index cuts prompts into pieces of 256 tokens. The hash of a piece covers all pieces before it. The hashes are
Python's own: they are valid only in this process, and a collision only makes a placement worse.

Invariant: a worker that holds a piece has used each earlier piece of that prompt at the same time or later. So the
deepest piece that a worker holds shows how much of the prompt its cache has.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..fleet.presence_table import MAX_WORKERS

__all__ = ["PIECE_TOKENS", "CacheId", "PrefixIndex", "PrefixScope", "hint_hash", "piece_hashes"]

PIECE_TOKENS: Final = 256
"""Tokens of a piece. Engines cache blocks of 16 to 128 tokens, but pieces of 16 take six times as long to hash."""
PIECE_BYTES: Final = PIECE_TOKENS * 4
MAX_PIECES: Final = 131_072
"""Pieces that are remembered: prompts of 33 million tokens, more than the caches of many fleets. About 60 MB."""
MAX_HOLDERS: Final = 4 * MAX_PIECES
"""Pairs of piece and worker that are remembered: many workers hold the pieces that many prompts share."""

MAX_AGE_S: Final = 3_600.0
"""Seconds for which a piece counts as cached if its worker does not report evictions. A busy engine evicts it earlier.
"""


class PrefixScope(NamedTuple):
    """The attributes besides the tokens that separate entries of a prefix cache."""

    lora: str | None = None
    """Name of the adapter; None: the base model."""
    lora_version: int = 0
    """The version of the adapter."""
    cache_salt: str | None = None
    """The cache salt of the request."""


class CacheId(NamedTuple):
    """One prefix cache, from its creation or reset to the next reset."""

    worker: str
    incarnation: str
    cache_epoch: int


def piece_hashes(token_ids: npt.NDArray[np.int32], scope: PrefixScope) -> tuple[int, ...]:
    """Return the hash of each whole piece of a prompt. A hash covers the scope and all tokens up to the piece's end."""
    data = np.asarray(token_ids, np.int32).tobytes()
    chained = hash(scope)
    pieces = []
    for start in range(0, len(data) - PIECE_BYTES + 1, PIECE_BYTES):
        chained = hash((chained, data[start : start + PIECE_BYTES]))
        pieces.append(chained)
    return tuple(pieces)


def hint_hash(kind: str, name: str, scope: PrefixScope) -> int:
    """Return the piece that represents a session or a group. A worker that serves it holds that piece."""
    return hash((scope, kind, name))


@dataclass(slots=True)
class _Cache:
    """The present cache of a worker."""

    id: CacheId
    number: int
    """The number of the worker in the index. A new worker may reuse the number of a lost one."""
    since: float
    """The earliest time of use of an entry that the cache still holds."""


class _Holders:
    """The workers that hold a piece."""

    __slots__ = ("mask", "used_at")

    def __init__(self) -> None:
        self.mask = 0
        """The bits of their numbers. They make a lookup of a piece fast, regardless of the number of workers."""
        self.used_at: dict[int, float] = {}
        """By number: the time at which the worker last used the piece."""


class PrefixIndex:
    """The pieces that each worker's cache should hold. Above the limits, the least recently used pieces are removed.

    Args:
        max_pieces: the maximum number of pieces.
        max_holders: the maximum number of pairs of piece and worker.
    """

    def __init__(self, max_pieces: int = MAX_PIECES, max_holders: int = MAX_HOLDERS) -> None:
        self._max_pieces = max_pieces
        self._max_holders = max_holders
        # Least recently used first.
        self._pieces: OrderedDict[int, _Holders] = OrderedDict()
        self._num_holders = 0
        self._caches: dict[str, _Cache] = {}
        # By number. The caches of lost workers are here too, and hold nothing.
        self._numbered: list[_Cache] = []
        self._free_numbers: list[int] = []

    def __len__(self) -> int:
        """Return the number of pieces that are remembered."""
        return len(self._pieces)

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<PrefixIndex pieces={len(self)} holders={self._num_holders} caches={len(self._caches)}>"

    def cache_of(self, worker: str) -> CacheId | None:
        """Return the present cache of a worker; None if the worker is not known."""
        cache = self._caches.get(worker)
        return None if cache is None else cache.id

    def update(self, cache_id: CacheId, oldest_prefix_s: float | None, now: float) -> None:
        """Handle presence. A new cache is empty, and a cache holds nothing that was used before its oldest prefix.

        Args:
            oldest_prefix_s: age of the oldest prefix that the cache still holds; None: not known.
        """
        cache = self._caches.get(cache_id.worker)
        if cache is None:
            if len(self._caches) >= MAX_WORKERS:
                return
            cache = self._caches[cache_id.worker] = self._add_cache(cache_id, now)
        elif cache.id != cache_id:
            cache.id, cache.since = cache_id, now
        if oldest_prefix_s is not None:
            cache.since = max(cache.since, now - oldest_prefix_s)

    def _add_cache(self, cache_id: CacheId, now: float) -> _Cache:
        if self._free_numbers:
            cache = _Cache(cache_id, self._free_numbers.pop(), now)
            self._numbered[cache.number] = cache
        else:
            cache = _Cache(cache_id, len(self._numbered), now)
            self._numbered.append(cache)
        return cache

    def remove(self, worker: str) -> None:
        """Remove the cache of a lost worker."""
        cache = self._caches.pop(worker, None)
        if cache is not None:
            cache.since = math.inf
            self._free_numbers.append(cache.number)

    def record(self, cache_id: CacheId, pieces: Sequence[int], now: float) -> None:
        """Record that a worker uses a prompt now; without effect if the worker has another cache meanwhile."""
        cache = self._caches.get(cache_id.worker)
        if cache is None or cache.id != cache_id:
            return
        number, bit = cache.number, 1 << cache.number
        # The deepest piece first: at the limit, the end of a prompt is removed before its beginning.
        for piece in reversed(pieces):
            holders = self._pieces.get(piece)
            if holders is None:
                holders = self._pieces[piece] = _Holders()
            else:
                self._pieces.move_to_end(piece)
            self._num_holders += number not in holders.used_at
            holders.mask |= bit
            holders.used_at[number] = now
        while len(self._pieces) > self._max_pieces or self._num_holders > self._max_holders:
            self._num_holders -= len(self._pieces.popitem(last=False)[1].used_at)

    def discard(self, worker: str, piece: int) -> None:
        """Remove one piece of a worker."""
        cache = self._caches.get(worker)
        if cache is not None and piece in self._pieces:
            self._discard(cache.number, piece)

    def _discard(self, number: int, piece: int) -> None:
        holders = self._pieces[piece]
        if holders.used_at.pop(number, None) is None:
            return
        holders.mask &= ~(1 << number)
        self._num_holders -= 1
        if not holders.used_at:
            del self._pieces[piece]

    def longest(self, pieces: Sequence[int], now: float) -> dict[str, int]:
        """Return how many tokens of a prompt each worker's cache should hold, without workers that hold none."""
        known = []
        for piece in pieces:
            holders = self._pieces.get(piece)
            if holders is None:
                break
            known.append(holders)
        found: dict[str, int] = {}
        seen, oldest, numbered = 0, now - MAX_AGE_S, self._numbered
        for depth in range(len(known), 0, -1):
            holders = known[depth - 1]
            # The workers that hold deeper pieces were found there.
            new = holders.mask & ~seen
            tokens, used_at = depth * PIECE_TOKENS, holders.used_at
            while new:
                number = new.bit_length() - 1
                new ^= 1 << number
                cache = numbered[number]
                if cache.since <= used_at[number] >= oldest:
                    found[cache.id.worker] = tokens
                else:
                    self._discard(number, pieces[depth - 1])
            seen |= holders.mask
        return found

    def last_holder(self, piece: int, now: float) -> str | None:
        """Return the worker that used a piece last, of those that should still hold it; None: no worker holds it."""
        holders = self._pieces.get(piece)
        if holders is None:
            return None
        oldest = now - MAX_AGE_S
        valid = [
            number for number, used_at in holders.used_at.items() if self._numbered[number].since <= used_at >= oldest
        ]
        if not valid:
            return None
        # At equal times, the worker that was recorded last.
        return self._numbered[max(reversed(valid), key=holders.used_at.__getitem__)].id.worker
