"""Subcommands of admins: queues, stored desired states, and their signatures."""

import argparse

from ...bus.control.store import DesiredStore
from ...bus.control.updates import provision
from ...bus.nats.connection import connected
from ...bus.nats.server import Server
from ...bus.objects.uploads import sources_in
from ...bus.objects.writer import sign_folder
from ...bus.subjects import Subjects
from .console import print_result
from .exits import ExitCode
from .options import connect


async def reset(args: argparse.Namespace) -> int:
    """Clear the desired state."""
    async with connect(args) as rb:
        models = await rb.fleet.reset(args.model)
    text = f"cleared the desired state of {', '.join(models)}" if models else "no desired state was recorded"
    print_result(args, {"models": models}, text)
    return ExitCode.OK


async def forget_model(args: argparse.Namespace) -> int:
    """Forget the model."""
    async with connect(args) as rb:
        was_known = await rb.fleet.forget_model(args.model)
    text = f"forgot the model {args.model}" if was_known else f"the model {args.model} was not known"
    print_result(args, {"model": args.model, "was_known": was_known}, text)
    return ExitCode.OK


async def make_queue(args: argparse.Namespace) -> int:
    """Create queues and bucket, and set limits."""
    given = {"max_msgs": args.max_requests, "max_bytes": args.max_bytes, "max_per_client": args.max_per_client}
    given = {name: value for name, value in given.items() if value is not None}
    buckets = await provision(Server.named(args.nats), args.fleet, args.models, given, upload_bytes=args.upload_bytes)
    lines = [f"the queue of {', '.join(args.models)} exists"]
    for bucket, change in buckets.items():
        lines.append(f"the bucket {bucket} for uploads was {change}: at most {args.upload_bytes:,} bytes")
    print_result(args, {"models": args.models, "upload_buckets": buckets}, *lines)
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
    lines = [f"signed the desired state of {model}: epoch {epoch}" for model, epoch in signed.items()]
    lines += [f"signed {one}" for one in sorted(objects)]
    value = {"signed": signed, "objects": sorted(objects)}
    print_result(args, value, *(lines or ["no desired state was recorded"]))
    return ExitCode.OK
