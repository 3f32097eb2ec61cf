"""Folders with weights: validates checkpoints and LoRA adapters for the worker's model, and detects later changes.

A checkpoint must have the same tensors, shapes and dtypes as the worker's own. An adapter is a folder in PEFT's layout.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from ...bus.protocol.weights.tensors import ADAPTER_CONFIG, ADAPTER_TENSORS, INDEX
from ...schemas.decoding import MALFORMED
from ...schemas.errors import ControlError, bad_source
from ...schemas.manifest import Manifest, tensors_digest
from ...schemas.options import memory_bytes
from .content import (
    FLOATS,
    PIECE_BYTES,
    FileNotes,
    FolderContent,
    Tensor,
    note_files,
    open_regular,
    read_header,
    reading,
    whole_file,
)
from .threads import Progress, Scratch, run_quietly

T = TypeVar("T")

CONFIG: Final = "config.json"
MAX_JSON_BYTES: Final = 64 * 1024 * 1024
"""Enough for an index with hundreds of thousands of tensors."""
MAX_SHARDS: Final = 4096
"""Far more than the largest checkpoints have."""
_WEIGHT_FILES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
"""Endings of the files from which an engine may load its weights."""
_SAME: Final = (
    *("architectures", "model_type", "head_dim", "hidden_act", "layer_types", "norm_topk_prob"),
    *("num_attention_heads", "num_experts_per_tok", "num_key_value_heads", "quantization_config"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings"),
)
"""Fields of config.json that change how a model computes, but not the shapes of its tensors. An engine that reloads its
weights keeps the fields that it read at its start. If they differed, a worker would compute differently from a worker
that starts on the new checkpoint."""
MAX_RANK: Final = 512
"""The largest rank that vLLM can be configured for. An engine may allow less and then states its limit."""
_PREFIX: Final = "base_model.model."
"""The prefix that PEFT puts before the module names of the base model."""
_SIDES: Final = {".lora_A.weight": "A", ".lora_B.weight": "B"}
JOB_BYTES: Final = 64 * 1024**2
"""Bytes that one job reads. Cancellation takes effect between two jobs."""
MEMORY_SHARE: Final = 2
"""Files larger than the free memory divided by this value are not read ahead: the last files would displace the first
files from the page cache."""


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
    return _check_any(folder, read_header(files[0]))


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
            found, expected = _encode_value(config[key]), _encode_value(own_config[key])
            raise bad_source(f"{folder / CONFIG} has {key}={found}; expected: {expected}, as the worker's model")


def check_tensors(
    where: object, tensors: Mapping[str, Tensor], own_tensors: Mapping[str, Tensor], whose: str = "the worker's model"
) -> None:
    """Compare tensors with those of the worker's own checkpoint, or of another version.

    Args:
        where: the owner of the tensors, for error messages.
        whose: the owner of `own_tensors`.

    Raises:
        ControlError: `bad_source`: tensors are missing, additional or different.
    """
    missing = own_tensors.keys() - tensors.keys()
    if missing:
        raise bad_source(f"{where} lacks {_name_first(missing)}: it is of another model, or incomplete")
    unknown = tensors.keys() - own_tensors.keys()
    if unknown:
        raise bad_source(f"{where} has {_name_first(unknown)}, which {whose} does not have")
    for name in sorted(tensors):
        found, expected = tensors[name], own_tensors[name]
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            raise bad_source(f"{found.file} has the tensor {name[:200]!r} as {found}; expected: {expected}, as {whose}")


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
    with open_regular(path) as fd, os.fdopen(fd, "rb", closefd=False) as file, reading(path):
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise bad_source(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
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
    return _check_any(folder, tensors)


def _check_any(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not tensors:
        raise bad_source(f"{folder} has no tensors")
    return tensors


def _name_first(names: Iterable[str]) -> str:
    """Format the first name, and the number of the others."""
    first, *others = sorted(names)
    return f"the tensor {first[:200]!r}" + (f" and {len(others)} others" if others else "")


def _encode_value(value: object) -> str:
    return msgspec.json.encode(value).decode()[:200]


class _Config(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that the worker validates."""

    peft_type: str
    r: Annotated[int, Meta(ge=1, le=MAX_RANK)]
    target_modules: str | list[str]
    """A pattern, or a list with the last parts of module names."""
    bias: str = "none"
    modules_to_save: list[str] | None = None
    use_dora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


