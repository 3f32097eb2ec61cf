"""The TLS files of a program."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from ...schemas.errors import BusBroken

__all__ = ["TLS_VARIABLES", "Tls"]

TLS_VARIABLES: Final = {"ca": "ROLLBUS_TLS_CA", "cert": "ROLLBUS_TLS_CERT", "key": "ROLLBUS_TLS_KEY"}
"""Environment variables that name the files of `Tls`, by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS files in PEM, required if the server has no public certificate or requests a client certificate.

    Any file makes TLS a requirement, as a `tls://` URL does. The program sends nothing to a server that offers no TLS.
    """

    ca: str = ""
    """File of the trusted certificates; empty: the system's certificates."""
    cert: str = ""
    """File of the client certificate; empty: none."""
    key: str = ""
    """File of the certificate's key."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the files that `$ROLLBUS_TLS_CA`, `$ROLLBUS_TLS_CERT` and `$ROLLBUS_TLS_KEY` name."""
        return cls(**{name: environment.get(variable, "") for name, variable in TLS_VARIABLES.items()})

    def __bool__(self) -> bool:
        """True if any file is named."""
        return bool(self.ca or self.cert or self.key)

    def context(self) -> ssl.SSLContext | None:
        """Return the SSL context with these files; None: the default context.

        Raises:
            BusBroken: a file cannot be read or is invalid, or the key has no certificate.
        """
        if not self:
            return None
        if self.key and not self.cert:
            raise BusBroken(f"the TLS key {self.key} has no certificate: --tls-cert FILE, or ${TLS_VARIABLES['cert']}")
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as error:  # an SSLError is one
            files = ", ".join(filter(None, (self.ca, self.cert, self.key)))
            raise BusBroken(f"TLS with {files} is not possible: {error.strerror or error}") from error
        return context
