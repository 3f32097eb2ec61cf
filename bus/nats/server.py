"""The NATS servers that a program connects to, its user there, and the TLS of the connection."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from ...schemas.checks import check_int
from ...schemas.errors import BusBroken, InvalidRequest
from ..auth.credentials import DEFAULT_PORT, Credentials, Tls, load_credentials

MAX_URLS: Final = 64
"""Maximum number of URLs, several times the servers of a large cluster. A client also learns the other servers from the
cluster."""
_CREDENTIALS: Final = re.compile(r"^(\w+://)?.*@")
_NEXT_URL: Final = re.compile(r"\s*,\s*(?=\w+://)")
URL_VARIABLE: Final = "ROLLBUS_NATS"
CREDENTIALS_VARIABLE: Final = "ROLLBUS_CREDS"
"""Environment variable that names the credentials file of a program without explicit credentials."""
REPLICAS_VARIABLE: Final = "ROLLBUS_REPLICAS"
MAX_REPLICAS: Final = 5
"""Maximum number of replicas in NATS."""


def parse_urls(text: str) -> tuple[str, ...]:
    """Check a list of URLs with commas between them, and return each once, with scheme and port.

    Raises:
        BusBroken: a URL is not that of a NATS server, only some URLs require TLS, or there are more than `MAX_URLS`.
    """
    urls = tuple(dict.fromkeys(parse_url(url) for url in _split(text)))
    if len({url.partition("://")[0] for url in urls}) > 1:
        raise BusBroken(f"{redact(text)!r} requires TLS for some servers only: begin all URLs with tls://, or none")
    if len(urls) > MAX_URLS:
        raise BusBroken(f"{len(urls)} URLs of NATS servers were named; allowed: {MAX_URLS}")
    return urls


def parse_url(url: str) -> str:
    """Check the URL of one server and return it with scheme and port.

    Raises:
        BusBroken: the text is not the URL of a NATS server.
    """
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = DEFAULT_PORT if parts.port is None else parts.port
        if parts.scheme not in {"nats", "tls"}:
            raise ValueError(f"its scheme is {parts.scheme!r}, not nats or tls")
        if not parts.hostname or re.search(r"\s", url):
            raise ValueError("it names no host")
        if parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise ValueError("something follows the port")
    except ValueError as error:
        raise BusBroken(f"{redact(url)!r} is not a URL like nats://127.0.0.1:{DEFAULT_PORT}: {error}") from None
    host = parts.netloc if parts.port is not None else f"{parts.netloc.rstrip(':')}:{port}"
    return f"{parts.scheme}://{host}"


def redact(urls: str) -> str:
    """Hide user and password of each URL in a list."""
    return ",".join(_CREDENTIALS.sub(r"\1***@", url) for url in _NEXT_URL.split(urls))


def _split(text: str) -> list[str]:
    """Split a list at its commas, except for commas in passwords, which precede the last `@` of a URL."""
    urls = []
    for part in _NEXT_URL.split(text):
        user, at, hosts = part.rpartition("@")
        first, *others = hosts.split(",")
        urls += [user + at + first.strip(), *(host.strip() for host in others)]
    return urls


@dataclass(frozen=True, slots=True)
class Server:
    """One NATS server or the servers of one cluster, and the user and TLS files with which a program connects."""

    url: str = field(repr=False)
    """`nats://host:port` or `tls://host:port`, with user and password if needed; they are never shown. Several URLs
    with commas are servers of one cluster: a program connects to any of them."""
    credentials: Credentials | None = None
    """Credentials of the user; None: the program has no user of `rollbus auth init`."""
    tls: Tls = field(default_factory=Tls)
    """TLS files of the connection."""
    replicas: int | None = None
    """Replicas of the queues, buckets and object stores that the program creates; None: three in a cluster with enough
    room, else one."""

    def __post_init__(self) -> None:
        """Check the range."""
        if self.replicas is not None:
            check_int("replicas", self.replicas, 1, MAX_REPLICAS)

    @property
    def requires_tls(self) -> bool:
        """True if the connection must use TLS: a URL with `tls://`, or a TLS file. BusBroken: a URL is malformed."""
        return bool(self.tls) or self.urls[0].startswith("tls:")

    @property
    def urls(self) -> tuple[str, ...]:
        """All URLs, with scheme and port.

        Raises:
            BusBroken: a URL is malformed, or only some URLs require TLS.
        """
        return parse_urls(self.url)

    @classmethod
    def named(
        cls,
        url: "str | Sequence[str] | Server | None" = None,
        credentials: Credentials | str | os.PathLike[str] | None = None,
    ) -> "Server":
        """Return a server with these arguments. Values that are not given come from the environment.

        Args:
            url: URL, or the URLs of the servers of a cluster; None: `$ROLLBUS_NATS`, else `nats://127.0.0.1:4222`.
            credentials: credentials or their file; None: the file in `$ROLLBUS_CREDS`, else none.

        Raises:
            BusBroken: a URL is malformed, or the credentials cannot be read.
            InvalidRequest: `$ROLLBUS_REPLICAS` is not a valid number of replicas.
        """
        if isinstance(url, Server):
            return url
        if not isinstance(credentials, Credentials):
            path = credentials or os.environ.get(CREDENTIALS_VARIABLE)
            credentials = load_credentials(path) if path else None
        if url is not None and not isinstance(url, str):
            url = ",".join(str(one) for one in url) or ","  # an empty list must fail, not select the default
        server = cls(url or default_url(), credentials, Tls.from_environment(), _replicas())
        _ = server.urls
        return server


def _replicas() -> int | None:
    text = os.environ.get(REPLICAS_VARIABLE)
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text[:9]) <= MAX_REPLICAS:
        raise InvalidRequest(REPLICAS_VARIABLE, f"is {text[:80]!r}", f"1 to {MAX_REPLICAS}")
    return int(text)


def default_url() -> str:
    """Return the default URL of NATS: `$ROLLBUS_NATS`, else this machine."""
    return os.environ.get(URL_VARIABLE) or f"nats://127.0.0.1:{DEFAULT_PORT}"
