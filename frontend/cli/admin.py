"""Subcommands of admins: queues, stored desired states, and their signatures."""

import argparse

from ... import bus
from ...bus.control.store import DesiredStore
from ...bus.control.updates import provision
from ...bus.nats.connection import connected
from ...bus.nats.server import Server
from ...bus.objects.uploads import sources_in
from ...bus.objects.writer import sign_folder
from ...bus.subjects import Subjects
from .console import print_json, write
from .exits import ExitCode


async def reset(args: argparse.Namespace) -> int:
    """Clear the desired state."""
    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        models = await rb.fleet.reset(args.model)
    if args.json:
        print_json({"models": models})
    else:
        write(f"cleared the desired state of {', '.join(models)}" if models else "no desired state was recorded")
    return ExitCode.OK


async def forget_model(args: argparse.Namespace) -> int:
    """Forget the model."""
    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        was_known = await rb.fleet.forget_model(args.model)
    if args.json:
        print_json({"model": args.model, "was_known": was_known})
    else:
        write(f"forgot the model {args.model}" if was_known else f"the model {args.model} was not known")
    return ExitCode.OK


async def make_queue(args: argparse.Namespace) -> int:
    """Create queues and bucket, and set limits."""
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


async def sign(args: argparse.Namespace) -> int:
    """Sign the stored data."""
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
