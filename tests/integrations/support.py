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
PROGRAMS = Path(__file__).parent / "programs"


def find_python(name: str) -> Path:
    """Return the Python of the environment that `make test-NAME` creates."""
    return ROOT / f".venv-{name}" / "bin" / "python"


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where the environment of `make test-NAME` is missing. That command sets a variable: then it fails."""
    missing = not find_python(name).exists() and os.environ.get("ROLLBUS_TEST_TRAINERS") != name
    return pytest.mark.skipif(missing, reason=f"no .venv-{name}: `make test-{name}` makes it")


needs_trainers, PYTHON = needs("trainers"), find_python("trainers")


@asynccontextmanager
async def started(
    program: str | Path, *arguments: object, python: Path = PYTHON
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program, of `programs/` if it is only a name, and kill it on exit from the context."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = await asyncio.create_subprocess_exec(
        python, "-W", "ignore", "-P", PROGRAMS / program, *map(str, arguments),
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


async def run_program(
    program: str | Path, *arguments: object, python: Path = PYTHON, on_line: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Run a program until it exits. Return its results, the JSON after the word `seen`."""
    seen, said = None, []
    async with started(program, *arguments, python=python) as process:
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
