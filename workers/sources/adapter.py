"""Validation of a LoRA adapter: a folder in PEFT's layout that fits the worker's own model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ...schemas.manifest import Manifest, tensors_digest
from .checkpoint import read_json
from .content import whole_file
from .headers import FLOATS, Tensor, read_header
from .roots import bad_source

__all__ = ["adapter_content", "adapter_files", "check_adapter", "is_adapter", "published_content"]

ADAPTER_CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
MAX_RANK: Final = 512
"""The largest rank that vLLM can be configured for. An engine may allow less and then states its limit."""
_PREFIX: Final = "base_model.model."
"""The prefix that PEFT puts before the module names of the base model."""
_SIDES: Final = {".lora_A.weight": "A", ".lora_B.weight": "B"}


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


def is_adapter(folder: Path) -> bool:
    """Return True if `folder` has an adapter's config and no config of a model. Blocks."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def adapter_files(folder: Path) -> set[Path]:
    """Return the existing files of an adapter that an engine reads. Blocks."""
    return {path for name in (ADAPTER_CONFIG, TENSORS) if (path := folder / name).exists()}


def adapter_content(folder: Path) -> tuple[Mapping[str, Tensor], frozenset[str]]:
    """Return what decides the effect of an adapter: its tensors and its config, and the names of whole files. Blocks.

    Raises:
        ControlError: `bad_source`.
        OSError: a file does not exist any more.
    """
    return {**read_header(folder / TENSORS), ADAPTER_CONFIG: whole_file(folder / ADAPTER_CONFIG)}, frozenset({ADAPTER_CONFIG})


def published_content(manifest: Manifest) -> str:
    """Return the digest of a published version, equal to that of its folder. It reads no content."""
    files = {} if manifest.adapter is None else {ADAPTER_CONFIG: manifest.files.get(ADAPTER_CONFIG, "")}
    return tensors_digest(((entry.name, entry.dtype, entry.shape, entry.sha256) for entry in manifest.tensors), files)


def check_adapter(folder: Path, own_tensors: Mapping[str, Tensor] | None, max_rank: int | None = None) -> None:
    """Check that `folder` is a LoRA adapter and that each pair of matrices fits a weight of the base model. Blocks.

    Args:
        own_tensors: tensors of the worker's checkpoint. None if they are unknown: names and shapes are then only
            checked against each other.
        max_rank: the largest rank that the worker's engine accepts, or None if the engine states no limit.

    Raises:
        ControlError: `bad_source`. The message names the file, the module, the expected and the actual value.
    """
    for name in (ADAPTER_CONFIG, TENSORS):
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
    file = folder / TENSORS
    pairs = _read_pairs(file, config)
    for module, (a, b) in sorted(pairs.items()):
        if a.shape[0] != b.shape[1]:
            raise bad_source(file, f"has {module!r} with lora_A {a} and lora_B {b}: their ranks differ")
        if a.shape[0] != config.r:
            raise bad_source(file, f"has {module!r} with the rank {a.shape[0]}; expected: {config.r}, as in {ADAPTER_CONFIG}")
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
