"""Copies of the installed vLLM with one changed file; all other files are symbolic links."""

import importlib.util
from pathlib import Path


def installed_vllm() -> Path:
    """Return the folder of the installed package."""
    spec = importlib.util.find_spec("vllm")
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def doctored_vllm(root: Path, file: str, old: str, new: str, source: Path | None = None) -> Path:
    """Make a package `vllm` below `root` with each `old` in `file` replaced by `new`; return its folder.

    The text `old` must occur in the file.

    Args:
        source: the package to copy; the installed vLLM by default.
    """
    source = source or installed_vllm()
    folder = root / "vllm"
    _link(source, folder, Path(file).parts)
    text = (source / file).read_text()
    assert old in text, f"{file} has no {old!r}"
    (folder / file).unlink()
    (folder / file).write_text(text.replace(old, new))
    return folder


def _link(source: Path, target: Path, way: tuple[str, ...]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name == way[0] and len(way) > 1:
            _link(entry, target / entry.name, way[1:])
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
