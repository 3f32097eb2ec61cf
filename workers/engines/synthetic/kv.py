"""The KV of prompts: which of them an engine has cached, and the KV that it transfers to another synthetic engine.

Nothing is kept that was computed. The connector's parameters hold all that a real connector would fetch, so that two
engines may be in one process or in two.
"""

import itertools
import time

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["PrefixCache", "SyntheticKv"]

BLOCK_TOKENS = 16
"""A prefix is found in whole blocks of so many tokens."""


class SyntheticKv(msgspec.Struct, frozen=True, kw_only=True):
    """Of one prompt."""

    num_tokens: int
    """Of the prompt."""
    context: int
    """A hash of them, in order."""
    weights: int
    """Of the model, with its adapter, that computed it."""

    def num_loaded(self, prompt_len: int) -> int:
        """How many tokens of a prompt that begins with this one come from it: whole blocks, and never the last."""
        return min(self.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS, prompt_len - 1)

    def encode(self) -> bytes:
        """As a connector's parameters."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, params: bytes) -> "SyntheticKv":
        """From a connector's parameters.

        Raises:
            DecodeError, UnicodeDecodeError, RecursionError: they are another connector's; see `MALFORMED`.
        """
        return msgspec.msgpack.decode(params, type=cls)


class PrefixCache:
    """The beginnings of prompts, by salt; least use is forgotten first, and of one prompt its end.

    Args:
        max_tokens: that are remembered.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS
        # When each was used last, on the monotonic clock; the oldest first.
        self._blocks: dict[tuple[str, int], float] = {}
        self._has_forgotten = False
        self.num_queried = self.num_hits = 0
        """Tokens of prompts that were looked up, and of those the tokens that were found."""

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._blocks)

    def add_prompt(self, salt: str, contexts: npt.NDArray[np.uint64]) -> int:
        """Remember a prompt; how many of its tokens were remembered already, of which the last never counts.

        Args:
            contexts: u8[Lp], a hash of the prompt up to each position.
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
        """What was counted, by the names of `EngineStats`."""
        return {"prefix_cache_queries": self.num_queried, "prefix_cache_hits": self.num_hits}

    def oldest_s(self, now: float) -> float | None:
        """Seconds since the oldest prefix was used that is still here; None: none was forgotten since `clear`."""
        return now - next(iter(self._blocks.values()), now) if self._has_forgotten else None

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        self._has_forgotten = False
