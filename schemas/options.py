"""The options of a worker process, which `rollbus worker` and `rollbus up` have too and pass on: types and checks.

The errors of a type state the wrong value and the allowed values.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, get_args
from urllib.parse import unquote, urlsplit

from .errors import InvalidRequest
from .presence import WorkerRole

SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+", re.ASCII)
DURATION_PART: Final = re.compile(r"([\d.]+)(ms|[smhd])", re.ASCII)
_PREFIXES: Final = list(enumerate("kmgt", start=1))
BYTES: Final = {"": 1, **{p: 1000**i for i, p in _PREFIXES}, **{f"{p}i": 1024**i for i, p in _PREFIXES}}
SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?((?:[kmgt]i?)?)b", re.ASCII | re.IGNORECASE)
DEFAULT_LEASE_S: Final = 5.0
"""Five heartbeats, also of a client that has announced no lease. A busy machine may delay some of them, and peers still
detect a dead worker or client within seconds."""
DEFAULT_ENGINE_TIMEOUT_S: Final = 300.0
"""Far above the duration of the longest step: a long prompt on a CPU."""
DEFAULT_IDLE_S: Final = 600.0
"""Seconds without a command after which a transfer ends. A debugger may stop a trainer for minutes."""
DEFAULT_START_TIMEOUT_S: Final = 1800.0
"""A large model on a slow disk needs many minutes to load."""
DEFAULT_DRAIN_S: Final = 60.0
"""Clients acknowledge within milliseconds. Slow ones have time, and lost ones are known after their lease."""
MAX_DRAIN_S: Final = 3600.0
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""Pattern of OWNER/NAME. A path that begins with `/`, `.` or `~`, and a single word, are not model ids."""
CONFIGS: Final = ("config.json", "params.json")
"""Files of which vLLM needs one in the folder of a model. Models in Mistral's format have the second."""
GPU_ONLY: Final = ("enable_sleep_mode",)
"""Engine arguments with which vLLM does not start on a CPU."""
ON_CPU: Final = "the installed vLLM computes only on the CPU"


Option = Callable[[Any], object]
"""Adds one or more options to a parser, or to a group of one."""


def arg(name: str, value: str | Collection[object] | None, text: str, **settings: Any) -> Option:
    """Return an argument or an option with a value.

    Args:
        value: placeholder of the value in the help, or the allowed values.
        text: its help.
        settings: further settings of `argparse`; `type` replaces the type of the placeholder.
    """
    if isinstance(value, str):
        settings = {"metavar": value, "type": TYPES.get(value), **settings}
    elif value is not None:
        settings["choices"] = value
    return lambda parser: parser.add_argument(name, help=text, **settings)


def flag(name: str, text: str, **settings: Any) -> Option:
    """Return an option without a value."""
    return lambda parser: parser.add_argument(name, action="store_true", help=text, **settings)


def add_options(parser: Any, options: Iterable[Option]) -> None:
    """Add options to a parser, or to a group of one."""
    for option in options:
        option(parser)


def flags_of(args: argparse.Namespace, options: Iterable[Option]) -> list[str]:
    """Return the flags of another process that has these options.

    Options with their default value are left out: the process has the same defaults.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, options)
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
        args: the options `ENGINE_OPTIONS`, and `model`.

    Raises:
        InvalidRequest: the model is neither a folder with a configuration nor a model id, an argument of the engine
            needs a GPU and there is none, or no file can be written into `--cache-dir`.
    """
    if args.engine == "vllm":
        is_folder = args.model is not None and not is_hub_id(args.model)
        if is_folder and not any((Path(args.model) / name).is_file() for name in CONFIGS):
            allowed = "a folder of save_pretrained()"
            raise InvalidRequest(f"--model {args.model}", "has no config.json", allowed)
        given = json.loads(args.engine_args or "{}")
        for name in GPU_ONLY:
            if given.get(name) and computes_on_cpu():
                problem = f"has {name}, which needs a GPU, and {ON_CPU}"
                raise InvalidRequest("--engine-args", problem, "arguments without it")
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
    raise InvalidRequest(f"--model {model}", "is not a folder", allowed)


