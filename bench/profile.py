"""Draws where client and worker spend their time, as flame graphs for docs/performance.md.

    python -m bench.profile [--load 64x16] [--seconds 8] [--folder docs/images]

py-spy must be installed (`pip install py-spy`) and needs the permission to trace processes. The ways `rollbus` (whole
results) and `rollbus-chunks` (streams) of `bench.transport` run the load again and again. For each of them, the client
and then the worker are sampled. The picture of `whole-client.svg` has one row of boxes for each level of calls: the
width is the share of the samples of the process, without those of waiting threads. Boxes below half a percent are left
out.
"""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

import psutil

from bench.processes import Way, own_process
from bench.report import ROOT, Load, parse_loads
from bench.ways import ask

WAYS: Final = {"whole": "rollbus", "streams": "rollbus-chunks"}
RATE_HZ: Final = 300
WIDTH, ROW = 1200, 16
LEAST: Final = 0.005
"""Share of the samples below which a function is not drawn."""
CHAR_PIXELS: Final = 6.2


@dataclass(slots=True)
class Frame:
    """A function with its callees, and the samples in them."""

    samples: int = 0
    callees: dict[str, "Frame"] = field(default_factory=dict)

    def add(self, stack: list[str], samples: int) -> None:
        """Add a stack, outermost function first."""
        self.samples += samples
        if stack:
            self.callees.setdefault(stack[0], Frame()).add(stack[1:], samples)

    def boxes(self, total: int, left: float = 0.0, level: int = 0) -> Iterator[tuple[str, float, int, float]]:
        """Yield name, left edge, level and width of each function to draw; lengths as shares of `total`."""
        for name, callee in sorted(self.callees.items()):
            share = callee.samples / total
            if share >= LEAST:
                yield name, left, level, share
                yield from callee.boxes(total, left, level + 1)
            left += share


def read_stacks(text: str) -> Frame:
    """Return the calls in py-spy's raw format: `outer (file:1);inner (file:2) 17` on each line."""
    root = Frame()
    for line in text.splitlines():
        stack, _, samples = line.rpartition(" ")
        if "pids_by_kind" in stack:  # the accounts of the bench itself
            continue
        # Lines of one function count together. Files have only their name.
        names = [
            name.rpartition(":")[0] + ")" if name.endswith(")") and ":" in name else name for name in stack.split(";")
        ]
        # Above this function are only those that start the program or the thread.
        start = next((at for at, name in enumerate(names) if name.startswith("Runner.run ")), 0)
        root.add([names[0], *(name.replace("rollbus/", "") for name in names[start + 1 :])], int(samples))
    return root


def flame_graph(root: Frame, title: str) -> str:
    """Return an SVG picture."""
    boxes = list(root.boxes(root.samples))
    height = (max(level for _, _, level, _ in boxes) + 3) * ROW
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace">',
        f'<g font-size="10"><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="4" y="12">{escape(title)}</text>',
    ]
    for name, left, level, share in boxes:
        x, y, width = left * WIDTH, (level + 1) * ROW, share * WIDTH
        shown = name if len(name) * CHAR_PIXELS < width else name.partition(" (")[0][: int(width / CHAR_PIXELS)]
        colour = "#f4a261" if "(bus/" in name or "(workers/" in name or "(schemas/" in name else "#cbd5e1"
        lines.append(
            f'<g><title>{escape(name)} {share:.1%}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="15" '
            f'fill="{colour}" stroke="#fff"/><text x="{x + 2:.1f}" y="{y + 11}">{escape(shown)}</text></g>'
        )
    return "\n".join([*lines, "</g></svg>\n"])


async def sample(way: Way, load: Load, pid: int, seconds: int) -> Frame:
    """Sample a process while the way runs the load again and again."""
    with NamedTemporaryFile("r") as file:
        options = ("--pid", pid, "--duration", seconds, "--rate", RATE_HZ, "--format", "raw", "--output", file.name)
        command = ["py-spy", "record", "--function", "--threads", *map(str, options)]
        spy = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        while spy.returncode is None:
            await ask(way, load)
        if spy.returncode:
            raise RuntimeError(f"py-spy exited with code {spy.returncode}")
        return read_stacks(file.read())


async def draw(load: Load, seconds: int, folder: Path) -> None:
    """Write the pictures of both ways."""
    for kind, name in WAYS.items():
        async with own_process(name, "transport:way", name) as way:
            await ask(way, load)
            children = psutil.Process(way.pid).children()
            worker = next(one.pid for one in children if "rollbus.workers" in one.cmdline())
            for process, pid in {"client": way.pid, "worker": worker}.items():
                calls = await sample(way, load, pid, seconds)
                path = folder / f"{kind}-{process}.svg"
                title = (
                    f"{process}, {kind}, {load[0]} requests at once, {load[1]} tokens each, {calls.samples:,} samples"
                )
                path.write_text(flame_graph(calls, title))
                sys.stderr.write(f"{path} {path.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description="Draw flame graphs.")
    parser.add_argument("--load", default="64x16", help="REQUESTSxTOKENS (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=8, help="seconds of each picture (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images", help="folder of the pictures")
    args = parser.parse_args()
    if shutil.which("py-spy") is None:
        sys.exit("py-spy is not installed: pip install py-spy")
    args.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(parse_loads([args.load])[0], args.seconds, args.folder))
