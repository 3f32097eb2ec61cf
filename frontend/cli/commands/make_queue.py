"""Create the queues of models and the bucket of desired states, and set limits.

Use this on a server with `rollbus auth`, where only admins may create queues. On other servers the workers create them.
Existing queues stay unchanged. A limit changes only if an option sets it. It cannot be lower than the present content
of the queue.
"""

import argparse

from ....schemas.options import positive_int, size
from ..exits import ExitCode

HELP = "create the queue of a model, or set its limits"
EXAMPLES = (
    "rollbus make-queue my-model",
    "rollbus make-queue my-model --max-requests 100000 --upload-bytes 34359738368",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("models", metavar="MODEL", nargs="+", help="name of a model")
    parser.add_argument(
        "--max-requests",
        metavar="N",
        type=positive_int,
        help="maximum number of waiting requests of all clients (default of a new queue: 65,536)",
    )
    parser.add_argument(
        "--max-bytes",
        metavar="SIZE",
        type=size,
        help="maximum size of waiting requests (default of a new queue: 1 GiB)",
    )
    parser.add_argument(
        "--max-per-client",
        metavar="N",
        type=positive_int,
        help="maximum number of waiting requests of one client in one lane (default of a new queue: 1,024)",
    )
    parser.add_argument(
        "--upload-bytes",
        metavar="SIZE",
        type=size,
        help="maximum size of the bucket for uploads of publishers, which is created if missing (for example 32GiB; "
        "default: unchanged)",
    )


async def run(args: argparse.Namespace) -> int:
    """Create queues and bucket, and set limits."""
    from ....bus.control.updates import provision
    from ....bus.nats.server import Server
    from ..console import print_json, write

    given = {"max_msgs": args.max_requests, "max_bytes": args.max_bytes, "max_per_client": args.max_per_client}
    given = {name: value for name, value in given.items() if value is not None}
    buckets = await provision(Server.named(args.nats), args.fleet, args.models, given, upload_bytes=args.upload_bytes)
    if args.json:
        print_json({"models": args.models, "upload_buckets": buckets})
    else:
        write(f"the queue of {', '.join(args.models)} exists")
        for bucket, change in buckets.items():
            write(f"the bucket {bucket} for uploads was {change}: at most {args.upload_bytes:,} bytes")
    return ExitCode.OK
