"""Serve the fleet over HTTP, for clients of vLLM, OpenAI and Dynamo.

Without --http, only this machine can reach the service. The service reads bearer tokens from the environment:
ROLLBUS_HTTP_TOKEN for requests, ROLLBUS_ADMIN_TOKEN for routes that change the fleet. With --json, the command prints
one line {"http": URL} when the service is ready.
"""

import argparse
import asyncio
from contextlib import closing

from ....schemas.options import add_otel
from ..exits import ExitCode
from ..local.http import (
    DEFAULT_ADDRESS,
    add_http_options,
    address,
    bind_address,
    check_installed,
    check_parsers,
    serve_http,
    settings_of,
)

HELP = "serve the fleet over HTTP"
EXAMPLES = (
    "rollbus frontend",
    "rollbus frontend --http 127.0.0.1:8000",
    "ROLLBUS_HTTP_TOKEN=secret rollbus frontend --http 0.0.0.0:8080 --allowed-host fleet.example.com",
    "curl -s http://127.0.0.1:8080/v1/models    # in a second terminal",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_http_options(parser, DEFAULT_ADDRESS, "%(default)s; port 0: any free port")
    add_otel(parser)


async def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
    from ..app import until_signalled
    from ..console import note, print_json

    host, port = address(args.http)
    check_installed()
    check_parsers(args)
    settings = settings_of(args, host)
    with until_signalled(), closing(bind_address(host, port)) as listening:
        async with serve_http(args.nats, args.fleet, settings, listening) as url:
            note(f"HTTP: {url}")
            note(f"Page: {url}/")
            if args.json:
                print_json({"http": url})
            await asyncio.Event().wait()
    return ExitCode.OK
