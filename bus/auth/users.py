"""The folder with the users of a NATS server. `rollbus auth init` creates it and adds users.

    DIR/users.json                  all users, with public keys; the source of the next file
    DIR/users.conf                  all users and their permissions, as a part of a server's configuration
    DIR/nats-server.conf            a complete configuration that includes it; the operator may edit it
    DIR/<fleet>/<role>-<name>.creds the secret of one user; may be moved to the user's machine
    DIR/<fleet>/root.seed           the root key, which certifies admins, frontends and publishers; no service needs it
    DIR/<fleet>/root*.seed          other keys that readers trust too, such as the previous key during a replacement

A key is written once and never replaced. Each fleet has its own accounts. Only the owner can read the files, and each
file is written as a whole.
"""

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from ...schemas.control import Certificate
from ...schemas.errors import BusBroken, InvalidRequest
from ...schemas.options import check_writable
from .credentials import (
    CLIENT_ROLES,
    BadSignature,
    Credentials,
    Role,
    Tls,
    User,
    decode_key,
    encode_key,
    issue,
    load_credentials,
    new_seed,
    public_key,
    signing_key,
)
from .permissions import accounts

FILE_MODE: Final = 0o600
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
USERS_FILE: Final = "users.json"
CONFIG_FILE: Final = "users.conf"
SERVER_FILE: Final = "nats-server.conf"
_FOLDER_MODE: Final = 0o700
WantedUser = tuple[str, Role, str]
"""A user by fleet, role and name."""


def is_private(path: str | os.PathLike[str]) -> bool:
    """Return True if only the owner can read the file."""
    return not stat.S_IMODE(Path(path).stat().st_mode) & ~FILE_MODE


def write_new(path: Path, data: bytes) -> None:
    """Create a file. The file must not exist."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
        file.write(data)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new content. The file keeps its owner."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    write_new(partial, data)
    with contextlib.suppress(FileNotFoundError):
        before = path.stat()
        if before.st_uid != partial.stat().st_uid:
            os.chown(partial, before.st_uid, before.st_gid)
    partial.replace(path)


@dataclass(frozen=True, slots=True)
class Roots:
    """The root keys of one fleet. The first key signs."""

    secrets: tuple[bytes, ...] = field(repr=False)

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


class _Users(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of `users.json`. An earlier release also wrote the accounts of leaf nodes there, as `leafs`."""

    users: tuple[User, ...] = ()


@dataclass(frozen=True, slots=True)
class UserFile:
    """One requested user."""

    user: User
    path: Path
    """Original path of the user's secret. The file may have been moved."""
    is_new: bool


def ensure_users(
    folder: Path, wanted: Iterable[WantedUser], models: Mapping[WantedUser, tuple[str, ...]] | None = None
) -> tuple[UserFile, ...]:
    """Create the missing users, and write the configuration of all users. Existing users keep their keys.

    All credentials in this folder get the root keys of their fleet. Users that may change something also get a
    certificate. This includes credentials of an earlier release.

    Args:
        models: models of publishers; without models, an existing publisher keeps its models.

    Raises:
        InvalidRequest: a name is not valid in a subject, or another client of the fleet has it; or a publisher has no
            models, or another user has models.
        BusBroken: a file in the folder has other content.
        OSError: a file cannot be read or written.
    """
    wanted = tuple(dict.fromkeys(wanted))
    with _lock(folder):
        known = {(user.fleet, user.role, user.name): user for user in list_users(folder)}
        _check_names([*known, *wanted])
        entries = []
        for one in wanted:
            path = credentials_path(folder, *one)
            user = known.get(one) or _make(path, one)
            user = _with_models(user, (models or {}).get(one, user.models))
            entries.append(UserFile(user, path, is_new=one not in known))
            known[one] = user
        _write(folder, tuple(known[one] for one in sorted(known)))
        for one, user in known.items():
            path = credentials_path(folder, *one)
            if path.exists():
                _certify(path, user, ensure_roots(path.parent))
    return tuple(entries)


def list_users(folder: Path) -> tuple[User, ...]:
    """Return the users of a folder; an empty tuple if it has none.

    Raises:
        BusBroken, OSError: as in `ensure_users`.
    """
    path = folder / USERS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Users).users
    except FileNotFoundError:
        return ()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BusBroken(f"{path} is not a list of users: {error}") from error


