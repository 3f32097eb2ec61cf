"""The files with which a program does TLS."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from ...schemas.errors import BusBroken

__all__ = ["TLS_VARIABLES", "Tls"]

TLS_VARIABLES: Final = {"ca": "ROLLBUS_TLS_CA", "cert": "ROLLBUS_TLS_CERT", "key": "ROLLBUS_TLS_KEY"}
"""Name the files of `Tls`, by field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files for TLS, in PEM. Needed where the server's certificate is no public one, or the server asks for ours.

    Any of them makes TLS a requirement, as a `tls://` URL does: a server that offers none gets nothing.
    """

    ca: str = ""
    """Certificates to trust instead of the system's; empty: the system's."""
    cert: str = ""
    """Our certificate; empty: none."""
    key: str = ""
    """Its key."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """`$ROLLBUS_TLS_CA`, `$ROLLBUS_TLS_CERT` and `$ROLLBUS_TLS_KEY`."""
        return cls(**{name: environment.get(variable, "") for name, variable in TLS_VARIABLES.items()})

    def __bool__(self) -> bool:
        """True if any file is named."""
        return bool(self.ca or self.cert or self.key)

    def context(self) -> ssl.SSLContext | None:
        """What TLS is to be done with; None: the usual.

        Raises:
            BusBroken: a file cannot be read, or is not what it should be, or the key has no certificate.
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
