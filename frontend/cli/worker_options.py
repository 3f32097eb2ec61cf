"""The options of a worker process, shared by the commands that start one."""

import argparse
import os
import site
import sys
from collections.abc import Iterable

from .arguments import add_otel, json_object, non_negative_int, positive_int
from .package import PACKAGE

__all__ = ["add_worker_options", "flags_of", "python_env", "python_module", "worker_flags"]


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `worker_flags` passes on."""
    parser.add_argument(
        "--engine",
        choices=("vllm", "synthetic"),
        default="vllm",
        help="synthetic: generated tokens without a model, for load tests (default: %(default)s)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name of the model in requests (default: the model's id, or the name of its folder)",
    )
    parser.add_argument(
        "--engine-args",
        metavar="JSON",
        type=json_object,
        help='arguments of the engine, such as {"dtype": "bfloat16"} (default: none)',
    )
    parser.add_argument(
        "--kv-transfer-config",
        metavar="JSON",
        type=json_object,
        help="configuration of vLLM's KV connector, through which prefill and decode workers share KV",
    )
    parser.add_argument(
        "--weight-version",
        metavar="N",
        type=non_negative_int,
        default=0,
        help="version of the weights in --model (default: 0)",
    )
    parser.add_argument(
        "--engine-timeout-s",
        metavar="S",
        type=float,
        help="seconds without a step after which an engine with open requests counts as dead (default: 300)",
    )
    parser.add_argument(
        "--transfer-idle-s",
        metavar="S",
        type=float,
        help="seconds without a command after which an open transfer of weights ends (default: 600)",
    )
    parser.add_argument(
        "--weight-root",
        dest="weight_roots",
        metavar="DIR",
        action="append",
        default=[],
        help="folder with weights and LoRA adapters that commands may name; may be repeated (default: none)",
    )
    _add_staging(parser)
    add_otel(parser)
    parser.add_argument(
        "--no-prove-reload",
        action="store_true",
        help="skip the second load of the weights at the start, which verifies that weight updates work",
    )


def _add_staging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder of fetched weights, one copy for all workers on this machine (default: ~/.cache/rollbus)",
    )
    parser.add_argument(
        "--stage-bytes",
        metavar="N",
        type=positive_int,
        help="bytes of fetched weights on this machine, for all workers of the fleet (default: no limit)",
    )
    parser.add_argument(
        "--fetch-rate",
        metavar="BYTES_PER_S",
        type=positive_int,
        help="bytes per second at which a worker fetches weights (default: no limit)",
    )


def worker_flags(args: argparse.Namespace) -> list[str]:
    """Return the options as flags of `python -m rollbus.workers`."""
    names = ("engine", "weight_version", "served_model_name", "engine_args", "kv_transfer_config")
    flags = flags_of(args, (*names, "engine_timeout_s", "transfer_idle_s"))
    for root in args.weight_roots:
        flags += ["--weight-root", root]
    flags += flags_of(args, ("cache_dir", "stage_bytes", "fetch_rate"))
    if args.no_prove_reload:
        flags.append("--no-prove-reload")
    if args.otel:
        flags.append("--otel")
    if args.verbose:
        flags += ["--log-level", "debug"]
    if args.log_format != "text":
        flags += ["--log-format", args.log_format]
    return flags


def flags_of(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return the options `names` that have a value, as flags."""
    given = ((name, getattr(args, name)) for name in names)
    return [text for name, value in given if value is not None for text in (f"--{name.replace('_', '-')}", str(value))]


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
