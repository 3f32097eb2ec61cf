"""`tls://`, a CA or a client certificate require TLS: the client sends no byte to a server without TLS."""

import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from nats.aio.msg import Msg

from rollbus.bus.auth.credentials import Role, Tls, load_credentials
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.nats.connection import Connection, open_connection, publish, subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.server import Server
from rollbus.schemas.errors import BusBroken, TlsFailed
from tests.support.nats_server import require_binary
from tests.support.tcp_proxy import tcp_proxy
from tests.support.tls_server import FakeServer, PlainServer, TlsServer, certificate, configure_tls
from tests.support.waits import SOON_S, on_both_loops, until_true

pytestmark = pytest.mark.slow

SECRETS = "alice:hunter2"


@contextlib.asynccontextmanager
async def opened(server: Server) -> AsyncIterator[Connection]:
    """Open a connection and close it at the end of the block."""
    connection = await open_connection(server, name="test", timeout_s=60)
    try:
        yield connection
    finally:
        await connection.shut(timeout_s=0.5)


async def ignore(_message: Msg) -> None:
    """Ignore the message."""


@pytest.mark.proves("P26")
@on_both_loops
@pytest.mark.parametrize("asked_by", ["url", "ca", "certificate", "key of a user"])
async def test_a_server_without_tls_gets_nothing(tmp_path: Path, loop: str, asked_by: str) -> None:
    """A server without TLS receives no byte, for each setting that requires TLS and each kind of credentials."""
    cert, key = certificate(tmp_path)
    async with PlainServer().beside() as plain:
        url = f"{SECRETS}@{plain.address}"
        [entry] = ensure_users(tmp_path / "users", [("F", Role.TRAINER, "bob")])
        asked = {
            "url": Server(f"tls://{url}"),
            "ca": Server(f"nats://{url}", tls=Tls(ca=str(cert))),
            "certificate": Server(url, tls=Tls(cert=str(cert), key=str(key))),
            "key of a user": Server(f"tls://{plain.address}", load_credentials(entry.path)),
        }
        with pytest.raises(TlsFailed, match="offers none; nothing was sent to it; give the server a certificate") as e:
            # A connection that succeeds unexpectedly must be closed, or the event loop would wait for it.
            async with opened(asked[asked_by]):
                pass
    assert "hunter2" not in str(e.value)
    assert plain.received == [b""]


@pytest.mark.proves("P26")
@on_both_loops
async def test_a_server_without_tls_gets_nothing_at_a_reconnect(tmp_path: Path, loop: str) -> None:
    """At a reconnect, a server without TLS receives no byte, and published messages wait for the server with TLS."""
    async with TlsServer(tmp_path).beside() as server:
        async with opened(replace(server.server, url=f"tls://{SECRETS}@{server.address}")) as connection:
            await subscribe(connection, "secret.subject", ignore)
            server.go_away()
            async with PlainServer().beside(server.port) as plain:
                await publish(connection, "secret.subject", b"secret")
                await until_true(lambda: len(plain.received) >= 3)
            assert not any(plain.received)
            assert not connection.is_connected
            server.listen()
            await until_true(lambda: connection.is_connected)
        assert [connect["pass"] for connect in server.connects] == ["hunter2"] * 2
        assert b"secret" in server.received[-1]


async def reconnects_past(server: TlsServer, other: FakeServer, connection: Connection) -> None:
    """Let a connection that has lost its server meet another one twice, and then its server again."""
    server.go_away()
    other.listen(server.port)
    await until_true(lambda: len(other.received) >= 2)
    other.go_away()
    server.listen()
    await until_true(lambda: connection.is_connected)


class ForgingServer(PlainServer):
    """A server without TLS that begins with messages for the subscriptions of the connection before."""

    def say_info(self, one: socket.socket, **more: Any) -> None:
        """Send the messages, and then the INFO."""
        one.sendall(b"".join(b"MSG secret.subject %d 6\r\nforged\r\n" % sid for sid in range(9)))
        super().say_info(one, **more)


@on_both_loops
async def test_messages_before_tls_are_ignored_at_a_reconnect(tmp_path: Path, loop: str) -> None:
    """At a reconnect, no subscription receives a message that came before the TLS handshake."""
    received: list[bytes] = []
    async with TlsServer(tmp_path).beside() as server, opened(server.server) as connection:
        await subscribe(connection, "secret.subject", lambda message: received.append(message.data))
        await connection.flush()
        await reconnects_past(server, ForgingServer(), connection)
    assert received == []


class SilentServer(PlainServer):
    """A server that sends nothing first."""

    def say_info(self, one: socket.socket, **more: Any) -> None:
        """Send nothing."""


@on_both_loops
async def test_closing_sends_nothing_without_tls(tmp_path: Path, loop: str) -> None:
    """Closing sends no unsent bytes, which nats-py flushes last, to a server that has sent nothing yet."""
    async with (
        TlsServer(tmp_path).beside() as server,
        SilentServer().beside() as silent,
        opened(server.server) as connection,
    ):
        await subscribe(connection, "secret.subject", ignore)
        server.go_away()
        silent.listen(server.port)
        await until_true(lambda: len(silent.received) >= 1)
        await publish(connection, "secret.subject", b"secret")
    assert not any(silent.received)


