"""The sampling masks of a result: the ids from which each of its tokens was sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import SamplingMask

__all__ = ["TokenMasks"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """For each token, the ids that top-k, top-p and min-p left, including the token itself.

    With logits f[G, vocabulary], `logits[masks.positions, masks.token_ids]` has the candidates of each token, one token
    after another. The sampler used the softmax of the candidates of each token.
    """

    counts: npt.NDArray[np.int32]
    """i4[G]: the number of ids of each token, at least 1."""
    token_ids: npt.NDArray[np.int32]
    """i4[sum of the counts]: the ids of the first token, then those of the second, and so on."""

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        return f"<TokenMasks tokens={len(self.counts)} ids={len(self.token_ids)}>"

    @classmethod
    def joined(cls, parts: Sequence["SamplingMask | TokenMasks"]) -> "TokenMasks":
        """Join consecutive masks. The result has its own arrays."""
        return cls(np.concatenate([part.counts for part in parts]), np.concatenate([part.token_ids for part in parts]))

    @classmethod
    def joined_of_all(cls, parts: Sequence["SamplingMask | TokenMasks | None"]) -> "TokenMasks | None":
        """Join the masks of parts that have tokens; None unless all parts have masks.

        An earlier or later attempt may have run on an engine that returns no masks.
        """
        found = [part for part in parts if part is not None]
        return cls.joined(found) if found and len(found) == len(parts) else None

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """i8[sum of the counts]: the index of the token of each of `token_ids`, from 0 on."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def split(self) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each token as views."""
        return np.split(self.token_ids, np.cumsum(self.counts)[:-1]) if len(self.counts) else []

    def cut(self, kept: int) -> "TokenMasks":
        """Return the masks of the first `kept` tokens as views."""
        counts = self.counts[:kept]
        return TokenMasks(counts, self.token_ids[: counts.sum(dtype=np.int64)])
