"""Measure how fast a fleet is, from where its trainers stand.

Prompts of random token ids go to the workers, as many at once as --concurrency says, and each gets --output-tokens
tokens. None is in a prefix cache. What is shown is the median of the rounds, with the lowest and the highest; what
comes before them, to warm up, is not counted. With --stream, chunks are taken one by one, and their times are measured.

A request that fails or ends early is counted by its error, and the command ends with 1.

With --synthetic, a NATS server and a worker are started for it, whose engine makes its tokens up: what is measured is
the transport alone. So it is where no fleet is named, and nobody listens at the default address.
"""

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..arguments import non_negative_int, positive_int, without_password
from ..exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from .... import bus
    from ..bench import BenchOptions

__all__ = ["EXAMPLES", "HELP", "add_arguments", "names_nobody", "run"]

HELP = "measure how fast the fleet is"
EXAMPLES = (
    "rollbus bench --synthetic --concurrency 16 --rounds 1",
    "rollbus bench --stream --routing",
    "rollbus bench --input-tokens 1024 --output-tokens 256 --json",
)

CONNECT_S = 1.0
"""To see whether anybody listens at an address of this machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="served model name (default: the fleet's only model)")
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=positive_int,
        nargs="+",
        default=[64, 256],
        help="requests that are open at once; several are measured in turns (default: 64 256)",
    )
    parser.add_argument(
        "--requests",
        metavar="N",
        type=positive_int,
        help="of each round (default: four times the concurrency, 32 or more)",
    )
    parser.add_argument("--input-tokens", metavar="N", type=positive_int, default=128, help="default: %(default)s")
    parser.add_argument("--output-tokens", metavar="N", type=positive_int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--logprobs",
        metavar="K",
        type=number_or_none,
        default=0,
        help="none; 0: of each token; more: of the K most likely ones as well (default: 0)",
    )
    parser.add_argument(
        "--routing",
        action=argparse.BooleanOptionalAction,
        help="take the routed experts, or not (default: if the model has experts)",
    )
    parser.add_argument("--rounds", metavar="N", type=positive_int, default=5, help="default: %(default)s")
    parser.add_argument("--stream", action="store_true", help="take chunks, and measure their times")
    parser.add_argument("--seed", metavar="N", type=non_negative_int, default=0, help="of the prompts (default: 0)")
    parser.add_argument(
        "--synthetic", action="store_true", help="measure the transport alone, with a server and a worker of its own"
    )


def number_or_none(text: str) -> int | None:
    """An integer of at least 0, or `none`."""
    return None if text == "none" else non_negative_int(text)


def run(args: argparse.Namespace) -> Coroutine[object, object, int]:
    """Measure, and say what came of it."""
    from ..bench import BenchOptions
    from ..bench.load import BenchLoad

    if args.synthetic and args.model is not None:
        raise CommandFailed("--model is of a fleet, and --synthetic has a model of its own", ExitCode.USAGE)
    load = BenchLoad(
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        logprobs=args.logprobs,
        routing=args.routing,
    )
    options = BenchOptions(
        load=load,
        concurrencies=list(dict.fromkeys(args.concurrency)),
        rounds=args.rounds,
        num_requests=args.requests,
        streams=args.stream,
        seed=args.seed,
    )
    args.synthetic = args.synthetic or names_nobody(args)
    return _bench(args, options)


def names_nobody(args: argparse.Namespace) -> bool:
    """No fleet was named, and nobody listens where one would be."""
    from urllib.parse import urlsplit

    from .. import app

    if args.model is not None or args.fleet != app.DEFAULT_FLEET or args.nats != app.DEFAULT_NATS:
        return False
    if os.environ.get(app.CREDENTIALS_VARIABLE):
        return False
    address = urlsplit(args.nats)
    try:
        socket.create_connection((address.hostname, address.port), CONNECT_S).close()
    except OSError:
        return True
    return False


async def _bench(args: argparse.Namespace, options: "BenchOptions") -> int:
    from .... import bus
    from ..bench.bench import Bench, target_of
    from ..bench.report import Report
    from ..console import print_json

    async with _server(args, options) as server, bus.connect(server, fleet=args.fleet) as rb:
        workers = (await rb.fleet.state()).workers
        target = target_of(workers, args.model, nats_url=args.nats, fleet=args.fleet)
        outcomes = await Bench(rb, target, options, shows_progress=not args.json).run()
    report = Report(
        command=shlex.join(["rollbus", *map(without_password, sys.argv[1:])]),
        fleet=args.fleet,
        target=target,
        options=options,
        outcomes=outcomes,
        is_synthetic=args.synthetic,
    )
    if args.json:
        print_json(report.as_json())
    else:
        report.show()
    failure = report.failure()
    if failure is not None:
        raise CommandFailed(failure)
    return ExitCode.OK


@asynccontextmanager
async def _server(args: argparse.Namespace, options: "BenchOptions") -> "AsyncIterator[str | bus.Server]":
    """Where the fleet is, or one of the bench's own."""
    if not args.synthetic:
        yield args.nats
        return
    from ..console import note
    from ..fleet_display import FleetObserver
    from ..local_fleet import LocalFleet, run_fleet

    note("starting a NATS server and a worker that makes its tokens up: what is measured is the transport alone")
    # All requests are in its batch: it is no engine's queue that is measured.
    engine_args = json.dumps({"max_num_seqs": max(options.concurrencies)})
    flags = ("--engine", "synthetic", "--engine-args", engine_args)
    fleet = LocalFleet(fleet=args.fleet, worker_flags=flags)

    async with run_fleet(fleet, FleetObserver(shows_logs=args.verbose)) as server:
        yield server
