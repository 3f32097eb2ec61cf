"""Signatures of messages that change a fleet: stored states, commands, and descriptions of uploads. Pure.

A subject alone proves little: an answer of JetStream can be directed to it, and an intruder on the server can write any
message. The author therefore signs each message that changes a fleet, in a header beside the payload:

    Rollbus-Signed: <certificate>.<root's signature>.<milliseconds since 1970>.<signature>

The certificate and the signatures are in base64url. The signature is Ed25519 over `rollbus message 1`, the subject, the
milliseconds and the payload as it was sent. The root's signature is over `rollbus certificate 1` and the certificate.
Each of these parts except the last ends with a newline.

The signing key is derived from the user's seed and differs from the seed's own key. With the seed's own key a program
signs the challenge of each server that it connects to, and a hostile server could choose a command as the challenge.
"""

import base64
import binascii
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from ...schemas.certificate import Certificate
from ...schemas.errors import InvalidRequest, RemoteProtocolError
from . import nkeys

if TYPE_CHECKING:
    from .credentials import Credentials

__all__ = [
    "SIGNED",
    "BadSignature",
    "Signatures",
    "Signed",
    "decode_key",
    "encode_key",
    "issue",
    "nkey_public_key",
    "signing_key",
]

SIGNED: Final = "Rollbus-Signed"
"""Name of the header that holds the signature."""
MAX_HEADER_CHARS: Final = 16_384
"""Maximum characters of the header. A publisher of a hundred models needs 10,000."""
MAX_CACHED: Final = 64
"""Number of verified certificates to remember, enough for all controllers of a fleet. Above it, the oldest are
dropped."""
_KEY_BYTES: Final = 32
_KEY_DOMAIN: Final = b"rollbus signing key 1"
_CERTIFICATE_DOMAIN: Final = b"rollbus certificate 1\n"
_MESSAGE_DOMAIN: Final = b"rollbus message 1\n"


class BadSignature(RemoteProtocolError):
    """A message is not signed, or its author may not make this change."""


class Signed(msgspec.Struct, frozen=True):
    """A valid signature."""

    by: Certificate
    at_ms: int
    """Time of the signature in milliseconds since 1970, by its author's clock."""

    @property
    def age_s(self) -> float:
        """Seconds since the signature; negative if the author's clock is ahead."""
        return time.time() - self.at_ms / 1000


class Signatures:
    """The signing key of one program, and the root keys that it trusts.

    Args:
        credentials: credentials of the user. Without credentials, or with those of an earlier release, which have no
            root keys, nothing is signed and every message is accepted.
    """

    def __init__(self, credentials: "Credentials | None") -> None:
        self._fleet = "" if credentials is None else credentials.fleet
        self._seed = "" if credentials is None else credentials.seed
        self._certificate = "" if credentials is None else credentials.certificate
        self._roots = () if credentials is None else tuple(map(decode_key, credentials.roots))
        self._good: OrderedDict[str, Certificate] = OrderedDict()

    def __repr__(self) -> str:
        """Return one line without keys."""
        return f"<Signatures fleet={self._fleet} signs={bool(self._certificate)} roots={len(self._roots)}>"

    @property
    def are_demanded(self) -> bool:
        """True if unsigned messages are ignored."""
        return bool(self._roots)

    @property
    def own(self) -> Certificate | None:
        """Certificate that states what this program may sign; None: it signs nothing."""
        if not self._certificate:
            return None
        return msgspec.json.decode(_decode(self._certificate.partition(".")[0]), type=Certificate)

    def headers(self, subject: str, data: bytes) -> dict[str, str]:
        """Sign `data` for a publication on `subject`. Return no header if this program signs nothing."""
        if not self._certificate:
            return {}
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        at_ms = int(time.time() * 1000)
        key = Ed25519PrivateKey.from_private_bytes(_signing_secret(self._seed))
        return {SIGNED: f"{self._certificate}.{at_ms}.{_encode(key.sign(_message(subject, at_ms, data)))}"}

    def check(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> Signed | None:
        """Return the author of `data` on `subject`; None if signatures are not required.

        The caller must compare the author's permissions with the content.

        Raises:
            BadSignature: the data has no author that a root key of the fleet certifies.
        """
        if not self._roots:
            return None
        header = (headers or {}).get(SIGNED)
        if not header:
            raise BadSignature(f"the message on {subject} is not signed")
        if len(header) > MAX_HEADER_CHARS or header.count(".") != 3:
            raise BadSignature(f"the header {SIGNED} on {subject} is malformed")
        certificate, at, signature = header.rsplit(".", 2)
        by = self._certified(certificate)
        if not (at.isascii() and at.isdigit() and len(at) <= 15):
            raise BadSignature(f"the header {SIGNED} on {subject} is malformed")
        if not _is_signed(_decode(by.key), _decode(signature), _message(subject, int(at), data)):
            raise BadSignature(f"the message on {subject} is not the one that {by.role} {by.name} signed")
        return Signed(by, int(at))

    def _certified(self, text: str) -> Certificate:
        """Decode a certificate that a root key signed. Remember valid certificates."""
        known = self._good.get(text)
        if known is not None:
            return known
        encoded, _, signature = text.partition(".")
        data = _decode(encoded)
        if not any(_is_signed(root, _decode(signature), _CERTIFICATE_DOMAIN + data) for root in self._roots):
            raise BadSignature("no root key of the fleet signed the certificate")
        try:
            certificate = msgspec.json.decode(data, type=Certificate)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest) as error:
            raise BadSignature(f"the certificate does not decode: {error}") from None
        if certificate.fleet != self._fleet:
            raise BadSignature(f"the certificate is for fleet {certificate.fleet}; this fleet is {self._fleet}")
        self._good[text] = certificate
        while len(self._good) > MAX_CACHED:
            self._good.popitem(last=False)
        return certificate


def signing_key(seed: str) -> str:
    """Return the public signing key of the user with this seed.

    Raises:
        BadKey: the text is not the seed of a user.
    """
    return public_key(_signing_secret(seed))


def public_key(secret: bytes) -> str:
    """Return the public part of a key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return encode_key(Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw())


def encode_key(key: bytes) -> str:
    """Encode a key as text."""
    return _encode(key)


def decode_key(text: str) -> bytes:
    """Decode a key from text.

    Raises:
        BadSignature: the text is not a key.
    """
    key = _decode(text)
    if len(key) != _KEY_BYTES:
        raise BadSignature(f"a key has {len(key)} bytes; allowed: {_KEY_BYTES}")
    return key


def issue(secret: bytes, certificate: Certificate) -> str:
    """Sign a certificate with the root key. Return the text that credentials and signatures carry."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    data = msgspec.json.encode(certificate)
    return f"{_encode(data)}.{_encode(Ed25519PrivateKey.from_private_bytes(secret).sign(_CERTIFICATE_DOMAIN + data))}"


def _message(subject: str, at_ms: int, data: bytes) -> bytes:
    return b"%b%b\n%d\n%b" % (_MESSAGE_DOMAIN, subject.encode(), at_ms, data)


def _signing_secret(seed: str) -> bytes:
    return hmac.digest(nkeys.decode_seed(seed), _KEY_DOMAIN, hashlib.sha256)


def _is_signed(key: bytes, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadSignature(f"{text[:20]!r} is not valid base64url") from None
