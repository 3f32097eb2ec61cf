"""Servers with and without TLS, for tests of the bytes that a client sends before and after the handshake."""

import asyncio
import contextlib
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rollbus.bus.auth.credentials import Tls
from rollbus.bus.nats import embedded
from rollbus.bus.nats.embedded import server_config
from rollbus.bus.nats.server import Server

INFO: Mapping[str, Any] = {
    "server_id": "x",
    "version": "2.12.0",
    "max_payload": 2**20,
    "headers": True,
    "proto": 1,
    "auth_required": True,
    "nonce": "PaQWx_kTVWMfhZc",
}
LEAVES_WITHIN_S = 30.0
"""Maximum wait for a client that has closed its connection; it usually takes milliseconds."""


class FakeServer:
    """A minimal NATS server for opening a connection, with one thread per client.

    Attributes:
        info: fields of the INFO message.
        received: decrypted or plain bytes of each connection, including those with a failed handshake.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.info: dict[str, Any] = {**INFO, **info}
        self.received: list[bytearray] = []
        self.port = 0
        self.over = threading.Event()
        self._listeners: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self._accepting: list[threading.Thread] = []
        self._serving: list[threading.Thread] = []

    @property
    def address(self) -> str:
        """The address as other servers advertise it."""
        return f"127.0.0.1:{self.port}"

    @property
    def connects(self) -> list[dict[str, Any]]:
        """The decoded CONNECT messages of all clients."""
        lines = b"".join(bytes(one) for one in self.received).splitlines()
        return [json.loads(line.removeprefix(b"CONNECT ")) for line in lines if line.startswith(b"CONNECT ")]

    @contextlib.asynccontextmanager
    async def beside(self, port: int = 0) -> AsyncIterator[Self]:
        """Listen until the block ends, then close all connections; the bytes of all clients are recorded by then."""
        self.listen(port)
        try:
            yield self
        finally:
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self.over.set()
        _close(self._listeners)
        # Join the accepting threads first, because they start the serving threads.
        for threads in (self._accepting, self._serving):
            for thread in threads:
                thread.join(LEAVES_WITHIN_S)
        self.go_away()

    def listen(self, port: int = 0) -> None:
        """Accept connections at `port`, or at the previous port by default."""
        listener = socket.create_server(("127.0.0.1", port or self.port))
        self.port = listener.getsockname()[1]
        self._listeners.append(listener)
        self._accepting.append(threading.Thread(target=self._accept, args=(listener,), daemon=True))
        self._accepting[-1].start()

    def go_away(self) -> None:
        """Stop accepting connections and close all open ones."""
        _close(self._listeners)
        _close(self._sockets)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = listener.accept()
                self._sockets.append(one)
                self.received.append(bytearray())
                thread = threading.Thread(target=self._serve, args=(one, self.received[-1]), daemon=True)
                thread.start()
                self._serving.append(thread)

    def _serve(self, one: socket.socket, sent: bytearray) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.serve(one, sent)

    def serve(self, one: socket.socket, sent: bytearray) -> None:
        """Serve one client and record its bytes."""
        raise NotImplementedError

    def say_info(self, one: socket.socket, **more: Any) -> None:
        """Send INFO."""
        one.sendall(b"INFO " + json.dumps({**self.info, **more}).encode() + b"\r\n")

    def answer_pings(self, one: socket.socket, sent: bytearray) -> Iterator[None]:
        """Record all bytes and answer pings; yield after each answer."""
        answered = 0
        while data := one.recv(65536):
            sent += data
            while answered < sent.count(b"PING\r\n"):
                answered += 1
                one.sendall(b"PONG\r\n")
                yield


class PlainServer(FakeServer):
    """A server without TLS, which records all bytes."""

    def __init__(self, **info: Any) -> None:
        super().__init__(info)

    def serve(self, one: socket.socket, sent: bytearray) -> None:
        """Send INFO without TLS and answer pings."""
        self.say_info(one)
        for _ in self.answer_pings(one, sent):
            pass


class TlsServer(FakeServer):
    """A TLS server with its own certificate.

    Args:
        folder: folder for the certificate.
        names: hosts of the certificate.
        days: days until the certificate expires.
        shakes_hands: if False, the handshake never ends.
        answers: if False, the server sends nothing after its first answer.
        learned: addresses of other servers, sent after the handshake.
    """

    def __init__(
        self,
        folder: Path,
        *,
        names: tuple[str, ...] = ("127.0.0.1",),
        days: float = 1,
        shakes_hands: bool = True,
        answers: bool = True,
        learned: tuple[str, ...] = (),
        **info: Any,
    ) -> None:
        super().__init__({"tls_required": True, **info})
        cert, key = certificate(folder, names=names, days=days, file=f"cert-{id(self)}")
        self.cert = cert
        self.tls = Tls(ca=str(cert))
        self.shakes_hands, self.answers, self.learned = shakes_hands, answers, learned
        self.before_handshake = b""
        """Plain bytes to send between INFO and the handshake, as an attacker on the network could."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, key)

    @property
    def server(self) -> Server:
        """The server's URL and TLS settings, for connections."""
        return Server(f"nats://{self.address}", tls=self.tls)

    def ask_for_certificates(self, ca: Path, newest: ssl.TLSVersion) -> None:
        """Require client certificates signed by `ca`, and allow no TLS version above `newest`."""
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_verify_locations(ca)
        self._context.maximum_version = newest

    def serve(self, one: socket.socket, sent: bytearray) -> None:
        """Send INFO, do the TLS handshake and answer pings."""
        self.say_info(one)
        one.sendall(self.before_handshake)
        if not self.shakes_hands:
            self.over.wait()
            return
        with self._context.wrap_socket(one, server_side=True) as safe:
            self._sockets.append(safe)
            for _ in self.answer_pings(safe, sent):
                if not self.answers:
                    self.over.wait()
                if self.learned:
                    self.say_info(safe, connect_urls=self.learned)


def _close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
    sockets.clear()


def configure_tls(
    monkeypatch: pytest.MonkeyPatch, cert: Path, key: Path, *, outside: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Make embedded servers use TLS with this certificate.

    Args:
        outside: additional fields of the server's configuration.
        options: additional fields of its `tls` block.
    """

    def changed(*, listen: str, store_dir: str, max_payload_bytes: int) -> str:
        tls = {"cert_file": str(cert), "key_file": str(key), **options}
        config = json.loads(server_config(listen=listen, store_dir=store_dir, max_payload_bytes=max_payload_bytes))
        return json.dumps({**config, "tls": tls, **(outside or {})})

    monkeypatch.setattr(embedded, "server_config", changed)


# TLS certificates for the servers of tests.


def certificate(
    folder: Path, *, names: Sequence[str] = ("127.0.0.1",), file: str = "cert", days: float = 1
) -> tuple[Path, Path]:
    """Make a self-signed certificate for these hosts and addresses; return the paths of the certificate and its key.

    Args:
        file: name of the files and of the certificate.
        days: days until the certificate expires.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_general_name(one) for one in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / f"{file}.pem", folder / f"{file}.key.pem"
    cert_path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    return cert_path, key_path


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
