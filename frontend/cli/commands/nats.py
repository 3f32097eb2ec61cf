"""Write the configurations of a NATS cluster and its leaf nodes, and change the replicas of its streams.

`rollbus nats init --nodes A,B,C --dir DIR` writes a configuration for each of three or more servers into DIR, which
also contains the users (see `rollbus auth`). The configuration has JetStream, routes with their own password, and TLS
if certificate files are given. The command prints the next steps.

`rollbus nats leaf --dir DIR --hub A,B,C --user trainer-alice --user worker-w0` writes DIR/leaf-NAME.conf for a
nats-server at another site. Through this leaf, these users reach the fleet. The command also writes DIR/leafs.conf,
which each server of the hub must include.

`rollbus nats replicas 3`, run by an admin, sets the fleet's queues, desired states and objects to three replicas. It
changes one stream at a time and waits until that stream is current. Run it again after an interruption.
"""

import argparse
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ....schemas.options import check_writable, duration, positive_int
from ..exits import CommandFailed, ExitCode
from ..options import refuse_options

if TYPE_CHECKING:
    from ....bus.auth.credentials import Role


HELP = "servers of a NATS cluster: configuration and replicas"
EXAMPLES = (
    "rollbus nats init --nodes a.example,b.example,c.example --dir nats",
    "rollbus nats leaf --dir nats --hub a.example --user trainer-alice --user worker-w0",
    "rollbus nats replicas 3 --creds nats/default/admin-admin.creds",
)
READS_NO_CREDENTIALS = True
LEAF_PORT = 7422
"""The default port of NATS for leaf nodes."""
REPLICATED_S = 600.0
"""Time limit for each stream, in seconds. A copy of a full object store of 32 GiB takes minutes on a fast network."""