async def learns_of(server: TlsServer, other: FakeServer, url: str, *, num_visits: int = 2) -> Connection:
    """Connect to the first server, learn the second server from it, and disconnect the first."""
    connection = await open_connection(Server(url, tls=server.tls), name="test", timeout_s=60)
    await until_true(lambda: len(connection.discovered_servers))
    server.go_away()
    await until_true(lambda: len(other.received) >= num_visits)
    return connection


@on_both_loops
async def test_a_learned_server_without_tls_gets_nothing(tmp_path: Path, loop: str) -> None:
    """A learned server without TLS receives no byte, and the connection returns to the server with TLS."""
    async with PlainServer().beside() as plain, TlsServer(tmp_path, learned=(plain.address,)).beside() as server:
        connection = await learns_of(server, plain, f"tls://{SECRETS}@{server.address}")
        assert not connection.is_connected
        server.listen()
        await until_true(lambda: connection.is_connected)
        await connection.shut()
        assert not any(plain.received)


@on_both_loops
@pytest.mark.parametrize(("names", "is_trusted"), [(("localhost",), False), (("localhost", "127.0.0.1"), True)])
async def test_a_learned_server_must_prove_the_name_of_the_url(
    tmp_path: Path, loop: str, names: tuple[str, ...], is_trusted: bool
) -> None:
    """A learned server's certificate must have the name in the URL: any server could advertise an address."""
    async with (
        TlsServer(tmp_path, names=names).beside() as other,
        TlsServer(tmp_path, learned=(f"localhost:{other.port}",)).beside() as server,
    ):
        bundle = tmp_path / "both.pem"
        bundle.write_bytes(server.cert.read_bytes() + other.cert.read_bytes())
        server.tls = Tls(ca=str(bundle))
        connection = await learns_of(server, other, server.server.url, num_visits=1 if is_trusted else 2)
        await until_true(lambda: connection.is_connected == is_trusted)
        refusal = "" if is_trusted else "not valid for '127.0.0.1'"
        await until_true(lambda: refusal in str(connection.last_error or ""))
        await connection.shut()
        assert bool(other.connects) is is_trusted


@on_both_loops
async def test_messages_and_addresses_before_tls_are_ignored(tmp_path: Path, loop: str) -> None:
    """Messages and addresses before the TLS handshake are ignored: an attacker could have sent them."""
    server, received = TlsServer(tmp_path, connect_urls=["198.51.100.1:4222"]), list[bytes]()
    server.before_handshake = b"MSG x 1 5\r\nhello\r\n+OK\r\nPONG\r\n"
    async with server.beside(), opened(server.server) as connection:
        await subscribe(connection, "x", lambda message: received.append(message.data))
        await connection.flush()
        assert [uri.netloc for uri in connection.servers] == [server.address]
        assert received == []


BAD_INFOS: dict[str, Any] = {
    "addresses": {"connect_urls": ["[::1", "a b:1", "h:99999", "h:x", 7]},
    "nonce": {"nonce": 7},
    "max_payload": {"max_payload": "much"},
    "no object": None,
}


class BadServer(PlainServer):
    """A server that sends an invalid INFO."""

    def __init__(self, info: dict[str, Any] | None) -> None:
        super().__init__(**(info or {}), tls_required=True)
        self.is_list = info is None

    def serve(self, one: socket.socket, sent: bytearray) -> None:
        """Send the INFO and wait for the client to disconnect."""
        one.sendall(b"INFO " + json.dumps([] if self.is_list else self.info).encode() + b"\r\n")
        one.recv(65536)


@on_both_loops
@pytest.mark.parametrize("what", BAD_INFOS)
async def test_an_invalid_info_does_not_end_reconnecting(tmp_path: Path, loop: str, what: str) -> None:
    """An invalid INFO counts as a failed attempt, and the client continues to reconnect."""
    async with TlsServer(tmp_path).beside() as server, opened(server.server) as connection:
        await reconnects_past(server, BadServer(BAD_INFOS[what]), connection)


@contextlib.asynccontextmanager
async def real_server(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, names: tuple[str, ...] = ("127.0.0.1",), **options: Any
) -> AsyncIterator[tuple[str, Tls]]:
    """Run a nats-server with TLS; yield its address and the TLS settings that trust it."""
    require_binary()
    cert, key = certificate(folder, names=names)
    configure_tls(monkeypatch, cert, key, **options)
    async with EmbeddedServer() as server:
        yield urlsplit(server.url).netloc, Tls(ca=str(cert))


