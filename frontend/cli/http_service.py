"""The HTTP service as commands run it: its address, its settings from the environment, and what is said of them."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from frontend.cli.exits import CommandFailed, ExitCode
from schemas.limits import DEFAULT_PREFILL_MIN_TOKENS

if TYPE_CHECKING:
    from bus import Server
    from frontend.http.settings import Settings

__all__ = [
    "CLIENT_TIMEOUT_S",
    "DEFAULT_ADDRESS",
    "MAX_IN_FLIGHT",
    "address",
    "check_installed",
    "serve_http",
    "settings_of",
    "take_address",
]

DEFAULT_ADDRESS = "127.0.0.1:8080"
MAX_IN_FLIGHT = 1024
"""Requests for tokens at a time, where nobody says another number."""
CLIENT_TIMEOUT_S = 300.0
"""For a client that does not read its answer, likewise."""


def address(text: str) -> tuple[str, int]:
    """Split HOST:PORT.

    Raises:
        CommandFailed: it is something else.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise CommandFailed(f"--http {text}: allowed is HOST:PORT, as in {DEFAULT_ADDRESS}", ExitCode.USAGE)
    return host.strip("[]"), int(port)


def check_installed() -> None:
    """Say what to install before anything is started without it.

    Raises:
        CommandFailed: the service's packages are not there.
    """
    try:
        import frontend.http.server  # noqa: F401 - whether it can be imported is the question
    except ImportError as exc:
        raise CommandFailed(f"{exc.name} is not installed: pip install 'rollbus[frontend]'") from exc


def take_address(host: str, port: int) -> socket.socket:
    """Listen there, and say so if others can reach it.

    Raises:
        CommandFailed: it is taken, or not of this machine.
    """
    from frontend.cli.console import note
    from frontend.http.server import listen
    from frontend.http.settings import LOOPBACK

    try:
        listening = listen(host, port)
    except OSError as exc:
        raise CommandFailed(f"--http {host}:{port}: {exc.strerror or exc}") from exc
    if host not in LOOPBACK:
        note(f"listening on {host}: other machines can reach this service")
        settings = settings_of()
        for name, token in (("ROLLBUS_HTTP_TOKEN", settings.token), ("ROLLBUS_ADMIN_TOKEN", settings.admin_token)):
            if token is None:
                note(f"warning: {name} is not set: nobody is asked for a token")
    return listening


def settings_of(
    *,
    max_in_flight: int = MAX_IN_FLIGHT,
    client_timeout_s: float = CLIENT_TIMEOUT_S,
    prefill_min_tokens: int = DEFAULT_PREFILL_MIN_TOKENS,
    tokenizer: Path | None = None,
) -> "Settings":
    """The settings, with the tokens from the environment."""
    from frontend.http.settings import Settings

    return Settings(
        token=os.environ.get("ROLLBUS_HTTP_TOKEN") or None,
        admin_token=os.environ.get("ROLLBUS_ADMIN_TOKEN") or None,
        max_in_flight=max_in_flight,
        client_timeout_s=client_timeout_s,
        prefill_min_tokens=prefill_min_tokens,
        tokenizer=tokenizer,
    )


@asynccontextmanager
async def serve_http(
    nats: "str | Server", fleet: str, settings: "Settings", listening: socket.socket
) -> AsyncIterator[str]:
    """Serve a fleet on a listening socket while the block lasts; yields the service's URL.

    Raises:
        BusBroken: no NATS server answers.
    """
    import bus
    from frontend.http.server import serving

    host, port = listening.getsockname()[:2]
    client = bus.connect(nats, fleet=fleet, prefill_min_tokens=settings.prefill_min_tokens)
    async with client as rb, serving(rb, settings, listening):
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
