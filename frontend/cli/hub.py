"""Models by their ids on Hugging Face: what is a folder and what an id, and how an id becomes a folder.

Workers, tokenizers and weight roots know folders alone. So an id is looked up once, before any worker starts.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Final

from .console import note
from .exits import CommandFailed, ExitCode

__all__ = ["fetch_model", "is_hub_id", "use_model"]

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""OWNER/NAME. A path that begins with `/`, `.` or `~` is none, and neither is a single word."""
OTHER_WEIGHTS: Final = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.onnx*",
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.tflite",
)
"""The same weights again, beside `*.safetensors`, and in forms that vLLM does not load from a folder."""
OTHER_FOLDERS: Final = ("original/*", "onnx/*", "openvino/*", "coreml/*")


def is_hub_id(model: str) -> bool:
    """True if --model is an id; False if it is a folder, which wins.

    Raises:
        CommandFailed: it is neither.
    """
    if model and Path(model).is_dir():
        return False
    if HUB_ID.fullmatch(model):
        return True
    raise CommandFailed(
        f"--model {model} is not a folder; allowed: a folder, or an id of Hugging Face such as Qwen/Qwen3-0.6B",
        ExitCode.USAGE,
    )


def use_model(args: argparse.Namespace) -> None:
    """Make `args.model` a folder if it is an id, which then is the served name unless the user chose another.

    Raises:
        CommandFailed: it is neither, or the id cannot be fetched.
    """
    if args.model is None or not is_hub_id(args.model):
        return
    if args.served_model_name is None:
        args.served_model_name = args.model
    args.model = str(fetch_model(args.model))


def fetch_model(hub_id: str) -> Path:
    """Return the folder of a model in the cache of Hugging Face, downloaded as far as that is necessary and possible.

    Raises:
        CommandFailed: it is not in the cache, and cannot be fetched.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as exc:
        raise CommandFailed(
            f"--model {hub_id} is no folder here, and {exc.name} is not installed: pip install 'rollbus[worker]', or "
            "name the folder of the model"
        ) from exc
    if not sys.stderr.isatty():
        disable_progress_bars()
    note(f"--model {hub_id}: no folder here, so from Hugging Face; kept in {constants.HF_HUB_CACHE}")
    try:
        folder = Path(snapshot_download(hub_id, ignore_patterns=[*OTHER_WEIGHTS, *OTHER_FOLDERS]))
        if not any(folder.glob("*.safetensors")):
            ignored = [pattern for pattern in OTHER_WEIGHTS if pattern != "*.bin"]
            folder = Path(snapshot_download(hub_id, ignore_patterns=[*ignored, *OTHER_FOLDERS]))
    except _fetch_errors() as exc:
        raise _failure(hub_id, _reason(exc)) from exc
    if not (folder / "config.json").is_file():
        raise _failure(hub_id, f"{folder} has no config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise _failure(hub_id, f"{folder} has no weights: *.safetensors or *.bin")
    return folder


def _fetch_errors() -> tuple[type[Exception], ...]:
    """What downloads raise: OSError and ValueError, RuntimeError by the part in Rust, and errors of the HTTP client.

    The client changes with the releases of huggingface_hub: requests, httpx, httpx2.
    """
    from huggingface_hub.errors import HfHubHTTPError

    of_client = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ in {"HTTPError", "RequestException"}]
    return OSError, ValueError, RuntimeError, *(kind for kind in of_client if issubclass(kind, Exception))


def _reason(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "its owner gives access on request: accept the terms there and set $HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no such model, or shows it only to users with access ($HF_TOKEN)"
    if constants.HF_HUB_OFFLINE:
        return f"$HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{constants.ENDPOINT} cannot be reached, and {constants.HF_HUB_CACHE} does not have it"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _failure(hub_id: str, reason: str) -> CommandFailed:
    return CommandFailed(
        f"--model {hub_id} is no folder here, and cannot be had from Hugging Face: {reason}. Name the folder of the "
        "model with --model DIR, or set $HF_HOME to a cache that has it"
    )
