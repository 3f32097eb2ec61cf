"""Manage the users of a NATS server with their roles and permissions.

`rollbus auth init --dir DIR --trainer alice --worker w0` creates a key for each user and a configuration for
nats-server. Each key is in a file that only its owner can read. The server then accepts only these users. Run `init`
again to add users; existing keys stay. `rollbus auth remove` removes users. Both commands take effect after the server
reloads its configuration: `nats-server --signal reload`.

Commands, desired states and uploads are signed. `init` creates the root key of the fleet, DIR/<fleet>/root.seed. The
root key certifies which user may sign which data. No running program needs it. `rollbus auth certify --dir DIR FILE...`
renews the certificates in credentials files that were moved out of DIR.

A program connects as a user with `--creds FILE` or $ROLLBUS_CREDS. Each trainer, worker and frontend needs its own
user, because the user's name is part of its subjects.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..exits import CommandFailed, ExitCode
from ..options import refuse_options

if TYPE_CHECKING:
    from ....bus.auth.users import UserFile, WantedUser


HELP = "users of a NATS server: keys and permissions"
EXAMPLES = (
    "rollbus auth init --dir auth --trainer alice --worker w0",
    "rollbus auth init --dir auth --publisher bob:my-model",
    "rollbus auth remove --dir auth --trainer alice",
)
READS_NO_CREDENTIALS = True

DEFAULT_LISTEN = "127.0.0.1:4222"
SINGLE = ("admin", "frontend", "viewer")
"""Roles for which `init` creates one user by default, with the name of the role."""
SETTINGS = {"listen": "listen", "server_cert": "cert_file", "server_key": "key_file", "client_ca": "ca_file"}
"""The name in the server's configuration, by option."""
ROLES = ("trainer", "worker", *SINGLE)
"""Roles of users that have only a name; publishers also have models."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "action", choices=("init", "remove", "certify"), help="create or add users; remove users; renew certificates"
    )
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="*", help="credentials files (for the action certify)"
    )
    parser.add_argument("--dir", metavar="DIR", type=Path, required=True, help="folder of the users")
    group = parser.add_argument_group("users; each option may be repeated")
    for role in ROLES:
        default = f" (init always creates one with the name {role})" if role in SINGLE else ""
        text = f"name of a user with the role {role}{default}"
        group.add_argument(f"--{role}", metavar="NAME", action="append", default=[], help=text)
    group.add_argument(
        "--publisher",
        metavar="NAME:MODEL",
        action="append",
        default=[],
        help="trainer that may also replace the weights of MODEL; repeat for more models (for remove, only NAME)",
    )
    group = parser.add_argument_group("configuration of the server, which init creates and never changes")
    group.add_argument("--listen", metavar="HOST:PORT", help=f"address of the server (default: {DEFAULT_LISTEN})")
    group.add_argument("--server-cert", metavar="FILE", default="", help="certificate for TLS (default: no TLS)")
    group.add_argument("--server-key", metavar="FILE", default="", help="key of the TLS certificate (default: no TLS)")
    group.add_argument(
        "--client-ca",
        metavar="FILE",
        default="",
        help="CA that must have signed the certificates of clients (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Change the folder, and print the result."""
    if bool(args.files) != (args.action == "certify"):
        raise CommandFailed("only the action certify has FILE arguments, and it requires at least one", ExitCode.USAGE)
    if args.action != "init":
        roles = (*ROLES, "publisher") if args.action == "certify" else ()
        options = (*SETTINGS, *roles, *(["fleet"] if args.action == "certify" else []))
        refuse_options(args, options, f"for the action {args.action}")
    refuse_options(args, ["nats"], "here: this command does not connect to a server")
    if args.action == "certify":
        return _certify(args)
    models = _models_of(args)
    users = (*_users_of(args), *models)
    return _init(args, users, models) if args.action == "init" else _remove(args, users)


def _users_of(args: argparse.Namespace) -> Iterator["WantedUser"]:
    from ....bus.auth.credentials import DEFAULT_FLEET, Role

    fleet = args.fleet or DEFAULT_FLEET
    for role in ROLES:
        names = getattr(args, role)
        if role in SINGLE and args.action == "init":
            names = [role, *names]
        yield from ((fleet, Role(role), name) for name in names)


def _models_of(args: argparse.Namespace) -> "dict[WantedUser, tuple[str, ...]]":
    """Return the publishers, each with its models."""
    from ....bus.auth.credentials import DEFAULT_FLEET, Role

    found: dict[WantedUser, tuple[str, ...]] = {}
    for text in args.publisher:
        name, _, model = text.partition(":")
        one = (args.fleet or DEFAULT_FLEET, Role.PUBLISHER, name)
        found[one] = (*found.get(one, ()), *filter(None, [model]))
    return found


