"""The checkpoints of all weight versions of a chaos run, with which staged folders and results are compared."""

import random
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from rollbus.bus.client.generation import Generation
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.publisher import FLEET
from tests.chaos.workload import undisturbed
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


async def assert_fresh(
    generation: Generation, request: GenerateRequest, checkpoints: Mapping[int, Path], config: SyntheticConfig
) -> None:
    """Check that each token is the greedy token of a new engine with the checkpoint of the token's version.

    Versions never decrease within a result.

    Args:
        checkpoints: checkpoint folders by version.
    """
    assert generation.error is None, generation.error
    versions = generation.weight_versions.tolist()
    assert versions == sorted(versions)
    tokens = [*request.prompt_token_ids]
    for version, run in groupby(versions):
        count = len(list(run))
        sampling = replace(request.sampling, max_tokens=count)
        asked = replace(request, request_id="r", prompt_token_ids=tokens, sampling=sampling)
        expected = await undisturbed([asked], config, checkpoints[version])
        begin = len(tokens) - len(request.prompt_token_ids)
        np.testing.assert_array_equal(generation.token_ids[begin : begin + count], expected["r"].token_ids)
        tokens += expected["r"].token_ids.tolist()
