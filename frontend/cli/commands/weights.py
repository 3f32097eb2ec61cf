"""Show the published weights of a model: the stored versions, their sizes, and the workers that have them.

A version is an anchor (a whole checkpoint), or a delta with the changes since the version in the line above. Workers
load the recorded version when they start.
"""

import argparse

from ..exits import CommandFailed, ExitCode
from ..options import check_known_model

HELP = "show the published weights"
EXAMPLES = (
    "rollbus weights",
    "rollbus weights --model policy --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: every model of the fleet)")


async def run(args: argparse.Namespace) -> int:
    """Read the chain records and ask the workers."""
    from .... import bus
    from ....bus.nats.connection import connected
    from ....bus.nats.server import Server
    from ....bus.objects.uploads import sources_in
    from ....bus.publish.chain_store import ChainKey
    from ....schemas.errors import ControlCode, ControlError
    from ..console import print_json
    from ..tables import print_table, print_text
    from ..weights import COLUMNS, ModelWeights, head_line, weights_as_json, weights_rows

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        fleet = await rb.fleet.state()
    models = [args.model] if args.model else sorted({worker.model for worker in fleet.workers} | fleet.desired.keys())
    found: list[ModelWeights] = []
    async with connected(Server.named(args.nats), name="rollbus weights") as nats:
        for model in models:
            key = ChainKey(nats, fleet.fleet, model)
            try:
                stored, bucket = await key.read(), await key.bucket_state()
            except ControlError as error:
                if error.code is not ControlCode.STORAGE:
                    raise
                if args.model:
                    check_known_model(fleet, model)
                    raise
                continue  # the model has no bucket
            versions: dict[int, list[str]] = {}
            for worker in fleet.workers:
                if worker.model == model:
                    versions.setdefault(worker.weight_version, []).append(worker.worker)
            found.append(
                ModelWeights(
                    record=stored.record,
                    age_s=stored.age_s,
                    used=bucket.used,
                    limit=bucket.limit,
                    recorded=sources_in(fleet.desired[model]) if model in fleet.desired else frozenset(),
                    workers=versions,
                )
            )
    if not found:
        shown = f"fleet {fleet.fleet!r} has no published weights: no model has a bucket for them"
        raise CommandFailed(
            f"{shown}; `rollbus publish-weights` or a trainer's rollbus.WeightPublisher publish weights"
        )
    if args.json:
        print_json({"models": [weights_as_json(weights) for weights in found]})
        return ExitCode.OK
    for weights in found:
        print_text(head_line(weights))
        print_table(COLUMNS, weights_rows(weights))
    return ExitCode.OK
