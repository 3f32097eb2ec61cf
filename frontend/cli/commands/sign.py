"""Sign what is stored of before the fleet had its root key, or of before that was replaced.

Programs whose credentials have a root key take no notice of what nobody has signed. This signs the desired states as
they stand, whoever wrote them: look at `rollbus status` first. It takes the credentials of an admin.
"""

import argparse

from ..exits import ExitCode

__all__ = ["HELP", "add_arguments", "run"]

HELP = "sign desired states of before there was a root key"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="what is desired of this model (default: of every model)")


async def run(args: argparse.Namespace) -> int:
    """Sign."""
    from ....bus.control.store import DesiredStore
    from ....bus.nats.connection import connected
    from ....bus.nats.server import Server
    from ....bus.subjects import Subjects
    from ..console import print_json, write

    signed: dict[str, int] = {}
    async with connected(Server.named(args.nats), name="rollbus sign") as nats:
        store = DesiredStore(nats, Subjects(args.fleet))
        for model in [args.model] if args.model else await store.models():
            state = await store.sign(model)
            if state is not None:
                signed[model] = state.epoch
    if args.json:
        print_json({"signed": signed})
    else:
        for model, epoch in signed.items():
            write(f"signed what is desired of {model}: epoch {epoch}")
        if not signed:
            write("nothing was recorded")
    return ExitCode.OK
