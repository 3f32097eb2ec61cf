"""Run benches one after the other, and write the figures of each to a folder.

    python -m bench [transport real_engine ...] [--results bench/results] [-- OPTIONS OF THE BENCH]
    python -m bench --compare COMMIT [transport ...] [--rounds 5] [-- OPTIONS OF THE BENCH]

All benches take about an hour and a half, and need the whole machine. Each is also a program with options:
`python -m bench.transport --help`. The second form measures another commit beside this one (`compare.py`).
"""

import argparse
import subprocess
import sys
from pathlib import Path

from bench.compare import compare

BENCHES = (
    "transport",
    "routing",
    "real_engine",
    "rollouts",
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
    "http",
    "experts",
    "instructions",
    "costs",
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
    parser.add_argument("--compare", metavar="COMMIT", help="measure this commit and the present one in turns")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a comparison (default: %(default)s)")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if unknown := set(args.benches) - set(BENCHES):
        parser.error(f"unknown benches: {', '.join(sorted(unknown))}; allowed: {', '.join(BENCHES)}")
    if args.compare is not None:
        return max(compare(args.compare, bench, args.rounds, options) for bench in args.benches or ["transport"])
    args.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for bench in args.benches or BENCHES:
        program = ["bench.instructions", "--costs"] if bench == "costs" else [f"bench.{bench}"]
        command = [sys.executable, "-m", *program, "--json", str(args.results / f"{bench}.json"), *options]
        if subprocess.run(command, check=False).returncode:
            failed.append(bench)
    if failed:
        sys.stderr.write(f"failed benches: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
