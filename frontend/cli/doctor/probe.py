"""Finds out what answers at an address if a connection to NATS failed."""

import asyncio
import contextlib
import ssl
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from nats import errors as nats_errors

from ....bus.nats.address import parse_url
from ....bus.nats.transport import NatsTransport, Peer
from ..tables import printable

__all__ = ["ProbeResult", "describe_peer", "host_of", "probe_server"]

WAIT_S: Final = 2.0
"""Seconds for each answer. A NATS server sends immediately, an HTTP server after a request."""
MAX_SHOWN_CHARS: Final = 60
_HTTP_QUESTION: Final = b"GET / HTTP/1.0\r\n\r\n"
_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name. With it, expired certificates are shown too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The answers of a server."""

    is_connected: bool = False
    """True if a server accepts connections."""
    greeting: str = ""
    """Beginning of the first line that the server sent without a request."""
    http: str = ""
    """Status line of the answer to an HTTP request."""
    peer: Peer | None = None
    """TLS protocol and certificate, which are not verified."""

    @property
    def is_nats(self) -> bool:
        """True if the first line is that of a NATS server."""
        return self.greeting.startswith("INFO ")


async def probe_server(url: str) -> ProbeResult:
    """Connect without sending anything about this user, and return the answers. Each wait lasts at most `WAIT_S`."""
    address = urlsplit(parse_url(url))
    host, port = address.hostname or "", address.port or 0
    first = await _answer(host, port, b"")
    if first is None:
        return ProbeResult()
    greeting = first
    http = "" if greeting else await _answer(host, port, _HTTP_QUESTION) or ""
    if http and not http.startswith("HTTP/"):
        greeting, http = http, ""
    # Try no handshake with a server without TLS. A silent server may wait for the handshake.
    is_tls_possible = '"tls_' in greeting if greeting else not http
    peer = await _unverified_peer(url, is_greeted=bool(greeting)) if is_tls_possible else None
    return ProbeResult(is_connected=True, greeting=_shown(greeting), http=_shown(http), peer=peer)


def host_of(url: str) -> str:
    """Return the host of a URL."""
    return urlsplit(parse_url(url)).hostname or ""


def describe_peer(peer: Peer) -> str:
    """Return one line with the protocol and the certificate's subject, names, issuer and expiry."""
    certificate = peer.certificate
    names = ", ".join(value for _, value in certificate.get("subjectAltName", ()))
    return printable(
        f"{peer.protocol}, certificate of {_name(certificate.get('subject'))} for {names or 'no names'}, "
        f"issued by {_name(certificate.get('issuer'))}, valid until {certificate.get('notAfter', '?')}"
    )


def _name(parts: Any) -> str:
    """Return the text of a distinguished name, which `ssl` decodes to a tuple of tuples of pairs."""
    short = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}
    pairs = [pair for part in parts or () for pair in part]
    return ", ".join(f"{short.get(key, key)}={value}" for key, value in pairs) or "unknown"


def _shown(text: str) -> str:
    return printable(text[:MAX_SHOWN_CHARS])


async def _answer(host: str, port: int, question: bytes) -> str | None:
    """Return the first line that a server sends; empty if it sends none, None if there is no server."""
    writer = None
    try:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(question)
            said = await reader.readline()
    except (OSError, ValueError):  # a TimeoutError is an OSError; a line without an end raises ValueError
        return None if writer is None else ""
    finally:
        if writer is not None:
            writer.transport.abort()
    return said.decode(errors="replace").strip()


async def _unverified_peer(url: str, *, is_greeted: bool) -> Peer | None:
    """Do two handshakes: the first gets the certificate, and the second trusts it.

    Python decodes only verified certificates.
    """
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    first = await _shake_hands(url, unverified, is_greeted=is_greeted)
    if first is None or not first.der:
        return None
    itself = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    itself.check_hostname = False
    itself.load_verify_locations(cadata=first.der)
    itself.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    return await _shake_hands(url, itself, is_greeted=is_greeted)


async def _shake_hands(url: str, context: ssl.SSLContext, *, is_greeted: bool) -> Peer | None:
    wire = NatsTransport()
    address = urlsplit(parse_url(url))
    with contextlib.suppress(OSError, nats_errors.Error):
        await wire.connect(address, 0, WAIT_S)  # type: ignore[arg-type]
        if is_greeted:
            async with asyncio.timeout(WAIT_S):
                await wire.readline()
        await wire.connect_tls(address.hostname or "", context, 0, WAIT_S)
    try:
        return wire.peer()
    finally:
        wire.abort()
