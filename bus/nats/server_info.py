"""A NATS server's `INFO`, validated before nats-py uses it.

The first `INFO` precedes TLS, so any machine between client and server can have written it.
"""

import re
from typing import Annotated, Any, Final

import msgspec

from ...schemas.errors import RemoteProtocolError

__all__ = ["MAX_LEARNED_SERVERS", "ServerInfo", "parse_info"]

MAX_LEARNED_SERVERS: Final = 64
"""Addresses that one `INFO` may add: several times the servers of a large cluster, each tried within seconds."""
_ADDRESS: Final = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.%]+\]):(\d{1,5})", re.ASCII)


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `INFO` that nats-py or this software reads."""

    version: str = ""
    max_payload: Annotated[int, msgspec.Meta(gt=0)] = 1024**2
    headers: bool = False
    auth_required: bool = False
    nonce: str = ""
    """Challenge that the user's key must sign."""
    tls_required: bool = False
    tls_available: bool = False
    """True if the server offers TLS to clients that begin with it."""
    connect_urls: list[str] | None = None
    """The addresses of the cluster's servers, without a scheme."""
    client_id: int = 0
    client_ip: str = ""
    ldm: bool = False

    @property
    def offers_tls(self) -> bool:
        """True if a client may begin a TLS handshake."""
        return self.tls_required or self.tls_available

    @property
    def learned_servers(self) -> list[str]:
        """Addresses that a client can connect to, at most `MAX_LEARNED_SERVERS`."""
        addresses = [url for url in self.connect_urls or () if _is_address(url)]
        return addresses[:MAX_LEARNED_SERVERS]


def parse_info(info: Any) -> ServerInfo:
    """Check the types of a decoded `INFO`.

    Raises:
        RemoteProtocolError: `info` is no object, or a field violates the protocol.
    """
    try:
        return msgspec.convert(info, ServerInfo)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(f"the NATS server sent an INFO that cannot be used: {error}") from None


def _is_address(url: str) -> bool:
    address = _ADDRESS.fullmatch(url)
    return address is not None and 0 < int(address[1]) < 65536
