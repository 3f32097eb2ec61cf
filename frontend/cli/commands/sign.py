"""Sign stored desired states and uploads from before the fleet had its root key, or from before a new root key.

Programs whose credentials contain a root key ignore unsigned data. This command signs the present desired states and
the uploads that they name. It does not check who wrote them, so check them first with `rollbus status`. It requires the
credentials of an admin.
"""

import argparse

from ..exits import ExitCode

HELP = "sign data that was stored without a root key"
EXAMPLES = (
    "rollbus sign --creds auth/default/admin-admin.creds",
    "rollbus sign --model my-model --objects BUCKET/PREFIX",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: every model)")
    parser.add_argument(
        "--objects",
        metavar="BUCKET/PREFIX",
        action="append",
        default=[],
        help="also sign this folder in the object store; may be repeated",
    )


async def run(args: argparse.Namespace) -> int:
    """Sign the stored data."""
    from ....bus.control.store import DesiredStore
    from ....bus.nats.connection import connected
    from ....bus.nats.server import Server
    from ....bus.objects.uploads import sources_in
    from ....bus.objects.writer import sign_folder
    from ....bus.subjects import Subjects
    from ..console import print_json, write

    signed: dict[str, int] = {}
    objects = set(args.objects)
    async with connected(Server.named(args.nats), name="rollbus sign") as nats:
        store = DesiredStore(nats, Subjects(args.fleet))
        for model in [args.model] if args.model else await store.models():
            state = await store.sign(model)
            if state is not None:
                signed[model] = state.epoch
                objects |= sources_in(state)
        for one in sorted(objects):
            await sign_folder(nats, one)
    if args.json:
        print_json({"signed": signed, "objects": sorted(objects)})
    else:
        for model, epoch in signed.items():
            write(f"signed the desired state of {model}: epoch {epoch}")
        for one in sorted(objects):
            write(f"signed {one}")
        if not signed and not objects:
            write("no desired state was recorded")
    return ExitCode.OK
