"""The client installs beside each trainer: each lock of `.ci` satisfies what `pip install .[EXTRA]` requires there.

The test reads files only. A lock installs with `--no-deps`, so pip itself would not notice a conflict.
"""

import importlib.util
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Mapping[str, list[str]] = PROJECT["optional-dependencies"]
LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)")
PYTHON = re.compile(r"Python (?P<version>3\.\d+) from ")
WITHOUT_CLIENT = {"requirements-deploy.lock"}
"""Locks that are installed into .venv, which has the client."""
LOCKS = sorted(path for path in (ROOT / ".ci").glob("requirements-*.lock") if path.name not in WITHOUT_CLIENT)


def canonical(name: str) -> str:
    """Return a package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> tuple[str, dict[str, Version]]:
    """Return the Python of a lock and its versions by package."""
    python = PYTHON.search(text)
    assert python is not None, "the header of a lock names its Python: 'Python 3.11 from'"
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found = [LINE.match(line) for line in lines if line]
    assert None not in found, [line for line in lines if line and LINE.match(line) is None]
    return python["version"], {canonical(each["name"]): Version(each["version"]) for each in found if each}


def required(dependencies: Iterable[str], python: str) -> Iterator[Requirement]:
    """Yield the requirements that apply under a Python of this machine's kind."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for requirement in map(Requirement, dependencies):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def unmet(dependencies: Iterable[str], python: str, versions: Mapping[str, Version]) -> list[str]:
    """Return what a lock does not satisfy, with the version that it has."""
    pairs = [(each, versions.get(canonical(each.name))) for each in required(dependencies, python)]
    return [
        f"{requirement}: the lock has {version}"
        for requirement, version in pairs
        if version is None or not requirement.specifier.contains(version, prereleases=True)
    ]


def extras_of(lock: Path) -> set[str]:
    """Return the extras that a lock is for: those that `.ci/lock.py` resolves, and the one with the lock's name."""
    spec = importlib.util.spec_from_file_location("lock_of_ci", ROOT / ".ci" / "lock.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    wanted = program.LOCKS.get(str(lock.relative_to(ROOT)), [])
    own = [text[len(str(ROOT)) :] for text in wanted if text.startswith(f"{ROOT}[")]
    named = lock.stem.removeprefix("requirements-")
    # The extra of developers is for tests of rollbus alone.
    return ({extra for text in own for extra in text.strip("[]").split(",")} - {"dev"}) | ({named} & EXTRAS.keys())


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem.removeprefix("requirements-"))
def test_the_client_and_the_extra_of_a_trainer_fit_into_its_lock(lock: Path) -> None:
    """A lock has each package that the client and the lock's extras require, in a version that they allow."""
    python, versions = read_lock(lock.read_text())
    dependencies = [*PROJECT["dependencies"], *(text for extra in sorted(extras_of(lock)) for text in EXTRAS[extra])]

    assert unmet(dependencies, python, versions) == []
    assert python in Requirement(f"python{PROJECT['requires-python']}").specifier


def test_a_missing_or_old_package_is_reported_with_its_version() -> None:
    """The comparison can fail: a missing package, an old one, and one above the upper bound are named."""
    python, versions = read_lock("# Python 3.12 from 3.12.0 on\nnumpy==1.20.0\nNats_Py==2.17.0  # a note\n")
    dependencies = ["numpy>=1.26", "nats-py>=2.16,<2.17", "msgspec>=0.22", "tomli>=2; python_version < '3.11'"]

    assert python == "3.12"
    assert unmet(dependencies, python, versions) == [
        "numpy>=1.26: the lock has 1.20.0",
        "nats-py<2.17,>=2.16: the lock has 2.17.0",
        "msgspec>=0.22: the lock has None",
    ]


def test_extras_for_trainers_have_an_upper_bound() -> None:
    """The extra of a trainer bounds the trainer's release, because the interfaces change with minor releases."""
    trainers = {"trl", "verifiers", *(lock.stem.removeprefix("requirements-") for lock in LOCKS)} & EXTRAS.keys()

    for extra in trainers:
        found = [Requirement(text) for text in EXTRAS[extra]]
        bounded = [each.name for each in found if any(part.operator in {"<", "=="} for part in each.specifier)]
        assert bounded, f"the extra {extra} has no package with an upper bound"
