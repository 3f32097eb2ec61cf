"""Command line of the soak run: `python -m tests.soak --minutes 60 --seed 7`, or `make soak`. See `tests.soak.run`."""

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tests.soak.run import Settings, run
from tests.support.processes import ROOT, print_line


def main() -> int:
    """Run the soak and return 0 if every result was right and nothing grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Load and faults, and what they cost.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=0, help="end when there are so many results and --versions")
    parser.add_argument("--versions", type=int, default=0, help="end when there are so many versions and --requests")
    parser.add_argument("--in-flight", type=int, default=Settings.in_flight, help="requests of each client at once")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of requests, weights and faults")
    parser.add_argument("--log", type=Path, help="a file for the logs of all processes; default: in /tmp")
    parser.add_argument("--page", type=Path, help="a file for the figures, as a page")
    args = parser.parse_args()
    seconds = 60 * args.minutes
    settings = Settings(
        seconds=seconds,
        num_requests=args.requests,
        num_versions=args.versions,
        warm_up_s=min(seconds / 4, Settings.warm_up_s),
        in_flight=args.in_flight,
        seed=args.seed,
    )
    replay = f'make soak ARGS="{" ".join(sys.argv[1:])}{"" if "--seed" in sys.argv else f" --seed {args.seed}"}"'
    print_line(f"to run the same faults again: {replay}")
    log = args.log or Path(tempfile.gettempdir()) / f"rollbus-soak-{args.seed}.log"
    lines, is_flat = [f"failed; the processes wrote {log}"], False
    try:
        with tempfile.TemporaryDirectory(prefix="rollbus-soak-") as folder:
            summary = asyncio.run(run(settings, Path(folder), log=log, say=print_line))
        lines, is_flat = summary.lines(), all(trend.is_flat for trend in summary.trends)
    finally:
        for line in lines:
            print_line(line)
        if args.page is not None:
            page = [f"# Soak run, seed {args.seed}\n", replay, *about(), *lines]
            args.page.write_text("\n- ".join(page) + "\n")
    return 0 if is_flat else 1


def about() -> list[str]:
    """Return date, commit and machine."""
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    return [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {commit}",
        f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory}",
    ]


if __name__ == "__main__":
    sys.exit(main())
