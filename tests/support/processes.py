"""Python programs as child processes of a test, and checks of processes."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.patience import SOON_S

ROOT = Path(__file__).parents[2]


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
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc/self").exists()


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
