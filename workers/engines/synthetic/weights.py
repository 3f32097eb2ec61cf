"""The weights of a synthetic model: numbers that its output is mixed with."""

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....schemas.errors import ControlCode, ControlError
from .hashing import MASK, mix_one

__all__ = ["DROPPED", "ReceivedWeights", "SyntheticAdapter", "SyntheticWeights", "checksum_of"]

READ_BYTES = 1024**2


class SyntheticWeights(NamedTuple):
    """What a model's output depends on besides the tokens."""

    tokens: int
    """Mixed into tokens and logprobs."""
    experts: int
    """Mixed into the routing; other than `tokens` only in an engine that is broken."""

    @classmethod
    def of(cls, checksum: int) -> "SyntheticWeights":
        """Of a checkpoint with this checksum, or of a seed."""
        return cls(mix_one(checksum), mix_one(checksum))

    def with_wrong_experts(self) -> "SyntheticWeights":
        """The same tokens and other routing."""
        return SyntheticWeights(self.tokens, mix_one(self.experts))

    def with_adapter(self, checksum: int) -> "SyntheticWeights":
        """As a LoRA adapter changes them."""
        delta = mix_one(checksum)
        return SyntheticWeights((self.tokens + delta) & MASK, (self.experts + delta) & MASK)


@dataclass(frozen=True, slots=True)
class SyntheticAdapter:
    """A LoRA adapter that is loaded."""

    version: int
    checksum: int
    salt: int
    """Another one for each load, so that what was cached before is not found."""


DROPPED = SyntheticWeights.of(-1)
"""No weights at all: what is made of them is nothing that a checkpoint gives."""


def checksum_of(folder: Path) -> int:
    """A number that depends on the bytes of all `*.safetensors` files in `folder`, in the order of their names.

    Raises:
        ControlError: `engine_error`, there are none or they cannot be read.
    """
    digest = hashlib.blake2b(digest_size=7)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ControlError(ControlCode.ENGINE_ERROR, f"{folder} holds no *.safetensors")
    try:
        for path in files:
            with path.open("rb") as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
    except OSError as exc:
        raise ControlError(ControlCode.ENGINE_ERROR, f"{exc}") from exc
    return int.from_bytes(digest.digest(), "little")


class ReceivedWeights:
    """Weights that come piece by piece: `{"data": base64}` appends bytes, `{"seed": n}` names a model.

    The bytes of a checkpoint's files, in the order of their names, give the same weights as the checkpoint.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=7)
        self._has_bytes = False
        self._seed: int | None = None

    def add(self, info: Mapping[str, Any]) -> None:
        """Take one piece.

        Raises:
            ControlError: `engine_error`, it is neither; nothing was taken.
        """
        data, seed = info.get("data"), info.get("seed")
        if isinstance(data, str):
            try:
                self._digest.update(base64.b64decode(data, validate=True))
            except binascii.Error as exc:
                raise ControlError(ControlCode.ENGINE_ERROR, f"info.data is no base64: {exc}") from None
            self._has_bytes = True
        elif isinstance(seed, int):
            self._seed = seed
        else:
            raise ControlError(ControlCode.ENGINE_ERROR, "info has neither data (base64) nor seed (an integer)")

    def weights(self) -> SyntheticWeights:
        """What came.

        Raises:
            ControlError: `half_written`, nothing did.
        """
        if self._seed is not None:
            return SyntheticWeights.of(self._seed)
        if not self._has_bytes:
            raise ControlError(ControlCode.HALF_WRITTEN, "no weights came")
        return SyntheticWeights.of(int.from_bytes(self._digest.digest(), "little"))
