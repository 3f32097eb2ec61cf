"""A prefix cache that remembers which prompts were seen, not what was computed of them."""

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_TOKENS", "PrefixCache"]

BLOCK_TOKENS = 16
"""A prefix is found in whole blocks of so many tokens."""
MAX_BLOCKS = 65_536
"""What is remembered: a million tokens; the oldest are forgotten first."""


class PrefixCache:
    """The beginnings of prompts, by salt."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], None] = {}

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._blocks)

    def take(self, salt: str, contexts: npt.NDArray[np.uint64]) -> int:
        """Remember a prompt; how many of its tokens were remembered already, of which the last never counts.

        Args:
            contexts: u8[Lp], a hash of the prompt up to each position.
        """
        num_cached, is_known = 0, True
        for end in range(BLOCK_TOKENS, len(contexts), BLOCK_TOKENS):
            block = (salt, int(contexts[end - 1]))
            is_known = is_known and block in self._blocks
            if is_known:
                num_cached = end
            self._blocks.pop(block, None)
            self._blocks[block] = None
        for block in list(self._blocks)[: max(len(self._blocks) - MAX_BLOCKS, 0)]:
            del self._blocks[block]
        return num_cached

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
