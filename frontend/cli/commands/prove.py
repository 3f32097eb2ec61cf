"""The subcommand that compares a fleet with its model."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ....schemas.options import ENGINE_OPTIONS, Option, arg, flag, non_negative_int
from ..arguments import command

MAX_MINUTES = 1440
"""A day. More minutes change no figure."""


def minutes(text: str) -> float:
    """Parse a number of minutes above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to {MAX_MINUTES}")
    return value


def _options() -> Iterator[Option]:
    yield arg("file", "FILE", "file for the JSON (default: none; --json alone prints it)", nargs="?")
    text = "directory of the checkpoint, or its id on Hugging Face (default with --nats: the only model of the fleet)"
    yield arg("--model", "DIR|ID", text)
    yield arg("--workers", "N", "workers of the command's own fleet (default: 1)", default=1)
    text = "GPUs of each worker; 0: all workers see all GPUs (default: the number that its engine uses)"
    yield arg("--gpus-per-worker", "K", text, type=non_negative_int)
    text = "forward passes of transformers with the checkpoint, or only the engine against itself (default: hf)"
    yield arg("--reference", ("hf", "none"), text, default="hf")
    text = "dtype of the reference: that of your trainer (default: that of the engine)"
    yield arg("--dtype", ("float32", "bfloat16", "float16"), text)
    text = "minutes for all stages, after the fleet serves (default: %(default)g)"
    yield arg("--minutes", "N", text, type=minutes, default=10)
    yield arg("--prompts", "FILE", "your own prompts, as for `generate` (default: random ones)")
    yield arg("--stages", "NAME", "agreement, routing, updates, survival, speed (default: all)", nargs="+")
    yield flag("--disruptive", "on a fleet in use, also run stages that stop workers and change weights")
    yield arg("--picture", "FILE", "file for the picture, an SVG (default: none)", type=Path)
    yield arg("--seed", "N", "seed of the prompts (default: 0)", type=non_negative_int, default=0)
    yield arg("--state-dir", "DIR", "folder of temporary files (default: ~/.cache/rollbus)")


@command(
    "prove that what you train on is what was sampled",
    "prove.command:run",
    *_options(),
    *ENGINE_OPTIONS,
)
def prove() -> None:
    """Prove on your model and machines that what you train on is what was sampled.

    Each stage has a bar, a number and a verdict: ok, look, wrong, or not run with the reason. The exit code is 1 only
    with a `wrong`. The result is a table, and on request a JSON and a picture that need nothing else.

    Without --nats, the command starts a fleet on this machine and ends it. With --nats it measures a fleet in use; then
    stages that stop workers or change weights need --disruptive. FILE gets the JSON.

    Examples:
        rollbus prove --model /models/qwen3 --json prove.json --picture prove.svg
        rollbus prove --model Qwen/Qwen3-0.6B --minutes 5 --stages agreement routing
        rollbus prove --nats nats://10.0.0.5:4222 --prompts prompts.jsonl
    """
