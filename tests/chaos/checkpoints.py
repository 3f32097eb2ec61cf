"""The checkpoints of a walk through versions of weights, as they must come out of every folder."""

import random
from pathlib import Path

from tests.chaos.publisher import FLEET
from tests.support.tensors import Amount, Tensors, changed, hashes, hashes_in, make_tensors, write

__all__ = ["Checkpoints"]

AMOUNTS: tuple[Amount, ...] = ("none", "few", "few", "few", "mixed", "all")


class Checkpoints:
    """Whole checkpoints of all versions.

    Args:
        folder: for them.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._tensors: Tensors = make_tensors(self._rng)
        self._hashes: list[dict[str, str]] = []
        self.folders: dict[int, Path] = {}
        """By version, also of those that were never recorded."""
        self.write(0)

    def change(self, amount: Amount | None = None) -> None:
        """Change the tensors; without an `amount`, any of them."""
        self._tensors = changed(self._tensors, self._rng.choice(AMOUNTS) if amount is None else amount, self._rng)

    def write(self, version: int) -> Path:
        """Write the present tensors as a version; returns the folder."""
        folder = self.folders[version] = write(self._folder / f"version-{version}", self._tensors)
        self._hashes.append(hashes(self._tensors))
        return folder

    def check(self, cache: Path, *, has_present: bool = True) -> None:
        """Check that every complete folder of a machine is one of the checkpoints, hash by hash.

        Args:
            has_present: the present tensors must be among them.
        """
        shared = cache / FLEET / "shared.weights" / "checkpoints"
        found = [hashes_in(folder) for folder in shared.glob("[!.]*")]
        assert all(one in self._hashes for one in found)
        assert not has_present or self._hashes[-1] in found
