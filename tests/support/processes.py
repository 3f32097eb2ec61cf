"""Python programs as child processes of a test, and checks of processes."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forks import fork
from tests.support.waits import SOON_S, UNHURRIED_LEASE_S

ROOT = Path(__file__).resolve().parents[2]


def print_line(line: str) -> None:
    """Print one line now, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def python_program(source: str, temporary: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run `source` in a new interpreter and session; kill it at the end of the block if it still runs.

    If the folder `temporary` is given, the program stores its temporary files there.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=ROOT,
        env={**os.environ, **({} if temporary is None else {"TMPDIR": str(temporary)})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with program:
        try:
            yield program
        finally:
            program.kill()


def read_line(program: subprocess.Popen[str]) -> str:
    """Read one line of the program's output; fail if the program ends before it prints a line."""
    if program.stdout is None:
        raise ValueError("the program's output is not a pipe")
    line = program.stdout.readline()
    if not line:
        raise AssertionError(f"the program ended with code {program.wait()} and said nothing more")
    return line.strip()


def is_alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(FileNotFoundError):
        return state_of(pid) != "Z"
    return not Path("/proc/self").exists()


def state_of(pid: int) -> str:
    """Return the letter of a process's state: T if it is stopped, Z for a zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent."""
    answer = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(answer.stdout)


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Poll `condition`, for example about children of other processes; return False after `SOON_S`."""
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


# Worker processes and other programs for tests, killed at the end of the test.


MAX_LINE_BYTES = 1 << 24
LASTING = ("--lease-s", f"{UNHURRIED_LEASE_S:g}")
"""A lease that a worker keeps on a busy machine, for tests without faults."""


def worker_process(
    nats_url: str,
    fleet: str,
    *options: str,
    engine_args: Mapping[str, object] | None = None,
    stderr: int = 2,
    cwd: Path | None = None,
) -> contextlib.AbstractAsyncContextManager[Process]:
    """Start a worker process; without `--model` it has the synthetic engine.

    It is forked, with the stderr of this process by default; see `forked`.
    """
    engine = () if "--model" in options else ("--engine", "synthetic")
    arguments = json.dumps(engine_args or {})
    args = ("--nats", nats_url, "--fleet", fleet, "--engine-args", arguments, *engine)
    # By default the worker does not listen for another worker with its id, because that wait lasts a whole lease.
    args += ("--listen-s", "0", *options)
    return forked("rollbus.workers.__main__", args, streams=(None, 2, stderr), cwd=cwd)


@contextlib.asynccontextmanager
async def forked(
    module: str,
    args: Sequence[str],
    *,
    streams: Sequence[int | None] = (None, 2, 2),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[Any]:
    """Run `main` of a module in a process that has already imported it; see `tests.support.forks`.

    Args:
        streams: stdin, stdout and stderr. For `PIPE`, the process has the attribute of this name: our end, as that of
            `asyncio.subprocess.Process`.
    """
    files, ours, writers = [], {}, []
    with contextlib.ExitStack() as theirs:
        for name, file in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            if file != subprocess.PIPE:
                files.append(file)
                continue
            our_end, their_end = socket.socketpair()
            files.append(theirs.enter_context(their_end).fileno())
            reader, writer = await asyncio.open_connection(sock=our_end, limit=MAX_LINE_BYTES)
            ours[name] = writer if name == "stdin" else reader
            writers.append(writer)
        process = fork(module, args, streams=files, env=env or os.environ, cwd=cwd)
    vars(process).update(ours)
    process.watch()
    try:
        yield process
    finally:
        process.kill()
        await process.wait()
        for writer in writers:
            writer.close()


# The cache directory of a test run: its programs use it instead of the user's, and the run removes it at its end.


RUN = "ROLLBUS_TEST_RUN"
"""Variable with the id of the run. Names of fleets contain it, so that the run recognizes what it has left behind."""
KEPT = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv"}
"""Caches of downloads, which stay those of the user: otherwise each run would load the packages again."""


class OwnCache:
    """Sets `$XDG_CACHE_HOME` for this process and its children.

    Attributes:
        user: the cache directory of the user.
        own: the cache directory of this run.
    """

    def __init__(self) -> None:
        self.user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.own = Path(tempfile.mkdtemp(prefix="rollbus-test-cache-"))
        for variable, name in KEPT.items():
            os.environ.setdefault(variable, str(self.user / name))
        os.environ["XDG_CACHE_HOME"] = str(self.own)
        os.environ[RUN] = uuid.uuid4().hex[:8]

    def left_behind(self) -> list[Path]:
        """Return what programs of this run have made in the user's directory of rollbus, despite `$XDG_CACHE_HOME`."""
        return sorted((self.user / "rollbus").glob(f"*{os.environ[RUN]}*"))

    def remove(self) -> None:
        """Remove the directory of the run."""
        shutil.rmtree(self.own, ignore_errors=True)


# The names under which a process has imported files of this repository.

FOLDERS = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")
"""The packages of `rollbus`, at the top of the repository."""


def misnamed() -> list[str]:
    """Return modules of this process from one of `FOLDERS` whose name does not begin with `rollbus.`."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        # A program started with -m has the module name __main__; its spec has the real name.
        names = {spec.name if name == "__main__" and spec is not None else name}
        if file is not None and not all(known.startswith("rollbus.") for known in names):
            path = Path(file).resolve()
            if any(path.is_relative_to(ROOT / folder) for folder in FOLDERS):
                found.append(f"{name}: {file}")
    return sorted(found)
