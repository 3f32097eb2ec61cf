"""Show the history of one request of any client: its attempts, its workers, and its time in each phase.

REQUEST is the id from the client, or the id of an OpenAI answer. The command asks the workers. Each worker stores the
history of its requests in flight and of its last 1,000 ended requests. If no worker knows the request, the command
exits with 1. If some workers do not answer, it exits with 3.
"""

import argparse
import shutil

from ....schemas.options import duration
from ..exits import CommandFailed, ExitCode

HELP = "show the history of a request"
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
        metavar="TIME",
        type=duration,
        default=5.0,
        help="seconds to wait for the answers of all workers (default: 5)",
    )


async def run(args: argparse.Namespace) -> int:
    """Ask the workers and print the history."""
    from .... import bus
    from ...command_json import answer_of, find_timelines, unknown_request
    from ..console import print_json, write
    from ..watch.traces import trace_lines

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        trace = await find_timelines(rb.fleet, args.request_id, model=args.model, timeout_s=args.timeout_s)
    if not trace.timelines:
        raise CommandFailed(unknown_request(trace), ExitCode.FAILED if trace.workers_answered else ExitCode.TIMEOUT)
    if args.json:
        print_json(answer_of(trace))
    else:
        write("\n".join(trace_lines(trace, shutil.get_terminal_size().columns)))
    return ExitCode.PARTIAL if trace.silent else ExitCode.OK
