"""Run benches one after the other, and write the figures of each to a folder.

    python -m bench [transport real_engine ...] [--results bench/results]

All of them take about an hour and a quarter, and need the whole machine. Each bench is also a program with options:
`python -m bench.transport --help`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

BENCHES = (
    "transport",
    "routing",
    "real_engine",
    "latency",
    "control",
    "scale",
    "trainer",
    "objects",
    "weights",
    "placement",
    "steps",
    "http_memory",
    "viewers",
    "accounts",
    "flood",
    "experts",
)


def main() -> int:
    """Run the benches, even after a bench fails. Return 1 if a bench failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Run benches and write their figures to files."
    )
    parser.add_argument(
        "benches", nargs="*", metavar="BENCH", help=f"bench to run: {', '.join(BENCHES)} (default: all)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(__file__).parent / "results",
        help="folder for the figures (default: bench/results)",
    )
    args = parser.parse_args()
    if unknown := set(args.benches) - set(BENCHES):
        parser.error(f"unknown benches: {', '.join(sorted(unknown))}; allowed: {', '.join(BENCHES)}")
    args.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for bench in args.benches or BENCHES:
        command = [sys.executable, "-m", f"bench.{bench}", "--json", str(args.results / f"{bench}.json")]
        if subprocess.run(command, check=False).returncode:
            failed.append(bench)
    if failed:
        sys.stderr.write(f"failed benches: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
