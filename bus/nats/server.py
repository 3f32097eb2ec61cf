"""The NATS servers that a program connects to, its user there, and the TLS of the connection."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ...schemas.checks import check_int
from ...schemas.errors import InvalidRequest
from ..auth.credentials import Credentials, load_credentials
from ..auth.tls import Tls
from .address import DEFAULT_PORT, parse_urls

__all__ = ["CREDENTIALS_VARIABLE", "MAX_REPLICAS", "Server", "default_url"]

URL_VARIABLE: Final = "ROLLBUS_NATS"
CREDENTIALS_VARIABLE: Final = "ROLLBUS_CREDS"
"""Environment variable that names the credentials file of a program without explicit credentials."""
REPLICAS_VARIABLE: Final = "ROLLBUS_REPLICAS"
MAX_REPLICAS: Final = 5
"""Maximum number of replicas in NATS."""


@dataclass(frozen=True, slots=True)
class Server:
    """One NATS server or the servers of one cluster, and the user and TLS files with which a program connects."""

    url: str = field(repr=False)
    """`nats://host:port` or `tls://host:port`, with user and password where needed; they are never shown. Several, with
    commas between them, are servers of one cluster: a program connects to any of them."""
    credentials: Credentials | None = None
    """Credentials of the user; None: the program has no user of `rollbus auth init`."""
    tls: Tls = field(default_factory=Tls)
    replicas: int | None = None
    """Replicas of the queues, buckets and object stores that the program creates; None: three in a cluster with enough
    room, else one."""

    def __post_init__(self) -> None:
        """Check the range."""
        if self.replicas is not None:
            check_int("replicas", self.replicas, 1, MAX_REPLICAS)

    @property
    def requires_tls(self) -> bool:
        """True if the connection has to be TLS: `tls://`, or a file for it. BusBroken: a URL is malformed."""
        return bool(self.tls) or self.urls[0].startswith("tls:")

    @property
    def urls(self) -> tuple[str, ...]:
        """Return each URL, with scheme and port.

        Raises:
            BusBroken: one is malformed, or some ask for TLS and others do not.
        """
        return parse_urls(self.url)

    @classmethod
    def named(
        cls,
        url: "str | Sequence[str] | Server | None" = None,
        credentials: Credentials | str | os.PathLike[str] | None = None,
    ) -> "Server":
        """What was said, and for the rest what the environment says.

        Args:
            url: one, or those of the servers of a cluster; None: `$ROLLBUS_NATS`, else `nats://127.0.0.1:4222`.
            credentials: or their file; None: that in `$ROLLBUS_CREDS`, else none.

        Raises:
            BusBroken: a URL is malformed, or the credentials cannot be read.
            InvalidRequest: `$ROLLBUS_REPLICAS` is no number of replicas.
        """
        if isinstance(url, Server):
            return url
        if not isinstance(credentials, Credentials):
            path = credentials or os.environ.get(CREDENTIALS_VARIABLE)
            credentials = load_credentials(path) if path else None
        if url is not None and not isinstance(url, str):
            url = ",".join(str(one) for one in url) or ","  # none at all is no default
        server = cls(url or default_url(), credentials, Tls.from_environment(), _replicas())
        _ = server.urls
        return server


def _replicas() -> int | None:
    text = os.environ.get(REPLICAS_VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text[:9]) <= MAX_REPLICAS:
        raise InvalidRequest(field=REPLICAS_VARIABLE, problem=f"is {text[:80]!r}", allowed=f"1 to {MAX_REPLICAS}")
    return int(text)


def default_url() -> str:
    """Return the default URL of NATS: `$ROLLBUS_NATS`, else this machine."""
    return os.environ.get(URL_VARIABLE) or f"nats://127.0.0.1:{DEFAULT_PORT}"
