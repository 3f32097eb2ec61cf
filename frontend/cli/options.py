"""Options that several commands have, the file of settings of `rollbus up`, and the arguments of child processes.

Workers, tokenizers and weight roots accept only folders. So a command downloads a Hugging Face model id into a folder
once, before it starts a worker.
"""

import argparse
import json
import os
import re
import site
import sys
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...schemas.decoding import nearest
from ...schemas.errors import ForeignError, foreign_code
from ...schemas.options import ENGINE_OPTIONS, PROCESS_OPTIONS, RAY_OPTIONS, flags_of, is_hub_id, pip_install
from .console import note
from .exits import CommandFailed, WrongUsage

if TYPE_CHECKING:
    from ...bus import Client, FleetState


def connect(args: argparse.Namespace) -> "Client":
    """Return the client of the fleet that the options name, for `async with`."""
    from ... import bus

    return bus.connect(args.nats, fleet=args.fleet)


START_SOME = "start some with `rollbus up` or `rollbus worker`"


def no_workers(nats_url: str, fleet: str) -> str:
    """Return the error text for a fleet without live workers."""
    return f"fleet {fleet} has no workers at {without_password(nats_url)}"


def check_known_model(state: "FleetState", model: str) -> None:
    """Check that a worker of the fleet serves this model, or has served it.

    Raises:
        CommandFailed: none has.
    """
    known = {worker.model for worker in state.workers} | state.desired.keys()
    if model not in known:
        allowed = ", ".join(sorted(known)) or "none, because no worker has served a model"
        raise WrongUsage(f"--model: fleet {state.fleet} has no model {model}; allowed: {allowed}")


def check_drawable(option: str) -> None:
    """Check that matplotlib, which draws the picture of `option`, is installed.

    Raises:
        CommandFailed: it is not.
    """
    try:
        import matplotlib  # noqa: F401 - checks that it is installed
    except ImportError as exc:
        raise CommandFailed(f"{option} requires {exc.name}, which is not installed: {pip_install('rl')}") from exc


