"""`rollbus nats init`: the configurations of the servers of a NATS cluster."""

import argparse
from pathlib import Path

from ...bus.auth.cluster import ClusterConfig, parse_nodes, write_cluster
from ...bus.auth.credentials import DEFAULT_FLEET, Role, Tls
from ...bus.auth.users import ensure_users
from ...schemas.options import check_writable
from .console import print_json, program, write
from .exits import CommandFailed, ExitCode
from .options import refuse_options
from .tables import print_table


def run(args: argparse.Namespace) -> int:
    """Write the configurations, and print the next steps."""
    refuse_options(args, ["nats"], "for the action init, which does not connect to a server")

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
