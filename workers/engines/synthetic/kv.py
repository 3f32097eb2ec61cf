"""The KV of prompts: the prefix cache of an engine, and the KV that it transfers to another synthetic engine.

No computed data is stored. The KV transfer parameters contain everything that a real connector would fetch, so the two
engines may run in one process or in two.
"""

import itertools
import time

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["PrefixCache", "SyntheticKv"]

BLOCK_TOKENS = 16
"""Number of tokens in a block. The cache finds whole blocks only."""


class SyntheticKv(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of one prompt, which is also the content of its KV transfer parameters."""

    num_tokens: int
    """Number of tokens of the prompt."""
    context: int
    """Hash of these tokens, in order."""
    weights: int
    """Weights of the model, with its adapter, that computed the KV."""

    def num_loaded(self, prompt_len: int) -> int:
        """Return the number of tokens that a prompt loads from this KV: whole blocks, but never its last token.

        Args:
            prompt_len: length of a prompt that begins with the prompt of this KV.
        """
        return min(self.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS, prompt_len - 1)

    def encode(self) -> bytes:
        """Encode this as KV transfer parameters."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, params: bytes) -> "SyntheticKv":
        """Decode KV transfer parameters.

        Raises:
            DecodeError, UnicodeDecodeError, RecursionError: the parameters belong to another connector; see
                `MALFORMED`.
        """
        return msgspec.msgpack.decode(params, type=cls)


class PrefixCache:
    """The cached prefixes of prompts, by salt.

    The least recently used blocks are evicted first. Of one prompt, the last blocks are evicted first.

    Args:
        max_tokens: number of tokens that fit into the cache.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS
        # For each block, the time of its last use on the monotonic clock; the oldest block first.
        self._blocks: dict[tuple[str, int], float] = {}
        self._has_forgotten = False
        self.num_queried = self.num_hits = 0
        """Number of prompt tokens that were looked up, and the number of these that were found."""

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._blocks)

    def add_prompt(self, salt: str, contexts: npt.NDArray[np.uint64]) -> int:
        """Add a prompt. Return the number of its tokens that were cached before; the last token never counts.

        Args:
            contexts: u8[Lp], the hash of the prompt up to each position.
        """
        blocks = [(salt, int(context)) for context in contexts[BLOCK_TOKENS - 1 : -1 : BLOCK_TOKENS]]
        num_known = next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        now = time.monotonic()
        for block in reversed(blocks):
            self._blocks.pop(block, None)
            self._blocks[block] = now
        self._has_forgotten |= len(self._blocks) > self._max_blocks
        for block in list(itertools.islice(self._blocks, max(len(self._blocks) - self._max_blocks, 0))):
            del self._blocks[block]
        return num_known * BLOCK_TOKENS

    def counts(self) -> dict[str, int]:
        """Return the counters under their names in `EngineStats`."""
        return {"prefix_cache_queries": self.num_queried, "prefix_cache_hits": self.num_hits}

    def oldest_s(self, now: float) -> float | None:
        """Return the seconds since the last use of the oldest cached prefix; None: none was evicted since `clear`."""
        return now - next(iter(self._blocks.values()), now) if self._has_forgotten else None

    def clear(self) -> None:
        """Remove all prefixes."""
        self._blocks.clear()
        self._has_forgotten = False
