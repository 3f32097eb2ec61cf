"""Runs `rollbus` as its users do: as a command of its own."""

import asyncio
import codecs
import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rollbus import bus
from rollbus.schemas.errors import BusBroken, NoWorkers
from tests.support.patience import SOON_S

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def rollbus(
    *args: str, nats: str = "nats://127.0.0.1:9", cwd: Path | None = None, env: Mapping[str, str] = ENV
) -> subprocess.CompletedProcess[str]:
    """Run a subcommand to its end; without `nats`, nobody listens at its address."""
    return subprocess.run(
        command(*args), env={**env, "ROLLBUS_NATS": nats}, cwd=cwd, capture_output=True, text=True, check=False
    )


class Ended(NamedTuple):
    """What a run of `rollbus` left."""

    code: int
    stdout: str
    stderr: str


async def run_rollbus(nats: str, fleet: str, *args: str) -> Ended:
    """Run a subcommand to its end, while the test's event loop goes on. Cancellation: kills it."""
    process = await asyncio.create_subprocess_exec(
        *command(*args, "--fleet", fleet),
        env={**ENV, "ROLLBUS_NATS": nats},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Ended(process.returncode or 0, stdout.decode(), stderr.decode())


def command(*args: str) -> list[str]:
    """The command line of a subcommand."""
    return [sys.executable, "-P", "-m", "rollbus.frontend.cli", *args]


@contextmanager
def running_up(
    *args: str, log: Path, env: Mapping[str, str] = ENV
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run `rollbus up --json` at a free port; yields the process and what it printed once it was ready."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command("up", "--json", "--nats", "nats://127.0.0.1:0", *args),
            env=env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        with process:
            try:
                if process.stdout is None:
                    raise RuntimeError("no stdout")
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"rollbus up ended with {process.wait()}:\n{log.read_text()}")
                yield process, json.loads(line)
            finally:
                process.terminate()


def serves(nats: str, count: int = 1) -> bool:
    """Say whether exactly so many workers serve at this address, at once or soon."""

    async def look() -> bool:
        try:
            async with bus.connect(nats) as rb:
                await rb.fleet.wait_for_workers(count, timeout_s=SOON_S)
                return len((await rb.fleet.state()).workers) == count
        except (BusBroken, NoWorkers):
            return False

    return asyncio.run(look())


def processes_with(*words: str) -> list[int]:
    """The ids of the worker processes whose command lines have all of these words."""
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
    """The ids of a process's children, their children, and so on."""
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
    """A command on a terminal of its own, and all that it has shown there."""

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self._process = process
        self._end = end
        # What is read at once may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""

    def read_until(self, words: str, *, times: int = 1) -> None:
        """Read until these were shown so many times; the test's own time limit ends the wait."""
        self.read_to_match(f"(?s){'.*?'.join([re.escape(words)] * times)}")

    def read_to_match(self, pattern: str) -> None:
        """Read until something that was shown matches; the test's own time limit ends the wait.

        Ctrl-C within a drawing that is larger than the terminal's buffer loses the rest of it: read to its end before.
        """
        while not re.search(pattern, self.text):
            if not self._read():
                raise AssertionError(f"it ended without {pattern!r}:\n{self.text}")

    def press_ctrl_c(self) -> None:
        """Interrupt it as a person does."""
        self.press(b"\x03")

    def press(self, keys: bytes) -> None:
        """Send what a terminal sends for these keys."""
        os.write(self._end, keys)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def settings(self) -> list[Any]:
        """How the terminal is set: echo, lines or single keys, and so on."""
        return termios.tcgetattr(self._end)

    def resize(self, columns: int, lines: int) -> None:
        """Change the terminal's size, as one does with its window."""
        termios.tcsetwinsize(self._end, (lines, columns))

    def read_to_end(self) -> int:
        """Read until it has ended, and return its exit code."""
        while self._read():
            pass
        return self._process.wait()

    def lines(self) -> list[str]:
        """What stands there in the end, as far as lines were overwritten in place."""
        lines = [""]
        for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r\n|\r|[^\x1b\r]+", self.text):
            if part == "\r\n":
                lines.append("")
            elif part == "\x1b[1A":
                # At the top the cursor stays, as when a part of what is drawn over was lost.
                lines[-1:] = [] if len(lines) > 1 else [""]
            elif part == "\x1b[2K":
                lines[-1] = ""
            elif part != "\r" and not part.startswith("\x1b"):
                lines[-1] += part
        return [line.rstrip() for line in lines if line.strip()]

    def _read(self) -> bool:
        try:
            data = os.read(self._end, 65536)
        except OSError:  # how Linux says that nobody has the terminal open any more
            return False
        self.text += self._decoder.decode(data)
        return bool(data)


@contextmanager
def on_terminal(
    *args: str, size: tuple[int, int] | None = None, program: Sequence[str] | None = None
) -> Iterator[Terminal]:
    """Run a subcommand on a terminal of its own; it is killed in the end.

    Args:
        size: columns and lines; None: wide enough for a line of any length.
        program: run instead of `rollbus`.
    """
    end, terminal = os.openpty()
    # The echo of Ctrl-C would stand anywhere, also within a character or within what moves the cursor.
    settings = termios.tcgetattr(terminal)
    settings[3] &= ~termios.ECHO
    # Without this, Ctrl-C also throws away what was written and not yet read.
    settings[3] |= termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    if size is not None:
        termios.tcsetwinsize(terminal, size[::-1])
    # These two would win over the terminal's own size; readline writes them into the environment of pytest.
    env = {name: value for name, value in ENV.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        ["setsid", "--ctty", *(program or command(*args))],
        env={**env, "TERM": "xterm"} | ({"COLUMNS": "1000"} if size is None else {}),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        yield Terminal(process, end)
    finally:
        process.kill()
        process.wait()
        os.close(end)
