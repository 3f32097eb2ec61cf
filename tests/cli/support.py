"""Runs `rollbus` in a process of its own, as its users do."""

import asyncio
import codecs
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from rollbus import bus
from rollbus.schemas.errors import BusBroken, NoWorkers
from tests.support.forks import Fork, fork
from tests.support.waits import SOON_S

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
CLI = "rollbus.frontend.cli"


def rollbus(
    *args: str, nats: str = "nats://127.0.0.1:9", cwd: Path | None = None, env: Mapping[str, str] = ENV
) -> subprocess.CompletedProcess[str]:
    """Run a subcommand to its end. The default of `nats` is an address without a server."""
    with started(args, {**env, "ROLLBUS_NATS": nats}, cwd) as run:
        code, stdout, stderr = run()
    return subprocess.CompletedProcess(args, code, stdout, stderr)


class Ended(NamedTuple):
    """The exit code and output of a run of `rollbus`."""

    code: int
    stdout: str
    stderr: str


async def run_rollbus(nats: str, fleet: str, *args: str) -> Ended:
    """Run a subcommand to its end without blocking the event loop of the test. Cancellation kills the process."""
    with started([*args, "--fleet", fleet], {**ENV, "ROLLBUS_NATS": nats}) as run:
        return await asyncio.to_thread(run)


async def run_together(nats: str, fleet: str, *lines: str) -> list[Ended]:
    """Run command lines at the same time. Most of their time is a wait for presence, or for silence."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run_rollbus(nats, fleet, *shlex.split(line))) for line in lines]
    return [each.result() for each in running]


@contextmanager
def started(args: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Iterator[Callable[[], Ended]]:
    """Start a subcommand, and kill it if the block ends before it. Yield a function that waits for its end."""
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        run = fork(CLI, args, streams=(None, stdout.fileno(), stderr.fileno()), env=env, cwd=cwd)

        def wait() -> Ended:
            code = run.result()
            for file in (stdout, stderr):
                file.seek(0)
            return Ended(code, stdout.read().decode(), stderr.read().decode())

        try:
            yield wait
        finally:
            run.kill()
            with suppress(ValueError):  # a thread of a cancelled test has read the end
                run.result()


def command(*args: str) -> list[str]:
    """Return the command line of a subcommand."""
    return [sys.executable, "-P", "-m", CLI, *args]


Running = AbstractContextManager[tuple[subprocess.Popen[str], dict[str, Any]]]


@contextmanager
def running(*args: str, log: Path, env: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a subcommand with --json. Yield the process and the JSON object that it prints when it is ready."""
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command(*args, "--json"), env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(f"rollbus {args[0]} ended with {process.wait()}:\n{log.read_text()}")
            yield process, json.loads(line)
        finally:
            process.terminate()


def running_up(*args: str, log: Path, env: Mapping[str, str] = ENV) -> Running:
    """Run `rollbus up --json` at a free port."""
    return running("up", "--nats", "nats://127.0.0.1:0", *args, log=log, env=env)


def serves(nats: str, count: int = 1, fleet: str = "default") -> bool:
    """Return True if exactly `count` workers of a fleet serve at this address, now or soon."""

    async def look() -> bool:
        try:
            async with bus.connect(nats, fleet=fleet) as rb:
                await rb.fleet.wait_for_workers(count, timeout_s=SOON_S)
                return len((await rb.fleet.state()).workers) == count
        except (BusBroken, NoWorkers):
            return False

    return asyncio.run(look())


def processes_with(*words: str) -> list[int]:
    """Return the ids of the worker processes whose command lines contain all of these words."""
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    found = []
    for line in listing.splitlines():
        pid, state, args = line.split(None, 2)
        if "-m rollbus.workers" in args and all(word in args for word in words) and not state.startswith("Z"):
            found.append(int(pid))
    return found


