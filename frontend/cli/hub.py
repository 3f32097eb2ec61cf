"""Distinguishes model folders from Hugging Face model ids, and downloads a model id into a folder.

Workers, tokenizers and weight roots accept only folders. So a command resolves a model id once, before it starts a
worker.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from ...schemas.install import pip_install
from ...schemas.worker_options import is_hub_id
from .console import note
from .exits import CommandFailed

__all__ = ["fetch_model", "use_model"]

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
    """Return the exceptions of downloads: OSError, ValueError, RuntimeError of the Rust code, HTTP client errors.

    The HTTP client depends on the release of huggingface_hub: requests, httpx or httpx2.
    """
    from huggingface_hub.errors import HfHubHTTPError

    of_client = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ in {"HTTPError", "RequestException"}]
    return OSError, ValueError, RuntimeError, *(kind for kind in of_client if issubclass(kind, Exception))


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
