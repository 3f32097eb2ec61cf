"""Runs the programs of trainers with the Python of an environment that has the trainers and only the client."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
PROGRAMS = Path(__file__).parent / "programs"

# `make test-trainers` creates the environment. CI calls it, so in CI a test that cannot run must fail.
needs_trainers = pytest.mark.skipif(
    not PYTHON.exists() and "ROLLBUS_TEST_TRAINERS" not in os.environ,
    reason="no .venv-trainers: `make test-trainers` makes it",
)


@asynccontextmanager
async def started(program: str, *arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program of this folder, and kill it on exit from the context."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-W", "ignore", "-P", PROGRAMS / program, *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=kept, limit=1 << 24,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until_line(process: asyncio.subprocess.Process, wanted: str) -> None:
    """Read the output of a program until it prints this line."""
    said = []
    if process.stdout is not None:
        async for raw in process.stdout:
            said.append(raw.decode(errors="replace").rstrip())
            if said[-1] == wanted:
                return
    pytest.fail(f"it did not say {wanted!r}\n" + "\n".join(said[-60:]), pytrace=False)


async def run_program(program: str, *arguments: object, on_line: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run a program until it exits. Return its results, the JSON after the word `seen`."""
    seen, said = None, []
    async with started(program, *arguments) as process:
        stdout = process.stdout
        if stdout is None:
            raise ValueError("a program without a pipe")
        async for raw in stdout:
            line = raw.decode(errors="replace").rstrip()
            said.append(line)
            if line.startswith("seen "):
                seen = json.loads(line.removeprefix("seen "))
            elif on_line is not None:
                on_line(line)
        code = await process.wait()
    if code or seen is None:
        pytest.fail(f"{program} ended with {code}\n" + "\n".join(said[-60:]), pytrace=False)
    return dict(seen)
