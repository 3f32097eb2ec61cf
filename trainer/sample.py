"""One sequence to train on, with everything aligned to its tokens.

Row i of the routed experts belongs to position `start + i`; the last token has not been through the model and has
none. So a sample of S tokens has `S - 1 - start` rows, as `schemas.rows` has it for what a worker returns.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.rows import Rows, dtype_of, expected_rows
from trainer.errors import PackError

__all__ = ["NOT_SAMPLED", "Sample"]

NOT_SAMPLED = -1
"""The weight version of a token that no weights sampled: a prompt's, a tool's, or padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Sample:
    """A sequence of S tokens. The arrays are checked, not copied.

    Raises:
        PackError: fields that contradict each other.
    """

    token_ids: npt.NDArray[np.int32]
    """i4[S]: prompts, what was sampled, and what came in between, in order."""
    loss_mask: npt.NDArray[np.bool_]
    """bool[S]: sampled, and to be trained. Token 0 is predicted by nothing and never trained."""
    logprobs: npt.NDArray[np.float32]
    """f4[S]: the sampler's, which may be -inf; 0.0 where not sampled."""
    weight_versions: npt.NDArray[np.int32]
    """i4[S]: the weights that sampled each token; -1 where not sampled."""
    routed_experts: Rows | None = None
    """u1|u2[S - 1 - start, L, K]: row i is that of position `start + i`; None without routing."""
    start: int = 0
    """The first position that has a row."""
    advantage: "float | npt.NDArray[np.float32]" = 0.0
    """One for all tokens, or f4[S]."""

    def __post_init__(self) -> None:
        size = _check_vector("token_ids", self.token_ids, np.int32, None)
        _check_vector("loss_mask", self.loss_mask, np.bool_, size)
        _check_vector("logprobs", self.logprobs, np.float32, size)
        _check_vector("weight_versions", self.weight_versions, np.int32, size)
        if isinstance(self.advantage, np.ndarray):
            _check_vector("advantage", self.advantage, np.float32, size)
            _check_all("advantage", np.isfinite(self.advantage), self.advantage, "finite numbers")
        elif not math.isfinite(self.advantage):
            raise PackError(f"advantage is {self.advantage}; allowed: finite numbers")
        _check_all("token_ids", self.token_ids >= 0, self.token_ids, "0 and above")
        if size and self.loss_mask[0]:
            raise PackError("loss_mask is on at position 0, which nothing predicts; allowed: positions 1 and above")
        trained_only = "numbers, and -inf, where the loss mask is on"
        _check_all("logprobs", (self.logprobs < np.inf) | ~self.loss_mask, self.logprobs, trained_only)
        trained_only = "0 and above where the loss mask is on"
        _check_all("weight_versions", (self.weight_versions >= 0) | ~self.loss_mask, self.weight_versions, trained_only)
        if self.routed_experts is not None:
            self._check_rows(self.routed_experts)

    def _check_rows(self, rows: Rows) -> None:
        try:
            dtype_of(rows)
        except ValueError as exc:
            raise PackError(f"routed_experts: {exc}") from None
        if rows.ndim != 3:
            raise PackError(f"routed_experts are of shape {rows.shape}; allowed: [S - 1 - start, layers, top_k]")
        size = len(self.token_ids)
        if not 0 <= self.start <= max(size - 1, 0):
            raise PackError(f"start is {self.start} of {size} tokens; allowed: 0 to S - 1")
        if len(rows) != (wanted := expected_rows(size - 1, self.start, 1)):
            raise PackError(
                f"routed_experts has {len(rows)} rows for {size} tokens from start {self.start};"
                f" allowed: S - 1 - start = {wanted}"
            )

    def __len__(self) -> int:
        """S."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        """One line with sizes, no contents."""
        rows = "none" if self.routed_experts is None else "x".join(map(str, self.routed_experts.shape))
        trained = np.count_nonzero(self.loss_mask)
        return f"<Sample tokens={len(self.token_ids)} trained={trained} rows={rows} start={self.start}>"


def _check_vector(name: str, array: object, dtype: type[np.generic], size: int | None) -> int:
    """Check an array of one dimension; returns its length."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise PackError(f"{name} is {found}; allowed: a numpy array of {np.dtype(dtype)} in one dimension")
    if size is not None and len(array) != size:
        raise PackError(f"{name} has {len(array)} entries for {size} tokens; allowed: one for each token")
    return len(array)


def _check_all(name: str, good: npt.NDArray[np.bool_], array: npt.NDArray[Any], allowed: str) -> None:
    if not good.all():
        position = int(good.argmin())
        raise PackError(f"{name} is {array[position]} at position {position}; allowed: {allowed}")
