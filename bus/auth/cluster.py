"""The configurations of the servers of a cluster, in the folder of its users. `rollbus nats init` creates them.

    DIR/node-<name>.conf   one server; it includes `users.conf` in the same folder

All servers know the same users. The servers authenticate each other with a random password, over TLS if they have
certificates for it.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ...schemas.errors import InvalidRequest
from .credentials import DEFAULT_PORT, Tls
from .users import CONFIG_FILE, write_new

MIN_NODES: Final = 3
"""Minimum number of servers. With one or two servers, the majority is all servers, so one loss stops everything."""
MAX_NODES: Final = 64
ROUTE_PORT_OFFSET: Final = 2000
"""Offset from a server's port for clients to its port for other servers. NATS uses 4222 and 6222."""
_ROUTE_USER: Final = "route"
_ROUTE_TIMEOUT_S: Final = 5
"""Seconds for another server to present its password or certificate; a busy machine takes seconds."""
_LAME_DUCK: Final = "30s"
"""Time for the clients of a stopping server to move to other servers. NATS allows no shorter time; clients need a
second."""


@dataclass(frozen=True, slots=True)
class Node:
    """One server of a cluster."""

    name: str
    """Name of the server, unique in the cluster: the host, plus the port if several servers share a host."""
    host: str
    """Host that clients and other servers connect to."""
    port: int

    @property
    def route_port(self) -> int:
        """Port for connections of other servers."""
        return self.port + ROUTE_PORT_OFFSET

    @property
    def url(self) -> str:
        """Host and port for clients, without a scheme."""
        return f"{_bracket(self.host)}:{self.port}"

    @property
    def file(self) -> str:
        """Name of the server's configuration file."""
        return f"node-{self.name}.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The settings that all servers of a cluster share."""

    name: str = "rollbus"
    store_dir: Path = Path("/var/lib/nats")
    """Folder on each machine. A server stores its streams in a subfolder with its own name."""
    max_file_store: str = "50GB"
    """Maximum size of the streams of one server. With three servers, each server has a copy of every stream with three
    replicas."""
    client_tls: Tls = field(default_factory=Tls)
    """TLS files on each machine for clients. With `ca`, clients must present certificates that `ca` signed. Empty: no
    TLS."""
    route_tls: Tls = field(default_factory=Tls)
    """TLS files for connections between servers. Each server must present a certificate that `ca` signed. Empty: no
    TLS."""


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Parse a comma-separated list of `HOST[:PORT]`.

    Raises:
        InvalidRequest: `nodes`: an address is invalid or repeated, two servers share a port, or there are too few or
            too many.
    """
    pairs = [_address(part.strip()) for part in text.split(",")]
    if not MIN_NODES <= len(pairs) <= MAX_NODES:
        raise _wrong(f"names {len(pairs)} servers", f"{MIN_NODES} to {MAX_NODES}; three survive the loss of one")
    hosts = [host for host, _ in pairs]
    nodes = tuple(
        Node(re.sub(r"[^\w.-]", "-", host if hosts.count(host) == 1 else f"{host}-{port}"), host, port)
        for host, port in pairs
    )
    taken: set[tuple[str, int]] = set()
    for node in nodes:
        for port in (node.port, node.route_port):
            if (node.host, port) in taken:
                raise _wrong(
                    f"needs port {port} of {node.host} twice",
                    f"different ports: a server also uses the port {ROUTE_PORT_OFFSET} above its own, for routes",
                )
            taken.add((node.host, port))
    return nodes


def write_cluster(folder: Path, nodes: Sequence[Node], config: ClusterConfig) -> tuple[Path, ...]:
    """Write the configuration of each server. Only the owner of the files can read them.

    Raises:
        InvalidRequest: `dir`: a file already exists.
        OSError: a file cannot be written.
    """
    paths = tuple(folder / node.file for node in nodes)
    for path in paths:
        if path.exists():
            raise InvalidRequest("dir", f"already contains {path.name}", "a folder without it")
    password = secrets.token_urlsafe(32)
    for node, path in zip(nodes, paths, strict=True):
        write_new(path, _text(node, nodes, config, password).encode())
    return paths


def _text(node: Node, nodes: Sequence[Node], config: ClusterConfig, password: str) -> str:
    interface = node.host if _is_loopback(node.host) else "0.0.0.0"
    routes = [
        f"nats-route://{_ROUTE_USER}:{password}@{_bracket(other.host)}:{other.route_port}"
        for other in nodes
        if other != node
    ]
    cluster = [
        f"name: {_quote(config.name)}",
        f"listen: {_quote(f'{_bracket(interface)}:{node.route_port}')}",
        f"advertise: {_quote(f'{_bracket(node.host)}:{node.route_port}')}",
        f"authorization {{ user: {_ROUTE_USER}, password: {_quote(password)}, timeout: {_ROUTE_TIMEOUT_S} }}",
        f"routes: {json.dumps(routes)}",
    ]
    if config.route_tls.cert:
        cluster.append(f"tls {{ {config.route_tls.as_config()}, verify: true, timeout: {_ROUTE_TIMEOUT_S} }}")
    jetstream = [
        f"store_dir: {_quote(str(config.store_dir / node.name))}",
        f"max_file_store: {config.max_file_store}",
        "max_memory_store: 1GB",
    ]
    lines = [
        "# Written once by `rollbus nats init`. Edit it as you need.",
        f"server_name: {_quote(node.name)}",
        f"listen: {_quote(f'{_bracket(interface)}:{node.port}')}",
        f"client_advertise: {_quote(node.url)}",
        "max_payload: 8MB",
        "# A server in lame duck mode (`nats-server --signal ldm=PID`) first sends its clients to the others.",
        f"lame_duck_duration: {_LAME_DUCK}",
        "lame_duck_grace_period: 2s",
        *_block("jetstream", jetstream),
        *_block("cluster", cluster),
        "# Users and their permissions, the same on all servers. Other users are rejected.",
        f"include {CONFIG_FILE}",
    ]
    if config.client_tls.cert:
        verify = ", verify: true" if config.client_tls.ca else ""
        lines.append(f"tls {{ {config.client_tls.as_config()}{verify} }}")
    return "\n".join([*lines, ""])


def _block(name: str, lines: Sequence[str]) -> list[str]:
    return [f"{name} {{", *(f"  {line}" for line in lines), "}"]


def _quote(text: str) -> str:
    # The configuration language has no \u escapes.
    return json.dumps(text, ensure_ascii=False)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, DEFAULT_PORT if parts.port is None else parts.port
    except ValueError as error:
        raise _wrong(f"has {text!r}: {error}", "HOST or HOST:PORT") from None
    if not host or parts.netloc != text or "@" in text or re.search(r"\s", text):
        raise _wrong(f"has {text!r}", "HOST or HOST:PORT")
    if not 0 < port <= 65535 - ROUTE_PORT_OFFSET:
        raise _wrong(
            f"has port {port}", f"1 to {65535 - ROUTE_PORT_OFFSET}: routes use the port {ROUTE_PORT_OFFSET} above"
        )
    return host, port


def _wrong(problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest("nodes", problem, allowed)
