"""A process that has imported rollbus and forks for each command line: it starts in milliseconds, not in a second.

`fork` starts this file as a program. It receives the module, arguments, environment and directory of each command as
JSON, with the files for stdin, stdout, stderr and the report: the id of the process, and at its end the exit code.
"""

import asyncio
import atexit
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = [
    "rollbus.workers.__main__",
    *(f"rollbus.frontend.cli.{name}" for name in ("admin", "auth", "bench", "control", "options", "records")),
    *(f"rollbus.frontend.cli.{name}" for name in ("weights", "generate.command", "local.http", "doctor.server")),
    *(f"rollbus.frontend.cli.watch.{name}" for name in ("status", "terminal", "traces", "why", "experts")),
]
MAX_BYTES = 100_000


class Fork:
    """A process that runs a module's `main`. It has the methods of `asyncio.subprocess.Process` that tests use.

    Attributes:
        pid: id of the process.
        returncode: exit code, below 0 if a signal ended the process; None until the end was read.
        stdin, stdout, stderr: set by `tests.support.processes.forked` for `PIPE`.
    """

    def __init__(self, report: IO[bytes]) -> None:
        self._report = report
        self._ended = asyncio.Event()
        self.pid = int(report.readline())
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter
        self.stdout: asyncio.StreamReader
        self.stderr: asyncio.StreamReader

    def result(self) -> int:
        """Block until the process has ended, and return its exit code."""
        if self.returncode is None:
            with self._report:
                self.returncode = int(self._report.readline())
            self._ended.set()
        return self.returncode

    def watch(self) -> None:
        """Set `returncode` on the running event loop as soon as the process has ended."""
        loop, descriptor = asyncio.get_running_loop(), self._report.fileno()

        def end() -> None:
            loop.remove_reader(descriptor)
            self.result()

        loop.add_reader(descriptor, end)

    async def wait(self) -> int:
        """Wait until the watched process has ended, and return its exit code."""
        await self._ended.wait()
        return self.result()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fork(
    module: str, args: Sequence[str], *, streams: Sequence[int | None], env: Mapping[str, str], cwd: Path | None = None
) -> Fork:
    """Run `main` of a module in a fork, with these files as stdin, stdout and stderr; None: no file.

    If stdin is a terminal, it is the controlling terminal of the process.
    """
    read_end, write_end = os.pipe()
    order = json.dumps([module, list(args), dict(env), str(cwd or Path.cwd())]).encode()
    null = os.open(os.devnull, os.O_RDWR)
    socket.send_fds(_forks(), [order], [*(null if stream is None else stream for stream in streams), write_end])
    os.close(null)
    os.close(write_end)
    return Fork(os.fdopen(read_end, "rb"))


@cache
def _forks() -> socket.socket:
    """Start the process that forks. It ends when this process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = [sys.executable, "-P", __file__, str(theirs.fileno())]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(program, env=env, stdin=nothing, stdout=nothing, pass_fds=[theirs.fileno()])
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# The rest runs in the process that forks.


def run(module: str, arguments: list[str]) -> int:
    """Run the module as `python -m` does, and return the exit code."""
    loaded = importlib.import_module(module)
    path = Path(loaded.__file__ or "")
    sys.argv = [str(path.with_name("__main__.py")), *arguments]
    try:
        return int(loaded.main())
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()


def serve(order: bytes, streams: Sequence[int], report: int) -> None:
    """Run one command in a process of its own, and report its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    module, arguments, env, directory = json.loads(order)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        for target, source in enumerate(streams):
            os.dup2(source, target)
            os.close(source)
        if os.isatty(0):
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(env)
        os._exit(run(module, arguments))
    os.write(report, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def main(channel: socket.socket) -> None:
    """Serve commands until the other end of the channel is closed."""
    for name in PRELOADED:
        importlib.import_module(name)
    # The garbage collector of a forked process would otherwise look at all these objects, and copy their memory.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, files, _, _ = socket.recv_fds(channel, MAX_BYTES, 4)
        if not order:
            return
        if os.fork() == 0:
            channel.close()
            serve(order, files[:3], files[3])
            os._exit(0)
        for file in files:
            os.close(file)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