def _init(
    args: argparse.Namespace, users: "tuple[WantedUser, ...]", models: "dict[WantedUser, tuple[str, ...]]"
) -> int:
    from ....bus.auth.credentials import Tls
    from ....bus.auth.users import CONFIG_FILE, SERVER_FILE, ensure_users, write_server_config
    from ..console import print_json

    if bool(args.server_cert) != bool(args.server_key) or (args.client_ca and not args.server_cert):
        raise CommandFailed(
            "TLS requires --server-cert and --server-key; --client-ca is allowed only with both", ExitCode.USAGE
        )
    has_cluster = next(args.dir.glob("node-*.conf"), None) is not None
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name)}
    if has_cluster and given:
        raise CommandFailed(
            f"{_options(given)}: {args.dir} has the servers of a cluster; their configuration is that of "
            "`rollbus nats init`",
            ExitCode.USAGE,
        )
    server = args.dir / SERVER_FILE
    if server.exists():
        _check_settings(server, given)
    # An existing publisher may be named without its models.
    entries = ensure_users(args.dir, users, {one: names for one, names in models.items() if names})
    tls = Tls(ca=args.client_ca, cert=args.server_cert, key=args.server_key)
    if has_cluster:
        server = args.dir / CONFIG_FILE
    else:
        write_server_config(args.dir, args.listen or DEFAULT_LISTEN, tls)
    if args.json:
        print_json({"server": str(server), "users": [_as_json(entry) for entry in entries]})
    else:
        _show(server, entries, has_cluster=has_cluster)
    return ExitCode.OK


def _check_settings(server: Path, given: Mapping[str, str]) -> None:
    """Check that an existing configuration has the settings of the options: it is the operator's, and never changed.

    Raises:
        CommandFailed: it lacks one.
    """
    lines = [line for line in server.read_text().splitlines() if not line.lstrip().startswith(("#", "//"))]
    values = {name: value if name == "listen" else str(Path(value).absolute()) for name, value in given.items()}
    for name, value in values.items():
        either = "|".join(re.escape(each) for each in (value, given[name]))
        if not re.search(rf"""\b{SETTINGS[name]}\s*[:=]?\s*["']?({either})["']?(?=[\s,;}}]|$)""", "\n".join(lines)):
            files = ", ".join(f'{SETTINGS[each]}: "{path}"' for each, path in values.items() if each != "listen")
            verified = ", verify: true" if "client_ca" in given else ""
            line = f'listen: "{value}"' if name == "listen" else f"tls {{ {files}{verified} }}"
            raise CommandFailed(
                f"{_options([name])} {given[name]}: {server} exists without it; nothing was changed. Write `{line}` "
                "into this file and restart the server"
            )


def _options(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _certify(args: argparse.Namespace) -> int:
    from ....bus.auth.users import certify
    from ..console import print_json, write

    users = [certify(args.dir, path) for path in args.files]
    if args.json:
        found = [{"role": user.role, "name": user.name, "fleet": user.fleet} for user in users]
        print_json({"certified": found})
    else:
        for user in users:
            write(f"certified {user}")
    return ExitCode.OK


def _remove(args: argparse.Namespace, users: "tuple[WantedUser, ...]") -> int:
    from ....bus.auth.users import remove_user
    from ..console import print_json, write

    if not users:
        raise CommandFailed("remove requires users, for example --trainer NAME", ExitCode.USAGE)
    removed = [one for one in users if remove_user(args.dir, one)]
    if args.json:
        print_json({"removed": [{"fleet": fleet, "role": role, "name": name} for fleet, role, name in removed]})
    for fleet, role, name in users:
        if (fleet, role, name) not in removed:
            raise CommandFailed(f"{args.dir} has no {role} {name} of fleet {fleet}")
        if not args.json:
            write(f"removed {role} {name} of fleet {fleet}; after its next reload, the server rejects this user")
    return ExitCode.OK


def _as_json(entry: "UserFile") -> dict[str, object]:
    user = entry.user
    return {"role": user.role, "name": user.name, "fleet": user.fleet, "creds": str(entry.path), "new": entry.is_new}


def _show(server: Path, entries: "tuple[UserFile, ...]", *, has_cluster: bool) -> None:
    from ....bus.auth.users import CONFIG_FILE
    from ..console import program, write
    from ..tables import print_table

    rows = [
        (entry.user.role, entry.user.name, entry.user.fleet, "new" if entry.is_new else "as before", str(entry.path))
        for entry in entries
    ]
    print_table(("role", "name", "fleet", "key", "credentials"), rows)
    admin = next(entry for entry in entries if entry.user.role == "admin")
    if has_cluster:
        write(f"\nServers: copy {CONFIG_FILE} to each server. Running servers reload it on SIGHUP; send SIGHUP twice.")
    else:
        write(f"\nServer: nats-server -c {server}. A running server reloads it on SIGHUP; send SIGHUP twice.")
    write(f"Keep {admin.path.parent / 'root.seed'} secret: no running program needs it.")
    write(
        f"Then create the queue of each model, since workers may not: {program()} make-queue MODEL --creds {admin.path}"
    )
