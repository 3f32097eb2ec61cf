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
    """Why the servers that were named by URL refused the connection; one that accepts it is enough.

    Args:
        name: the connection's, for messages.
    """

    def __init__(self, server: Server, name: str) -> None:
        self._name = name
        self._scheme = server.urls[0].partition(":")[0]
        self._addresses = frozenset(redact(url).rpartition("/")[2].rpartition("@")[2] for url in server.urls)
        if server.credentials is not None:
            user = server.credentials.user
            self._identity = f"it was shown the key of {user}; nats-server --signal reload has it read new users"
        elif "@" in server.url:
            self._identity = "it was shown the user of the URL: check the user, password or token there"
        else:
            self._identity = (
                f"it was shown no credentials: name some with --creds FILE, credentials=FILE or ${CREDENTIALS_VARIABLE}"
            )
        self._errors: dict[str, BusBroken] = {}

    @property
    def first(self) -> BusBroken | None:
        """Return what the first of them said; None: none has failed."""
        return next(iter(self._errors.values()), None)

    def add(self, address: str, error: Exception) -> BusBroken | None:
        """Take an error of an attempt, and return what ends all attempts; None: others may go better."""
        failure = self._explain(address, error)
        if failure is None or address in self._errors:
            return None
        self._errors[address] = failure
        if self._addresses <= self._errors.keys():
            return failure
        logger.warning("nats.server_failed name=%s error=%s", self._name, failure)
        return None

    def _explain(self, address: str, error: Exception) -> BusBroken | None:
        """Explain an error that another attempt would bring again; None: it is no such error."""
        url = f"{self._scheme}://{address}"
        if (failure := tls_failure(error, url)) is not None:
            return failure
        # The server itself said no: nats-py quotes its words.
        if isinstance(error, nats_errors.Error) and str(error).startswith("nats: '"):
            return BusBroken(f"the NATS server at {url} refused {self._name!r}: {error}; {self._identity}")
        return None
