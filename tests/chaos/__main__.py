"""Command line of the chaos run: `python -m tests.chaos --requests 10000 --seed 1 --seconds-between-faults 3`.

See `tests.chaos.run`.
"""

import sys

from tests.chaos.command import run_command
from tests.chaos.run import Settings, run
from tests.support.processes import print_line

if __name__ == "__main__":
    sys.exit(run_command("tests.chaos", Settings(), lambda given, _, log: run(given, stderr=log, say=print_line)))
