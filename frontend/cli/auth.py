"""`rollbus auth`: the users of a NATS server and their files. `rollbus nats init`: the configurations of a cluster."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ...bus.auth.cluster import ClusterConfig, parse_nodes, write_cluster
from ...bus.auth.credentials import DEFAULT_FLEET, Role, Tls
from ...bus.auth.users import (
    CONFIG_FILE,
    SERVER_FILE,
    WantedUser,
    certify,
    ensure_users,
    remove_user,
    write_server_config,
)
from ...schemas.options import check_writable
from .commands.machine import DEFAULT_LISTEN, ROLES, SINGLE
from .console import print_json, print_result, program, write
from .exits import CommandFailed, ExitCode, WrongUsage
from .options import refuse_options
from .tables import print_table

SETTINGS = {"listen": "listen", "server_cert": "cert_file", "server_key": "key_file", "client_ca": "ca_file"}
"""The name in the server's configuration, by option."""


def run(args: argparse.Namespace) -> int:
    """Change the folder, and print the result."""
    if bool(args.files) != (args.action == "certify"):
        raise WrongUsage("only the action certify has FILE arguments, and it requires at least one")
    if args.action != "init":
        roles = (*ROLES, "publisher") if args.action == "certify" else ()
        options = (*SETTINGS, *roles, *(["fleet"] if args.action == "certify" else []))
        refuse_options(args, options, f"for the action {args.action}")
    refuse_options(args, ["nats"], "here: this command does not connect to a server")
    if args.action == "certify":
        certified = [certify(args.dir, path) for path in args.files]
        found = [{"role": user.role, "name": user.name, "fleet": user.fleet} for user in certified]
        print_result(args, {"certified": found}, *(f"certified {user}" for user in certified))
        return ExitCode.OK
    models = _models_of(args)
    users = (*_users_of(args), *models)
    return _init(args, users, models) if args.action == "init" else _remove(args, users)


def _users_of(args: argparse.Namespace) -> Iterator[WantedUser]:
    fleet = args.fleet or DEFAULT_FLEET
    for role in ROLES:
        names = getattr(args, role)
        if role in SINGLE and args.action == "init":
            names = [role, *names]
        yield from ((fleet, Role(role), name) for name in names)


def _models_of(args: argparse.Namespace) -> dict[WantedUser, tuple[str, ...]]:
    """Return the publishers, each with its models."""
    found: dict[WantedUser, tuple[str, ...]] = {}
    for text in args.publisher:
        name, _, model = text.partition(":")
        one = (args.fleet or DEFAULT_FLEET, Role.PUBLISHER, name)
        found[one] = (*found.get(one, ()), *filter(None, [model]))
    return found


def _init(args: argparse.Namespace, users: tuple[WantedUser, ...], models: dict[WantedUser, tuple[str, ...]]) -> int:
    tls = _read_tls(args, "server", "client")
    has_cluster = next(args.dir.glob("node-*.conf"), None) is not None
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name)}
    if has_cluster and given:
        raise WrongUsage(
            f"{_options(given)}: {args.dir} has the servers of a cluster; their configuration is that of "
            "`rollbus nats init`"
        )
    server = args.dir / SERVER_FILE
    if server.exists():
        _check_settings(server, given)
    # An existing publisher may be named without its models.
    entries = ensure_users(args.dir, users, {one: names for one, names in models.items() if names})
    if has_cluster:
        server = args.dir / CONFIG_FILE
    else:
        write_server_config(args.dir, args.listen or DEFAULT_LISTEN, tls)
    rows = [(each.user.role, each.user.name, each.user.fleet, str(each.path), each.is_new) for each in entries]
    if args.json:
        names = ("role", "name", "fleet", "creds", "new")
        print_json({"server": str(server), "users": [dict(zip(names, row, strict=True)) for row in rows]})
        return ExitCode.OK
    cells = [(*row[:3], "new" if row[4] else "as before", row[3]) for row in rows]
    print_table(("role", "name", "fleet", "key", "credentials"), cells)
    admin = next(entry.path for entry in entries if entry.user.role == "admin")
    start = f"Servers: copy {CONFIG_FILE} to each server." if has_cluster else f"Server: nats-server -c {server}."
    running = "Running servers reload it" if has_cluster else "A running server reloads it"
    write(f"\n{start} {running} on SIGHUP; send SIGHUP twice.")
    write(f"Keep {admin.parent / 'root.seed'} secret: no running program needs it.")
    write(f"Then create the queue of each model, since workers may not: {program()} make-queue MODEL --creds {admin}")
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


