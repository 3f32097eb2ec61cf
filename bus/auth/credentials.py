"""The identity of a program on NATS: its role and name, its key, and the signatures that it makes with the key.

The key never appears in a log, error, `repr` or process argument. It is an nkey of NATS: an Ed25519 key in base32, with
a kind and a checksum. The `nkeys` package exists only as source, which the lock does not install, so this module
implements the encoding. `cryptography` signs, and is imported when a key is used.

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
import enum
import hashlib
import hmac
import json
import os
import secrets
import ssl
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from ...schemas.checks import check_name, check_subject_token
from ...schemas.control import Certificate
from ...schemas.errors import BusBroken, InvalidRequest, LocalProtocolError, RemoteProtocolError
from ...schemas.limits import Recent

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SEED: Final = 18 << 3
"""First byte of a seed; it encodes as S."""
_USER: Final = 20 << 3
"""First byte of a public key; it encodes as U, which is also the second letter of a seed."""
_KEY_BYTES: Final = 32
SIGNED: Final = "Rollbus-Signed"
"""Name of the header that holds the signature."""
MAX_HEADER_CHARS: Final = 16_384
"""Maximum characters of the header. A publisher of a hundred models needs 10,000."""
MAX_CACHED: Final = 64
"""Number of verified certificates to remember, enough for all controllers of a fleet. Above it, the oldest are
dropped."""
_KEY_DOMAIN: Final = b"rollbus signing key 1"
_CERTIFICATE_DOMAIN: Final = b"rollbus certificate 1\n"
_MESSAGE_DOMAIN: Final = b"rollbus message 1\n"
DEFAULT_FLEET: Final = "default"
DEFAULT_PORT: Final = 4222
MAX_FILE_BYTES: Final = 64 * 1024
"""Maximum bytes of a credentials file. A file has about 200 bytes. The limit avoids reading a large file that was named
by mistake."""
TLS_VARIABLES: Final = {"ca": "ROLLBUS_TLS_CA", "cert": "ROLLBUS_TLS_CERT", "key": "ROLLBUS_TLS_KEY"}
"""Environment variables that name the files of `Tls`, by field."""


class BadKey(LocalProtocolError):
    """The text is not the seed of a user. The message does not quote it."""


def new_seed() -> str:
    """Create a random seed for a new user: `SU` and 56 more characters."""
    return _encode_nkey(bytes([_SEED | _USER >> 5, (_USER & 31) << 3]), secrets.token_bytes(_KEY_BYTES))


def nkey_public_key(seed: str) -> str:
    """Return the public key of a seed's user, as in a server's configuration: `U` and 55 more characters.

    Raises:
        BadKey: the text is not the seed of a user.
    """
    return _encode_nkey(bytes([_USER]), _private_key(decode_seed(seed)).public_key().public_bytes_raw())


def _private_key(secret: bytes) -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(secret)


def _encode_nkey(prefix: bytes, key: bytes) -> str:
    raw = prefix + key
    return base64.b32encode(raw + _checksum(raw)).decode().rstrip("=")


def decode_seed(seed: str) -> bytes:
    """Return the 32 random bytes of a seed.

    Raises:
        BadKey: the text is not the seed of a user.
    """
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError):
        raw = b""
    kind = bytes([_SEED | _USER >> 5, (_USER & 31) << 3])
    if len(raw) != len(kind) + _KEY_BYTES + 2 or not raw.startswith(kind) or _checksum(raw[:-2]) != raw[-2:]:
        raise BadKey("the seed is not that of a NATS user: `SU` and 56 more characters, with a checksum")
    return raw[len(kind) : -2]


def _checksum(raw: bytes) -> bytes:
    return binascii.crc_hqx(raw, 0).to_bytes(2, "little")


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
        self._good = Recent[str, Certificate](MAX_CACHED)

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
        at_ms = int(time.time() * 1000)
        signature = _private_key(_signing_secret(self._seed)).sign(_message(subject, at_ms, data))
        return {SIGNED: f"{self._certificate}.{at_ms}.{encode_key(signature)}"}

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
        by = self._decode_certificate(certificate)
        if not (at.isascii() and at.isdigit() and len(at) <= 15):
            raise BadSignature(f"the header {SIGNED} on {subject} is malformed")
        if not _is_signed(_decode(by.key), _decode(signature), _message(subject, int(at), data)):
            raise BadSignature(f"the message on {subject} is not the one that {by.role} {by.name} signed")
        return Signed(by, int(at))

    def _decode_certificate(self, text: str) -> Certificate:
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
        return certificate


def signing_key(seed: str) -> str:
    """Return the public signing key of the user with this seed.

    Raises:
        BadKey: the text is not the seed of a user.
    """
    return public_key(_signing_secret(seed))


def public_key(secret: bytes) -> str:
    """Return the public part of a key."""
    return encode_key(_private_key(secret).public_key().public_bytes_raw())


def encode_key(data: bytes) -> str:
    """Encode a key, a certificate or a signature as text: base64url without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


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
    data = msgspec.json.encode(certificate)
    return f"{encode_key(data)}.{encode_key(_private_key(secret).sign(_CERTIFICATE_DOMAIN + data))}"


def _message(subject: str, at_ms: int, data: bytes) -> bytes:
    return b"%b%b\n%d\n%b" % (_MESSAGE_DOMAIN, subject.encode(), at_ms, data)


