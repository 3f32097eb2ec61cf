"""`rollbus doctor` and connection problems: other protocols, TLS, refused credentials, and a small store."""

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollbus.bus.auth.credentials import Role
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.nats.connection import open_connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.jetstream import ask
from rollbus.frontend.cli.doctor.machine import Finding, Status
from tests.auth.support import FLEET, guarded
from tests.cli.test_doctor import examined
from tests.support.nats_server import change_config, require_binary
from tests.support.tls_server import FakeServer, PlainServer, TlsServer, certificate, configure_tls

pytestmark = pytest.mark.slow


class OtherServer(FakeServer):
    """A server that is not NATS. It sends one message on connect and another after the first data."""

    def __init__(self, unasked: bytes, asked: bytes) -> None:
        super().__init__({})
        self.unasked, self.asked = unasked, asked

    def serve(self, one: socket.socket, sent: bytearray) -> None:
        """Send both messages."""
        one.sendall(self.unasked)
        if one.recv(65536):
            one.sendall(self.asked)
        one.recv(65536)


@pytest.mark.parametrize(
    ("unasked", "asked", "found", "advice"),
    [
        (b"", b"HTTP/1.0 404 Not Found\r\n\r\n", "speaks HTTP, not NATS: HTTP/1.0 404", "(default: 4222)"),
        (b"", b"HTTP/1.1 400 \x1b[31mred\r\n\r\n", "speaks HTTP, not NATS: HTTP/1.1 400 \\x1b[31mred", "4222"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", b"", "is not a NATS server: 'SSH-2.0-OpenSSH_9.6'", "name one with --nats"),
        (b"", b"", "accepts connections and sends nothing", "look at its log"),
    ],
)
async def test_the_protocol_of_a_server_that_is_not_nats_is_named(
    unasked: bytes, asked: bytes, found: str, advice: str
) -> None:
    """`doctor` names the protocol of a server that is not NATS by the bytes that the server sends."""
    async with OtherServer(unasked, asked).beside() as server:
        finding = (await examined(f"nats://{server.address}"))["server"]

    assert finding.status is Status.FAIL
    assert found in finding.found
    assert advice in finding.advice


def trust(monkeypatch: pytest.MonkeyPatch, cert: Path) -> None:
    """Trust a certificate as `--tls-ca` does."""
    monkeypatch.setenv("ROLLBUS_TLS_CA", str(cert))


async def test_a_server_without_tls_is_a_failure_if_tls_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the server offers no TLS, `doctor` reports that and sends neither user nor password."""
    cert, _ = certificate(tmp_path)
    trust(monkeypatch, cert)
    async with PlainServer().beside() as server:
        finding = (await examined(f"tls://alice:hunter2@{server.address}"))["tls"]

    assert finding.status is Status.FAIL
    assert "offers none; nothing was sent" in finding.found
    assert "--server-cert" in finding.advice
    assert not any(server.received)


@pytest.mark.parametrize(
    ("name", "days", "is_trusted", "words"),
    [
        (
            "nats.example.com",
            100,
            True,
            ("not valid for '127.0.0.1'", "use a name of the server's certificate in the URL"),
        ),
        ("127.0.0.1", 100, False, ("self-signed certificate", "--tls-ca FILE")),
        ("127.0.0.1", -1, True, ("certificate has expired", "renew")),
    ],
)
async def test_a_wrong_certificate_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, name: str, days: float, is_trusted: bool, words: tuple[str, str]
) -> None:
    """`doctor` shows subject, names, issuer and end of a wrong certificate, and the error."""
    async with TlsServer(tmp_path, names=(name,), days=days).beside() as server:
        if is_trusted:
            trust(monkeypatch, server.cert)
        finding = (await examined(f"tls://{server.address}"))["tls"]

    assert finding.status is Status.FAIL
    assert words[0] in finding.found
    assert f"certificate of CN={server.cert.stem} for {name}, issued by CN={server.cert.stem}" in finding.found
    assert "valid until" in finding.found
    assert words[1] in finding.advice


async def at_tls(monkeypatch: pytest.MonkeyPatch, folder: Path, scheme: str, days: float, **options: Any) -> Finding:
    """Return the finding about the TLS of a nats-server."""
    require_binary()
    cert, key = certificate(folder, days=days)
    configure_tls(monkeypatch, cert, key, **options)
    async with EmbeddedServer() as server:
        # This is the variable of OpenSSL. No option of rollbus requests TLS in this test.
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        findings = await examined(server.url.replace("nats://", scheme))
    return findings["tls"] if "tls" in findings else findings["server"]


@pytest.mark.parametrize(
    ("scheme", "days", "status", "words"),
    [
        ("tls://", 100, Status.OK, ("TLSv1.3, certificate of CN=cert for 127.0.0.1, issued by CN=cert, valid", "")),
        ("tls://", 5.1, Status.WARN, ("5 days", "renew")),
        ("nats://", 100, Status.WARN, ("the URL does not require it", "tls:// in the URL")),
    ],
)
async def test_a_good_certificate_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, scheme: str, days: float, status: Status, words: tuple[str, str]
) -> None:
    """`doctor` shows protocol and certificate.

    It warns if the certificate expires soon or the URL does not require TLS.
    """
    finding = await at_tls(monkeypatch, tmp_path, scheme, days)

    assert (finding.status, words[0] in finding.found, words[1] in finding.advice) == (status, True, True)


async def test_a_server_that_requires_the_tls_handshake_first_is_detected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`doctor` detects a server that sends nothing before a TLS handshake."""
    finding = await at_tls(monkeypatch, tmp_path, "nats://", 100, handshake_first=True)

    assert "sends nothing before a TLS handshake; there it shows TLSv1.3, certificate of CN=cert" in finding.found
    assert finding.advice == "tls:// in the URL"


async def test_refused_credentials_are_distinguished_from_missing_credentials(tmp_path: Path) -> None:
    """For each refusal, `doctor` reports the credentials that it presented, with matching advice."""
    [other] = ensure_users(tmp_path / "other", [(FLEET, Role.TRAINER, "alice")])
    async with guarded(tmp_path / "users") as guard:
        none = (await examined(guard.url))["server"]
        unknown = (await examined(guard.url, other.path))["server"]
        password = (await examined(guard.url.replace("//", "//alice:hunter2@")))["server"]

    assert {one.status for one in (none, unknown, password)} == {Status.FAIL}
    assert none.advice == "name your credentials with --creds FILE or $ROLLBUS_CREDS"
    assert "it received the key of trainer alice of fleet F" in unknown.found
    assert unknown.advice.startswith("the server does not know this key of trainer alice of fleet F")
    assert "password in the URL" in password.advice
    assert "hunter2" not in f"{password}"


async def test_credentials_without_roots_are_a_warning(tmp_path: Path) -> None:
    """Credentials without roots are a warning: they work, but accept unsigned messages."""
    async with guarded(tmp_path) as guard:
        new = (await examined(guard.url, guard.path("alice")))["credentials"]
        fields = msgspec.json.decode(guard.path("alice").read_bytes())
        del fields["roots"]
        guard.path("alice").write_bytes(msgspec.json.encode(fields))
        old = (await examined(guard.url, guard.path("alice")))["credentials"]

    assert (new.status, old.status) == (Status.OK, Status.WARN)
    assert "rollbus auth certify --dir DIR" in old.advice


async def test_a_small_store_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` reports the size of a small store, although the API states no limit, and leaves no trace."""
    require_binary()
    change_config(monkeypatch, max_file_store=2 * 1024**2)
    async with EmbeddedServer() as server:
        finding = (await examined(server.url))["jetstream"]
        nats = await open_connection(server.url, name="test")
        info = await ask(nats, "INFO")
        await nats.shut()

    assert finding.status is Status.WARN
    assert "2 MiB left to reserve; the queues of a model reserve 5.0 GiB" in finding.found
    assert "max_file_store of 5GB" in finding.advice
    assert (info["streams"], info["reserved_storage"], info["limits"]["max_storage"]) == (0, 0, -1)


async def test_a_store_with_room_for_a_model_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with exactly enough room for the queues of a model gives no warning."""
    require_binary()
    change_config(monkeypatch, max_file_store=5 * 1024**3)
    async with EmbeddedServer() as server:
        finding = (await examined(server.url))["jetstream"]

    assert (finding.status, "room for the queues of another model (5.0 GiB)" in finding.found) == (Status.OK, True)
