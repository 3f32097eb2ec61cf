"""A request whose routing is known: each row names its position."""

import numpy as np

__all__ = ["HAND_ROWS", "PROMPT_LEN", "START", "TOKENS"]

PROMPT_LEN = 40
START = 8
TOKENS = (11, 12, 13)
HAND_ROWS = np.array(
    [[[position % 16, 1], [2, position // 16]] for position in range(START, PROMPT_LEN + len(TOKENS))], np.uint8
)
"""Of the positions from `START` on: two layers, two experts."""
