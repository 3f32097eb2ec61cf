"""The identity of a program on NATS, stored in one file: its role, its name, and the key that proves both.

This module never gives out the key, only signatures. The key never appears in a log, error, `repr` or process argument.
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
"""Maximum bytes of a credentials file. A file has about 200 bytes. The limit avoids reading a large file that was named
by mistake."""


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
    """Public root keys of the fleet, as `signatures` encodes them. A root key must certify each author of a change to
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
        return User(fleet=self.fleet, role=self.role, name=self.name, public_key=nkeys.nkey_public_key(self.seed))

    def sign(self, nonce: str) -> bytes:
        """Sign a server's challenge to prove this identity."""
        return nkeys.sign(self.seed, nonce)


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest, nkeys.BadKey, BadSignature):
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
            field="credentials",
            problem=f"belong to the {credentials.user}",
            allowed=f"those of a {field.removesuffix('_id')}",
        )
    return _own("fleet", fleet, credentials.fleet), _own(field, name, credentials.name)


def _own(field: str, given: str | None, own: str) -> str:
    if given not in (None, own):
        raise InvalidRequest(field=field, problem=f"is {given!r}", allowed=f"{own}, as in the credentials")
    return own
