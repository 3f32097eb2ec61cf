"""The configuration of a leaf node: a nats-server at another site, through which named users reach the fleet.

    DIR/leaf-<name>.conf   the leaf server; it holds the seeds of its users
    DIR/leafs.conf         a part of the configuration of the hub's servers, beside `users.conf`

The leaf server connects once for each of its users, as that user, so the hub enforces the user's permissions. At the
leaf, each user has its own account, which shares nothing, so two users of the leaf reach each other only through the
hub. JetStream runs at the hub. NATS keeps JetStream's subjects off a leaf connection unless both sides name its account
in `default_js_domain`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...schemas.errors import InvalidRequest
from .credentials import Role, Tls, User, load_credentials
from .permissions import permissions
from .users import WantedUser, credentials_path, keep_for_leafs, known_users, replace_file

MAX_PAYLOAD_BYTES: Final = 8 * 1024**2
"""Maximum payload, equal to the hub's."""
HUB_FILE: Final = "leafs.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafLink:
    """The connection between the leaf server and its hub."""

    hosts: Sequence[str]
    """Hosts of the hub's servers. The leaf connects to any of them."""
    port: int
    """Port on which the hub's servers listen for leaf nodes."""
    tls: Tls
    """TLS files: certificate and key on each machine of the hub, `ca` on the machine of the leaf. Empty: no TLS."""


def write_leaf(
    folder: Path, name: str, users: Iterable[WantedUser], link: LeafLink, *, listen: str
) -> tuple[Path, Path]:
    """Write the configuration of a leaf server and of its hub. Only the owner of the files can read them.

    Args:
        users: users that may connect to the leaf server.
        listen: address on which the leaf server listens.

    Returns:
        The files of the leaf and of the hub.

    Raises:
        InvalidRequest: `user`: a user is not in the folder, or is an admin.
        BusBroken: the folder has no users, or lacks the credentials of a user.
        OSError: a file cannot be read or written.
    """
    known = known_users(folder)
    found = [_known(known, *one) for one in dict.fromkeys(users)]
    if not found:
        raise InvalidRequest(field="user", problem="names no user", allowed="users of this folder")
    seeds = {user: load_credentials(credentials_path(folder, user.fleet, user.role, user.name)).seed for user in found}
    leaf, at_hub = folder / f"leaf-{name}.conf", folder / HUB_FILE
    accounts = {
        _local(user): {"users": [{"nkey": user.public_key, "permissions": permissions(user).as_config()}]}
        for user in found
    }
    tls = link.tls
    trusted = {"tls": {"ca_file": tls.ca} if tls.ca else {}} if tls.cert else {}
    urls = [f"{'tls' if tls.cert else 'nats-leaf'}://{host}:{link.port}" for host in link.hosts]
    remotes = [{"urls": urls, "account": _local(user), "nkey": seeds[user]} | trusted for user in found]
    replace_file(
        leaf,
        _text(
            "Written by `rollbus nats leaf`, with the seeds of its users: only nats-server may read it.",
            server_name=name,
            listen=listen,
            max_payload=MAX_PAYLOAD_BYTES,
            default_js_domain=dict.fromkeys(accounts, ""),
            accounts=accounts,
            leafnodes={"remotes": remotes},
        ),
    )
    own = {"tls": {"cert_file": tls.cert, "key_file": tls.key}} if tls.cert else {}
    replace_file(
        at_hub,
        _text(
            "Written by `rollbus nats leaf`; a server reads it when it starts, and not on a reload.",
            # The leaf knows the hosts. Advertised addresses may be unreachable or absent from the certificate.
            leafnodes={"listen": f"0.0.0.0:{link.port}", "no_advertise": True} | own,
            default_js_domain=dict.fromkeys(keep_for_leafs(folder), ""),
        ),
    )
    return leaf, at_hub


def _known(users: Iterable[User], fleet: str, role: Role, name: str) -> User:
    for user in users:
        if (user.fleet, user.role, user.name) == (fleet, role, name) and role is not Role.ADMIN:
            return user
    problem = f"names the {role} {name} of fleet {fleet}"
    raise InvalidRequest(field="user", problem=problem, allowed="users of this folder; admins connect to the hub")


def _local(user: User) -> str:
    return f"{user.fleet}~{user.role}~{user.name}"


def _text(comment: str, **settings: object) -> bytes:
    # The configuration language has no \u escapes.
    lines = [f"{name}: {json.dumps(value, indent=2, ensure_ascii=False)}" for name, value in settings.items()]
    return "\n".join([f"# {comment}", *lines, ""]).encode()
