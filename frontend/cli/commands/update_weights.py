"""Replace the weights of all workers of a model, while requests are in flight.

PATH is the folder of a whole checkpoint: config.json and safetensors files. Each worker looks for it on its own
machine, and refuses it unless its real path is below one of the worker's --weight-root. With --upload the folder is on
this machine, and goes to the workers through NATS.

All workers first stage it while they serve: they fetch what is in NATS, and check every file, shape and type. If any
refuses, nothing is changed. Then each stops its requests (--mode, as for `rollbus pause`), loads, proves with a fixed
prompt that it computes what it should, and goes on. Every token says which version sampled it. A worker that failed
serves nothing until a good update or a restart; `rollbus status` says why. A worker that starts later loads these
weights before it serves.

An update that has begun goes on when this command is interrupted; `rollbus status` shows how far it is.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from ..arguments import non_negative_int
from ..control import add_send_options, add_source_options, add_switch_options, command, source_of
from ..exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from ....schemas.control import Canary

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "replace the weights"
EXAMPLES = (
    "rollbus update-weights /models/step-7 --version 7 --check",
    "rollbus update-weights /models/step-7 --version 7",
    "rollbus update-weights out/step-7 --version 7 --upload --mode wait",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_source_options(parser, "checkpoint")
    parser.add_argument(
        "--version", metavar="N", type=non_negative_int, help="of the new weights; needed, except with --check"
    )
    add_switch_options(parser)
    parser.add_argument(
        "--expected-canary",
        metavar="FILE",
        type=Path,
        help="JSON with what the new weights must give: a `canary` of an earlier --json, or made by the trainer",
    )
    parser.add_argument("--check", action="store_true", help="only ask the workers whether they could; change nothing")
    add_send_options(parser)


async def run(args: argparse.Namespace) -> int:
    """Update, or check."""
    path, objects = astuple(source_of(args))
    if args.check:
        if args.upload:
            raise CommandFailed("--check looks at what the workers can reach; --upload changes that", ExitCode.USAGE)
        return await command(lambda _, fleet, options: fleet.check_weights(path, objects=objects, **options))(args)
    if args.version is None:
        raise CommandFailed("--version N is needed: tokens of the new weights bear it", ExitCode.USAGE)
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
        CommandFailed: there is none in it.
    """
    import msgspec

    from ....schemas.control import Canary

    try:
        return msgspec.json.decode(path.read_bytes(), type=Canary)
    except (OSError, msgspec.MsgspecError) as exc:
        raise CommandFailed(f"--expected-canary {path}: {exc}", ExitCode.USAGE) from exc
