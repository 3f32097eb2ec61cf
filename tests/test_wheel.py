"""The distribution has the right files and also runs beside user files with the same names."""

import asyncio
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from rollbus.bus.nats.embedded import find_binary
from rollbus.frontend.cli.local.fleet import TINY_MOE
from tests.support.processes import FOLDERS, ROOT
from tests.support.waits import SOON_S

pytestmark = pytest.mark.slow


class Archives(NamedTuple):
    """The archives of one build."""

    source: Path
    wheel: Path
    wheel_from_source: Path


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """Build both archives from the checkout, and a wheel from the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    build("sdist", ROOT, folder)
    build("wheel", ROOT, folder)
    [source], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    build("wheel", unpacked, folder / "again")
    return Archives(source, wheel, folder / "again" / wheel.name)


def build(target: str, folder: Path, output: Path) -> None:
    """Run the build backend without downloads."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(output)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_archives_hold_files_and_no_links(archives: Archives) -> None:
    """The wheel has each tracked file of the packages, and neither archive has a link."""
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS, "examples"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    with zipfile.ZipFile(archives.wheel) as wheel:
        modes = {item.filename: item.external_attr >> 16 for item in wheel.infolist()}
    with tarfile.open(archives.source) as source:
        links = [item.name for item in source if not item.isfile() and not item.isdir()]

    ours = {name for name in modes if not name.split("/")[0].endswith(".dist-info")}
    assert ours == {f"rollbus/{name}" for name in [*listed, "__init__.py", "py.typed", "ray.py", "sync.py"]}
    assert [name for name, mode in modes.items() if stat.S_ISLNK(mode)] == []
    assert links == []


def test_the_source_archive_and_the_checkout_give_the_same_wheel(archives: Archives) -> None:
    """The wheels from the checkout and from the source archive have the same files and bytes."""
    checkout, source = (contents(path) for path in (archives.wheel, archives.wheel_from_source))

    assert checkout.keys() == source.keys()
    assert [name for name, data in checkout.items() if source[name] != data] == []


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel with their contents."""
    with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Place(NamedTuple):
    """A folder with user files that have names of rollbus packages, and an environment with the wheel."""

    folder: Path
    bin: Path

    def environment(self, **settings: str) -> dict[str, str]:
        """Return environment variables without references to this checkout."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {**kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", **settings}

    def run(self, *command: str | Path, **settings: str) -> str:
        """Run a command in the folder; return its stdout, or fail with its output."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(**settings), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def place(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Install only the wheel; its dependencies come from this environment without the editable rollbus."""
    folder = tmp_path_factory.mktemp("place")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", archives.wheel], check=True)
    [site] = (folder / "venv" / "lib").glob("python3*/site-packages")
    # Python does not read .pth files in a folder that a .pth file adds.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    mine = folder / "mine"
    mine.mkdir()
    for name in FOLDERS:
        trap = mine / f"{name}.py" if name in ("bus", "schemas") else mine / name / "__init__.py"
        trap.parent.mkdir(exist_ok=True)
        trap.write_text("raise ImportError('this one is the user\\'s own')\n")
    return Place(mine, python.parent)


def test_only_one_name_is_installed(place: Place, archives: Archives) -> None:
    """`rollbus` comes from the wheel and has its version, and no part of it can be imported alone."""
    code = f"""
import importlib.util, rollbus
print(rollbus.__file__)
specs = map(importlib.util.find_spec, {FOLDERS})
# Folders without files are no packages.
print([spec.name for spec in specs if spec is not None and spec.origin is not None])
"""
    file, found = place.run(place.bin / "python", "-P", "-c", code).splitlines()
    version = place.run(place.bin / "rollbus", "--version")

    assert Path(file).is_relative_to(place.bin.parent)
    assert found == "[]"
    assert version == f"rollbus {archives.wheel.name.split('-')[1]}\n"


@contextmanager
def up(place: Place) -> Iterator[str]:
    """Run `rollbus up` with a real engine; yield its NATS URL when it serves."""
    program, state = str(place.bin / "rollbus"), str(place.folder)
    command = [program, "up", "--json", "--nats", "nats://127.0.0.1:0", "--state-dir", state]
    environment = place.environment(ROLLBUS_NATS_SERVER=str(find_binary()))
    log = place.folder / "up.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, cwd=place.folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            assert line, log.read_text()
            yield json.loads(line)["nats"]
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.vllm
async def test_rollbus_runs_beside_files_with_the_names_of_its_folders(place: Place) -> None:
    """The README example, a worker and `up` run beside user files such as `bus.py`, `schemas.py` and `trainer/`."""
    [lines] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (place.folder / "train.py").write_text(lines)

    with up(place) as nats:
        printed = await asyncio.to_thread(place.run, place.bin / "python", "train.py", ROLLBUS_NATS=nats)
        worker = await asyncio.create_subprocess_exec(
            *(place.bin / "rollbus", "worker", "--engine", "synthetic", "--worker-id", "second", "--nats", nats),
            cwd=place.folder,
            env=place.environment(),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(SOON_S):
                line = b"-"
                while line and b"worker.serving" not in line:
                    line = await worker.stderr.readline() if worker.stderr is not None else b""
            assert b"rollbus.workers.lifecycle worker.serving worker=second" in line
            workers = json.loads(place.run(place.bin / "rollbus", "status", "--json", "--nats", nats))["workers"]
        finally:
            worker.terminate()
            await worker.wait()

    assert re.search(r"^\(\d+, 4, 4\) (length|stop)$", printed, re.MULTILINE)
    assert {(worker["worker"], worker["model"]) for worker in workers} == {
        ("local-0", TINY_MOE),
        ("second", "synthetic"),
    }
