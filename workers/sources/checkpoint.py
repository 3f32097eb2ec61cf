"""Validation of a complete checkpoint of the worker's own model: the same tensors, shapes and dtypes."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ...schemas.errors import ControlError
from .content import FileNotes, note_files, whole_file
from .headers import Tensor, read_header
from .roots import bad_source, open_regular

__all__ = [
    "check_model",
    "check_tensors",
    "has_checkpoint",
    "read_checkpoint",
    "read_config",
    "read_json",
    "start_content",
]

T = TypeVar("T")

INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
MAX_JSON_BYTES: Final = 64 * 1024 * 1024
"""Enough for an index with hundreds of thousands of tensors."""
MAX_SHARDS: Final = 4096
"""Far more than the largest checkpoints have."""
_WEIGHT_FILES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
"""Endings of the files from which an engine may load its weights."""
_SAME: Final = (
    "architectures",
    "model_type",
    "head_dim",
    "hidden_act",
    "layer_types",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_key_value_heads",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
)
"""Fields of config.json that change how a model computes, but not the shapes of its tensors. An engine that reloads its
weights keeps the fields that it read at its start. If they differed, a worker would compute differently from a worker
that starts on the new checkpoint."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def has_checkpoint(folder: Path) -> bool:
    """Return True if `folder` is a folder with at least one safetensors file. Blocks."""
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Read the headers of a checkpoint: of its only safetensors file, or of all shards of its index. Blocks.

    Raises:
        ControlError: `bad_source`: the checkpoint is missing, incomplete or damaged. The message names file and tensor.
    """
    index_path = folder / INDEX
    if index_path.exists():
        return _read_shards(folder, _read_index(index_path))
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = "no safetensors file" if not files else f"{len(files)} safetensors files and no {INDEX}"
        raise bad_source(f"{folder} has {found}; expected: one file, or an index and its shards")
    return _checked(folder, read_header(files[0]))


def checkpoint_files(folder: Path, tensors: Mapping[str, Tensor]) -> set[Path]:
    """Return the files of a checkpoint that an engine reads. Blocks."""
    return {tensor.file for tensor in tensors.values()} | {
        path for name in (INDEX, CONFIG) if (path := folder / name).exists()
    }


def start_content(model: Path) -> tuple[FileNotes, Mapping[str, Tensor], frozenset[str]]:
    """Return the states of the weight files of a start checkpoint, its tensors, and the names that are whole files.

    Blocks. Without readable safetensors files, all weight files count as a whole. Empty if there are none.

    Raises:
        OSError: a file does not exist any more.
    """
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.suffix in _WEIGHT_FILES)
    notes = note_files(files)
    try:
        if (tensors := read_checkpoint(model)).keys() and {each.file for each in tensors.values()} <= notes.keys():
            return notes, tensors, frozenset()
    except ControlError:
        pass
    whole = {path.name: whole_file(path) for path in files}
    return notes, whole, frozenset(whole)


def check_model(
    folder: Path, tensors: Mapping[str, Tensor], own_tensors: Mapping[str, Tensor], own_config: Mapping[str, Any]
) -> None:
    """Compare a checkpoint with the worker's own. Blocks.

    Raises:
        ControlError: `bad_source`: tensors are missing, additional or different, or config.json differs in a field of
            `_SAME`.
    """
    check_tensors(folder, tensors, own_tensors)
    config = read_config(folder)
    for key in _SAME:
        if key in config and key in own_config and config[key] != own_config[key]:
            raise bad_source(
                f"{folder / CONFIG} has {key}={_shown(config[key])}; expected: {_shown(own_config[key])}, as the "
                "worker's model"
            )


def check_tensors(where: object, tensors: Mapping[str, Tensor], own_tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with those of the worker's own checkpoint.

    Args:
        where: the owner of the tensors, for error messages.

    Raises:
        ControlError: `bad_source`: tensors are missing, additional or different.
    """
    missing = own_tensors.keys() - tensors.keys()
    if missing:
        raise bad_source(f"{where} lacks {_some(missing)}: it is of another model, or incomplete")
    unknown = tensors.keys() - own_tensors.keys()
    if unknown:
        raise bad_source(f"{where} has {_some(unknown)}, which the worker's model does not have")
    for name in sorted(tensors):
        found, expected = tensors[name], own_tensors[name]
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            raise bad_source(
                f"{found.file} has the tensor {name!r} as {found}; expected: {expected}, as the worker's model"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json; return an empty dict if the file does not exist. Blocks.

    Raises:
        ControlError: `bad_source`.
    """
    path = folder / CONFIG
    return read_json(path, dict[str, Any]) if path.exists() else {}


def read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file of at most `MAX_JSON_BYTES` as `kind`. Blocks.

    Raises:
        ControlError: `bad_source`.
    """
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        try:
            data = file.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise bad_source(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_JSON_BYTES:
        raise bad_source(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_source(f"{path} does not decode: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of the file that contains each tensor."""
    files = read_json(path, _Index).weight_map
    if len(set(files.values())) > MAX_SHARDS:
        raise bad_source(f"{path} names more than {MAX_SHARDS} files")
    for name, file in files.items():
        # A path could name a file outside of the folder, which was not validated.
        if "/" in file or not file.endswith(".safetensors") or not file.isprintable():
            raise bad_source(f"{path} has {name[:200]!r} in {file[:200]!r}; expected: the name of a safetensors file")
    return files


def _read_shards(folder: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Read all shards, and check that each contains exactly the tensors that the index places in it."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if not (folder / file).exists():
            raise bad_source(f"{folder / file} is missing: the index names it")
        for name, tensor in read_header(folder / file).items():
            if files.get(name) != file:
                expected = f"in {files[name]}" if name in files else "nowhere"
                raise bad_source(f"{folder / file} has the tensor {name[:200]!r}; by the index it is {expected}")
            tensors[name] = tensor
    for name, file in files.items():
        if name not in tensors:
            raise bad_source(f"{folder / file} lacks the tensor {name[:200]!r}, which the index places there")
    return _checked(folder, tensors)


def _checked(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not tensors:
        raise bad_source(f"{folder} has no tensors")
    return tensors


def _some(names: Iterable[str]) -> str:
    """Format the first name, and the number of the others."""
    first, *others = sorted(names)
    return f"the tensor {first[:200]!r}" + (f" and {len(others)} others" if others else "")


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()[:200]
