"""NATS's nkeys for users: Ed25519 keys in base32 with a kind and a checksum. A server knows the public keys.

The `nkeys` package exists only as source, which the lock does not install, so this module implements the encoding.
`cryptography` signs, and is imported when a key is used.
"""

import base64
import binascii
import secrets
from typing import Final

from ...schemas.errors import LocalProtocolError

__all__ = ["BadKey", "decode_seed", "new_seed", "nkey_public_key", "sign"]

_SEED: Final = 18 << 3
"""First byte of a seed; it encodes as S."""
_USER: Final = 20 << 3
"""First byte of a public key; it encodes as U, which is also the second letter of a seed."""
_KEY_BYTES: Final = 32


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
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(decode_seed(seed))
    return _encode_nkey(bytes([_USER]), key.public_key().public_bytes_raw())


def sign(seed: str, nonce: str) -> bytes:
    """Sign a server's challenge and return the signature in base64, as the server expects it.

    Raises:
        BadKey: the text is not the seed of a user.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return base64.b64encode(Ed25519PrivateKey.from_private_bytes(decode_seed(seed)).sign(nonce.encode()))


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
