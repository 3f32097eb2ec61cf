"""Runs the HTTP service for commands: its options, its address and its settings from the environment."""

import argparse
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ....schemas.limits import MAX_TIMEOUT_S
from ....schemas.options import duration, pip_install, positive_int
from ...http.service import LOOPBACK, Settings
from ..exits import CommandFailed, ExitCode
from ..options import add_tokenizer, host_name

if TYPE_CHECKING:
    from ....bus import Server


DEFAULT_ADDRESS = "127.0.0.1:8080"


def add_http_options(parser: argparse.ArgumentParser, http: str | None, default: str) -> None:
    """Add the options of the HTTP service.

    Args:
        http: default address, for the option's value.
        default: default address, for its help text.
    """
    settings = Settings()
    parser.add_argument(
        "--http", metavar="HOST:PORT", default=http, help=f"address of the HTTP service (default: {default})"
    )
    parser.add_argument(
        "--allowed-host",
        metavar="NAME",
        type=host_name,
        action="append",
        default=[],
        help="name by which clients reach the HTTP service, such as that of a proxy in front of it; may be repeated "
        "(default: the host of --http; always: localhost and addresses)",
    )
    add_tokenizer(parser)
    _add_parsers(parser)
    _add_request_options(parser)
    parser.add_argument(
        "--max-in-flight",
        metavar="N",
        type=positive_int,
        default=settings.max_in_flight,
        help="maximum concurrent HTTP requests for tokens; further requests get status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--client-timeout",
        metavar="TIME",
        type=duration,
        default=settings.client_timeout_s,
        help="time for a client to send its request, and to read each part of the answer (default: %(default)g)",
    )
    parser.add_argument(
        "--prefill-min-tokens",
        metavar="N",
        type=positive_int,
        default=settings.prefill_min_tokens,
        help="minimum tokens of a prompt for a prefill worker, if the fleet has prefill workers (default: %(default)s)",
    )


def _add_parsers(parser: argparse.ArgumentParser) -> None:
    """Add the options that select vLLM's parsers. vLLM has the same names for these options."""
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="vLLM's parser of the model's tool calls, such as hermes or qwen3_coder; vLLM must be installed where the "
        "HTTP service runs (default: none; requests with tools are rejected)",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="vLLM's parser of the model's reasoning, such as qwen3 or deepseek_r1 (default: none; reasoning stays in "
        "the content)",
    )


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
        raise CommandFailed(str(exc), ExitCode.USAGE) from exc


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that apply to every request."""
    parser.add_argument(
        "--default-model",
        metavar="NAME",
        help="model or adapter of HTTP requests that name none (default: the only known model; with several, such "
        "requests are rejected)",
    )
    parser.add_argument(
        "--request-timeout",
        metavar="TIME",
        type=request_timeout,
        default=Settings().timeout_s,
        help="timeout of requests for tokens without timeout_s and without the header X-Request-Timeout "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--max-wait",
        metavar="TIME",
        type=request_timeout,
        default=Settings().max_wait_s,
        help="how long an HTTP request waits while no worker serves its model and one starts, updates or is "
        "paused; then the answer is 503 (default: %(default)g)",
    )
    parser.add_argument(
        "--return-tokens",
        action="store_true",
        help="return token ids and log probabilities in every answer, even if the request does not ask for them",
    )
    parser.add_argument(
        "--routed-experts-npy",
        action="store_true",
        help="return routed experts as vLLM's base64 .npy string in every choice "
        "(default: as an object, and on OpenAI's routes only on request)",
    )
    parser.add_argument(
        "--trust-traceparent",
        action="store_true",
        help="let the flags of a client's traceparent decide whether its request is sampled (default: clear the flags)",
    )


def request_timeout(text: str) -> float:
    """Parse the timeout of a request."""
    value = duration(text)
    if value > MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is above {MAX_TIMEOUT_S:g}")
    return value


def settings_of(args: argparse.Namespace, host: str) -> Settings:
    """Return the settings that `rollbus frontend` and `rollbus up` have in common."""
    return replace(
        settings_from_environment(),
        allowed_hosts=frozenset({host, *args.allowed_host}),
        default_model=args.default_model,
        timeout_s=args.request_timeout,
        max_in_flight=args.max_in_flight,
        client_timeout_s=args.client_timeout,
        prefill_min_tokens=args.prefill_min_tokens,
        tokenizer=args.tokenizer,
        max_wait_s=args.max_wait,
        returns_tokens=args.return_tokens,
        routed_experts_npy=args.routed_experts_npy,
        otel=args.otel,
        trusts_traceparent=args.trust_traceparent,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )


def address(text: str) -> tuple[str, int]:
    """Split HOST:PORT.

    Raises:
        CommandFailed: `text` has another form.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise CommandFailed(f"--http {text}: allowed is HOST:PORT, as in {DEFAULT_ADDRESS}", ExitCode.USAGE)
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
    from ...http.edge import raise_descriptor_limit
    from ...http.server import listen
    from ..console import note

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
    nats: "str | Server", fleet: str, settings: Settings, listening: socket.socket
) -> AsyncIterator[str]:
    """Run the HTTP service of a fleet on a listening socket while the body runs. Yield its URL.

    Raises:
        BusBroken: no NATS server answers.
    """
    from .... import bus
    from ...http.server import serving

    host, port = listening.getsockname()[:2]
    client = bus.connect(nats, fleet=fleet, prefill_min_tokens=settings.prefill_min_tokens, tracing=settings.otel)
    async with client as rb, serving(rb, settings, listening):
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