_ROUTES: Final = ("dir", "cluster_cert", "cluster_key", "cluster_ca")
OPTIONS: Final = {
    "init": ("nodes", "cluster", "store_dir", "max_file_store", "server_cert", "server_key", "client_ca", *_ROUTES),
    "leaf": ("hub", "leaf_port", "user", "leaf", "listen", *_ROUTES),
    "replicas": ("objects", "timeout_s"),
}
"""The options of each action."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "action",
        choices=("init", "leaf", "replicas"),
        help="write configurations (init, leaf), or change replicas",
    )
    parser.add_argument(
        "count", metavar="N", nargs="?", type=positive_int, help="number of replicas (for the action replicas)"
    )
    group = parser.add_argument_group("replicas")
    group.add_argument("--objects", metavar="N", type=positive_int, help="replicas of uploaded weights (default: N)")
    group.add_argument(
        "--timeout-s",
        metavar="TIME",
        type=duration,
        default=REPLICATED_S,
        help="seconds until each stream must be current (default: %(default)g)",
    )
    group = parser.add_argument_group("init")
    group.add_argument(
        "--nodes", metavar="HOST[:PORT],...", help="three or more servers; the port of routes is PORT + 2000"
    )
    group.add_argument(
        "--dir", metavar="DIR", type=Path, default=Path("nats"), help="folder of the files (default: %(default)s)"
    )
    group.add_argument(
        "--cluster", metavar="NAME", type=_name, default="rollbus", help="name of the cluster (default: %(default)s)"
    )
    group.add_argument(
        "--store-dir",
        metavar="DIR",
        type=Path,
        default=Path("/var/lib/nats"),
        help="folder of streams on each machine; each server has its own folder in it (default: %(default)s)",
    )
    group.add_argument(
        "--max-file-store",
        metavar="SIZE",
        type=_size,
        default="50GB",
        help="disk space for the streams of one server; the queue of a model reserves 5 GiB (default: %(default)s)",
    )
    for what, side in (("server", "clients"), ("cluster", "the other servers")):
        group.add_argument(
            f"--{what}-cert",
            metavar="FILE",
            default="",
            help=f"path of the certificate for {side}, the same on each machine (default: no TLS)",
        )
        group.add_argument(
            f"--{what}-key", metavar="FILE", default="", help="path of the certificate's key, the same on each machine"
        )
    group.add_argument(
        "--client-ca",
        metavar="FILE",
        default="",
        help="CA that must have signed the certificates of clients (default: none)",
    )
    group.add_argument(
        "--cluster-ca",
        metavar="FILE",
        default="",
        help="CA that must have signed the certificates of the other servers (required with --cluster-cert)",
    )
    _add_leaf_arguments(parser)


def _add_leaf_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "leaf", "also --dir, and --cluster-cert, --cluster-key and --cluster-ca for the connection to the hub"
    )
    group.add_argument("--hub", metavar="HOST,...", type=_hosts, help="servers of the hub, without ports")
    group.add_argument(
        "--leaf-port",
        metavar="N",
        type=positive_int,
        default=LEAF_PORT,
        help="port of the hub for leaf nodes (default: %(default)s)",
    )
    group.add_argument(
        "--user",
        metavar="ROLE-NAME",
        type=_user,
        action="append",
        default=[],
        help="user that may connect to the leaf; may be repeated",
    )
    group.add_argument(
        "--leaf", metavar="NAME", type=_name, default="leaf", help="name of the leaf (default: %(default)s)"
    )
    group.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="0.0.0.0:4222",
        help="address of the leaf for users (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int | Coroutine[object, object, int]:
    """Run the action."""
    if args.action != "replicas" and args.count is not None:
        raise CommandFailed(f"only the action replicas has an argument N; {args.action} has none", ExitCode.USAGE)
    others = {name for action, names in OPTIONS.items() if action != args.action for name in names}
    refuse_options(args, sorted(others - set(OPTIONS[args.action])), f"for the action {args.action}")
    if args.action != "replicas":
        refuse_options(args, ["nats"], f"for the action {args.action}, which does not connect to a server")
    if args.action == "init":
        return _init(args)
    if args.action == "leaf":
        return _leaf(args)
    if args.count is None:
        raise CommandFailed("replicas requires a number, for example: nats replicas 3", ExitCode.USAGE)
    return _replicas(args)


async def _replicas(args: argparse.Namespace) -> int:
    import msgspec

    from ....bus.auth.credentials import DEFAULT_FLEET
    from ....bus.control.replicas import set_replicas
    from ....bus.nats.server import Server
    from ..console import note, print_json, write

    server = Server.named(args.nats)
    fleet = args.fleet or (DEFAULT_FLEET if server.credentials is None else server.credentials.fleet)
    changes = []
    async for change in set_replicas(server, fleet, args.count, objects=args.objects, timeout_s=args.timeout_s):
        changes.append(change)
        if not args.json:
            write(f"{change.what}: {change.after} replicas (before: {change.before}), leader {change.leader or 'none'}")
    if args.json:
        print_json({"streams": [msgspec.to_builtins(change) for change in changes]})
    elif not changes:
        note(f"fleet {fleet!r} has no streams yet")
    return ExitCode.OK


def _init(args: argparse.Namespace) -> int:
    from ....bus.auth.cluster import ClusterConfig, parse_nodes, write_cluster
    from ....bus.auth.credentials import DEFAULT_FLEET, Role, Tls
    from ....bus.auth.users import ensure_users
    from ..console import print_json

    if not args.nodes:
        raise CommandFailed("init requires servers, for example --nodes a.example,b.example,c.example", ExitCode.USAGE)
    nodes = parse_nodes(args.nodes)
    client_tls = _tls("server", args.server_cert, args.server_key, args.client_ca, "--client-ca")
    route_tls = _tls("cluster", args.cluster_cert, args.cluster_key, args.cluster_ca, "--cluster-ca")
    if route_tls["cert"] and not route_tls["ca"]:
        raise CommandFailed("--cluster-cert requires --cluster-ca: servers verify each other", ExitCode.USAGE)
    config = ClusterConfig(
        name=args.cluster,
        store_dir=args.store_dir.absolute(),
        max_file_store=args.max_file_store,
        client_tls=Tls(**client_tls),
        route_tls=Tls(**route_tls),
    )
    if args.dir.is_dir():
        check_writable("the directory", args.dir)
    paths = write_cluster(args.dir, nodes, config) if args.dir.is_dir() else ()
    fleet = args.fleet or DEFAULT_FLEET
    users = ensure_users(args.dir, [(fleet, role, str(role)) for role in (Role.ADMIN, Role.FRONTEND, Role.VIEWER)])
    paths = paths or write_cluster(args.dir, nodes, config)
    scheme = "tls" if client_tls["cert"] else "nats"
    url = ",".join(f"{scheme}://{node.url}" for node in nodes)
    if args.json:
        files = {node.name: str(path) for node, path in zip(nodes, paths, strict=True)}
        print_json({"nodes": files, "url": url, "admin": str(users[0].path)})
    else:
        rows = [(node.name, node.url, str(path)) for node, path in zip(nodes, paths, strict=True)]
        _show(args.dir, rows, url, users[0].path)
    return ExitCode.OK


def _leaf(args: argparse.Namespace) -> int:
    from ....bus.auth.credentials import DEFAULT_FLEET, Tls
    from ....bus.auth.leaf import LeafLink, write_leaf
    from ..console import print_json, write

    if not args.hub or not args.user:
        raise CommandFailed(
            "leaf requires hub and users, for example --hub a.example --user trainer-alice --user worker-w0",
            ExitCode.USAGE,
        )
    fleet = args.fleet or DEFAULT_FLEET
    link = LeafLink(
        hosts=args.hub,
        port=args.leaf_port,
        tls=Tls(**_tls("cluster", args.cluster_cert, args.cluster_key, args.cluster_ca, "--cluster-ca")),
    )
    users = [(fleet, role, name) for role, name in args.user]
    leaf, at_hub = write_leaf(args.dir, args.leaf, users, link, listen=args.listen)
    if args.json:
        print_json({"leaf": str(leaf), "hub": str(at_hub)})
    else:
        write(
            f"""1. Copy {at_hub} to each hub server, beside users.conf. Its configuration: `include {at_hub.name}`.
