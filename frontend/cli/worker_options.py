"""The command line and the environment of processes that a command starts."""

import argparse
import os
import site
import sys

from ...schemas.worker_options import add_engine_options, flags_of
from .package import PACKAGE

__all__ = ["python_env", "python_module", "worker_flags"]


def worker_flags(args: argparse.Namespace) -> list[str]:
    """Return the options that all workers of a command share, as flags of `python -m rollbus.workers`."""
    flags = flags_of(args, add_engine_options)
    if args.verbose:
        flags += ["--log-level", "debug"]
    if args.log_format != "text":
        flags += ["--log-format", args.log_format]
    return flags


def python_module(module: str) -> list[str]:
    """Return the command that runs a module of rollbus.

    -P: Python must not import a folder `rollbus` in the working directory of the user.
    """
    return [sys.executable, "-P", "-m", module]


def python_env() -> dict[str, str]:
    """Return the environment of a child process, which finds `rollbus` where this process found it."""
    env = dict(os.environ)
    root = str(PACKAGE.parent)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in site.getsitepackages() and root not in paths:
        env["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return env
