"""Replace the weights of all workers of a model while requests are in flight.

PATH is the folder of a whole checkpoint: config.json and safetensors files. Each worker looks for it on its own machine
and rejects it unless its real path is below one of the worker's --weight-root folders. With --upload, the folder is on
this machine and goes to the workers through NATS.

All workers first stage the weights while they serve: they fetch files from NATS and check every file, shape and dtype.
If one worker rejects the weights, nothing changes. Then each worker pauses (--mode, as in `rollbus pause`), loads the
weights, verifies them with a fixed prompt (the canary) and resumes. Every token has the version of its weights. A
worker whose update failed serves no requests until a successful update or a restart; `rollbus status` shows the reason.
A worker that starts later loads these weights before it serves.

An update continues if this command is interrupted; `rollbus status` shows its progress.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from ....schemas.options import non_negative_int
from ..control import add_send_options, add_source_options, add_switch_options, command, source_of
from ..exits import CommandFailed, ExitCode
from ..options import refuse_options

if TYPE_CHECKING:
    from ....schemas.weights import Canary


HELP = "replace the weights of workers"
EXAMPLES = (
    "rollbus update-weights /models/step-7 --version 7 --check",
    "rollbus update-weights /models/step-7 --version 7",
    "rollbus update-weights out/step-7 --version 7 --upload --mode wait",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_source_options(parser, "checkpoint")
    parser.add_argument(
        "--version", metavar="N", type=non_negative_int, help="version of the new weights (required unless --check)"
    )
    add_switch_options(parser)
    parser.add_argument(
        "--expected-canary",
        metavar="FILE",
        type=Path,
        help="JSON with the expected canary of the new weights, from an earlier --json or from the trainer (default: "
        "no comparison)",
    )
    parser.add_argument(
        "--check", action="store_true", help="dry run: check that the workers can load these weights, change nothing"
    )
    add_send_options(parser)


async def run(args: argparse.Namespace) -> int:
    """Update the weights, or check them."""
    path, objects = astuple(source_of(args))
    if args.check:
        if args.upload:
            raise CommandFailed(
                "--check and --upload exclude each other: --check tests weights that the workers can reach already",
                ExitCode.USAGE,
            )
        refuse_options(args, ("version", "mode", "allow_rollback", "min_staged", "expected_canary"), "with --check")
        return await command(lambda _, fleet, options: fleet.check_weights(path, objects=objects, **options))(args)
    if args.version is None:
        raise CommandFailed("--version N is required: it marks the tokens of the new weights", ExitCode.USAGE)
    canary = None if args.expected_canary is None else read_canary(args.expected_canary)
    send = command(
        lambda args, fleet, options: fleet.update_weights(
            path,
            objects=objects,
            upload=args.upload,
            version=args.version,
            mode=args.mode,
            allow_rollback=args.allow_rollback,
            expected_canary=canary,
            min_staged=args.min_staged,
            **options,
        )
    )
    return await send(args)


def read_canary(path: Path) -> "Canary":
    """Read a canary from a file.

    Raises:
        CommandFailed: the file cannot be read or contains no canary.
    """
    import msgspec

    from ....schemas.weights import Canary

    try:
        return msgspec.json.decode(path.read_bytes(), type=Canary)
    except (OSError, msgspec.MsgspecError) as exc:
        raise CommandFailed(f"--expected-canary {path}: {exc}", ExitCode.USAGE) from exc
