"""A request with known routed experts: each row names its position."""

import numpy as np

PROMPT_LEN = 40
START = 8
TOKENS = (11, 12, 13)
HAND_ROWS = np.array(
    [[[position % 16, 1], [2, position // 16]] for position in range(START, PROMPT_LEN + len(TOKENS))], np.uint8
)
"""The rows of the positions from `START` on, with two layers and two experts."""
