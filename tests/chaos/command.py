"""The command line of a run: `python -m tests.chaos`, `tests.chaos.weights` and `tests.elastic`."""

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.processes import print_line


def run_command(prog: str, defaults: Any, run: Callable[[Any, Path, int], Coroutine[Any, Any, Any]]) -> int:
    """Run with an option for each field of the settings, without `num_`. Print the report, and return 0.

    Args:
        run: receives the settings, an empty folder and a file descriptor for logs, and returns the summary.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {prog}")
    for field in fields(defaults):
        default = getattr(defaults, field.name)
        option = field.name.removeprefix("num_").replace("_", "-")
        parser.add_argument(f"--{option}", dest=field.name, type=type(default), default=default)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="a file for the logs of all")
    given = vars(parser.parse_args())
    with given.pop("log").open("ab") as log, TemporaryDirectory(prefix="rollbus-run-") as folder:
        logging.basicConfig(filename=log.name, level="DEBUG", format="%(asctime)s %(levelname)s %(name)s %(message)s")
        summary = asyncio.run(run(replace(defaults, **given), Path(folder), log.fileno()))
    for line in summary.lines():
        print_line(line)
    return 0
