"""The reason for a TLS failure with a NATS server, and the next step."""

import ssl
from typing import Final

from ...schemas.errors import TlsFailed
from .transport import NoTls

__all__ = ["tls_failure"]

# X509_V_ERR of OpenSSL, for which Python has no names.
_EXPIRED: Final = 10
_UNKNOWN_ISSUER: Final = frozenset({18, 19, 20, 21})
_OTHER_NAME: Final = frozenset({62, 64})
_NO_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "BAD_CERTIFICATE", "UNKNOWN_CA")
"""Alerts for a client without a certificate, or with one that the server does not trust; TLS 1.2 has no better ones."""


def tls_failure(error: Exception, url: str) -> TlsFailed | None:
    """Explain `error`. Return None if it does not concern TLS, or another attempt may succeed.

    Args:
        url: URL of the server, without password.
    """
    match error:
        case NoTls():
            return TlsFailed(
                problem=f"TLS is required, and the NATS server at {url} offers none; nothing was sent to it",
                advice="give the server a certificate (rollbus auth init --server-cert FILE --server-key FILE), or "
                "connect without TLS in a trusted network: nats:// and none of --tls-ca, --tls-cert, --tls-key",
            )
        case ssl.SSLCertVerificationError():
            return TlsFailed(
                problem=f"the certificate of the NATS server at {url} is refused; nothing was sent to it: "
                f"certificate verify failed: {error.verify_message}",
                advice=_advice(error.verify_code),
            )
        case ssl.SSLError() if any(alert in (error.reason or "") for alert in _NO_CERTIFICATE):
            return TlsFailed(
                problem=f"the NATS server at {url} ended the TLS handshake: {error.reason}",
                advice="it may ask for a certificate that its CA has signed: --tls-cert FILE and --tls-key FILE",
            )
    return None


def _advice(code: int) -> str:
    if code == _EXPIRED:
        return "renew the server's certificate, or correct the clock of this machine"
    if code in _UNKNOWN_ISSUER:
        return "name the certificate of its CA with --tls-ca FILE or $ROLLBUS_TLS_CA"
    if code in _OTHER_NAME:
        return "use a name of the server's certificate in the URL; all servers of a cluster must have that name"
    return "give the server a certificate that this machine trusts, or name its CA with --tls-ca FILE"
