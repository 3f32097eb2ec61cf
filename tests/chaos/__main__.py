"""Command line of the chaos run: `python -m tests.chaos --requests 10000 --seed 1 --seconds-between-faults 3`.

See `tests.chaos.run`.
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from tests.chaos.run import Settings, run
from tests.support.processes import print_line


def main() -> int:
    """Run the chaos and return 0 if every result was right."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Requests through a suffering fleet.")
    parser.add_argument("--requests", type=int, default=defaults.num_requests)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of requests and faults")
    parser.add_argument("--seconds-between-faults", type=float, default=defaults.seconds_between_faults)
    parser.add_argument("--workers", type=int, default=defaults.num_workers)
    parser.add_argument("--prefill", type=int, default=defaults.num_prefill, help="prefill workers among them")
    parser.add_argument("--max-in-flight", type=int, default=defaults.max_in_flight)
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="a file for the logs of all")
    args = parser.parse_args()
    settings = Settings(
        num_requests=args.requests,
        seed=args.seed,
        seconds_between_faults=args.seconds_between_faults,
        num_workers=args.workers,
        num_prefill=args.prefill,
        max_in_flight=args.max_in_flight,
    )
    with args.log.open("ab") as log:
        logging.basicConfig(filename=args.log, level="DEBUG", format="%(asctime)s %(levelname)s %(name)s %(message)s")
        summary = asyncio.run(run(settings, stderr=log.fileno(), say=print_line))
    for line in summary.lines():
        print_line(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