def computes_on_cpu() -> bool:
    """Return True if the installed vLLM is a build for CPUs, which uses no GPU."""
    from importlib.metadata import PackageNotFoundError, version

    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        # Then vLLM comes from a package with another name, and only builds for CPUs have another name.
        return True


def memory_bytes() -> int | None:
    """Return the memory that programs can allocate without swapping, also what files cache; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    available = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(available[1]) * 1024 if available else None


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation, for example `pip install 'rollbus[data]'`.

    If rollbus was not installed from an index, `direct_url.json` (PEP 610) has its origin.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    package = f"rollbus[{extra}]"
    try:
        origin = json.loads(distribution("rollbus").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        origin = {}
    url, vcs, folder = origin.get("url"), origin.get("vcs_info"), origin.get("dir_info")
    if not url:
        return f"pip install '{package}'"
    if folder is not None:
        editable = "-e " if folder.get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if vcs is not None:
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install '{package} @ {url}'"


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    return _int(text, 1)


def non_negative_int(text: str) -> int:
    """Parse an integer of at least 0."""
    return _int(text, 0)


def _int(text: str, low: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}")
    return number


def duration(text: str) -> float:
    """Parse a duration above 0, such as `90`, `1.5s`, `5m` or `1h30m`, and return it in seconds."""
    seconds = duration_or_zero(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above 0, such as 90 (seconds), 5m or 1h30m")
    return seconds


def duration_or_zero(text: str) -> float:
    """Parse a duration as `duration` does, or 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if DURATION.fullmatch(text):
        seconds = sum(float(number) * SECONDS[unit] for number, unit in DURATION_PART.findall(text))
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 90 (seconds), 5m or 1h30m")
    return seconds


def size(text: str) -> int:
    """Parse a number of bytes of at least 1, such as `1000000`, `100MB` or `2GiB`."""
    found = SIZE.fullmatch(text)
    try:
        number = int(text) if found is None else int(float(found[1]) * BYTES[found[2].lower()])
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of at least 1 byte, such as 1000000, 100MB or 2GiB")
    return number


