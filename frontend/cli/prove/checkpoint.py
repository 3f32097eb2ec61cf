"""A copy of a checkpoint with a change: one new file of weights beside hard links to the other files."""

import json
import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ....bus.objects.safetensors_header import BadSafetensors, StoredTensor, read_header
from ....bus.protocol.weights.tensors import INDEX
from ....schemas.rows import Uint8s
from ..console import size
from .stage import StageRefused

STEP: Final = 4
FACTOR: Final = 1.25
"""Every `STEP`-th element of the changed tensors is multiplied by this: enough to change each token's log probability
visibly, also in bfloat16, and too little for infinite values."""
MIN_FREE: Final = 8
"""A file that cannot be linked is copied if the disk has free space for this number of copies."""
DTYPES: Final = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
"""The dtypes of the changed tensors, as numpy reads them. Quantized tensors stay as they are."""


class Copies(NamedTuple):
    """Two copies of a checkpoint."""

    original: Path
    changed: Path
    file: str
    """The file of weights that differs."""
    num_bytes: int
    """Size of all files of weights."""


def copy_checkpoint(model: Path, folder: Path) -> Copies:
    """Make two copies of a checkpoint in `folder`, both of hard links, and change one file of the second copy. Blocks.

    Raises:
        StageRefused: the files cannot be linked there, or no file has tensors of a known dtype.
        OSError: a file cannot be read or written.
    """
    files = [file for file in sorted(model.iterdir()) if file.is_file()]
    index = model / INDEX
    indexed = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
    weights = [file for file in files if file.suffix == ".safetensors" and (indexed is None or file.name in indexed)]
    shards = {file: tensors for file in weights if (tensors := read_tensors(file))}
    if not shards:
        raise StageRefused(f"{model} has no safetensors file with tensors of {', '.join(DTYPES)}")
    # The smallest file with experts, or the smallest: the change reaches them, and writing it takes the least time.
    chosen = min(shards, key=lambda file: (not any("expert" in name for name in shards[file]), file.stat().st_size))
    copies = Copies(folder / "original", folder / "changed", chosen.name, sum(file.stat().st_size for file in weights))
    needed, free = chosen.stat().st_size, shutil.disk_usage(folder).free
    if needed > free:
        raise StageRefused(
            f"the disk of {folder} has {size(free)} free, and the changed copy of {chosen.name} needs {size(needed)}; "
            "let --state-dir be on another disk"
        )
    for copy in (copies.original, copies.changed):
        copy.mkdir()
        for file in files:
            if copy == copies.changed and file == chosen:
                shutil.copyfile(file, copy / file.name)
            else:
                _link(file, copy / file.name)
    content = np.memmap(copies.changed / chosen.name, np.uint8, "r+")
    for tensor in shards[chosen].values():
        _change(content[tensor.begin : tensor.end], tensor.dtype)
    content.flush()
    return copies


def read_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file that have a known dtype.

    Raises:
        StageRefused: the file is no whole safetensors file.
    """
    with file.open("rb") as opened:
        try:
            tensors = read_header(opened.fileno())
        except BadSafetensors as exc:
            raise StageRefused(f"{file} {exc}") from exc
    return {name: tensor for name, tensor in tensors.items() if tensor.dtype in DTYPES}


def _link(file: Path, link: Path) -> None:
    try:
        # Files in the cache of Hugging Face are symlinks, and a link to a symlink would lead out of the weight root.
        os.link(file.resolve(), link)
    except OSError as exc:
        if file.stat().st_size * MIN_FREE > shutil.disk_usage(link.parent).free:
            problem = f"cannot be hard-linked into {link.parent} ({exc.strerror}), and is too large for copies there"
            raise StageRefused(f"{file} {problem}; let --state-dir be on the checkpoint's file system") from exc
        shutil.copyfile(file, link)


def _change(content: Uint8s, dtype: str) -> None:
    """Multiply every `STEP`-th element by `FACTOR`, in place."""
    elements = content.view(DTYPES[dtype])[::STEP]
    if dtype == "BF16":
        # numpy has no bfloat16: it is the upper half of a float32.
        scaled = (elements.astype("<u4") << 16).view("<f4") * np.float32(FACTOR)
        elements[:] = scaled.view("<u4") >> 16
    else:
        elements *= elements.dtype.type(FACTOR)