2. Restart these servers, one after the other: a reload does not apply this change.
3. Copy {leaf} to the site. Only nats-server may read it, because it contains the seeds of its users.
4. At the site: nats-server -c {leaf.name}"""
        )
    return ExitCode.OK


def _show(folder: Path, rows: list[tuple[str, str, str]], url: str, admin: Path) -> None:
    from ..console import program, write
    from ..tables import print_table

    print_table(("server", "address", "configuration"), rows)
    name = program()
    write(
        f"""
1. Create users: {name} auth init --dir {folder} --trainer NAME --worker NAME ...
2. Copy to each machine its configuration and {folder / "users.conf"}, into one folder. Only nats-server may read them.
3. On each machine: nats-server -c FILE
4. For all programs: export ROLLBUS_NATS={url}
5. As an admin: {name} make-queue MODEL --creds {admin}
6. {name} doctor --creds {admin}"""
    )


def _tls(what: str, cert: str, key: str, ca: str, ca_option: str) -> dict[str, str]:
    if bool(cert) != bool(key) or (ca and not cert):
        raise CommandFailed(
            f"TLS requires --{what}-cert and --{what}-key; {ca_option} is allowed only with both", ExitCode.USAGE
        )
    return {
        name: str(Path(file).absolute()) if file else "" for name, file in (("cert", cert), ("key", key), ("ca", ca))
    }


def _hosts(text: str) -> list[str]:
    if not re.fullmatch(r"(\[[\da-fA-F:.]+\]|[\w.-]+)(,(\[[\da-fA-F:.]+\]|[\w.-]+)){0,63}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of hosts, separated by commas and without ports")
    return text.split(",")


def _user(text: str) -> tuple["Role", str]:
    from ....bus.auth.credentials import Role

    role, _, name = text.partition("-")
    if role not in list(Role) or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ROLE-NAME such as trainer-alice or worker-w0")
    return Role(role), name


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a cluster name; allowed: up to 64 letters, digits, '_' and '-'"
        )
    return text


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d{0,11}[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 50GB")
    return text
