"""The reasons why NATS servers deny a subject, reject a connection or cannot be reached."""

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from ...schemas.errors import BusBroken, PermissionDenied, TlsFailed
from ..auth.credentials import User
from ..auth.permissions import describe_denial
from .library import Client
from .library import errors as nats_errors
from .server import CREDENTIALS_VARIABLE, Server, redact
from .transport import NoTls

logger = logging.getLogger(__name__)

MAX_LOGGED: Final = 100
"""Maximum number of logged subjects. A program has few kinds of subjects, and further denials repeat them."""
_VIOLATION: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
_ACTIONS: Final = {"publish": "publish", "subscription": "subscribe"}
ATTEMPT_S = 2.0
"""Seconds for a server to accept a connection. A disconnected machine does not even reject it."""

# X509_V_ERR of OpenSSL, for which Python has no names.
_EXPIRED: Final = 10
_UNKNOWN_ISSUER: Final = frozenset({18, 19, 20, 21})
_OTHER_NAME: Final = frozenset({62, 64})
_NO_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE", "BAD_CERTIFICATE", "UNKNOWN_CA")
"""Alerts for a client without a certificate, or with one that the server does not trust; TLS 1.2 has no better ones."""


@dataclass(eq=False, slots=True)
class _Waiter:
    """A call that waits for a possible denial."""

    action: str
    subject: str
    scope: asyncio.Timeout
    denial: PermissionDenied | None = None


class Denials:
    """All denials of one connection. The server reports them later; `expected` raises them in the waiting call.

    Args:
        user: the connection's user; None without credentials.

    Attributes:
        first: the first denial that no call waited for.
    """

    def __init__(self, user: User | None) -> None:
        self._user = user
        self._waiters: list[_Waiter] = []
        self._logged: set[tuple[str, str]] = set()
        self.first: PermissionDenied | None = None

    @asynccontextmanager
    async def expected(self, subject: str, action: str = "publish") -> AsyncIterator[None]:
        """Raise `PermissionDenied` in the block as soon as the server denies a publish or subscribe on `subject`.

        Args:
            action: `publish` or `subscribe`.

        If several blocks publish to one subject at once, each block gets its own denial. The server rejects the
        messages one by one in their order.
        """
        waiter = _Waiter(action, subject, asyncio.timeout(None))
        try:
            async with waiter.scope:
                self._waiters.append(waiter)
                try:
                    yield
                finally:
                    self._waiters.remove(waiter)
        except TimeoutError:
            if waiter.denial is None:
                raise
        if waiter.denial is not None:
            raise waiter.denial

    def add(self, words: str) -> PermissionDenied | None:
        """Handle an error text of the server. Return the denial if no call waits for it."""
        violation = _VIOLATION.search(words)
        action, subject = (_ACTIONS[violation[1].lower()], violation[2]) if violation else ("do", words)
        denial = PermissionDenied(self._describe(action, subject), action=action, subject=subject)
        waiters = [waiter for waiter in self._waiters if (waiter.action, waiter.subject) == (action, subject)]
        for waiter in waiters:
            if waiter.denial is None:
                waiter.denial = denial
                waiter.scope.reschedule(asyncio.get_running_loop().time())
                break
        if waiters:
            return None
        self.first = self.first or denial
        if (action, subject) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((action, subject))
            logger.warning("nats.denied action=%s subject=%s error=%s", action, subject, denial)
        return denial

    def _describe(self, action: str, subject: str) -> str:
        if self._user is None:
            return f"a user without credentials may not {action} {'to' if action == 'subscribe' else 'on'} {subject}"
        return f"user {self._user.name} (role {self._user.role}) {describe_denial(self._user, action, subject)}"


async def describe_reachable(nats: Client) -> str:
    """Connect to each named or learned server, and describe how many accept connections.

    A server that ended before this connection was opened is known only if its URL was named.
    """
    addresses = {(uri.hostname or "", uri.port or 0) for uri in nats.servers}
    async with asyncio.TaskGroup() as tasks:
        attempts = [tasks.create_task(_is_reachable(host, port)) for host, port in sorted(addresses)]
    return f"{sum(attempt.result() for attempt in attempts)} of {len(attempts)} known servers are reachable"


