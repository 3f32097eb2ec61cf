"""Command line of the elastic run: `python -m tests.elastic --seconds 600 --seed 1`. See `tests.elastic.run`."""

import sys

from tests.chaos.command import run_command
from tests.elastic.run import Settings, run
from tests.support.processes import print_line

if __name__ == "__main__":
    sys.exit(run_command("tests.elastic", Settings(), lambda *given: run(*given[:2], stderr=given[2], say=print_line)))
