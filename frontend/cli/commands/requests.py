"""List the requests at the workers: running, slowest, failed or resumed. In a terminal, Enter opens a request's trace.

Each worker knows its requests in flight and the last 1,000 that ended. Requests that wait in the queue are not listed:
`rollbus status` counts them. In a terminal, the list is updated each second. Keys: arrows select, Enter opens the
trace, b goes back, s shows the next list, q quits. If some workers do not answer, the command exits with 3.
"""

import argparse
import shutil

from ..exits import ExitCode

HELP = "list requests: running, slowest, failed or resumed"
EXAMPLES = (
    "rollbus requests",
    "rollbus requests slowest --client trainer-0",
    "rollbus requests failed --worker local-0 --json",
)
LISTS = ("running", "slowest", "failed", "resumed")
MAX_LISTED = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("show", nargs="?", choices=LISTS, default="running", help="the list (default: running)")
    parser.add_argument("--client", metavar="NAME", help="only requests of this client (default: of all)")
    parser.add_argument("--model", metavar="NAME", help="only requests for this model (default: for all)")
    parser.add_argument(
        "--worker",
        dest="only_workers",
        metavar="ID",
        action="append",
        help="only requests at this worker; may be repeated (default: at all workers)",
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        choices=range(1, MAX_LISTED + 1),
        default=50,
        help=f"maximum number of requests, up to {MAX_LISTED} (default: 50)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the list once, also in a terminal (implied by --json)"
    )


async def run(args: argparse.Namespace) -> int:
    """Show the list until the user quits, or print it once."""
    from .... import bus
    from ...command_json import RequestQuery
    from ..console import print_json, write
    from ..watch.terminal import is_capable
    from ..watch.traces import browse, list_as_json, list_notes, list_table

    query = RequestQuery(args.show, args.client, args.model, args.only_workers, args.limit)
    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        if is_capable() and not (args.once or args.json):
            await browse(rb, query)
            return ExitCode.OK
        found = await query.read(rb.fleet)
    if args.json:
        print_json(list_as_json(args.show, found))
    else:
        width = shutil.get_terminal_size().columns
        lines = list_notes(args.show, found, width)
        write("\n".join([*lines, "", *list_table(found, width).lines] if found.timelines else lines))
    return ExitCode.PARTIAL if found.silent else ExitCode.OK
