"""Measure the throughput and latency of a fleet as a trainer sees them.

The bench sends prompts of random token ids. --concurrency requests are open at once, and each generates --output-tokens
tokens. No prompt is in a prefix cache. The result is the median of the rounds with the lowest and the highest value. A
warm-up round is not counted. With --stream, the bench reads chunks one by one and measures their times. If requests
fail, the command counts them by error and exits with 1.

With --synthetic, the bench starts a NATS server and a worker with a synthetic engine, and measures only the transport.
This is the default if no option names a fleet and no server listens at the default address.
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

from ....schemas.options import non_negative_int, positive_int
from ..exits import CommandFailed, ExitCode
from ..options import refuse_options, without_password

if TYPE_CHECKING:
    from .... import bus
    from ..bench import BenchOptions


HELP = "measure throughput and latency of the fleet"
EXAMPLES = (
    "rollbus bench --synthetic --concurrency 16 --rounds 1",
    "rollbus bench --stream --routing",
    "rollbus bench --input-tokens 1024 --output-tokens 256 --json",
)

CONNECT_S = 1.0
"""Seconds to check whether a server listens at an address of this machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the only model of the fleet)")
    parser.add_argument(
        "--concurrency",
        metavar="N",
        type=positive_int,
        nargs="+",
        default=[64, 256],
        help="number of requests open at once; several values are measured in turn (default: 64 256)",
    )
    parser.add_argument(
        "--requests",
        metavar="N",
        type=positive_int,
        help="number of requests of each round (default: four times the concurrency, at least 32)",
    )
    parser.add_argument(
        "--input-tokens",
        metavar="N",
        type=positive_int,
        default=128,
        help="tokens of each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--output-tokens",
        metavar="N",
        type=positive_int,
        default=128,
        help="tokens of each answer (default: %(default)s)",
    )
    parser.add_argument(
        "--logprobs",
        metavar="K",
        type=number_or_none,
        default=0,
        help="log probabilities to request: none; 0: each sampled token; K: also the K most likely tokens (default: 0)",
    )
    parser.add_argument(
        "--routing",
        action=argparse.BooleanOptionalAction,
        help="request routed experts, or do not (default: request them if the model has experts)",
    )
    parser.add_argument(
        "--rounds", metavar="N", type=positive_int, default=5, help="number of rounds (default: %(default)s)"
    )
    parser.add_argument("--stream", action="store_true", help="stream chunks and measure their times")
    parser.add_argument(
        "--seed", metavar="N", type=non_negative_int, default=0, help="seed of the prompts (default: 0)"
    )
    parser.add_argument(
        "--synthetic", action="store_true", help="measure only the transport, with a new server and a synthetic worker"
    )


def number_or_none(text: str) -> int | None:
    """Parse an integer of at least 0, or `none`."""
    return None if text == "none" else non_negative_int(text)


def run(args: argparse.Namespace) -> Coroutine[object, object, int]:
    """Measure and print the result."""
    from ..bench import BenchLoad, BenchOptions

    if args.synthetic and args.model is not None:
        raise CommandFailed("--model names a model of a fleet, and --synthetic uses its own model", ExitCode.USAGE)
    if args.synthetic:
        refuse_options(args, ["nats"], "with --synthetic, which starts its own server")
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
    """Return True if the user named no fleet and no server listens at the default address."""
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
    from ..bench import Bench, Report, target_of
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
    """Yield the server of the fleet, or start one for the bench."""
    if not args.synthetic:
        yield args.nats
        return
    from ..console import note
    from ..local.display import FleetObserver
    from ..local.fleet import LocalFleet, run_fleet

    note("starting a NATS server and a worker with a synthetic engine: the bench measures only the transport")
    # All requests are in the engine's batch, so the bench does not measure the queue of an engine.
    engine_args = json.dumps({"max_num_seqs": max(options.concurrencies)})
    flags = ("--engine", "synthetic", "--engine-args", engine_args)
    fleet = LocalFleet(fleet=args.fleet, served_model="synthetic", worker_flags=flags)

    async with run_fleet(fleet, FleetObserver(shows_logs=args.verbose)) as server:
        yield server
