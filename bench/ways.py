"""Runs the ways that a bench compares, each in its own process, and asks them to measure.

A way is one variant of doing something. Its process runs a module that ends with `answer`. The module prints `ready`,
then answers each line on stdin with one line of JSON on stdout. It ends with its stdin, and so with the program that
started it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

MAX_LINE_BYTES = 2**24
"""Maximum bytes of an answer: the figures of a hundred thousand requests."""


class Way:
    """A way that runs in its own process.

    Args:
        name: name of the way in error messages.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @property
    def pid(self) -> int:
        """Process id. The process may have children."""
        return self._process.pid

    async def ask(self, *question: object) -> dict[str, Any]:
        """Send a command to the process and return its answer.

        Raises:
            RuntimeError: the process has ended.
        """
        if self._process.stdin is None:
            raise RuntimeError("the process was started without pipes")
        self._process.stdin.write(f"{' '.join(map(str, question))}\n".encode())
        while not (line := await self.line()).startswith("{"):
            # Skip lines that engines print.
            pass
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def line(self) -> str:
        """Return the next line of its output.

        Raises:
            RuntimeError: the process has ended.
        """
        if self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise RuntimeError(f"the process of {self.name} has exited")
        return line


@asynccontextmanager
async def running(name: str, module: str, *args: object) -> AsyncIterator[Way]:
    """Run `python -m MODULE ARGS` while the body runs, and wait until it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *map(str, args)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    try:
        way = Way(name, process)
        while (await way.line()).strip() != "ready":
            pass
        yield way
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def answer(measure: Callable[[list[str]], Awaitable[object]]) -> None:
    """Run a way: pass the arguments of each line on stdin to `measure`, and write its result, until stdin ends."""
    write("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        write(json.dumps(await measure(line.split())))


def write(line: str) -> None:
    """Write a line to stdout and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
