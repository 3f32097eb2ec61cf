"""The sampling masks of a result: which ids each of its tokens was sampled from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....schemas.chunk import SamplingMask

__all__ = ["TokenMasks"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """For each token the ids that top-k, top-p and min-p left, its own among them.

    Of logits f[G, vocabulary], the sampler's choice was among `logits[masks.positions, masks.token_ids]`, each token's
    beside those of the token before: their softmax, token by token, is what it sampled from.
    """

    counts: npt.NDArray[np.int32]
    """i4[G]: how many ids each token has, at least 1."""
    token_ids: npt.NDArray[np.int32]
    """i4[sum of the counts]: the ids of the first token, then those of the second, and so on."""

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        """One line with sizes, no contents."""
        return f"<TokenMasks tokens={len(self.counts)} ids={len(self.token_ids)}>"

    @classmethod
    def joined(cls, parts: Sequence["SamplingMask | TokenMasks"]) -> "TokenMasks":
        """What follows each other as one; its arrays are its own."""
        return cls(np.concatenate([part.counts for part in parts]), np.concatenate([part.token_ids for part in parts]))

    @classmethod
    def joined_of_all(cls, parts: Sequence["SamplingMask | TokenMasks | None"]) -> "TokenMasks | None":
        """The masks of parts that have tokens, as one; None unless all of them have masks.

        An attempt before or after may have run where none are made.
        """
        found = [part for part in parts if part is not None]
        return cls.joined(found) if found and len(found) == len(parts) else None

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """i8[sum of the counts]: which token each of `token_ids` belongs to, from 0 on."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def split(self) -> list[npt.NDArray[np.int32]]:
        """The ids of each token; views."""
        return np.split(self.token_ids, np.cumsum(self.counts)[:-1]) if len(self.counts) else []

    def cut(self, kept: int) -> "TokenMasks":
        """Those of the first `kept` tokens; views."""
        counts = self.counts[:kept]
        return TokenMasks(counts, self.token_ids[: counts.sum(dtype=np.int64)])