async def test_optional_tls_of_the_server_is_used_if_the_client_requires_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If TLS is optional on the server, the client uses it if its settings require TLS."""
    async with (
        real_server(monkeypatch, tmp_path, outside={"allow_non_tls": True}) as (address, tls),
        opened(Server(f"nats://{address}", tls=tls)) as asks,
        opened(Server(f"nats://{address}")) as does_not,
    ):
        assert await asks.confirm(timeout_s=10)
        assert (asks._wire.is_secure, does_not._wire.is_secure) == (True, False)


@pytest.mark.parametrize("waits_s", [SOON_S, 1.2], ids=["client-ends", "server-ends"])
async def test_a_server_that_requires_the_handshake_first_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits_s: float
) -> None:
    """If a server sends nothing before the handshake, the second attempt and the next connection begin with TLS.

    This holds if the client ends the first attempt, and if the server ends it.
    """
    async with (
        real_server(monkeypatch, tmp_path, handshake_first=True, timeout=waits_s) as (address, tls),
        opened(Server(f"tls://{address}", tls=tls)) as connection,
    ):
        assert connection._wire.is_secure
        assert await connection.confirm(timeout_s=10)
        connection._wire.abort()
        await until_true(lambda: connection.counters().reconnects)


async def test_an_info_from_which_tls_was_removed_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If an attacker removes TLS from the INFO, the client raises an error and sends no CONNECT."""
    async with real_server(monkeypatch, tmp_path) as (address, tls), tcp_proxy(f"nats://{address}") as proxy:
        proxy.make_filter = lambda: lambda data: data.replace(b'"tls_required":true', b'"tls_required":false')
        with pytest.raises(TlsFailed, match="offers none"):
            await open_connection(Server(proxy.url, tls=tls), name="test", timeout_s=60)


@pytest.mark.parametrize(
    ("names", "days", "is_named", "words"),
    [
        (("127.0.0.1",), 1, False, "self-signed certificate; name the certificate of its CA with --tls-ca FILE"),
        (
            ("nats.example.com",),
            1,
            True,
            "not valid for '127.0.0.1'.*; use a name of the server's certificate in the URL",
        ),
        (("127.0.0.1",), -1, True, "expired; renew the server's certificate"),
    ],
)
async def test_an_untrusted_certificate_is_an_error_with_the_next_step(
    tmp_path: Path, names: tuple[str, ...], days: float, is_named: bool, words: str
) -> None:
    """An untrusted certificate raises an immediate error with the next step, and the server receives no CONNECT."""
    server = TlsServer(tmp_path, names=names, days=days)
    async with server.beside():
        tls = server.tls if is_named else Tls()
        with pytest.raises(TlsFailed, match=words):
            await open_connection(Server(f"tls://{server.address}", tls=tls), name="test", timeout_s=60)
    assert server.connects == []


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_can_require_a_client_certificate(tmp_path: Path, newest: ssl.TLSVersion) -> None:
    """Without a client certificate the error names the options, in both TLS versions; with it, connecting succeeds."""
    cert, key = certificate(tmp_path, file="client")
    server = TlsServer(tmp_path)
    server.ask_for_certificates(cert, newest)
    async with server.beside():
        with pytest.raises(TlsFailed, match="--tls-cert FILE and --tls-key FILE"):
            await open_connection(server.server, name="test", timeout_s=60)
        shown = replace(server.tls, cert=str(cert), key=str(key))
        async with opened(Server(server.server.url, tls=shown)) as connection:
            assert await connection.confirm(timeout_s=10)


async def test_a_real_nats_server_can_require_a_client_certificate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real nats-server that requires a client certificate behaves in the same way."""
    cert, key = certificate(tmp_path, file="client")
    async with real_server(monkeypatch, tmp_path, verify=True, ca_file=str(cert)) as (address, tls):
        with pytest.raises(TlsFailed, match="--tls-cert FILE and --tls-key FILE"):
            await open_connection(Server(f"tls://{address}", tls=tls), name="test", timeout_s=60)
        async with opened(Server(f"tls://{address}", tls=replace(tls, cert=str(cert), key=str(key)))) as connection:
            assert await connection.confirm(timeout_s=10)


async def test_without_settings_tls_is_used_if_the_server_requires_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without settings for TLS, the client uses TLS if the server requires it, and still verifies the certificate."""
    async with real_server(monkeypatch, tmp_path) as (address, _):
        with pytest.raises(TlsFailed, match="self-signed"):
            await open_connection(f"nats://{address}", name="test", timeout_s=60)


def test_a_tls_scheme_a_ca_or_a_certificate_requires_tls() -> None:
    """The scheme in any case, a CA or a certificate requires TLS, and a key without a certificate is an error."""
    assert Server("TLS://h").requires_tls
    assert Server("h", tls=Tls(ca="x")).requires_tls
    assert Server("h", tls=Tls(cert="x")).requires_tls
    assert not Server("h").requires_tls
    with pytest.raises(BusBroken, match="has no certificate: --tls-cert"):
        Tls(key="k.pem").context()
    assert Server("tls://a,tls://b").requires_tls
    assert not Server("nats://a:1,b:2").requires_tls