def _remove(args: argparse.Namespace, users: tuple[WantedUser, ...]) -> int:
    if not users:
        raise WrongUsage("remove requires users, for example --trainer NAME")
    removed = [one for one in users if remove_user(args.dir, one)]
    found = [{"fleet": fleet, "role": role, "name": name} for fleet, role, name in removed]
    told = "after its next reload, the server rejects this user"
    lines = [f"removed {role} {name} of fleet {fleet}; {told}" for fleet, role, name in removed]
    print_result(args, {"removed": found}, *lines)
    for fleet, role, name in users:
        if (fleet, role, name) not in removed:
            raise CommandFailed(f"{args.dir} has no {role} {name} of fleet {fleet}")
    return ExitCode.OK


def run_nats(args: argparse.Namespace) -> int:
    """Write the configurations, and print the next steps."""
    refuse_options(args, ["nats"], "for the action init, which does not connect to a server")

    if not args.nodes:
        raise WrongUsage("init requires servers, for example --nodes a.example,b.example,c.example")
    nodes = parse_nodes(args.nodes)
    client_tls = _read_tls(args, "server", "client")
    route_tls = _read_tls(args, "cluster", "cluster")
    if route_tls.cert and not route_tls.ca:
        raise WrongUsage("--cluster-cert requires --cluster-ca: servers verify each other")
    config = ClusterConfig(
        name=args.cluster,
        store_dir=args.store_dir.absolute(),
        max_file_store=args.max_file_store,
        client_tls=client_tls,
        route_tls=route_tls,
    )
    if args.dir.is_dir():
        check_writable("the directory", args.dir)
    paths = write_cluster(args.dir, nodes, config) if args.dir.is_dir() else ()
    fleet = args.fleet or DEFAULT_FLEET
    users = ensure_users(args.dir, [(fleet, role, str(role)) for role in (Role.ADMIN, Role.FRONTEND, Role.VIEWER)])
    paths = paths or write_cluster(args.dir, nodes, config)
    scheme = "tls" if client_tls.cert else "nats"
    url = ",".join(f"{scheme}://{node.url}" for node in nodes)
    rows = [(node.name, node.url, str(path)) for node, path in zip(nodes, paths, strict=True)]
    admin = users[0].path
    if args.json:
        print_json({"nodes": {node: path for node, _, path in rows}, "url": url, "admin": str(admin)})
        return ExitCode.OK
    print_table(("server", "address", "configuration"), rows)
    name, file = program(), args.dir / "users.conf"
    write(
        f"""
1. Create users: {name} auth init --dir {args.dir} --trainer NAME --worker NAME ...
2. Copy to each machine its configuration and {file}, into one folder. Only nats-server may read them.
3. On each machine: nats-server -c FILE
4. For all programs: export ROLLBUS_NATS={url}
5. As an admin: {name} make-queue MODEL --creds {admin}
6. {name} doctor --creds {admin}"""
    )
    return ExitCode.OK


def _read_tls(args: argparse.Namespace, what: str, peer: str) -> Tls:
    """Return the files of the options, as absolute paths.

    Raises:
        CommandFailed: one of them lacks another.
    """
    given = [getattr(args, name) for name in (f"{peer}_ca", f"{what}_cert", f"{what}_key")]
    ca, cert, key = (str(Path(file).absolute()) if file else "" for file in given)
    if bool(cert) != bool(key) or (ca and not cert):
        raise WrongUsage(f"TLS requires --{what}-cert and --{what}-key; --{peer}-ca is allowed only with both")
    return Tls(ca=ca, cert=cert, key=key)