def json_object(text: str) -> str:
    """Check that `text` is a JSON object and return it unchanged."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object, such as '{\"max_model_len\": 4096}'")
    return text


TYPES: Final[dict[str, Callable[[str], object]]] = {
    "N": positive_int,
    "TIME": duration,
    "SIZE": size,
    "JSON": json_object,
    "DIR": Path,
    "FILE": Path,
}
"""The type of a value, by its placeholder in the help. Values with other placeholders are texts."""
OTEL: Final = flag("--otel", "export spans of requests, configured by the variables OTEL_*; needs the extra otel")


def _engine_options() -> Iterator[Option]:
    text = "synthetic: generated tokens without a model, for load tests (default: %(default)s)"
    yield arg("--engine", ("vllm", "synthetic"), text, default="vllm")
    text = "name of the model in requests (default: the model's id, or the name of its folder)"
    yield arg("--served-model-name", "NAME", text)
    yield arg("--engine-args", "JSON", 'arguments of the engine, such as {"dtype": "bfloat16"} (default: none)')
    text = "configuration of vLLM's KV connector, through which prefill and decode workers share KV"
    yield arg("--kv-transfer-config", "JSON", text)
    text = "version of the weights in --model (default: 0)"
    yield arg("--weight-version", "N", text, type=non_negative_int, default=0)
    text = "time within which a worker must serve; requests may wait for it (default: %(default)g seconds)"
    yield arg("--start-timeout", "TIME", text, default=DEFAULT_START_TIMEOUT_S)
    text = "time without a step after which an engine with open requests counts as dead (default: %(default)g)"
    yield arg("--engine-timeout-s", "TIME", text, default=DEFAULT_ENGINE_TIMEOUT_S)
    text = "time without a command after which an open transfer of weights ends (default: %(default)g)"
    yield arg("--transfer-idle-s", "TIME", text, default=DEFAULT_IDLE_S)
    text = "folder with weights and LoRA adapters that commands may name; may be repeated (default: none)"
    yield arg("--weight-root", "DIR", text, type=str, action="append", default=[])
    text = "folder of fetched weights, one copy for all workers on this machine (default: ~/.cache/rollbus)"
    yield arg("--cache-dir", "DIR", text, type=str)
    text = "size of the fetched weights on this machine, for all workers of the fleet (default: no limit)"
    yield arg("--stage-bytes", "SIZE", text)
    yield arg("--fetch-rate", "SIZE", "bytes per second at which a worker fetches weights (default: no limit)")
    text = "skip the second load of the weights at the start, which verifies that weight updates work"
    yield flag("--no-prove-reload", text)
    yield OTEL


def _process_options() -> Iterator[Option]:
    text = "prefill: compute prompts for decode workers; both: serve whole requests (default: both)"
    yield arg("--role", get_args(WorkerRole), text)
    text = "id of the worker, unique in the fleet (default: host, process id and four characters)"
    yield arg("--worker-id", "ID", text)
    text = "address for /health, /ready and /metrics over HTTP, for supervisors (default: none)"
    yield arg("--probe", "HOST:PORT", text)
    text = "Unix socket for /health, /ready, /metrics and `rollbus drain --socket`, only for this user (default: none)"
    yield arg("--socket", "PATH", text, type=Path)
    text = "time within which a stopped or drained worker hands its requests over (default: %(default)g)"
    yield arg("--drain-s", "TIME", text, type=duration_or_zero, default=DEFAULT_DRAIN_S)
    text = "if another worker has this id: exit with code 78, or wait until the id is free (default: %(default)s)"
    yield arg("--on-duplicate", ("exit", "wait"), text, default="exit")
    text = "time to listen for another worker of this id before serving (default: one lease; 0 with a default id)"
    yield arg("--listen-s", "TIME", text, type=duration_or_zero)
    text = "time without presence after which peers treat the worker as lost (default: %(default)g)"
    yield arg("--lease-s", "TIME", text, default=DEFAULT_LEASE_S)


ENGINE_OPTIONS: Final = tuple(_engine_options())
"""The options that all workers of one command share."""
PROCESS_OPTIONS: Final = tuple(_process_options())
"""The options of one worker."""

RAY_OPTIONS: Final = (
    arg("--model", "DIR|ID", "folder of the checkpoint on each node, or its Hugging Face id (required for vllm)"),
    arg("--workers", "N", "number of workers (default: %(default)s)", default=1),
    arg(
        "--gpus-per-worker",
        "N",
        "GPUs of each worker; more than a node has: vLLM's Ray executor uses several nodes (default: %(default)s)",
        type=non_negative_int,
        default=0,
    ),
    arg("--cpus-per-worker", "CPUS", "CPUs of each worker (default: %(default)g)", type=float, default=1.0),
    arg("--address", "ADDRESS", "address of the Ray cluster (default: $RAY_ADDRESS, or that of this machine)"),
    arg("--nats-servers", "1|3", "NATS servers inside the cluster (default: 3 on three nodes, else 1)", type=int),
    arg("--runtime-env", "JSON", "Ray's runtime environment of all actors (default: none)"),
    flag("--detach", "end this command when the workers serve; `rollbus ray down` ends the fleet"),
)
"""The options of `rollbus ray`, beside those of the engine."""


def check_writable(name: str, folder: Path, mode: int = 0o777) -> None:
    """Check that files can be written into a directory. Create the directory if it is missing.

    Args:
        name: the option or the noun before the directory in the error.
        mode: permissions of a new directory.

    Raises:
        InvalidRequest: no file can be written.
    """
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        problem, allowed = f"cannot be written: {exc.strerror}", "a directory in which this user may create files"
        raise InvalidRequest(f"{name} {folder}", problem, allowed) from exc
