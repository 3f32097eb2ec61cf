"""The checkpoints of all weight versions of a chaos run, with which staged folders and results are compared."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from rollbus.bus.client.generation import Generation
from rollbus.bus.protocol.weights.tensors import layouts, ordered
from rollbus.schemas.manifest import TensorEntry
from rollbus.schemas.request import GenerateRequest
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.chaos.publisher import FLEET
from tests.chaos.workload import undisturbed

# Checkpoints of random tensors in several dtypes with random changes, as a trainer would publish them.

Amount = Literal["none", "few", "all", "mixed"]
"""The share of elements that change."""
SHAPES = {
    "model.embed_tokens.weight": ("BF16", (300, 64)),
    "model.layers.0.mlp.down_proj.weight": ("BF16", (64, 256)),
    "model.layers.0.mlp.scales": ("F32", (16, 4)),
    "model.layers.0.experts.codes": ("U8", (64, 64)),
    "model.layers.1.self_attn.q_proj.weight": ("F32", (64, 64)),
    "model.layers.1.steps": ("I64", (3,)),
    "model.norm.bias": ("F16", (0,)),
    "model.norm.weight": ("F16", (64,)),
    "model.scale": ("F32", ()),
}
"""Tensors with several element sizes, including an empty tensor and a scalar."""
FEW = 0.03
"""Share of the bytes that change, similar to a step of RL."""
FILE = "model.safetensors"


class RandomTensor(NamedTuple):
    """The dtype, shape and bytes of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    content: npt.NDArray[np.uint8]


Tensors = Mapping[str, RandomTensor]


def make_tensors(rng: random.Random) -> Tensors:
    """Make the first version from random bits, which may be NaN."""
    found = {}
    for name, (dtype, shape) in SHAPES.items():
        entry = TensorEntry(name=name, dtype=dtype, shape=shape, sha256="0" * 64, file=FILE)
        found[name] = RandomTensor(dtype, shape, np.frombuffer(rng.randbytes(entry.size), np.uint8))
    return found


def changed(tensors: Tensors, amount: Amount, rng: random.Random) -> Tensors:
    """Make the next version."""
    amounts: Sequence[Amount] = ("none", "few", "all")
    return {
        name: tensor._replace(
            content=_changed(tensor, rng.choice(amounts) if amount == "mixed" else amount, rng),
        )
        for name, tensor in tensors.items()
    }


def _changed(tensor: RandomTensor, amount: Amount, rng: random.Random) -> npt.NDArray[np.uint8]:
    if amount == "none" or not len(tensor.content):
        return tensor.content
    if amount == "all":
        # Adding an odd number changes every byte.
        return tensor.content + np.uint8(2 * rng.randrange(128) + 1)
    content = tensor.content.copy()
    for _ in range(max(1, int(FEW * len(content)))):
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    return content


def hashes(tensors: Tensors) -> dict[str, str]:
    """Return the SHA-256 of each tensor."""
    return {name: hashlib.sha256(tensor.content.data).hexdigest() for name, tensor in tensors.items()}


def hashes_in(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each tensor in the safetensors files of a folder, without a safetensors library."""
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, tensor in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                found[name] = hashlib.sha256(data[begin + first : begin + last]).hexdigest()
    return found


def write(folder: Path, tensors: Tensors) -> Path:
    """Write a complete checkpoint in the layout of publishers, with a configuration; return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "none", "rope_theta": 10000.0}))
    entries = ordered(
        TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, sha256=hashes(tensors)[name], file=FILE)
        for name, tensor in tensors.items()
    )
    [layout] = layouts(entries)
    contents = (tensors[entry.name].content.tobytes() for entry in layout.entries)
    (folder / FILE).write_bytes(layout.header + b"".join(contents))
    return folder


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
    generation: Generation, request: GenerateRequest, checkpoints: Mapping[int, Path | None], config: SyntheticConfig
) -> None:
    """Check a result as `assert_fresh_tokens` does."""
    assert generation.error is None, generation.error
    versions, token_ids = generation.weight_versions.tolist(), generation.token_ids.tolist()
    await assert_fresh_tokens(versions, token_ids, request, checkpoints, config)


async def assert_fresh_tokens(
    versions: Sequence[int],
    token_ids: Sequence[int],
    request: GenerateRequest,
    checkpoints: Mapping[int, Path | None],
    config: SyntheticConfig,
) -> None:
    """Check that each token is the greedy token of a new engine with the checkpoint of the token's version.

    Versions never decrease within a result.

    Args:
        checkpoints: checkpoint folders by version.
    """
    assert list(versions) == sorted(versions)
    tokens = [*request.prompt_token_ids]
    for version, run in groupby(versions):
        count = len(list(run))
        sampling = replace(request.sampling, max_tokens=count)
        asked = replace(request, request_id="r", prompt_token_ids=tokens, sampling=sampling)
        expected = await undisturbed([asked], config, checkpoints[version])
        begin = len(tokens) - len(request.prompt_token_ids)
        np.testing.assert_array_equal(token_ids[begin : begin + count], expected["r"].token_ids)
        tokens += expected["r"].token_ids.tolist()