async def _is_reachable(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(ATTEMPT_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # a TimeoutError is one
        return False
    writer.transport.abort()
    return True


def tls_failure(error: Exception, url: str) -> TlsFailed | None:
    """Explain `error`. Return None if it does not concern TLS, or another attempt may succeed.

    Args:
        url: URL of the server, without password.
    """
    match error:
        case NoTls():
            return TlsFailed(
                problem=f"TLS is required, and the NATS server at {url} offers none; nothing was sent to it",
                advice="give the server a certificate (rollbus auth init --server-cert FILE --server-key FILE), or "
                "connect without TLS in a trusted network: nats:// and none of --tls-ca, --tls-cert, --tls-key",
            )
        case ssl.SSLCertVerificationError():
            return TlsFailed(
                problem=f"the certificate of the NATS server at {url} is refused; nothing was sent to it: "
                f"certificate verify failed: {error.verify_message}",
                advice=_advice(error.verify_code),
            )
        case ssl.SSLError() if any(alert in (error.reason or "") for alert in _NO_CERTIFICATE):
            return TlsFailed(
                problem=f"the NATS server at {url} ended the TLS handshake: {error.reason}",
                advice="it may ask for a certificate that its CA has signed: --tls-cert FILE and --tls-key FILE",
            )
    return None


def _advice(code: int) -> str:
    if code == _EXPIRED:
        return "renew the server's certificate, or correct the clock of this machine"
    if code in _UNKNOWN_ISSUER:
        return "name the certificate of its CA with --tls-ca FILE or $ROLLBUS_TLS_CA"
    if code in _OTHER_NAME:
        return "use a name of the server's certificate in the URL; all servers of a cluster must have that name"
    return "give the server a certificate that this machine trusts, or name its CA with --tls-ca FILE"


class FailedServers:
    """The errors of servers that were named by URL and rejected the connection. One server that accepts is enough.

    Args:
        name: name of the connection for messages.
    """

    def __init__(self, server: Server, name: str) -> None:
        self._name = name
        self._scheme = server.urls[0].partition(":")[0]
        self._addresses = frozenset(redact(url).rpartition("/")[2].rpartition("@")[2] for url in server.urls)
        if server.credentials is not None:
            user = server.credentials.user
            self._identity = f"it received the key of {user}; nats-server --signal reload makes it read new users"
        elif "@" in server.url:
            self._identity = "it received the user of the URL: check the user, password or token there"
        else:
            self._identity = (
                f"it received no credentials: set --creds FILE, credentials=FILE or ${CREDENTIALS_VARIABLE}"
            )
        self._errors: dict[str, BusBroken] = {}

    @property
    def first(self) -> BusBroken | None:
        """First error; None: no server has failed."""
        return next(iter(self._errors.values()), None)

    def add(self, address: str, error: Exception) -> BusBroken | None:
        """Add the error of an attempt. Return the error that ends all attempts; None: another server may accept."""
        failure = self._explain(address, error)
        if failure is None or address in self._errors:
            return None
        self._errors[address] = failure
        if self._addresses <= self._errors.keys():
            return failure
        logger.warning("nats.server_failed name=%s error=%s", self._name, failure)
        return None

    def _explain(self, address: str, error: Exception) -> BusBroken | None:
        """Return the reason of an error that each further attempt would repeat; None: another attempt may succeed."""
        url = f"{self._scheme}://{address}"
        if (failure := tls_failure(error, url)) is not None:
            return failure
        # The server rejected the connection, and nats-py quotes its message.
        if isinstance(error, nats_errors.Error) and str(error).startswith("nats: '"):
            return BusBroken(f"the NATS server at {url} refused {self._name!r}: {error}; {self._identity}")
        return None
