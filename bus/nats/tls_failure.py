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
"""What servers answer to a client without a certificate, or with one that they do not trust; TLS 1.2 has no better."""


def tls_failure(error: Exception, url: str) -> TlsFailed | None:
    """Explain `error`; None: it is not about TLS, or another attempt may go better.

    Args:
        url: the server's, without password.
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
        return "renew the server's certificate; a wrong clock of this machine looks the same"
    if code in _UNKNOWN_ISSUER:
        return "name the certificate of its CA with --tls-ca FILE or $ROLLBUS_TLS_CA"
    if code in _OTHER_NAME:
        return "name the server in the URL as its certificate does; all servers of a cluster must bear that name"
    return "let the server have a certificate that this machine trusts, or name its CA with --tls-ca FILE"