def holds_adapter(folder: Path) -> bool:
    """Return True if `folder` has an adapter's config and no config of a model. Blocks."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).exists()


def digest_of_published(manifest: Manifest) -> str:
    """Return the digest of a published version, equal to that of its folder. It reads no content."""
    files = {} if manifest.adapter is None else {ADAPTER_CONFIG: manifest.files.get(ADAPTER_CONFIG, "")}
    return tensors_digest(((entry.name, entry.dtype, entry.shape, entry.sha256) for entry in manifest.tensors), files)


def check_adapter(folder: Path, own_tensors: Mapping[str, Tensor] | None, max_rank: int | None) -> None:
    """Check that `folder` is a LoRA adapter and that each pair of matrices fits a weight of the base model. Blocks.

    Args:
        own_tensors: tensors of the worker's checkpoint. None if they are unknown: names and shapes are then only
            checked against each other.
        max_rank: the largest rank that the worker's engine accepts, or None if the engine states no limit.

    Raises:
        ControlError: `bad_source`. The message names the file, the module, the expected and the actual value.
    """
    for name in (ADAPTER_CONFIG, ADAPTER_TENSORS):
        if not (folder / name).exists():
            raise bad_source(
                folder / name, "is missing: an adapter needs adapter_config.json and adapter_model.safetensors"
            )
    config = read_json(folder / ADAPTER_CONFIG, _Config)
    _check_config(folder / ADAPTER_CONFIG, config)
    if max_rank is not None and config.r > max_rank:
        raise bad_source(
            folder / ADAPTER_CONFIG,
            f"has the rank r={config.r}; allowed: up to {max_rank}, as the worker's engine was started (vLLM's engine "
            "argument 'max_lora_rank')",
        )
    file = folder / ADAPTER_TENSORS
    pairs = _read_pairs(file, config)
    for module, (a, b) in sorted(pairs.items()):
        if a.shape[0] != b.shape[1]:
            raise bad_source(file, f"has {module!r} with lora_A {a} and lora_B {b}: their ranks differ")
        if a.shape[0] != config.r:
            raise bad_source(
                file, f"has {module!r} with the rank {a.shape[0]}; expected: {config.r}, as in {ADAPTER_CONFIG}"
            )
        if own_tensors is not None:
            _check_base(file, module, (a, b), own_tensors)


def _check_config(path: Path, config: _Config) -> None:
    """Reject an adapter that engines cannot serve, or would serve with wrong results."""
    if config.peft_type != "LORA":
        raise bad_source(path, f"has peft_type={config.peft_type[:40]!r}; expected: 'LORA'")
    if not config.target_modules:
        raise bad_source(path, "has no target_modules; expected: at least one")
    for name in ("modules_to_save", "use_dora", "rank_pattern", "alpha_pattern"):
        if value := getattr(config, name):
            raise bad_source(path, f"has {name}={str(value)[:200]}; expected: plain LoRA without it")
    if config.bias != "none":
        raise bad_source(path, f"has bias={config.bias[:40]!r}; expected: 'none'")


def _read_pairs(file: Path, config: _Config) -> dict[str, tuple[Tensor, Tensor]]:
    """Return lora_A and lora_B of each module, by the name of the module in the base model."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_header(file).items():
        ending = next((ending for ending in _SIDES if name.endswith(ending)), None)
        if ending is None:
            raise bad_source(file, f"has the tensor {name[:200]!r}; expected: names that end in {' or '.join(_SIDES)}")
        if tensor.dtype not in FLOATS or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise bad_source(file, f"has the tensor {name[:200]!r} as {tensor}; expected: a matrix of floats")
        module = name.removesuffix(ending).removeprefix(_PREFIX)
        sides.setdefault(module, {})[_SIDES[ending]] = tensor
    if not sides:
        raise bad_source(file, "has no tensors")
    for module, found in sides.items():
        if len(found) != 2:
            raise bad_source(
                file, f"has only lora_{next(iter(found))} of {module[:200]!r}; expected: lora_A and lora_B"
            )
        targets = config.target_modules
        if isinstance(targets, list) and not any(f".{module}".endswith(f".{target}") for target in targets):
            raise bad_source(file, f"has {module[:200]!r}, which is none of the target_modules of {ADAPTER_CONFIG}")
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def _check_base(file: Path, module: str, pair: tuple[Tensor, Tensor], own_tensors: Mapping[str, Tensor]) -> None:
    """Check that the product of the two matrices has the shape of the base model's weight."""
    weight = own_tensors.get(f"{module}.weight")
    if weight is None:
        raise bad_source(file, f"is for another base: it has {module[:200]!r}, which the worker's model does not have")
    a, b = pair
    if weight.shape != (b.shape[0], a.shape[1]):
        raise bad_source(
            file,
            f"is for another base: {module!r} makes {[b.shape[0], a.shape[1]]}; expected: {list(weight.shape)}, as the "
            "worker's model",
        )


