"""Command line of the elastic run: `python -m tests.elastic --seconds 600 --seed 1`. See `tests.elastic.run`."""

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

from tests.elastic.run import Settings, run
from tests.support.processes import print_line


def main() -> int:
    """Run and return 0 if every result was right."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m tests.elastic", description="Workers that come and go.")
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of requests, changes and weights")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="a file for the logs of all")
    args = parser.parse_args()
    settings = Settings(seconds=args.seconds, seed=args.seed)
    with args.log.open("ab") as log, tempfile.TemporaryDirectory(prefix="rollbus-elastic-") as folder:
        logging.basicConfig(filename=args.log, level="DEBUG", format="%(asctime)s %(levelname)s %(name)s %(message)s")
        summary = asyncio.run(run(settings, Path(folder), stderr=log.fileno(), say=print_line))
    for line in summary.lines():
        print_line(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
