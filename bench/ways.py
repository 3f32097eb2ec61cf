"""The ways of doing something that a bench compares, each in a process of its own, and how it asks them to measure.

Such a process is a module that ends in `answer`: it says `ready`, then answers each line on stdin with one line of JSON
on stdout, and ends with its stdin, so that it goes with the program that started it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["Way", "answer", "running", "write"]

MAX_LINE_BYTES = 2**24
"""Of an answer: figures of a hundred thousand requests."""


class Way:
    """One way, in its process.

    Args:
        name: for people.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @property
    def pid(self) -> int:
        """Of its process, which may have children."""
        return self._process.pid

    async def ask(self, *question: object) -> dict[str, Any]:
        """Have it measure once; returns what it says.

        Raises:
            RuntimeError: the process has ended.
        """
        if self._process.stdin is None:
            raise RuntimeError("started without a pipe")
        self._process.stdin.write(f"{' '.join(map(str, question))}\n".encode())
        while not (line := await self.line()).startswith("{"):
            # Engines print there whenever they like.
            pass
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def line(self) -> str:
        """What it says next.

        Raises:
            RuntimeError: it has ended.
        """
        if self._process.stdout is None:
            raise RuntimeError("started without a pipe")
        line = (await self._process.stdout.readline()).decode()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return line


@asynccontextmanager
async def running(name: str, module: str, *args: object) -> AsyncIterator[Way]:
    """Start `python -m MODULE ARGS`, and wait until it is ready; it ends with the block."""
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
    """Be a way: give the words of each line on stdin to `measure`, and write its result, until stdin ends."""
    write("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        write(json.dumps(await measure(line.split())))


def write(line: str) -> None:
    """Write a line on stdout now."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
