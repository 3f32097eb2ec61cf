"""Run one worker: one process with one engine that pulls requests from NATS.

This process becomes the worker: signals and the exit code are those of the worker. Logs go to stderr.
"""

import argparse
import os
from typing import get_args

from ....schemas.presence import Role
from ..arguments import refuse_options
from ..hub import use_model
from ..worker_options import add_worker_options, flags_of, python_env, python_module, worker_flags

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "run one worker"
EXAMPLES = (
    "rollbus worker --engine synthetic --served-model-name my-model",
    "rollbus worker --model /models/qwen3 --weight-root /models --worker-id w0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the worker's options."""
    parser.add_argument(
        "--model",
        metavar="DIR|ID",
        help="folder of the checkpoint, or its Hugging Face id such as Qwen/Qwen3-0.6B (required for the engine vllm)",
    )
    add_worker_options(parser)
    parser.add_argument(
        "--role",
        choices=get_args(Role),
        help="prefill: compute prompts for decode workers; both: serve whole requests (default: both)",
    )
    parser.add_argument(
        "--worker-id",
        metavar="ID",
        help="id of the worker, unique in the fleet (default: host, process id and four characters)",
    )
    parser.add_argument(
        "--probe",
        metavar="HOST:PORT",
        help="address for /health, /ready and /metrics over HTTP, for supervisors (default: none)",
    )
    parser.add_argument(
        "--listen-s",
        metavar="S",
        type=float,
        help="seconds to listen for another worker of this id before serving (default: one lease; 0 with a default id)",
    )


def run(args: argparse.Namespace) -> int:
    """Replace this process by the worker."""
    refuse_options(args, ["json"], "here: a worker prints no result; --log-format json has logs as JSON")
    use_model(args)
    own = flags_of(args, ("nats", "fleet", "model", "role", "worker_id", "probe", "listen_s"))
    command = [*python_module("rollbus.workers"), *own, *worker_flags(args)]
    os.execve(command[0], command, python_env())
