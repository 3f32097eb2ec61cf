"""Run one worker: one process with one engine that pulls requests from NATS.

This process becomes the worker: signals and the exit code are those of the worker. Logs go to stderr.
"""

import argparse
import os

from ....schemas.options import add_engine_options, add_process_options, flags_of
from ..options import python_env, python_module, refuse_options, use_model, worker_flags

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
    add_engine_options(parser)
    add_process_options(parser)


def run(args: argparse.Namespace) -> int:
    """Replace this process by the worker."""
    refuse_options(args, ["json"], "here: a worker prints no result; --log-format json has logs as JSON")
    use_model(args)
    model = () if args.model is None else ("--model", args.model)
    own = ["--nats", args.nats, "--fleet", args.fleet, *model, *flags_of(args, add_process_options)]
    command = [*python_module("rollbus.workers"), *own, *worker_flags(args)]
    os.execve(command[0], command, python_env())
