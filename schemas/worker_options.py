"""The options of a worker process, which `rollbus worker` and `rollbus up` have too and pass on, and their checks."""

import argparse
import json
import os
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, get_args

from .errors import InvalidRequest
from .option_types import duration, duration_or_zero, json_object, non_negative_int, size
from .presence import Role
from .writable import check_writable

__all__ = [
    "DEFAULT_ENGINE_TIMEOUT_S",
    "DEFAULT_IDLE_S",
    "DEFAULT_LEASE_S",
    "DEFAULT_START_TIMEOUT_S",
    "HUB_ID",
    "ON_CPU",
    "add_engine_options",
    "add_otel",
    "add_process_options",
    "check_start",
    "computes_on_cpu",
    "flags_of",
    "is_hub_id",
]

DEFAULT_LEASE_S: Final = 5.0
"""Five heartbeats. A busy machine may delay some of them, and peers still detect a dead worker within seconds."""
DEFAULT_ENGINE_TIMEOUT_S: Final = 300.0
"""Far above the duration of the longest step: a long prompt on a CPU."""
DEFAULT_IDLE_S: Final = 600.0
"""Seconds without a command after which a transfer ends. A debugger may stop a trainer for minutes."""
DEFAULT_START_TIMEOUT_S: Final = 1800.0
"""A large model on a slow disk needs many minutes to load."""
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""Pattern of OWNER/NAME. A path that begins with `/`, `.` or `~`, and a single word, are not model ids."""
CONFIGS: Final = ("config.json", "params.json")
"""Files of which vLLM needs one in the folder of a model. Models in Mistral's format have the second."""
GPU_ONLY: Final = ("enable_sleep_mode",)
"""Engine arguments with which vLLM does not start on a CPU."""
ON_CPU: Final = "the installed vLLM computes only on the CPU"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all workers of one command share."""
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
    _add_times(parser)
    _add_weights(parser)
    add_otel(parser)


def _add_times(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start-timeout",
        metavar="TIME",
        type=duration,
        default=DEFAULT_START_TIMEOUT_S,
        help="time within which a worker must serve; requests may wait for it (default: %(default)g seconds)",
    )
    parser.add_argument(
        "--engine-timeout-s",
        metavar="TIME",
        type=duration,
        default=DEFAULT_ENGINE_TIMEOUT_S,
        help="time without a step after which an engine with open requests counts as dead (default: %(default)g)",
    )
    parser.add_argument(
        "--transfer-idle-s",
        metavar="TIME",
        type=duration,
        default=DEFAULT_IDLE_S,
        help="time without a command after which an open transfer of weights ends (default: %(default)g)",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weight-root",
        metavar="DIR",
        action="append",
        default=[],
        help="folder with weights and LoRA adapters that commands may name; may be repeated (default: none)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder of fetched weights, one copy for all workers on this machine (default: ~/.cache/rollbus)",
    )
    parser.add_argument(
        "--stage-bytes",
        metavar="SIZE",
        type=size,
        help="size of the fetched weights on this machine, for all workers of the fleet (default: no limit)",
    )
    parser.add_argument(
        "--fetch-rate",
        metavar="SIZE",
        type=size,
        help="bytes per second at which a worker fetches weights (default: no limit)",
    )
    parser.add_argument(
        "--no-prove-reload",
        action="store_true",
        help="skip the second load of the weights at the start, which verifies that weight updates work",
    )


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of one worker."""
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
        metavar="TIME",
        type=duration_or_zero,
        help="time to listen for another worker of this id before serving (default: one lease; 0 with a default id)",
    )
    parser.add_argument(
        "--lease-s",
        metavar="TIME",
        type=duration,
        default=DEFAULT_LEASE_S,
        help="time without presence after which peers treat the worker as lost (default: %(default)g)",
    )


def add_otel(parser: argparse.ArgumentParser) -> None:
    """Add the option that enables tracing."""
    parser.add_argument(
        "--otel",
        action="store_true",
        help="export spans of requests, configured by the variables OTEL_*; needs the extra otel",
    )


def flags_of(args: argparse.Namespace, *added: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """Return the flags of another process for the options that these functions add.

    Options with their default value are left out: the process has the same defaults.
    """
    parser = argparse.ArgumentParser(add_help=False)
    for add in added:
        add(parser)
    flags: list[str] = []
    for action in parser._actions:
        name, value = action.option_strings[0], getattr(args, action.dest)
        if value == action.default:
            continue
        if action.nargs == 0:
            flags.append(name)
        else:
            flags += [text for each in (value if isinstance(value, list) else [value]) for text in (name, str(each))]
    return flags


def check_start(args: argparse.Namespace) -> None:
    """Check everything that would end a worker after its engine has loaded for minutes.

    Args:
        args: the options of `add_engine_options`, and `model`.

    Raises:
        InvalidRequest: the model is neither a folder with a configuration nor a model id, an argument of the engine
            needs a GPU and there is none, or no file can be written into `--cache-dir`.
    """
    if args.engine == "vllm":
        is_folder = args.model is not None and not is_hub_id(args.model)
        if is_folder and not any((Path(args.model) / name).is_file() for name in CONFIGS):
            allowed = "a folder of save_pretrained()"
            raise InvalidRequest(field=f"--model {args.model}", problem="has no config.json", allowed=allowed)
        given = json.loads(args.engine_args or "{}")
        for name in GPU_ONLY:
            if given.get(name) and computes_on_cpu():
                problem = f"has {name}, which needs a GPU, and {ON_CPU}"
                raise InvalidRequest(field="--engine-args", problem=problem, allowed="arguments without it")
    if args.cache_dir is not None:
        check_writable("--cache-dir", Path(args.cache_dir))


def is_hub_id(model: str) -> bool:
    """True if `--model` is a model id and not a folder. A folder takes precedence.

    Raises:
        InvalidRequest: `model` is neither a folder nor a model id.
    """
    if model and Path(model).is_dir():
        return False
    if HUB_ID.fullmatch(model):
        return True
    allowed = "a folder, or a Hugging Face model id such as Qwen/Qwen3-0.6B"
    raise InvalidRequest(field=f"--model {model}", problem="is not a folder", allowed=allowed)


def computes_on_cpu() -> bool:
    """Return True if the installed vLLM is a build for CPUs, which uses no GPU."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        # Then vLLM comes from a package with another name, and only builds for CPUs have another name.
        return True
