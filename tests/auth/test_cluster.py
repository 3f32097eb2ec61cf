"""The NATS servers of a cluster that `rollbus nats init` configures."""

import json
from pathlib import Path

import pytest

import rollbus
from rollbus.bus.auth.cluster import Node, parse_nodes
from rollbus.bus.auth.credentials import Role, Tls, load_credentials
from rollbus.bus.auth.users import credentials_path, ensure_users
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.server import Server
from rollbus.schemas.errors import BusBroken, InvalidRequest
from tests.auth.support import run_here
from tests.support.fleet import synthetic_worker
from tests.support.nats_server import check_config, configured_servers, free_nodes
from tests.support.requests import greedy
from tests.support.tls_server import certificate
from tests.support.waits import SOON_S, until


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a,b.example,c:4300", ["a", "b.example", "c"]),
        ("h:4222,h:4223,g", ["h-4222", "h-4223", "g"]),
        ("[::1]:1,[::1]:2,[::1]:3", ["--1-1", "--1-2", "--1-3"]),
    ],
)
def test_servers_are_named_by_host(text: str, names: list[str]) -> None:
    """Each server of a cluster is named by its host, and also by its port if several servers have the same host."""
    assert [node.name for node in parse_nodes(text)] == names
    assert parse_nodes("a,b,[::1]:7")[2].url == "[::1]:7"
    assert parse_nodes("a,b,c")[0] == Node("a", "a", 4222)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b", "names 2 servers; allowed: 3 to 64"),
        ("a,b,", "has ''"),
        ("a,b,nats://c", "has 'nats://c'"),
        ("a,b,u:p@c", "has 'u:p@c'"),
        ("a,b,c:x", "has 'c:x': Port could not be cast"),
        ("a,b,c:64000", "has port 64000; allowed: 1 to 63535"),
        ("a,a,b", "needs port 4222 of a twice"),
        ("a:4222,a:6222,b", "needs port 6222 of a twice"),
    ],
)
def test_wrong_servers_are_refused(text: str, problem: str) -> None:
    """The error for an invalid list of servers names the invalid server and the reason."""
    with pytest.raises(InvalidRequest) as caught:
        parse_nodes(text)
    assert problem in str(caught.value)


def written(folder: Path, nodes: list[str], *options: str) -> tuple[list[Path], str]:
    """Run `rollbus nats init`, and return the paths of its configuration files and its output."""
    arguments = ("nats", "init", "--nodes", ",".join(nodes), "--dir", str(folder), "--fleet", "F", *options)
    ended = run_here(*arguments, "--store-dir", str(folder / "store"), "--max-file-store", "20GB")
    assert ended.code == 0
    return [folder / node.file for node in parse_nodes(",".join(nodes))], ended.stdout


def test_nats_server_accepts_the_written_files(tmp_path: Path) -> None:
    """nats-server accepts the written files with and without TLS for clients and routes.

    Only the owner can read the files, and a second run never replaces a file.
    """
    cert, key = map(str, certificate(tmp_path))
    tls = [f"--{what}-{kind}={path}" for what in ("server", "cluster") for kind, path in (("cert", cert), ("key", key))]
    for folder, options in ((tmp_path / "plain", []), (tmp_path / "tls", [*tls, f"--cluster-ca={cert}"])):
        paths, shown = written(folder, ["a.example", "b.example", "c.example"], *options)
        for path in paths:
            check_config(path)
            assert path.stat().st_mode & 0o077 == 0
    assert "ROLLBUS_NATS=tls://a.example:4222,tls://b.example:4222,tls://c.example:4222" in shown
    before = (tmp_path / "plain/node-a.example.conf").read_text()
    refused = run_here("nats", "init", "--nodes", "a.example,x,y", "--dir", str(tmp_path / "plain"))
    assert (refused.code, "already contains node-a.example.conf" in refused.stderr) == (2, True)
    assert (tmp_path / "plain/node-a.example.conf").read_text() == before
    assert not (tmp_path / "plain/node-x.conf").exists()


def test_auth_init_writes_a_users_file_that_all_servers_include(tmp_path: Path) -> None:
    """In a cluster's folder, `rollbus auth init` writes `users.conf`, which all servers include.

    It asks the user to copy the file to each server.
    """
    written(tmp_path, ["a", "b", "c"])
    ended = run_here("auth", "init", "--dir", str(tmp_path), "--fleet", "F", "--trainer", "alice")
    assert (ended.code, "copy users.conf to each server" in ended.stdout) == (0, True)
    assert not (tmp_path / "nats-server.conf").exists()
    assert '"F~trainer~alice"' in (tmp_path / "users.conf").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "init requires servers"),
        (["--nodes", "a,b,c", "--server-cert", "x"], "--server-cert and --server-key"),
        (["--nodes", "a,b,c", "--cluster-ca", "x"], "--cluster-cert and --cluster-key"),
        (["--nodes", "a,b,c", "--cluster-cert", "x", "--cluster-key", "y"], "requires --cluster-ca"),
        (["--nodes", "a,b,c", "--max-file-store", "much"], "is not a size such as 50GB"),
    ],
)
def test_invalid_options_of_nats_init_are_a_usage_error(options: list[str], message: str, tmp_path: Path) -> None:
    """Invalid options of `rollbus nats init` are a usage error, and no file is written."""
    ended = run_here("nats", "init", "--dir", str(tmp_path / "d"), *options)
    assert ended.code == 2
    assert message in ended.stderr
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
@pytest.mark.parametrize("has_tls", [False, True])
async def test_users_on_different_servers_of_a_cluster_share_one_fleet(tmp_path: Path, has_tls: bool) -> None:
    """Users on different servers of the cluster share one fleet, and a connection without credentials is rejected."""
    folder, nodes = tmp_path / "nats", free_nodes(3)
    ensure_users(folder, [("F", Role.WORKER, "w0"), ("F", Role.TRAINER, "alice")])
    cert, key = map(str, certificate(tmp_path))
    files = [
        f"--{what}-{kind}={path}" for what in ("server", "cluster") for kind, path in (("cert", cert), ("key", key))
    ]
    paths, _ = written(folder, nodes, *([*files, f"--cluster-ca={cert}"] if has_tls else []))
    tls = Tls(ca=cert) if has_tls else Tls()
    scheme = "tls" if has_tls else "nats"

    def server(role: Role, name: str, first: int) -> Server:
        urls = ",".join(f"{scheme}://{node}" for node in [*nodes[first:], *nodes[:first]])
        return Server(urls, load_credentials(credentials_path(folder, "F", role, name)), tls)

    async def is_provisioned() -> bool:
        try:
            await provision(server(Role.ADMIN, "admin", 0), "F", ["synthetic"])
        except BusBroken:
            return False  # the servers have not elected a leader yet
        return True

    async with configured_servers(paths) as servers:
        await until(is_provisioned, expected=True)
        worker = server(Role.WORKER, "w0", 1)
        trainer = server(Role.TRAINER, "alice", 2)
        async with (
            synthetic_worker(worker.url, "F", credentials=worker.credentials, tls=tls, worker_id="w0"),
            rollbus.connect(trainer) as rb,
        ):
            await rb.fleet.wait_for_workers(1, timeout_s=SOON_S)
            assert (await rb.complete(greedy(1, 5))).token_ids.size == 5
        with pytest.raises(BusBroken, match="received no credentials"):
            async with rollbus.connect(Server(trainer.url, None, tls)):
                pass
    assert len(servers) == 3
    assert json.loads((folder / "users.json").read_text())["users"]
