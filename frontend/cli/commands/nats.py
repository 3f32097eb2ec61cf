"""Write the configurations of the servers of a NATS cluster.

`rollbus nats init --nodes A,B,C --dir DIR` writes a configuration for each of three or more servers into DIR, which
also contains the users (see `rollbus auth`). The configuration has JetStream, routes with their own password, and TLS
if certificate files are given. The command prints the next steps.
"""

import argparse
import re
from pathlib import Path

from ....schemas.options import check_writable
from ..exits import CommandFailed, ExitCode
from ..options import refuse_options

HELP = "servers of a NATS cluster: configuration"
EXAMPLES = (
    "rollbus nats init --nodes a.example,b.example,c.example --dir nats",
    "rollbus nats init --nodes a,b,c --server-cert server.pem --server-key server.key",
)
READS_NO_CREDENTIALS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("action", choices=("init",), help="write configurations")
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


def run(args: argparse.Namespace) -> int:
    """Write the configurations, and print the next steps."""
    refuse_options(args, ["nats"], "for the action init, which does not connect to a server")
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
