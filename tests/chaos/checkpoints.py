"""The checkpoints of all weight versions of a chaos run, against which staged folders are compared."""

import random
from pathlib import Path

from tests.chaos.publisher import FLEET
from tests.support.tensors import Amount, Tensors, changed, hashes, hashes_in, make_tensors, write

AMOUNTS: tuple[Amount, ...] = ("none", "few", "few", "few", "mixed", "all")


class Checkpoints:
    """Whole checkpoints of all versions.

    Args:
        folder: folder for the checkpoints.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._tensors: Tensors = make_tensors(self._rng)
        self._hashes: list[dict[str, str]] = []
        self.folders: dict[int, Path] = {}
        """Folders by version, including versions that were never recorded."""
        self.write(0)

    def change(self, amount: Amount | None = None) -> None:
        """Change the tensors by this amount, or by a random amount."""
        self._tensors = changed(self._tensors, self._rng.choice(AMOUNTS) if amount is None else amount, self._rng)

    def write(self, version: int) -> Path:
        """Write the current tensors as a version and return its folder."""
        folder = self.folders[version] = write(self._folder / f"version-{version}", self._tensors)
        self._hashes.append(hashes(self._tensors))
        return folder

    def check(self, cache: Path, *, has_present: bool = True) -> None:
        """Check that every complete folder of a machine equals one of the checkpoints, by the hashes of its tensors.

        Args:
            has_present: True if one of the folders must have the current tensors.
        """
        shared = cache / FLEET / "shared.weights" / "checkpoints"
        found = [hashes_in(folder) for folder in shared.glob("[!.]*")]
        assert all(one in self._hashes for one in found)
        assert not has_present or self._hashes[-1] in found
