"""Runs the HTTP service for commands: its options, its address and its settings from the environment."""

import argparse
import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import fields, replace

from .... import bus
from ....bus import Server
from ....schemas.options import pip_install
from ...http import LOOPBACK, Settings
from ..app import until_signalled
from ..commands.machine import DEFAULT_ADDRESS
from ..console import note, print_json
from ..exits import CommandFailed, ExitCode, WrongUsage


def check_parsers(args: argparse.Namespace) -> None:
    """Load the parsers before any process starts, so that a wrong name fails early.

    Raises:
        CommandFailed: vLLM has no parser of that name, or vLLM is not installed.
    """
    if args.tool_call_parser is None and args.reasoning_parser is None:
        return
    from ...http.openai.parsers import ParserUnavailable, load_parsers

    try:
        load_parsers(args.tool_call_parser, args.reasoning_parser)
    except ParserUnavailable as exc:
        raise WrongUsage(str(exc)) from exc


def settings_of(args: argparse.Namespace, host: str) -> Settings:
    """Return the settings that `rollbus frontend` and `rollbus up` have in common."""
    given = {each.name: getattr(args, each.name) for each in fields(Settings) if hasattr(args, each.name)}
    return replace(settings_from_environment(), allowed_hosts=frozenset({host.lower(), *args.allowed_host}), **given)


def address(text: str) -> tuple[str, int]:
    """Split HOST:PORT.

    Raises:
        CommandFailed: `text` has another form.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise WrongUsage(f"--http {text}: allowed is HOST:PORT, as in {DEFAULT_ADDRESS}")
    return host.strip("[]"), int(port)


def check_installed() -> None:
    """Check that the packages of the HTTP service are installed, before any process starts.

    Raises:
        CommandFailed: a package is not installed. The message has the pip command that installs it.
    """
    try:
        from ...http import server  # noqa: F401 - this only checks that the import works
    except ImportError as exc:
        raise CommandFailed(f"{exc.name} is not installed: {pip_install('frontend')}") from exc


def bind_address(host: str, port: int) -> socket.socket:
    """Listen at an address and raise the limit of file descriptors to its maximum.

    If other machines can reach the address, print a note, and a warning for each token that is not set.

    Raises:
        CommandFailed: another process uses the address, or it is not an address of this machine.
    """
    from ...http.server import listen, raise_descriptor_limit

    try:
        listening = listen(host, port)
    except OSError as exc:
        raise CommandFailed(f"--http {host}:{port}: {exc.strerror or exc}") from exc
    raise_descriptor_limit()
    if host not in LOOPBACK:
        note(f"listening on {host}: other machines can reach this service")
        settings = settings_from_environment()
        for name, token in (("ROLLBUS_HTTP_TOKEN", settings.token), ("ROLLBUS_ADMIN_TOKEN", settings.admin_token)):
            if token is None:
                note(f"warning: {name} is not set: the service accepts requests without this token")
    return listening


def settings_from_environment() -> Settings:
    """Return the default settings with the tokens from the environment."""
    return Settings(
        token=os.environ.get("ROLLBUS_HTTP_TOKEN") or None, admin_token=os.environ.get("ROLLBUS_ADMIN_TOKEN") or None
    )


@asynccontextmanager
async def serve_http(
    nats: str | Server, fleet: str, settings: Settings, listening: socket.socket
) -> AsyncIterator[str]:
    """Run the HTTP service of a fleet on a listening socket while the body runs. Yield its URL.

    Raises:
        BusBroken: no NATS server answers.
    """
    from ...http.server import serving

    host, port = listening.getsockname()[:2]
    client = bus.connect(nats, fleet=fleet, prefill_min_tokens=settings.prefill_min_tokens, tracing=settings.otel)
    async with client as rb, serving(rb, settings, listening):
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives."""
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
