"""The weights of a synthetic model: numbers that are mixed into its output."""

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
    """The numbers on which the output of a model depends besides the tokens."""

    tokens: int
    """Number that is mixed into tokens and logprobs."""
    experts: int
    """Number that is mixed into the routed experts. It differs from `tokens` only in an engine with a fault."""

    @classmethod
    def of(cls, checksum: int) -> "SyntheticWeights":
        """Return the weights of a checkpoint with this checksum, or of a seed."""
        return cls(mix_one(checksum), mix_one(checksum))

    def with_wrong_experts(self) -> "SyntheticWeights":
        """Return weights with the same tokens and other routed experts."""
        return SyntheticWeights(self.tokens, mix_one(self.experts))

    def with_adapter(self, checksum: int) -> "SyntheticWeights":
        """Return the weights after the change by the LoRA adapter with this checksum."""
        delta = mix_one(checksum)
        return SyntheticWeights((self.tokens + delta) & MASK, (self.experts + delta) & MASK)


@dataclass(frozen=True, slots=True)
class SyntheticAdapter:
    """A loaded LoRA adapter."""

    version: int
    checksum: int
    salt: int
    """Salt of the prefix cache. Each load has another salt, so requests do not find older entries."""


DROPPED = SyntheticWeights.of(-1)
"""Weights that are missing or incomplete. No checkpoint gives the same output."""


def checksum_of(folder: Path) -> int:
    """Return a checksum of the bytes of all `*.safetensors` files in `folder`, in the order of their names.

    Raises:
        ControlError: `engine_error`: there are no files, or a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=7)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ControlError(ControlCode.ENGINE_ERROR, f"folder {folder} has no *.safetensors files")
    try:
        for path in files:
            with path.open("rb") as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
    except OSError as exc:
        raise ControlError(ControlCode.ENGINE_ERROR, f"{exc}") from exc
    return int.from_bytes(digest.digest(), "little")


class ReceivedWeights:
    """Weights that arrive in chunks: `{"data": base64}` appends bytes, `{"seed": n}` names a model.

    The bytes of a checkpoint's files, in the order of their names, give the same weights as the checkpoint.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=7)
        self._has_bytes = False
        self._seed: int | None = None

    def add(self, info: Mapping[str, Any]) -> None:
        """Add one chunk.

        Raises:
            ControlError: `engine_error`: the chunk has neither data nor seed, or its data is not base64. Nothing was
                added.
        """
        data, seed = info.get("data"), info.get("seed")
        if isinstance(data, str):
            try:
                self._digest.update(base64.b64decode(data, validate=True))
            except binascii.Error as exc:
                raise ControlError(ControlCode.ENGINE_ERROR, f"info.data is not base64: {exc}") from None
            self._has_bytes = True
        elif isinstance(seed, int):
            self._seed = seed
        else:
            raise ControlError(ControlCode.ENGINE_ERROR, "info has neither data (base64) nor seed (an integer)")

    def weights(self) -> SyntheticWeights:
        """Return the received weights.

        Raises:
            ControlError: `half_written`: no weights were received.
        """
        if self._seed is not None:
            return SyntheticWeights.of(self._seed)
        if not self._has_bytes:
            raise ControlError(ControlCode.HALF_WRITTEN, "the weight update received no weights")
        return SyntheticWeights.of(int.from_bytes(self._digest.digest(), "little"))
