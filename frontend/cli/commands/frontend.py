"""Serve the fleet over HTTP, for clients of vLLM, OpenAI and Dynamo.

Without --http, only this machine can reach the service. The service reads bearer tokens from the environment:
ROLLBUS_HTTP_TOKEN for requests, ROLLBUS_ADMIN_TOKEN for routes that change the fleet. With --json, the command prints
one line {"http": URL} when the service is ready.
"""

import argparse
import asyncio
from contextlib import closing
from dataclasses import replace

from ...http.settings import Settings
from ..arguments import add_otel, add_tokenizer, positive_float, positive_int
from ..exits import ExitCode
from ..http_service import (
    DEFAULT_ADDRESS,
    add_allowed_host,
    add_parsers,
    add_request_options,
    address,
    bind_address,
    check_installed,
    check_parsers,
    serve_http,
    settings_of,
)

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "serve the fleet over HTTP"
EXAMPLES = (
    "rollbus frontend",
    "rollbus frontend --http 127.0.0.1:8000",
    "ROLLBUS_HTTP_TOKEN=secret rollbus frontend --http 0.0.0.0:8080 --allowed-host fleet.example.com",
    "curl -s http://127.0.0.1:8080/v1/models    # in a second terminal",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    defaults = Settings()
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT_ADDRESS,
        help="address of the service; port 0: any free port (default: %(default)s)",
    )
    add_allowed_host(parser)
    add_tokenizer(parser)
    add_parsers(parser)
    add_request_options(parser)
    add_otel(parser)
    parser.add_argument(
        "--max-in-flight",
        metavar="N",
        type=positive_int,
        default=defaults.max_in_flight,
        help="maximum concurrent requests for tokens; further requests get status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--client-timeout",
        metavar="S",
        type=positive_float,
        default=defaults.client_timeout_s,
        help="seconds for a client to send its request, and to read each part of the answer (default: %(default)g)",
    )
    parser.add_argument(
        "--prefill-min-tokens",
        metavar="N",
        type=positive_int,
        default=defaults.prefill_min_tokens,
        help="minimum tokens of a prompt for a prefill worker, if the fleet has prefill workers (default: %(default)s)",
    )


async def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    from ..app import until_signalled
    from ..console import note, print_json

    host, port = address(args.http)
    check_installed()
    check_parsers(args)
    settings = replace(
        settings_of(args, host),
        max_in_flight=args.max_in_flight,
        client_timeout_s=args.client_timeout,
        prefill_min_tokens=args.prefill_min_tokens,
        tokenizer=args.tokenizer,
    )
    with until_signalled(), closing(bind_address(host, port)) as listening:
        async with serve_http(args.nats, args.fleet, settings, listening) as url:
            note(f"HTTP: {url}")
            note(f"Page: {url}/")
            if args.json:
                print_json({"http": url})
            await asyncio.Event().wait()
    return ExitCode.OK
