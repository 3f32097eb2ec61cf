"""The servers that a first connection need not retry: each rejects this user, or TLS with it fails."""

import logging

from nats import errors as nats_errors

from ...schemas.errors import BusBroken
from .address import redact
from .server import CREDENTIALS_VARIABLE, Server
from .tls_failure import tls_failure

__all__ = ["FailedServers"]

logger = logging.getLogger(__name__)


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