def _signing_secret(seed: str) -> bytes:
    return hmac.digest(decode_seed(seed), _KEY_DOMAIN, hashlib.sha256)


def _is_signed(key: bytes, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise BadSignature(f"{text[:20]!r} is not valid base64url") from None


class Role(enum.StrEnum):
    """The role of a user in a fleet. `rollbus.bus.auth.permissions` defines the permissions of each role."""

    TRAINER = "trainer"
    """Sends requests and reads its own results."""
    PUBLISHER = "publisher"
    """A trainer that also publishes new weights to the workers of its models."""
    WORKER = "worker"
    """Serves requests."""
    FRONTEND = "frontend"
    """Sends requests and commands, for the clients of its HTTP service."""
    ADMIN = "admin"
    """Sends commands to the fleet, uploads weights and creates the queues."""
    VIEWER = "viewer"
    """Reads the fleet's state."""


CLIENT_ROLES: Final = frozenset(Role) - {Role.WORKER}
"""Roles that connect as a client."""


class User(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A user of a NATS server. The constructor raises `InvalidRequest` for a name that is not valid in a subject."""

    fleet: str
    role: Role
    name: str
    """Name of the client or worker, used in subjects."""
    public_key: str
    models: tuple[str, ...] = ()
    """Models whose weights a publisher may replace."""

    def __post_init__(self) -> None:
        """Check all fields that become part of subjects."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("name", self.name)
        for model in self.models:
            check_name("models", model)

    def __str__(self) -> str:
        """Return the user's name for error messages."""
        return f"{self.role} {self.name} of fleet {self.fleet}"

    @property
    def inbox_prefix(self) -> str:
        """Prefix of the subjects of all answers to this user. No other user may subscribe to them."""
        return f"_INBOX_{self.role}.{self.name}"


class Credentials(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The content of a credentials file. Invalid content raises `BadKey`, `BadSignature` or `InvalidRequest`."""

    fleet: str
    """Name of the fleet."""
    role: Role
    """Role of the user."""
    name: str
    """Name of the user within its role."""
    seed: str
    """Secret of the user: an nkey seed."""
    roots: tuple[str, ...] = ()
    """Public root keys of the fleet, as `encode_key` encodes them. A root key must certify each author of a change to
    the fleet. Empty in files of an earlier release: nothing is checked."""
    certificate: str = ""
    """Certificate by the first root key; it states what this user may sign. Empty: nothing."""

    def __post_init__(self) -> None:
        """Check names and keys."""
        _ = self.user, Signatures(self)

    def __repr__(self) -> str:
        """Return one line without the key."""
        return f"<Credentials of {self.role} {self.name} of fleet {self.fleet}>"

    @property
    def user(self) -> User:
        """The user without the secret."""
        return User(fleet=self.fleet, role=self.role, name=self.name, public_key=nkey_public_key(self.seed))

    def sign(self, nonce: str) -> bytes:
        """Sign a server's challenge. Return the signature in base64, as the server expects it."""
        return base64.b64encode(_private_key(decode_seed(self.seed)).sign(nonce.encode()))


def load_credentials(path: str | os.PathLike[str]) -> Credentials:
    """Load a credentials file that `rollbus auth init` wrote.

    Raises:
        BusBroken: the file cannot be read or is invalid. The message never quotes its content.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
        return msgspec.json.decode(data, type=Credentials)
    except OSError as error:
        raise BusBroken(f"the credentials {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest, BadKey, BadSignature):
        # The exact error would quote a part of the file.
        raise BusBroken(f"{path} is not a credentials file; create one with `rollbus auth init`") from None


def client_identity(credentials: Credentials | None, *, fleet: str | None, client: str | None) -> tuple[str, str]:
    """Return the fleet and the name of a client: the arguments, or else the values of its credentials.

    Raises:
        InvalidRequest: a name is not valid in a subject, or the credentials belong to another user.
    """
    fleet, name = _identity(credentials, CLIENT_ROLES, fleet, "client", client)
    return fleet, check_subject_token("client", name or f"c-{uuid.uuid4().hex[:12]}")


def worker_identity(
    credentials: Credentials | None, *, fleet: str | None, worker: str | None
) -> tuple[str, str | None]:
    """Return the fleet and the name of a worker, as `client_identity` does. The name is None if it is not set."""
    return _identity(credentials, frozenset({Role.WORKER}), fleet, "worker_id", worker)


def _identity(
    credentials: Credentials | None, roles: frozenset[Role], fleet: str | None, field: str, name: str | None
) -> tuple[str, str | None]:
    if credentials is None:
        return fleet or DEFAULT_FLEET, name
    if credentials.role not in roles:
        raise InvalidRequest(
            "credentials", f"belong to the {credentials.user}", f"those of a {field.removesuffix('_id')}"
        )
    return _own("fleet", fleet, credentials.fleet), _own(field, name, credentials.name)


def _own(field: str, given: str | None, own: str) -> str:
    if given not in (None, own):
        raise InvalidRequest(field, f"is {given!r}", f"{own}, as in the credentials")
    return own


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

    def as_config(self, folder: Path = Path()) -> str:
        """Return the files as a part of a server's configuration. Relative paths begin in `folder`."""
        files = {"cert_file": self.cert, "key_file": self.key, "ca_file": self.ca}
        # That language has no \u escapes.
        found = {name: json.dumps(str(folder / path), ensure_ascii=False) for name, path in files.items() if path}
        return ", ".join(f"{name}: {path}" for name, path in found.items())

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
