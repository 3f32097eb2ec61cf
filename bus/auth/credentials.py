"""The identity of a program on NATS: its role, its name and the key that proves both, in a file of its own.

The key never leaves this module but as a signature, and stands in no log, error, `repr` or process argument.
"""

import enum
import os
import uuid
from pathlib import Path
from typing import Final

import msgspec

from ...schemas.checks import check_name, check_subject_token
from ...schemas.errors import BusBroken, InvalidRequest
from . import nkeys
from .signatures import BadSignature, Signatures

__all__ = [
    "CLIENT_ROLES",
    "Credentials",
    "Role",
    "User",
    "client_identity",
    "load_credentials",
    "worker_identity",
]

DEFAULT_FLEET: Final = "default"

MAX_FILE_BYTES: Final = 64 * 1024
"""Of a credentials file; one has some 200 bytes, and what was named by mistake is not read whole."""


class Role(enum.StrEnum):
    """What a user of a fleet is for; `rollbus.bus.auth.permissions` says what each may do."""

    TRAINER = "trainer"
    """Sends requests and reads its own results."""
    PUBLISHER = "publisher"
    """A trainer that also gives new weights to the workers of its models."""
    WORKER = "worker"
    """Serves requests."""
    FRONTEND = "frontend"
    """Sends requests and commands, for the clients of its HTTP service."""
    ADMIN = "admin"
    """Commands the fleet, uploads weights, makes the queues."""
    VIEWER = "viewer"
    """Sees the fleet's state."""


CLIENT_ROLES: Final = frozenset(Role) - {Role.WORKER}
"""Those that connect as a client."""


class User(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A user of a NATS server. Raises `InvalidRequest` for a name that cannot stand in a subject."""

    fleet: str
    role: Role
    name: str
    """Of the client or worker: it stands in the subjects."""
    public_key: str
    models: tuple[str, ...] = ()
    """Of a publisher: whose weights it may replace."""

    def __post_init__(self) -> None:
        """Check what becomes part of subjects."""
        check_subject_token("fleet", self.fleet)
        check_subject_token("name", self.name)
        for model in self.models:
            check_name("models", model)

    def __str__(self) -> str:
        """How errors name it."""
        return f"{self.role} {self.name} of fleet {self.fleet}"

    @property
    def inbox_prefix(self) -> str:
        """The start of the subjects of all answers to this user; no other user may subscribe there."""
        return f"_INBOX_{self.role}.{self.name}"


class Credentials(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a credentials file holds. Raises `BadKey`, `BadSignature` or `InvalidRequest` for what cannot be."""

    fleet: str
    role: Role
    name: str
    seed: str
    """The secret: an nkey."""
    roots: tuple[str, ...] = ()
    """The fleet's root keys, as `signatures` writes public keys: what changes the fleet must be certified by one of
    them. None in files of an earlier release: nothing is checked."""
    certificate: str = ""
    """By the first of them: what this user may sign. Empty: nothing."""

    def __post_init__(self) -> None:
        """Check names and keys."""
        _ = self.user, Signatures(self)

    def __repr__(self) -> str:
        """One line without the key."""
        return f"<Credentials of {self.role} {self.name} of fleet {self.fleet}>"

    @property
    def user(self) -> User:
        """The same without the secret."""
        return User(fleet=self.fleet, role=self.role, name=self.name, public_key=nkeys.public_key(self.seed))

    def sign(self, nonce: str) -> bytes:
        """Sign a server's challenge, to prove this identity."""
        return nkeys.sign(self.seed, nonce)


def load_credentials(path: str | os.PathLike[str]) -> Credentials:
    """Read a credentials file, as `rollbus auth init` writes it.

    Raises:
        BusBroken: it cannot be read or is none; what stands in it is not quoted.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
        return msgspec.json.decode(data, type=Credentials)
    except OSError as error:
        raise BusBroken(f"the credentials {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest, nkeys.BadKey, BadSignature):
        # What exactly is wrong would quote a part of it.
        raise BusBroken(f"{path} is no credentials file; `rollbus auth init` makes them") from None


def client_identity(credentials: Credentials | None, *, fleet: str | None, client: str | None) -> tuple[str, str]:
    """Return the fleet and the name of a client: those that were given, else those of its credentials.

    Raises:
        InvalidRequest: a name cannot stand in a subject, or the credentials are those of another user.
    """
    fleet, name = _identity(credentials, CLIENT_ROLES, fleet, "client", client)
    return fleet, check_subject_token("client", name or f"c-{uuid.uuid4().hex[:12]}")


def worker_identity(
    credentials: Credentials | None, *, fleet: str | None, worker: str | None
) -> tuple[str, str | None]:
    """Likewise of a worker; without a name where it has none yet."""
    return _identity(credentials, frozenset({Role.WORKER}), fleet, "worker_id", worker)


def _identity(
    credentials: Credentials | None, roles: frozenset[Role], fleet: str | None, field: str, name: str | None
) -> tuple[str, str | None]:
    if credentials is None:
        return fleet or DEFAULT_FLEET, name
    if credentials.role not in roles:
        raise InvalidRequest(
            field="credentials",
            problem=f"are those of the {credentials.user}",
            allowed=f"those of a {field.removesuffix('_id')}",
        )
    return _own("fleet", fleet, credentials.fleet), _own(field, name, credentials.name)


def _own(field: str, given: str | None, own: str) -> str:
    if given not in (None, own):
        raise InvalidRequest(field=field, problem=f"is {given!r}", allowed=f"{own}, as the credentials say")
    return own
