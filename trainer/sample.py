"""One sequence for training, with all arrays aligned to its tokens.

Row i of the routed experts belongs to position `start + i`. The last token has not passed through the model and has no
row. A sample of S tokens therefore has `S - 1 - start` rows, by the row rule of `rollbus.schemas.rows`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..schemas.rows import Rows, expected_rows
from .checks import check_entries, check_integer, check_rows, check_vector, describe
from .errors import PackError

__all__ = ["NOT_SAMPLED", "Sample", "check_samples"]

NOT_SAMPLED = -1
"""Weight version of a token that was not sampled: a token of a prompt, of a tool, or padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Sample:
    """A sequence of S tokens. The constructor checks the arrays and does not copy them.

    Raises:
        PackError: fields contradict each other.
    """

    token_ids: npt.NDArray[np.int32]
    """i4[S]: prompts, sampled tokens, and tokens between them, in order."""
    loss_mask: npt.NDArray[np.bool_]
    """bool[S]: True if the token was sampled and is trained. Token 0 has no prediction and is never trained."""
    logprobs: npt.NDArray[np.float32]
    """f4[S]: log probabilities from the sampler, possibly -inf; 0.0 where not sampled."""
    weight_versions: npt.NDArray[np.int32]
    """i4[S]: version of the weights that sampled each token; -1 where not sampled."""
    routed_experts: Rows | None = None
    """u1|u2[S - 1 - start, L, K]: expert ids. Row i belongs to position `start + i`. None without routed experts."""
    start: int = 0
    """Position of the first row."""
    advantage: "float | npt.NDArray[np.float32]" = 0.0
    """One advantage for all tokens, or f4[S]."""

    def __post_init__(self) -> None:
        check_vector(PackError, "token_ids", self.token_ids, np.int32)
        size = len(self.token_ids)
        check_vector(PackError, "loss_mask", self.loss_mask, np.bool_, size)
        check_vector(PackError, "logprobs", self.logprobs, np.float32, size)
        check_vector(PackError, "weight_versions", self.weight_versions, np.int32, size)
        self._check_advantage()
        check_entries(PackError, "token_ids", self.token_ids, self.token_ids >= 0, "0 and above")
        if size and self.loss_mask[0]:
            raise PackError("loss_mask is on at position 0, which nothing predicts; allowed: positions 1 and above")
        good = (self.logprobs < np.inf) | ~self.loss_mask
        check_entries(PackError, "logprobs", self.logprobs, good, "numbers, and -inf, where the loss mask is on")
        good = (self.weight_versions >= 0) | ~self.loss_mask
        check_entries(PackError, "weight_versions", self.weight_versions, good, "0 and above where the loss mask is on")
        check_integer(PackError, "start", self.start, 0)
        if self.routed_experts is not None:
            self._check_rows(self.routed_experts)

    def _check_advantage(self) -> None:
        advantage: Any = self.advantage
        if isinstance(advantage, np.ndarray):
            check_vector(PackError, "advantage", advantage, np.float32, len(self.token_ids))
            check_entries(PackError, "advantage", advantage, np.isfinite(advantage), "finite numbers")
        elif not isinstance(advantage, Real):
            raise PackError(f"advantage is {describe(advantage)}; allowed: a number, or a numpy array of float32")
        elif not abs(cast(float, advantage)) <= float(np.finfo(np.float32).max):
            raise PackError(f"advantage is {advantage}; allowed: finite numbers that float32 has")

    def _check_rows(self, rows: Rows) -> None:
        check_rows(PackError, "routed_experts", rows)
        size = len(self.token_ids)
        if self.start > max(size - 1, 0):
            raise PackError(f"start is {self.start} of {size} tokens; allowed: 0 to S - 1")
        if len(rows) != (wanted := expected_rows(size - 1, self.start, 1)):
            raise PackError(
                f"routed_experts has {len(rows)} rows for {size} tokens from start {self.start};"
                f" allowed: S - 1 - start = {wanted}"
            )

    def __len__(self) -> int:
        """Return S, the number of tokens."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        rows = "none" if self.routed_experts is None else "x".join(map(str, self.routed_experts.shape))
        trained = np.count_nonzero(self.loss_mask)
        return f"<Sample tokens={len(self.token_ids)} trained={trained} rows={rows} start={self.start}>"


def check_samples(samples: object) -> list[Sample]:
    """Return the samples as a list.

    Raises:
        PackError: `samples` is a single sample, or has an item that is no sample.
    """
    if not isinstance(samples, Iterable):
        raise PackError(f"samples is {describe(samples)}; allowed: a list, or anything else that yields samples")
    listed = list(samples)
    for index, sample in enumerate(listed):
        if not isinstance(sample, Sample):
            raise PackError(f"sample {index} is {describe(sample)}; allowed: rollbus.trainer.Sample")
    return listed