def certify(folder: Path, path: Path) -> User:
    """Renew the roots and the certificate in a credentials file outside `folder`. Its key stays.

    Raises:
        BusBroken: the file is not a credentials file, or its user is not in this folder.
        OSError: the file cannot be read or written.
    """
    with _lock(folder):
        found = load_credentials(path).user
        for user in list_users(folder):
            if user.public_key == found.public_key:
                _certify(path, user, ensure_roots(folder / user.fleet))
                return user
    raise BusBroken(f"{path} holds the credentials of the {found}, which is not a user in {folder}")


def remove_user(folder: Path, unwanted: WantedUser) -> bool:
    """Remove a user, and its secret if the file is still in the folder. Return False if there is no such user.

    A server ends the user's connections after it reloads its configuration.

    Raises:
        BusBroken, OSError: as in `ensure_users`.
    """
    with _lock(folder):
        before = list_users(folder)
        left = tuple(user for user in before if (user.fleet, user.role, user.name) != unwanted)
        _write(folder, left)
        credentials_path(folder, *unwanted).unlink(missing_ok=True)
    return len(left) < len(before)


def credentials_path(folder: Path, fleet: str, role: Role, name: str) -> Path:
    """Return the path of a user's secret."""
    return folder / fleet / f"{role}-{name}.creds"


def write_server_config(folder: Path, listen: str, tls: Tls) -> bool:
    """Write a configuration for a server with these users, unless it exists. Return True if it was written.

    Args:
        tls: TLS files of the server. With `ca`, clients must present certificates that `ca` signed. Without a
            certificate there is no TLS.
    """
    lines = [
        "# Written once by `rollbus auth init`. Edit it as you need.",
        f"listen: {json.dumps(listen)}",
        "max_payload: 8MB",
        f"jetstream {{ store_dir: {json.dumps(str(folder.absolute() / 'jetstream'), ensure_ascii=False)} }}",
        "# Users and their permissions; rewritten when users are added. Other users are rejected.",
        f"include {CONFIG_FILE}",
    ]
    if tls.cert:
        lines.append(f"tls {{ {tls.as_config(Path.cwd())}{', verify: true' if tls.ca else ''} }}")
    try:
        write_new(folder / SERVER_FILE, "\n".join([*lines, ""]).encode())
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder against other programs; create the folder if it is missing."""
    check_writable("the directory", folder, _FOLDER_MODE)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_names(users: Iterable[WantedUser]) -> None:
    """Reject two clients with one name: each could read messages to the other."""
    roles: dict[tuple[str, str], Role] = {}
    for fleet, role, name in users:
        other = roles.setdefault((fleet, name), role) if role in CLIENT_ROLES else role
        if other is not role:
            raise InvalidRequest(str(role), f"is {name}, the name of the fleet's {other}", "a name of its own")


def _make(path: Path, wanted: WantedUser) -> User:
    """Create and write a key, or load the existing key."""
    fleet, role, name = wanted
    credentials = Credentials(fleet=fleet, role=role, name=name, seed=new_seed())
    path.parent.mkdir(mode=_FOLDER_MODE, exist_ok=True)
    try:
        write_new(path, _as_file(credentials))
    except FileExistsError:
        # An interrupted run wrote the file but did not record the user.
        credentials = load_credentials(path)
        if (credentials.fleet, credentials.role, credentials.name) != wanted:
            raise BusBroken(f"{path} holds the credentials of the {credentials.user}") from None
    return credentials.user


def _with_models(user: User, models: tuple[str, ...]) -> User:
    if bool(models) != (user.role is Role.PUBLISHER):
        problem = f"{user.name} has {'models' if models else 'no models'}"
        raise InvalidRequest(str(user.role), problem, "models for publishers, and for no others")
    return msgspec.structs.replace(user, models=models)


def _certify(path: Path, user: User, roots: Roots) -> None:
    before = load_credentials(path)
    after = roots.certify(before, user)
    if after != before and before.user.public_key == user.public_key:
        replace_file(path, _as_file(after))


def _as_file(credentials: Credentials) -> bytes:
    return msgspec.json.format(msgspec.json.encode(credentials)) + b"\n"


def _write(folder: Path, users: tuple[User, ...]) -> None:
    config = f"accounts: {json.dumps(accounts(users), indent=2)}\n"
    replace_file(folder / CONFIG_FILE, f"# Written by `rollbus auth` from {USERS_FILE}.\n{config}".encode())
    replace_file(folder / USERS_FILE, msgspec.json.format(msgspec.json.encode(_Users(users))) + b"\n")
