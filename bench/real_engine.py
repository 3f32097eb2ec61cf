"""Tokens a second from a real vLLM engine, with logprobs and routing: rollbus, vLLM's own HTTP server, vLLM in process.

    python -m bench.real_engine [--loads 64x64 256x128] [--rounds 5] [--ways rollbus vllm-http ...] [--json FILE]

Each way has an engine of its own on the same tiny MoE, all are running, and their rounds take turns: whatever slows
this machine down slows all of them. What the ways are: `bench.real_engine_ways`. A load of 64x64 is 64 requests at
once, of 64 tokens each. Rows are what came of the routing, of those that the row rule says.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.real_engine_ways import PROMPT_TOKENS, WAYS
from workers.engines.vllm.tiny_moe import make_tiny_moe

__all__: list[str] = []

MODEL = Path.home() / ".cache" / "rollbus" / "bench-tiny-moe"
Load = tuple[int, int]
"""Requests at once, and tokens of each."""


class Way:
    """One way, in its process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    async def measure(self, load: Load) -> dict[str, float]:
        """One round.

        Raises:
            RuntimeError: the process has ended, or fewer tokens came than were asked for.
        """
        if self._process.stdin is None:
            raise RuntimeError("started without a pipe")
        self._process.stdin.write(f"{load[0]} {load[1]}\n".encode())
        answer: dict[str, float] = json.loads(await self.line())
        if answer["tokens"] != load[0] * load[1]:
            raise RuntimeError(f"{self.name}: {answer['tokens']} tokens of {load[0] * load[1]}")
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
async def running(name: str, model: Path) -> AsyncIterator[Way]:
    """Start a way, and wait until it is ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.real_engine_ways", name, str(model)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        way = Way(name, process)
        while (await way.line()).strip() != "ready":
            # Others print there too while they start.
            pass
        yield way
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def measure(names: Sequence[str], loads: Sequence[Load], rounds: int) -> list[dict[str, object]]:
    """All results, in the order of loads and ways."""
    model = make_tiny_moe(MODEL)
    results: list[dict[str, object]] = []
    async with AsyncExitStack() as stack:
        # One after the other: engines that start at once look at the same free memory.
        ways = [await stack.enter_async_context(running(name, model)) for name in names]
        for load in loads:
            for way in ways:
                await way.measure(load)
            taken = [[await way.measure(load) for way in ways] for _ in range(rounds)]
            results += [summary(way.name, load, [turn[i] for turn in taken]) for i, way in enumerate(ways)]
    return results


def summary(name: str, load: Load, rounds: Sequence[dict[str, float]]) -> dict[str, object]:
    """One row of the table."""
    rates = [one["tokens"] / one["seconds"] for one in rounds]
    expected = load[0] * (PROMPT_TOKENS + load[1] - 1)
    return {
        "way": name,
        "requests": load[0],
        "tokens": load[1],
        "tokens_per_s": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "rows_share": min(one["rows"] for one in rounds) / expected,
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_engine", description="Tokens a second of a real engine."
    )
    parser.add_argument("--loads", nargs="+", default=["64x64", "256x128"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    loads = [(int(load.split("x")[0]), int(load.split("x")[1])) for load in args.loads]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    command = " ".join(["python -m bench.real_engine", *sys.argv[1:]])
    sys.stdout.write(f"{command}\n{machine}\n")
    results = asyncio.run(measure(args.ways, loads, args.rounds))
    for row in results:
        spread = f"median of {args.rounds}; {row['lowest']:,.0f} to {row['highest']:,.0f}"
        rates = f"{row['tokens_per_s']:>9,.0f} tokens/s ({spread})"
        sys.stdout.write(
            f"{row['requests']:>5} x {row['tokens']:<4} {row['way']:<15} {rates}; {row['rows_share']:.1%} of rows\n"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"command": command, "machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
