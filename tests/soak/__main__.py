"""Command line of the soak run: `python -m tests.soak --minutes 10`, which is `make soak`. See `tests.soak.run`."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from tests.soak.run import Settings, run
from tests.support.processes import print_line


def main() -> int:
    """Run the soak and return 0 if every result was right and no process grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Load and faults, and what they cost.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of requests and faults")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="a file for the logs of all")
    args = parser.parse_args()
    settings = Settings(seconds=60 * args.minutes, warm_up_s=min(60 * args.minutes / 4, 120.0), seed=args.seed)
    with args.log.open("ab") as log:
        logging.basicConfig(filename=args.log, level="WARNING")
        summary = asyncio.run(run(settings, stderr=log.fileno(), say=print_line))
    for line in summary.lines():
        print_line(line)
    return 0 if all(trend.is_flat for trend in summary.trends) else 1


if __name__ == "__main__":
    sys.exit(main())
