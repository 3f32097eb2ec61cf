"""Show the history of one request of any client: its attempts, its workers, and where its time went.

REQUEST is the id from the client, or the id of an OpenAI answer. The command asks the workers. Each worker stores its
requests in flight and its last 1,000 ended requests. Exits with 1 if no worker knows the request, and with 3 if some
workers did not answer.
"""

import argparse

from ..arguments import positive_float
from ..exits import CommandFailed, ExitCode

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "show what became of a request"
EXAMPLES = (
    "rollbus trace req-1",
    "rollbus trace chatcmpl-6f1c --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("request_id", metavar="REQUEST", help="id of the request")
    parser.add_argument("--model", metavar="NAME", help="name of the model whose workers to ask (default: every model)")
    parser.add_argument(
        "--timeout-s",
        metavar="S",
        type=positive_float,
        default=5.0,
        help="seconds for all workers to answer (default: 5)",
    )


async def run(args: argparse.Namespace) -> int:
    """Ask the workers and print the history."""
    from .... import bus
    from ...request_traces import answer_of, find_timelines, unknown_request
    from ..console import print_json
    from ..trace_tables import print_trace

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        trace = await find_timelines(rb.fleet, args.request_id, model=args.model, timeout_s=args.timeout_s)
    if not trace.timelines:
        raise CommandFailed(unknown_request(trace), ExitCode.FAILED if trace.workers_answered else ExitCode.TIMEOUT)
    if args.json:
        print_json(answer_of(trace))
    else:
        print_trace(trace)
    return ExitCode.PARTIAL if trace.silent else ExitCode.OK
