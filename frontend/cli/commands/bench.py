"""Measure the throughput and latency of a fleet as a trainer sees them.

The bench sends prompts of random token ids. --concurrency requests are open at once, and each generates --output-tokens
tokens. No prompt is in a prefix cache. The result is the median of the rounds with the lowest and the highest value. A
warm-up round is not counted. With --stream, the bench reads chunks one by one and measures their times. If requests
fail, the command counts them by error and exits with 1.
"""

import argparse
import shlex
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from ....schemas.options import non_negative_int, positive_int
from ..exits import CommandFailed, ExitCode
from ..options import without_password

if TYPE_CHECKING:
    from ..bench import BenchOptions


HELP = "measure throughput and latency of the fleet"
EXAMPLES = (
    "rollbus bench --concurrency 16 --rounds 1",
    "rollbus bench --stream --routing",
    "rollbus bench --input-tokens 1024 --output-tokens 256 --json",
)


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


def number_or_none(text: str) -> int | None:
    """Parse an integer of at least 0, or `none`."""
    return None if text == "none" else non_negative_int(text)


def run(args: argparse.Namespace) -> Coroutine[object, object, int]:
    """Measure and print the result."""
    from ..bench import BenchLoad, BenchOptions

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
    return _bench(args, options)


async def _bench(args: argparse.Namespace, options: "BenchOptions") -> int:
    from .... import bus
    from ..bench import Bench, Report, target_of
    from ..console import print_json

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        workers = (await rb.fleet.state()).workers
        target = target_of(workers, args.model, nats_url=args.nats, fleet=args.fleet)
        outcomes = await Bench(rb, target, options, shows_progress=not args.json).run()
    report = Report(
        command=shlex.join(["rollbus", *map(without_password, sys.argv[1:])]),
        fleet=args.fleet,
        target=target,
        options=options,
        outcomes=outcomes,
    )
    if args.json:
        print_json(report.as_json())
    else:
        report.show()
    failure = report.failure()
    if failure is not None:
        raise CommandFailed(failure)
    return ExitCode.OK
