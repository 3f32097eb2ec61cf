"""The users of a fleet that one command runs on this machine, each with credentials of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bus.auth.credentials import Credentials, Role, User, load_credentials
from ...bus.auth.users import ensure_users

__all__ = ["LocalUsers", "local_users"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUsers:
    """Who runs what."""

    everybody: tuple[User, ...]
    """Whom the server lets in."""
    workers: Mapping[str, Path]
    """Credentials files by worker."""
    admin: Credentials
    """Makes the queue."""
    frontend: Credentials
    """The HTTP service, and the command itself."""
    others: Mapping[str, Path]
    """For people: credentials files by role."""


def local_users(folder: Path, fleet: str, workers: Sequence[str]) -> LocalUsers:
    """Make the users that are missing in `folder`: one for each worker, and one of each role but publishers.

    Raises:
        BusBroken: the folder holds something else, or the key of one of them is not there any more.
        OSError: it cannot be read or written.
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
