"""Formats the published weights of a model as a table and as JSON."""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Set
from typing import NamedTuple

import msgspec

from ... import bus
from ...bus import Client, PublishedWeights, WeightPublisher
from ...bus.nats.connection import connected
from ...bus.nats.server import Server
from ...bus.objects.uploads import sources_in
from ...bus.protocol.weights.chain import chain_length
from ...bus.publish.chain_store import ChainKey
from ...bus.publish.options import PublishSettings
from ...bus.publish.tensors import folder_tensors
from ...schemas.decoding import JsonObject
from ...schemas.errors import ControlCode, ControlError
from ...schemas.manifest import ChainRecord, Link
from ..command_json import result_as_json
from .console import note, print_json, size, waiting, write
from .control import AckCounter, show_result
from .exits import CommandFailed, ExitCode, WrongUsage, exit_code_of_result
from .options import check_known_model, connect, refuse_options
from .tables import NONE, print_table, print_text, printable

COLUMNS = ("version", "kind", "anchor", "delta", "recorded", "workers", "objects")


class ModelWeights(NamedTuple):
    """The published weights of one model."""

    record: ChainRecord
    age_s: float
    """Seconds since the record was stored, by the server's clock. Infinite without a record."""
    used: int
    """Bytes in the bucket."""
    limit: int
    """Maximum bytes of the bucket."""
    recorded: Set[str]
    """Folders that the desired state names."""
    workers: Mapping[int, list[str]]
    """Ids of the live workers that serve each version."""


def head_line(weights: ModelWeights) -> str:
    """Return a line with the publisher, the bytes in the bucket and the length of the chain."""
    record = weights.record
    holder = "no publisher"
    if record.holder is not None:
        holder = f"published by {record.holder.publisher} (heard {weights.age_s:.0f} s ago)"
    limit = f" of {size(weights.limit)}" if weights.limit < 2**60 else ""
    length = f"{chain_length(record.links)} versions after the last anchor"
    return f"{record.model}: {holder}, epoch {record.epoch}, {size(weights.used)}{limit} used, {length}"


def weights_rows(weights: ModelWeights) -> list[list[str]]:
    """Return the cells of `COLUMNS` for each version, the newest last."""
    newest = {link.version: link.objects for link in weights.record.links}
    return [
        [
            str(link.version),
            _kind(link),
            NONE if link.anchor_bytes is None else size(link.anchor_bytes),
            NONE if link.delta_bytes is None else size(link.delta_bytes),
            "yes" if link.objects in weights.recorded else NONE,
            # Workers publish only the number of their version. It means the last published version of that number.
            ", ".join(sorted(weights.workers.get(link.version, ())) if newest[link.version] == link.objects else ())
            or NONE,
            link.objects,
        ]
        for link in weights.record.links
    ]


def weights_as_json(weights: ModelWeights) -> JsonObject:
    """Return the published weights as a JSON object."""
    record = weights.record
    return {
        "model": record.model,
        "epoch": record.epoch,
        "publisher": None if record.holder is None else record.holder.publisher,
        "renewed_s": None if math.isinf(weights.age_s) else round(weights.age_s, 3),
        "used_bytes": weights.used,
        "limit_bytes": weights.limit,
        "chain_length": chain_length(record.links),
        "versions": [
            {
                **msgspec.to_builtins(link),
                "kind": _kind(link),
                "recorded": link.objects in weights.recorded,
                "workers": sorted(weights.workers.get(link.version, ())),
            }
            for link in record.links
        ],
    }


def _kind(link: Link) -> str:
    if link.anchor_bytes is None:
        return "delta"
    return "anchor" if link.delta_bytes is None else "anchor, delta"


async def run(args: argparse.Namespace) -> int:
    """Read the chain records and ask the workers."""
    async with connect(args) as rb:
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
            versions = defaultdict[int, list[str]](list)
            for worker in fleet.workers:
                if worker.model == model:
                    versions[worker.weight_version].append(worker.worker)
            recorded = sources_in(fleet.desired[model]) if model in fleet.desired else frozenset()
            found.append(ModelWeights(stored.record, stored.age_s, bucket.used, bucket.limit, recorded, versions))
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


async def publish(args: argparse.Namespace) -> int:
    """Store and load the version."""
    if args.store_only:
        refuse_options(args, ("mode", "min_staged", "timeout_s"), "with --store-only")

    async with connect(args) as rb:
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
                async with WeightPublisher(rb, model=model, checkpoint=args.folder, base=args.base) as publisher:
                    tensors = folder_tensors(args.folder)
                    published = await publisher.publish(tensors, version=args.version, **settings)
            except bus.CommandIncomplete as error:
                incomplete = error
            else:
                _show_published(args, published)
                return ExitCode.OK if published.ledger is None else exit_code_of_result(published.ledger)
    show_result(args, incomplete.ledger)
    note(f"rollbus: version {args.version} is stored. {printable(str(incomplete))}")
    return exit_code_of_result(incomplete.ledger)


async def only_model(rb: Client) -> str:
    """Return the only model of the fleet.

    Raises:
        CommandFailed: the fleet has no model, or several models.
    """
    models = await rb.fleet.known_models()
    if len(models) != 1:
        found = f"the fleet has the models {', '.join(models)}" if models else "the fleet has no model"
        raise WrongUsage(f"--model NAME is required: {found}")
    return models[0]


def _show_published(args: argparse.Namespace, published: PublishedWeights) -> None:
    if args.json:
        told = msgspec.to_builtins(msgspec.structs.replace(published, ledger=None))
        told["ledger"] = None if published.ledger is None else result_as_json(published.ledger)
        print_json(told)
        return
    if published.ledger is not None:
        show_result(args, published.ledger)
    what = "an anchor" if published.is_anchor else "a delta"
    write(
        f"published version {published.version} as {what}: {size(published.stored_bytes)} of "
        f"{size(published.model_bytes)}, {published.num_changed} of {published.num_tensors} tensors changed, in "
        f"{published.seconds:.2f} s: {published.objects}"
    )
