"""The NATS server that a program connects to, its user there, and the TLS of the connection."""

import os
from dataclasses import dataclass, field
from typing import Final, Self

from ..auth.credentials import Credentials, load_credentials
from ..auth.tls import Tls
from .address import DEFAULT_PORT, parse_url

__all__ = ["CREDENTIALS_VARIABLE", "Server", "default_url"]

URL_VARIABLE: Final = "ROLLBUS_NATS"
CREDENTIALS_VARIABLE: Final = "ROLLBUS_CREDS"
"""Names the credentials file of a program that was given none."""


@dataclass(frozen=True, slots=True)
class Server:
    """One NATS server, and the user and TLS files with which a program connects to it."""

    url: str = field(repr=False)
    """`nats://host:port` or `tls://host:port`, with user and password where needed; they are never shown."""
    credentials: Credentials | None = None
    """None: no user of `rollbus auth init`."""
    tls: Tls = field(default_factory=Tls)

    @property
    def requires_tls(self) -> bool:
        """True if the connection has to be TLS: `tls://`, or a file for it. BusBroken: the URL is malformed."""
        return bool(self.tls) or parse_url(self.url).startswith("tls:")

    @classmethod
    def named(
        cls, url: str | Self | None = None, credentials: Credentials | str | os.PathLike[str] | None = None
    ) -> Self:
        """What was said, and for the rest what the environment says.

        Args:
            url: None: `$ROLLBUS_NATS`, else `nats://127.0.0.1:4222`.
            credentials: or their file; None: that in `$ROLLBUS_CREDS`, else none.

        Raises:
            BusBroken: the credentials cannot be read.
        """
        if isinstance(url, cls):
            return url
        if not isinstance(credentials, Credentials):
            path = credentials or os.environ.get(CREDENTIALS_VARIABLE)
            credentials = load_credentials(path) if path else None
        return cls(str(url or default_url()), credentials, Tls.from_environment())


def default_url() -> str:
    """Where a program looks for NATS that was not told: `$ROLLBUS_NATS`, else this machine."""
    return os.environ.get(URL_VARIABLE) or f"nats://127.0.0.1:{DEFAULT_PORT}"