def refuse_options(args: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Check that the user gave none of these options.

    Args:
        names: names of the options in `args`.
        reason: continues the error: why the option has no effect here.

    Raises:
        CommandFailed: an option was given.
    """
    for name in names:
        if getattr(args, name) != args.default_of(name):
            raise WrongUsage(f"--{name.replace('_', '-')} has no effect {reason}")


def without_password(text: str) -> str:
    """Return NATS addresses without user names, passwords and tokens."""
    return ",".join(re.sub(r"//.*@", "//", url) for url in re.split(r",(?=\w+://)", text))


NOT_IN_FILES: Final = frozenset({"help", "config", "json", "verbose"})
"""Options that belong to one call of the command."""
EXAMPLES: Final = {"N": 1, "K": 1, "SIZE": "100MB", "TIME": "5m", "HOST:PORT": "127.0.0.1:8080"}
"""Values of options without a default, by the placeholder of the value."""
HEADER: Final = """\
# Settings of `rollbus up --config {file}`. Each key is an option of `rollbus up`; the command line takes precedence.
# Durations are seconds or have a unit ("5m"), sizes are bytes or have one ("100MB"). Paths are relative to the
# directory in which the command runs. The HTTP service reads its tokens from the environment.
"""


def config_flags(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """Return the settings of a file as flags of `parser`.

    Raises:
        CommandFailed: the file cannot be read, or a key is no option. The message has the file and the key.
    """
    try:
        settings = tomllib.loads(path.read_text())
    except OSError as exc:
        raise WrongUsage(f"{path}: {exc.strerror}; `rollbus init` writes a file") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise WrongUsage(f"{path}: {exc}") from exc
    options = {_flag_of(action)[2:]: action for action in parser._actions if action.dest not in NOT_IN_FILES}
    flags: list[str] = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if name not in options:
            advice = nearest(name, options) or "; `rollbus init` writes a file with all keys"
            raise WrongUsage(f'{path}: no setting "{key}"{advice}')
        flags += _flags(options[name], value, f"{path}: {key}")
    return flags


def _flags(action: argparse.Action, value: Any, where: str) -> list[str]:
    name = _flag_of(action)
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise WrongUsage(f"{where} is {value!r}; allowed: true or false")
        return [name] if value else []
    if isinstance(value, list) and isinstance(action.default, list):
        return [flag for each in value for flag in _flags(action, each, where)]
    if isinstance(value, bool) or not isinstance(value, str | int | float | dict):
        raise WrongUsage(f"{where} is {value!r}; allowed: {action.metavar or 'text'}")
    text = json.dumps(value, default=str) if isinstance(value, dict) else str(value)
    try:
        (action.type or str)(text)  # type: ignore[operator]
    except argparse.ArgumentTypeError as exc:
        raise WrongUsage(f"{where}: {exc}") from exc
    except ValueError as exc:
        raise WrongUsage(f"{where} is {value!r}; allowed: {action.metavar}") from exc
    if action.choices is not None and text not in map(str, action.choices):
        allowed = ", ".join(map(str, action.choices))
        raise WrongUsage(f"{where} is {value!r}; allowed: {allowed}")
    return [f"{name}={text}"]


def config_template(parsers: Iterable[argparse.ArgumentParser], file: str) -> str:
    """Return a file with all options as comments, each with its help and its default or an example."""
    parts = [HEADER.format(file=file)]
    for action in (action for parser in parsers for action in parser._actions if action.dest not in NOT_IN_FILES):
        text = (action.help or "") % vars(action)
        parts.append(f"# {text}\n#{_flag_of(action)[2:]} = {_example(action)}\n")
    return "\n".join(parts)


def _example(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "true"
    if isinstance(action.default, list):
        return f'["{action.metavar}"]'
    if action.metavar == "JSON":
        return "{}"
    value = action.default
    if value is None:
        value = EXAMPLES.get(str(action.metavar), action.metavar)
    return json.dumps(without_password(value) if isinstance(value, str) else value)


def _flag_of(action: argparse.Action) -> str:
    """Return the long name of an option."""
    return next((name for name in action.option_strings if name.startswith("--")), "--")


OTHER_WEIGHTS: Final = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf"),
    *("*.onnx*", "*.h5", "*.msgpack", "*.ot", "*.tflite"),
)
"""Files not to download: copies of the weights in formats that vLLM does not load from a folder."""
OTHER_FOLDERS: Final = ("original/*", "onnx/*", "openvino/*", "coreml/*")


def use_model(args: argparse.Namespace) -> None:
    """Replace a model id in `args.model` by its folder. The id becomes the served name unless the user chose one.

    Raises:
        InvalidRequest: `args.model` is neither a folder nor a model id.
        CommandFailed: the download failed.
    """
    if args.model is None or not is_hub_id(args.model):
        return
    if args.served_model_name is None:
        args.served_model_name = args.model
    args.model = str(fetch_model(args.model))


def fetch_model(hub_id: str) -> Path:
    """Return the folder of a model in the cache of Hugging Face. Download the files that are missing there.

    Raises:
        CommandFailed: the model is not in the cache and cannot be downloaded.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as exc:
        raise CommandFailed(
            f"--model {hub_id} is not a folder, and {exc.name} is not installed: {pip_install('worker')}, or "
            "name the folder of the model"
        ) from exc
    if not sys.stderr.isatty():
        disable_progress_bars()
    note(f"--model {hub_id}: not a folder; reading the model from Hugging Face, cache: {constants.HF_HUB_CACHE}")
    try:
        # Its HTTP client, and with it the exceptions, depend on the release of huggingface_hub.
        with foreign_code():
            folder = Path(snapshot_download(hub_id, ignore_patterns=[*OTHER_WEIGHTS, *OTHER_FOLDERS]))
            if not any(folder.glob("*.safetensors")):
                ignored = [pattern for pattern in OTHER_WEIGHTS if pattern != "*.bin"]
                folder = Path(snapshot_download(hub_id, ignore_patterns=[*ignored, *OTHER_FOLDERS]))
    except ForeignError as exc:
        raise _failure(hub_id, _reason(exc.cause)) from exc.cause
    if not (folder / "config.json").is_file():
        raise _failure(hub_id, f"{folder} has no config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise _failure(hub_id, f"{folder} has no weights: *.safetensors or *.bin")
    return folder


def _reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "the model is gated: accept its terms on the model page and set $HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no model of this id, or the model needs a token with access ($HF_TOKEN)"
    if constants.HF_HUB_OFFLINE:
        return f"$HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not contain the model"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{constants.ENDPOINT} cannot be reached, and {constants.HF_HUB_CACHE} does not contain the model"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _failure(hub_id: str, reason: str) -> CommandFailed:
    return CommandFailed(
        f"--model {hub_id} is not a folder, and cannot be downloaded from Hugging Face: {reason}. Name the folder of "
        "the model with --model DIR, or set $HF_HOME to a cache that contains the model"
    )


PACKAGE: Final = Path(str(files(__name__.partition(".")[0])))
"""The folder `rollbus`. Its links are not resolved: in a checkout its entries link to folders outside of `rollbus`."""
EXAMPLES_DIR: Final = PACKAGE / "examples"


def run_worker(args: argparse.Namespace) -> int:
    """Replace this process by the worker."""
    refuse_options(args, ["json"], "here: a worker prints no result; --log-format json has logs as JSON")
    use_model(args)
    model = () if args.model is None else ("--model", args.model)
    own = ["--nats", args.nats, "--fleet", args.fleet, *model, *flags_of(args, PROCESS_OPTIONS)]
    command = [*python_module("rollbus.workers"), *own, *worker_flags(args)]
    os.execve(command[0], command, python_env())


def run_ray(args: argparse.Namespace) -> int:
    """Replace this process by the one that starts or ends a fleet on Ray."""
    nats = ["--nats", args.nats] if args.is_nats_named else []
    own = [args.action, *nats, "--fleet", args.fleet, *(["--json"] if args.json else [])]
    command = [*python_module("rollbus.workers.ray"), *own, *flags_of(args, (*RAY_OPTIONS, *ENGINE_OPTIONS))]
    os.execve(command[0], command, python_env())


def worker_flags(args: argparse.Namespace) -> list[str]:
    """Return the options that all workers of a command share, as flags of `python -m rollbus.workers`."""
    flags = flags_of(args, ENGINE_OPTIONS)
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
