"""Several URLs name servers of one cluster: a client uses any of them, and any server that they advertise."""

from dataclasses import replace
from pathlib import Path

import pytest

import rollbus
from rollbus.bus.auth.credentials import Tls
from rollbus.bus.nats.connection import open_connection
from rollbus.bus.nats.server import Server, parse_urls, redact
from rollbus.schemas.errors import BusBroken, TlsFailed
from tests.support.nats_cluster import nats_cluster
from tests.support.nats_server import opened, require_binary
from tests.support.tls_server import TlsServer
from tests.support.waits import SOON_S, on_both_loops, until_true

DEAD = "nats://127.0.0.1:1"


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("a,b:2", ["nats://a:4222", "nats://b:2"]),
        ("nats://a, nats://b:2 ", ["nats://a:4222", "nats://b:2"]),
        ("tls://a,tls://[::1]:7", ["tls://a:4222", "tls://[::1]:7"]),
        ("a,nats://a:4222", ["nats://a:4222"]),
        ("nats://u:p,w@a,nats://v:q@b", ["nats://u:p,w@a:4222", "nats://v:q@b:4222"]),
        ("nats://u:p,w@a,b", ["nats://u:p,w@a:4222", "nats://b:4222"]),
    ],
)
def test_a_list_of_urls_is_split_at_its_commas(text: str, urls: list[str]) -> None:
    """A comma before an `@` belongs to a password, and a repeated server counts once."""
    assert list(parse_urls(text)) == urls
    assert "p,w" not in redact(text)


@pytest.mark.parametrize(
    ("urls", "problem"),
    [
        ("tls://a,nats://b", "requires TLS for some servers only"),
        ("tls://a,b", "requires TLS for some servers only"),
        ("nats://a,http://b", "'http://b' is not a URL .*: its scheme is 'http'"),
        ("nats://a,", "'' is not a URL .*: it names no host"),
        (["nats://a", "b:port"], "'b:port' is not a URL"),
        ([], "names no host"),
        ([f"h{i}" for i in range(65)], "65 URLs of NATS servers were named; allowed: 64"),
    ],
)
def test_an_invalid_list_is_rejected_before_any_connection(urls: str | list[str], problem: str) -> None:
    """An invalid list is rejected with the invalid URL before any connection."""
    with pytest.raises(BusBroken, match=problem):
        rollbus.connect(urls)


async def test_a_dead_url_does_not_stop_a_connect(nats_url: str) -> None:
    """Connecting succeeds with a dead URL at any position, in a string or a sequence."""
    for urls in ([DEAD, nats_url], [nats_url, DEAD]):
        async with rollbus.connect(urls, fleet="nobody") as rb:
            assert (await rb.fleet.state()).workers == ()


async def test_if_all_servers_are_dead_the_error_names_each_url() -> None:
    """If all servers are dead, the error names each URL and the reason of the last attempt."""
    with pytest.raises(
        BusBroken, match=r"no NATS server at nats://127.0.0.1:1,nats://\*\*\*@127.0.0.1:2 within .*Errno"
    ):
        await open_connection(f"{DEAD},nats://u:p@127.0.0.1:2", name="test", timeout_s=0.1)


@pytest.mark.slow
@on_both_loops
async def test_an_untrusted_server_does_not_stop_a_connect(tmp_path: Path, loop: str) -> None:
    """Connecting fails because of untrusted servers only if no URL has a trusted server."""
    async with (
        TlsServer(tmp_path).beside() as good,
        TlsServer(tmp_path).beside() as bad,
        TlsServer(tmp_path).beside() as worse,
    ):
        server = Server(f"tls://{bad.address},tls://{good.address}", tls=good.tls)
        connection = await open_connection(server, name="test", timeout_s=SOON_S)
        assert connection.is_connected
        await connection.shut()
        server = replace(server, url=f"tls://{bad.address},tls://{worse.address}")
        with pytest.raises(TlsFailed, match="self-signed certificate"):
            await open_connection(server, name="test", timeout_s=SOON_S)
    assert (bad.connects, worse.connects) == ([], [])


@pytest.mark.slow
@on_both_loops
@pytest.mark.parametrize(("name", "is_trusted"), [("127.0.0.1", True), ("localhost", True), ("other.example", False)])
async def test_a_learned_server_must_prove_a_name_of_the_urls(
    tmp_path: Path, loop: str, name: str, is_trusted: bool
) -> None:
    """A learned server must prove one of the names in the URLs; only then it receives the user of the URL."""
    async with (
        TlsServer(tmp_path, names=(name,)).beside() as learned,
        TlsServer(tmp_path, names=("127.0.0.1",), learned=(learned.address,)).beside() as first,
        TlsServer(tmp_path, names=("localhost",), learned=(learned.address,)).beside() as second,
    ):
        bundle = tmp_path / "all.pem"
        bundle.write_bytes(b"".join(one.cert.read_bytes() for one in (first, second, learned)))
        urls = f"tls://alice:hunter2@127.0.0.1:{first.port},tls://alice:hunter2@localhost:{second.port}"
        connection = await open_connection(Server(urls, tls=Tls(ca=str(bundle))), name="test", timeout_s=SOON_S)
        await until_true(lambda: connection.discovered_servers)
        first.go_away()
        second.go_away()
        # The client tries each of the names.
        await until_true(lambda: len(learned.received) >= (1 if is_trusted else 3))
        await until_true(lambda: connection.is_connected == is_trusted)
        await connection.shut()
    assert [connect["pass"] for connect in learned.connects] == (["hunter2"] if is_trusted else [])


@pytest.mark.slow
async def test_a_connection_moves_from_a_killed_server_to_a_learned_server() -> None:
    """A connection with one URL moves from each killed server to a running server that it has learned."""
    require_binary()
    async with nats_cluster() as cluster, opened(cluster.urls[0]) as connection:
        await until_true(lambda: len(connection.discovered_servers) == 2)
        left = dict(zip(cluster.urls, cluster.servers, strict=True))
        for num_reconnects in (1, 2):
            await left.pop(f"nats://{connection._address_now()}").kill()
            await until_true(lambda expected=num_reconnects: connection.counters().reconnects == expected)  # type: ignore[misc]
            assert f"nats://{connection._address_now()}" in left
