"""Serve the fleet over HTTP, for clients of vLLM, OpenAI and Dynamo.

Without --http it can be reached from this machine only. Bearer tokens are read from the environment: ROLLBUS_HTTP_TOKEN
for requests, ROLLBUS_ADMIN_TOKEN for what changes the fleet. With --json, one line {"http": URL} once it serves.
"""

import argparse
import asyncio
from contextlib import closing
from pathlib import Path

from frontend.cli.arguments import positive_float, positive_int
from frontend.cli.exits import ExitCode
from frontend.cli.http_service import (
    CLIENT_TIMEOUT_S,
    DEFAULT_ADDRESS,
    MAX_IN_FLIGHT,
    address,
    check_installed,
    serve_http,
    settings_of,
    take_address,
)
from schemas.limits import DEFAULT_PREFILL_MIN_TOKENS

__all__ = ["HELP", "add_arguments", "run"]

HELP = "serve the fleet over HTTP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT_ADDRESS,
        help="where to listen (default: %(default)s); port 0: any",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="folder of the tokenizer (default: that of a worker on this machine)",
    )
    parser.add_argument(
        "--max-in-flight",
        metavar="N",
        type=positive_int,
        default=MAX_IN_FLIGHT,
        help="requests for tokens at a time; one more is answered 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--client-timeout",
        metavar="S",
        type=positive_float,
        default=CLIENT_TIMEOUT_S,
        help="seconds until a client that does not read its answer loses its connection (default: %(default)g)",
    )
    parser.add_argument(
        "--prefill-min-tokens",
        metavar="N",
        type=positive_int,
        default=DEFAULT_PREFILL_MIN_TOKENS,
        help="prompts of at least so many tokens go to a prefill worker first, where there is one (default: "
        "%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from frontend.cli.app import run_async

    host, port = address(args.http)
    check_installed()
    return run_async(_serve(args, host, port))


async def _serve(args: argparse.Namespace, host: str, port: int) -> int:
    from frontend.cli.app import cancel_on_signals
    from frontend.cli.console import note, print_json

    cancel_on_signals()
    settings = settings_of(
        max_in_flight=args.max_in_flight,
        client_timeout_s=args.client_timeout,
        prefill_min_tokens=args.prefill_min_tokens,
        tokenizer=args.tokenizer,
    )
    try:
        with closing(take_address(host, port)) as listening:
            async with serve_http(args.nats, args.fleet, settings, listening) as url:
                note(f"HTTP: {url}")
                if args.json:
                    print_json({"http": url})
                await asyncio.Event().wait()
    except asyncio.CancelledError:
        # Nobody else cancels this task.
        note("stopped")
    return ExitCode.OK
