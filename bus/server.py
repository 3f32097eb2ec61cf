"""Which NATS server a program connects to, as whom, and how the connection is protected."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from bus.address import DEFAULT_PORT
from bus.credentials import Credentials, load_credentials
from schemas.errors import BusBroken

__all__ = ["CREDENTIALS_VARIABLE", "Server", "Tls", "default_url"]

URL_VARIABLE: Final = "ROLLBUS_NATS"
CREDENTIALS_VARIABLE: Final = "ROLLBUS_CREDS"
"""Names the credentials file of a program that was given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files for TLS, in PEM. Needed where the server's certificate is no public one, or the server asks for ours."""

    ca: str = ""
    """Certificates to trust instead of the system's; empty: the system's."""
    cert: str = ""
    """Our certificate; empty: none."""
    key: str = ""
    """Its key."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """`$ROLLBUS_TLS_CA`, `$ROLLBUS_TLS_CERT` and `$ROLLBUS_TLS_KEY`."""
        return cls(**{name: environment.get(f"ROLLBUS_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")})

    def context(self) -> ssl.SSLContext | None:
        """What TLS is to be done with; None: the usual.

        Raises:
            BusBroken: a file cannot be read, or is not what it should be.
        """
        if not (self.ca or self.cert):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as error:  # an SSLError is one
            files = ", ".join(filter(None, (self.ca, self.cert, self.key)))
            raise BusBroken(f"TLS with {files} is not possible: {error.strerror or error}") from error
        return context


@dataclass(frozen=True, slots=True)
class Server:
    """One NATS server, and who we are to it."""

    url: str = field(repr=False)
    """`nats://host:port` or `tls://host:port`, with user and password where needed; they are never shown."""
    credentials: Credentials | None = None
    """None: no user of `rollbus auth init`."""
    tls: Tls = Tls()

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