def folder_content(folder: Path, check: Callable[[Path], None] | None, *, is_adapter: bool) -> FolderContent:
    """Validate a folder with `check`, and return its content: of an adapter its tensors and its config. Blocks.

    Raises:
        ControlError: an error of `check`, or `bad_source`.
        OSError: a file cannot be read.
    """
    files = set() if is_adapter else {tensor.file for tensor in read_checkpoint(folder).values()}
    names = (ADAPTER_CONFIG, ADAPTER_TENSORS) if is_adapter else (INDEX, CONFIG)
    notes = note_files(files | {path for name in names if (path := folder / name).exists()})
    if check is not None:
        check(folder)
    if not is_adapter:
        return FolderContent(folder, notes, read_checkpoint(folder), frozenset())
    tensors = {**read_header(folder / ADAPTER_TENSORS), ADAPTER_CONFIG: whole_file(folder / ADAPTER_CONFIG)}
    return FolderContent(folder, notes, tensors, frozenset({ADAPTER_CONFIG}))


def start_content(model: Path) -> FolderContent:
    """Return the content of a start checkpoint. Blocks.

    Without readable safetensors files, all weight files count as a whole. There are no tensors if there are none.

    Raises:
        OSError: a file does not exist any more.
    """
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.suffix in _WEIGHT_FILES)
    notes = note_files(files)
    with contextlib.suppress(ControlError):
        tensors = read_checkpoint(model)
        if {tensor.file for tensor in tensors.values()} <= notes.keys():
            return FolderContent(model, notes, tensors, frozenset())
    whole = {path.name: whole_file(path) for path in files}
    return FolderContent(model, notes, whole, frozenset(whole))


class Watched(NamedTuple):
    """A folder as it was hashed."""

    notes: FileNotes
    """States of the files that the engine reads."""
    digest: str
    """Digest of the content that they had."""


def find_changed_file(notes: FileNotes, *, is_strict: bool) -> Path | None:
    """Return the first file that is not in the noted state, or None. Blocks.

    Args:
        is_strict: False accepts a change of attributes alone, such as another hard link: the engine has read the file.
    """
    for path, note in notes.items():
        try:
            now = note_files([path])[path]
        except OSError:
            return path
        if now != note and (is_strict or now.content != note.content):
            return path
    return None


async def read_ahead(notes: FileNotes, progress: Progress) -> None:
    """Read files once, so that the engine then reads them from memory. Requests wait for that read of the engine."""
    total = sum(note.size for note in notes.values())
    if not total or total > (memory_bytes() or 0) // MEMORY_SHARE:
        return
    progress.begin("reading", total)
    await run_quietly(
        partial(_read_part, path, begin, progress)
        for path, note in notes.items()
        for begin in range(0, note.size, JOB_BYTES)
    )


def _read_part(path: Path, begin: int, progress: Progress, scratch: Scratch) -> None:
    piece = scratch.get(PIECE_BYTES).data
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        left = JOB_BYTES
        while left > 0 and (count := file.readinto(piece)):
            left -= count
            progress.add(count)
