"""Serve the fleet over HTTP, for clients of vLLM, OpenAI and Dynamo.

Without --http it can be reached from this machine only. Bearer tokens are read from the environment: ROLLBUS_HTTP_TOKEN
for requests, ROLLBUS_ADMIN_TOKEN for what changes the fleet.
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path

from frontend.cli.arguments import positive_int
from frontend.cli.exits import CommandFailed, ExitCode

__all__ = ["HELP", "add_arguments", "address", "run"]

HELP = "serve the fleet over HTTP"

DEFAULT_ADDRESS = "127.0.0.1:8080"


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
        default=1024,
        help="requests for tokens at a time; one more is answered 429 (default: %(default)s)",
    )


def address(text: str) -> tuple[str, int]:
    """Split HOST:PORT.

    Raises:
        CommandFailed: it is something else.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise CommandFailed(f"--http {text}: allowed is HOST:PORT, as in {DEFAULT_ADDRESS}", ExitCode.USAGE)
    return host.strip("[]"), int(port)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from frontend.cli.app import run_async

    return run_async(_serve(args, *address(args.http)))


async def _serve(args: argparse.Namespace, host: str, port: int) -> int:
    try:
        from frontend.http.server import listen, serving
        from frontend.http.settings import LOOPBACK, Settings
    except ImportError as exc:
        raise CommandFailed(f"{exc.name} is not installed: pip install 'rollbus[frontend]'") from exc
    import bus
    from frontend.cli.console import note

    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("not called in a task")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    settings = Settings(
        token=os.environ.get("ROLLBUS_HTTP_TOKEN") or None,
        admin_token=os.environ.get("ROLLBUS_ADMIN_TOKEN") or None,
        max_in_flight=args.max_in_flight,
        tokenizer=args.tokenizer,
    )
    listening = listen(host, port)
    if host not in LOOPBACK:
        note(f"listening on {host}: other machines can reach this service")
        for name, token in (("ROLLBUS_HTTP_TOKEN", settings.token), ("ROLLBUS_ADMIN_TOKEN", settings.admin_token)):
            if token is None:
                note(f"warning: {name} is not set: nobody is asked for a token")
    try:
        async with bus.connect(args.nats, fleet=args.fleet) as rb, serving(rb, settings, listening):
            shown = f"[{host}]" if ":" in host else host
            note(f"HTTP: http://{shown}:{listening.getsockname()[1]}")
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        # Nobody else cancels this task.
        note("stopped")
    return ExitCode.OK
