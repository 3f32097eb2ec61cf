"""`docker build` gets all that the Dockerfile copies, and the image of a worker installs its own packages only.

`tests/test_structure.py` installs the wheel from the copied files. `tests/docker/run` builds the images.
"""

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.docker.context import context_files, copies, copy_stage, is_ignored
from tests.support.processes import FOLDERS, ROOT

OLDEST_PYTHON = "3.11.0"
LEFT_OUT = re.compile(r"torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*")
"""Packages that .ci/lock.py leaves out of each lock."""


def read_lock(name: str) -> dict[str, str]:
    """Return the versions of a lock by the name of the package."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def required_by(name: str, extras: frozenset[str]) -> set[str]:
    """Return the packages that a package with these extras needs on this machine, directly or through others."""
    found: set[str] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    seen = set(waiting)
    while waiting:
        package, extra = waiting.pop()
        for requirement in map(Requirement, distribution(package).requires or ()):
            needed = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if LEFT_OUT.fullmatch(needed) or not (
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            ):
                continue
            found.add(needed)
            new = {(needed, each) for each in ("", *requirement.extras)} - seen
            seen |= new
            waiting += new
    return found


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        (".venv/bin/python", True),
        ("bus/client/client.py", False),
        ("bus/__pycache__/limits.pyc", True),
        ("bus/limits.pyc", True),
        ("pyproject.toml", False),
        ("docs/pyproject.toml", True),
        ("bus2/limits.py", True),
    ],
)
def test_the_last_pattern_that_matches_decides(path: str, ignored: bool) -> None:
    """A pattern holds for all files of a directory, and a later pattern for an earlier one."""
    assert is_ignored(path, ["*", "!bus", "!pyproject.toml", "**/__pycache__", "**/*.pyc"]) is ignored


def test_the_context_has_each_source_of_the_dockerfile() -> None:
    """Each file and directory that the Dockerfile copies is in the repository, and .dockerignore leaves it in."""
    files = context_files()
    missing = [
        source
        for copy in copies()
        for source in copy.sources
        if not any(file == source or file.startswith(f"{source}/") for file in files)
    ]

    assert len(copies()) > len(FOLDERS)
    assert missing == []


def test_the_wheel_of_the_images_has_each_package(tmp_path: Path) -> None:
    """The Dockerfile copies each package to the place where pyproject.toml's build expects it."""
    copy_stage("wheel", tmp_path)

    linked = {path.name: path.resolve() for path in (tmp_path / "src/src/rollbus").iterdir() if path.is_symlink()}
    assert linked.keys() == {*FOLDERS, "examples"}
    assert [name for name, path in linked.items() if not list(path.glob("*.py"))] == []


def test_the_image_of_a_worker_installs_what_a_worker_needs() -> None:
    """The lock of worker-cpu has exactly the packages that a worker needs, with the versions of the tests."""
    image, tests = read_lock("deploy/docker/worker-cpu.lock"), read_lock("requirements-cpu.lock")

    assert image.keys() == required_by("rollbus", frozenset({"worker-cpu"}))
    assert image.items() <= tests.items()


def test_the_lock_installs_on_each_release_of_python_3_11() -> None:
    """No package of the lock requires a later release than 3.11.0, for example that of Debian 12."""
    wanted = {name: distribution(name).metadata["Requires-Python"] for name in read_lock("requirements-cpu.lock")}

    assert {name: line for name, line in wanted.items() if not SpecifierSet(line or "").contains(OLDEST_PYTHON)} == {}
