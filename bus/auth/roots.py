"""The root keys of a fleet, and the certificates that they sign.

DIR/<fleet>/root.seed the key that signs certificates; only `rollbus auth` needs it, never a running service
DIR/<fleet>/root*.seed other keys that readers trust too, such as the previous key during a replacement
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from ...schemas.certificate import Certificate
from ...schemas.errors import BusBroken
from .credentials import Credentials, Role, User
from .files import write_new
from .signatures import BadSignature, decode_key, encode_key, issue, public_key, signing_key

__all__ = ["PUBLISHER_COMMANDS", "Roots", "ensure_roots"]

ROOT_FILE: Final = "root.seed"
ROOT_FILES: Final = "root*.seed"
SIGNING_ROLES: Final = frozenset({Role.ADMIN, Role.FRONTEND, Role.PUBLISHER})
"""Roles that may change the fleet. `rollbus.bus.auth.permissions` defines where they may publish the change."""
PUBLISHER_COMMANDS: Final = (
    "check_weights",
    "update_weights",
    "fence",
    "init_weight_transfer",
    "start_weight_update",
    "update_weight_chunk",
    "finish_weight_update",
)
"""Commands that a publisher may sign: new weights by a folder or a transfer, and the commands that `Updates` adds.
These are the check before an update, and the fence of differing workers after it.

`load_lora` cannot be added. Workers of this release and of older releases let a publisher change only the registers of
these commands. An adapter's register is not among them, so these workers would reject the whole state, with the
weights."""


@dataclass(frozen=True, slots=True)
class Roots:
    """The root keys of one fleet. The first key signs."""

    secrets: tuple[bytes, ...]

    def __repr__(self) -> str:
        """Return one line without keys."""
        return f"<Roots {len(self.secrets)}>"

    def certify(self, credentials: Credentials, user: User) -> Credentials:
        """Return the credentials with the trusted root keys and, for users that may change something, a certificate."""
        certificate = ""
        if user.role in SIGNING_ROLES:
            is_publisher = user.role is Role.PUBLISHER
            found = Certificate(
                fleet=user.fleet,
                role=user.role,
                name=user.name,
                key=signing_key(credentials.seed),
                models=user.models if is_publisher else None,
                commands=PUBLISHER_COMMANDS if is_publisher else None,
            )
            certificate = issue(self.secrets[0], found)
        return replace(credentials, roots=tuple(map(public_key, self.secrets)), certificate=certificate)


def ensure_roots(folder: Path) -> Roots:
    """Load the root keys of the fleet whose credentials are in `folder`. Create the first key if it is missing.

    Raises:
        BusBroken: a file has other content.
        OSError: a file cannot be read or written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    own = folder / ROOT_FILE
    if not own.exists():
        write_new(own, f"{encode_key(secrets.token_bytes(32))}\n".encode())
    others = sorted(path for path in folder.glob(ROOT_FILES) if path != own)
    return Roots(tuple(map(_read_root, (own, *others))))


def _read_root(path: Path) -> bytes:
    try:
        return decode_key(path.read_text().strip())
    except (BadSignature, UnicodeDecodeError):
        raise BusBroken(f"{path} is not a root key: 43 characters in base64url, from `rollbus auth init`") from None