def descendants_of(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    family = []
    pending = [pid]
    while pending:
        found = children.get(pending.pop(), [])
        family += found
        pending += found
    return family


class Terminal:
    """A command on a separate terminal, and all text that it has shown there."""

    def __init__(self, process: subprocess.Popen[bytes] | Fork, end: int) -> None:
        self._process = process
        self.pid = process.pid
        self._end = end
        # One read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""

    def read_until(self, words: str, *, times: int = 1) -> None:
        """Read until the text was shown `times` times. The time limit of the test ends the wait."""
        self.read_to_match(f"(?s){'.*?'.join([re.escape(words)] * times)}")

    def read_to_match(self, pattern: str) -> None:
        """Read until the shown text matches. The time limit of the test ends the wait.

        Ctrl-C during a drawing that is larger than the terminal's buffer loses the rest of the drawing: read to its end
        before.
        """
        while not re.search(pattern, self.text):
            if not self._read():
                raise AssertionError(f"it ended without {pattern!r}:\n{self.text}")

    def press_ctrl_c(self) -> None:
        """Interrupt the command as a user does."""
        self.press(b"\x03")

    def press(self, keys: bytes) -> None:
        """Send the bytes that a terminal sends for these keys."""
        os.write(self._end, keys)

    def signal(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        self._process.send_signal(number)

    def settings(self) -> list[Any]:
        """Return the settings of the terminal, for example echo and line mode."""
        return termios.tcgetattr(self._end)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal, like a resized window."""
        termios.tcsetwinsize(self._end, (lines, columns))

    def read_to_end(self) -> int:
        """Read until the command has ended, and return its exit code."""
        while self._read():
            pass
        return _wait(self._process)

    def lines(self) -> list[str]:
        """Return the lines that remain visible after all overwriting in place."""
        lines = [""]
        for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r\n|\r|[^\x1b\r]+", self.text):
            if part == "\r\n":
                lines.append("")
            elif part == "\x1b[1A":
                # In the top line the cursor does not move. This happens if a part of the overwritten drawing was lost.
                lines[-1:] = [] if len(lines) > 1 else [""]
            elif part == "\x1b[2K":
                lines[-1] = ""
            elif part != "\r" and not part.startswith("\x1b"):
                lines[-1] += part
        return [line.rstrip() for line in lines if line.strip()]

    def _read(self) -> bool:
        try:
            data = os.read(self._end, 65536)
        except OSError:  # Linux raises this error if no process has the terminal open any more.
            return False
        self.text += self._decoder.decode(data)
        return bool(data)


@contextmanager
def on_terminal(
    *args: str, size: tuple[int, int] | None = None, program: Sequence[str] | None = None
) -> Iterator[Terminal]:
    """Run a subcommand on a separate terminal, and kill it at the end.

    Args:
        size: columns and lines. None: wide enough for a line of any length.
        program: run this instead of `rollbus`.
    """
    end, terminal = os.openpty()
    # The echo of Ctrl-C could appear anywhere, also within a character or an escape sequence.
    settings = termios.tcgetattr(terminal)
    settings[3] &= ~termios.ECHO
    # Without this flag, Ctrl-C also discards output that was not read yet.
    settings[3] |= termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    if size is not None:
        termios.tcsetwinsize(terminal, size[::-1])
    # These two variables override the terminal's size. readline sets them in the environment of pytest.
    env = {name: value for name, value in ENV.items() if name not in ("COLUMNS", "LINES")}
    env |= {"TERM": "xterm"} | ({"COLUMNS": "1000"} if size is None else {})
    streams = [terminal] * 3
    process = fork(CLI, args, streams=streams, env=env) if program is None else _on_terminal(program, env, terminal)
    os.close(terminal)
    try:
        yield Terminal(process, end)
    finally:
        process.kill()
        _wait(process)
        os.close(end)


def _wait(process: subprocess.Popen[bytes] | Fork) -> int:
    return process.result() if isinstance(process, Fork) else process.wait()


def _on_terminal(program: Sequence[str], env: Mapping[str, str], terminal: int) -> subprocess.Popen[bytes]:
    words = ["setsid", "--ctty", *program]
    return subprocess.Popen(words, env=env, stdin=terminal, stdout=terminal, stderr=terminal)
