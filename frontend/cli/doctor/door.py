"""Check of the connection to the NATS server: what answers, TLS, and whether the server accepts this user."""

import asyncio
import ssl
import time
from dataclasses import replace
from typing import Final

from ....bus.nats.address import redact
from ....bus.nats.connection import Connection, connected
from ....bus.nats.server import Server
from ....schemas.errors import BusBroken, TlsFailed
from .findings import Finding, Status, fail, ok, warn
from .probe import describe_peer, host_of, probe_server

__all__ = ["enter"]

LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
ENDS_SOON_S: Final = 14 * 24 * 3600.0
"""Remaining validity of a certificate below which it must be renewed."""


async def enter(server: Server) -> list[Finding]:
    """Connect to the server of each URL separately. If another server accepts, a rejection is only a warning."""
    try:
        urls = server.urls
    except BusBroken as error:
        return [fail("server", str(error), "name NATS servers as nats://HOST:PORT or tls://HOST:PORT with --nats")]
    async with asyncio.TaskGroup() as tasks:
        entering = [tasks.create_task(_enter_one(replace(server, url=url))) for url in urls]
    found = [task.result() for task in entering]
    is_open = any(findings[0].status is Status.OK for findings in found)
    return [
        replace(finding, status=Status.WARN) if is_open and finding.status is Status.FAIL else finding
        for findings in found
        for finding in findings
    ]


async def _enter_one(server: Server) -> list[Finding]:
    try:
        async with connected(server, name="rollbus doctor") as nats:
            version = nats.connected_server_version
            shown = f"{version.major}.{version.minor}.{version.patch}"
            return [ok("server", f"nats-server {shown} at {redact(server.url)}"), _tls_finding(nats, server)]
    except BusBroken as error:
        return [await _explain(error, server)]


def _tls_finding(nats: Connection, server: Server) -> Finding:
    """Return the finding about the TLS of an open connection."""
    peer = nats.peer()
    if peer is None:
        found = "the connection does not use TLS"
        if host_of(server.url) in LOOPBACK:
            return ok("tls", f"{found}; the server is on this machine")
        return warn(
            "tls",
            f"{found}: others on the network can read all messages",
            "fine in a trusted network; otherwise set up TLS (rollbus auth init --server-cert FILE) and a tls:// URL",
        )
    found = describe_peer(peer)
    left_s = ssl.cert_time_to_seconds(peer.certificate["notAfter"]) - time.time()
    if left_s < ENDS_SOON_S:
        return warn("tls", f"{found}: {left_s / 86400:.0f} days left", "renew the server's certificate")
    if not server.requires_tls:
        return warn("tls", f"{found}; the URL does not require it", "tls:// in the URL; the server may be a wrong one")
    return ok("tls", found)


async def _explain(error: BusBroken, server: Server) -> Finding:
    """Return why there is no connection, and a remedy."""
    url = redact(server.url)
    if isinstance(error, TlsFailed):
        seen = await probe_server(server.url)
        shown = f"; it showed {describe_peer(seen.peer)}" if seen.peer is not None and seen.peer.certificate else ""
        return fail("tls", f"{error.problem}{shown}", error.advice)
    if "refused" in str(error) and ("uthorization" in str(error) or "uthentication" in str(error)):
        return _refused(str(error), server)
    return await _without_connection(error, server, url)


def _refused(problem: str, server: Server) -> Finding:
    """Return a remedy for credentials that the server rejects."""
    if server.credentials is not None:
        advice = (
            f"the server does not know this key of {server.credentials.user}: the file belongs to another server or is "
            "old. An admin must run `rollbus auth init` with this name, reload the server's configuration "
            "(nats-server --signal reload), and pass on the new file"
        )
    elif "@" in server.url:
        advice = "check user and password in the URL with the administrator of the server"
    else:
        advice = "name your credentials with --creds FILE or $ROLLBUS_CREDS"
    return fail("server", problem, advice)


async def _without_connection(error: BusBroken, server: Server, url: str) -> Finding:
    """Return what answers at the URL, if anything does."""
    seen = await probe_server(server.url)
    if seen.http:
        return fail(
            "server",
            f"the server at {url} speaks HTTP, not NATS: {seen.http}",
            "name the NATS port with --nats (default: 4222); port 8222 is NATS's monitoring page, port 8080 the HTTP "
            "service of rollbus",
        )
    if seen.greeting and not seen.is_nats:
        return fail("server", f"the server at {url} is not a NATS server: {seen.greeting!r}", "name one with --nats")
    if not seen.greeting and seen.peer is not None and not server.requires_tls:
        return fail(
            "server",
            f"the server at {url} sends nothing before a TLS handshake; there it shows {describe_peer(seen.peer)}",
            "tls:// in the URL",
        )
    if seen.is_connected and not seen.greeting:
        return fail(
            "server",
            f"the server at {url} accepts connections and sends nothing, but a NATS server sends first: {error}",
            "if it is a NATS server, it hangs: look at its log; otherwise name a NATS server with --nats",
        )
    advice = (
        "start a server (`rollbus up` with all other processes on this machine, or `nats-server -js` alone), or name "
        "one with --nats"
    )
    return fail("server", str(error), advice)
