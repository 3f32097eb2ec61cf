"""Publish a checkpoint through NATS, without a shared disk. All workers of the model then load it.

DIR is the folder of a whole checkpoint on this machine. The command stores it in the bucket of the model as an anchor,
a whole checkpoint. With --base, the folder of the last published version, it stores only the changes. Workers with that
version then fetch only the changes. The content of --base must equal the published version; the command compares
hashes.

Only one program at a time may publish weights of a model. `rollbus weights` shows the published versions. A trainer
publishes from its memory with rollbus.WeightPublisher.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ....schemas.options import duration, non_negative_int
from ..control import add_switch_options
from ..exits import CommandFailed, ExitCode
from ..options import refuse_options

if TYPE_CHECKING:
    from ....bus import Client, PublishedWeights
    from ....bus.publish.options import PublishSettings


HELP = "store a checkpoint for the fleet, and load it"
EXAMPLES = (
    "rollbus publish-weights out/step-7 --version 7",
    "rollbus publish-weights out/step-8 --version 8 --base out/step-7",
    "rollbus publish-weights out/step-9 --version 9 --base out/step-8 --store-only",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of a whole checkpoint on this machine")
    parser.add_argument("--version", metavar="N", type=non_negative_int, required=True, help="version of the weights")
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the only model of the fleet)")
    parser.add_argument(
        "--base",
        metavar="DIR",
        type=Path,
        help="folder of the last published version (default: store the whole checkpoint)",
    )
    parser.add_argument("--store-only", action="store_true", help="store the version without loading it on workers")
    add_switch_options(parser)
    parser.add_argument(
        "--timeout-s",
        metavar="TIME",
        type=duration,
        help="seconds within which each worker must load the version (default: 600)",
    )


async def run(args: argparse.Namespace) -> int:
    """Store and load the version."""
    if args.store_only:
        refuse_options(args, ("mode", "min_staged", "timeout_s"), "with --store-only")
    from .... import bus
    from ..console import note, waiting
    from ..control import AckCounter, show_ledger
    from ..exits import exit_code_of_ledger

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        model = args.model or await only_model(rb)
        with waiting("publish-weights") as show:
            settings: PublishSettings = {
                "update": not args.store_only,
                "mode": args.mode,
                "allow_rollback": args.allow_rollback,
                "min_staged": args.min_staged,
                "on_ack": AckCounter(show).add,
            }
            if args.timeout_s is not None:
                settings["timeout_s"] = args.timeout_s
            show("storing")
            try:
                published = await _publish(rb, model, args, settings)
            except bus.CommandIncomplete as error:
                incomplete = error
            else:
                _show(args, published)
                return ExitCode.OK if published.ledger is None else exit_code_of_ledger(published.ledger)
    show_ledger(args, incomplete.ledger)
    note(f"rollbus: version {args.version} is stored. {incomplete}")
    return exit_code_of_ledger(incomplete.ledger)


async def only_model(rb: "Client") -> str:
    """Return the only model of the fleet.

    Raises:
        CommandFailed: the fleet has no model, or several models.
    """
    models = await rb.fleet.known_models()
    if len(models) != 1:
        found = f"the fleet has the models {', '.join(models)}" if models else "the fleet has no model"
        raise CommandFailed(f"--model NAME is required: {found}", ExitCode.USAGE)
    return models[0]


async def _publish(
    rb: "Client", model: str, args: argparse.Namespace, settings: "PublishSettings"
) -> "PublishedWeights":
    from ....bus import WeightPublisher
    from ....bus.publish.tensors import folder_tensors

    async with WeightPublisher(rb, model=model, checkpoint=args.folder, base=args.base) as publisher:
        return await publisher.publish(folder_tensors(args.folder), version=args.version, **settings)


def _show(args: argparse.Namespace, published: "PublishedWeights") -> None:
    import msgspec

    from ...command_json import ledger_as_json
    from ..console import print_json, size, write
    from ..control import show_ledger

    if args.json:
        told = msgspec.to_builtins(msgspec.structs.replace(published, ledger=None))
        told["ledger"] = None if published.ledger is None else ledger_as_json(published.ledger)
        print_json(told)
        return
    if published.ledger is not None:
        show_ledger(args, published.ledger)
    what = "an anchor" if published.is_anchor else "a delta"
    write(
        f"published version {published.version} as {what}: {size(published.stored_bytes)} of "
        f"{size(published.model_bytes)}, {published.num_changed} of {published.num_tensors} tensors changed, in "
        f"{published.seconds:.2f} s: {published.objects}"
    )
