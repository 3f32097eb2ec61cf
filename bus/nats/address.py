"""The addresses of NATS servers: validation, and display without passwords."""

import re
from typing import Final
from urllib.parse import urlsplit

from ...schemas.errors import BusBroken

__all__ = ["DEFAULT_PORT", "parse_url", "parse_urls", "redact"]

DEFAULT_PORT: Final = 4222
MAX_URLS: Final = 64
"""Maximum number of URLs, several times the servers of a large cluster. A client also learns the other servers from the
cluster."""

_CREDENTIALS: Final = re.compile(r"^(\w+://)?.*@")
_NEXT_URL: Final = re.compile(r"\s*,\s*(?=\w+://)")


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
