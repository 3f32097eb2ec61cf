"""Creates the NATS users of a fleet that one command runs on this machine. Each user has its own credentials."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bus.auth.credentials import Credentials, Role, User, load_credentials
from ...bus.auth.users import ensure_users

__all__ = ["LocalUsers", "local_users"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUsers:
    """The NATS users of a local fleet and their credentials."""

    everybody: tuple[User, ...]
    """All users that the server accepts."""
    workers: Mapping[str, Path]
    """Credentials file of each worker."""
    admin: Credentials
    """Credentials that create the queue."""
    frontend: Credentials
    """Credentials of the HTTP service and of the command."""
    others: Mapping[str, Path]
    """Credentials file of each role except worker, for the user of the command."""


def local_users(folder: Path, fleet: str, workers: Sequence[str]) -> LocalUsers:
    """Create the users that are missing in `folder`: one for each worker, and one for each other role but publisher.

    Raises:
        BusBroken: the folder holds other files, or the key of a user is missing.
        OSError: the folder cannot be read or written.
    """
    single = tuple(role for role in Role if role not in {Role.WORKER, Role.PUBLISHER})
    listed = [(fleet, role, str(role)) for role in single] + [(fleet, Role.WORKER, name) for name in workers]
    entries = ensure_users(folder, listed)
    others = {entry.user.role: entry.path for entry in entries if entry.user.role is not Role.WORKER}
    return LocalUsers(
        everybody=tuple(entry.user for entry in entries),
        workers={entry.user.name: entry.path for entry in entries if entry.user.role is Role.WORKER},
        admin=load_credentials(others[Role.ADMIN]),
        frontend=load_credentials(others[Role.FRONTEND]),
        others={str(role): path for role, path in others.items()},
    )
