"""The address of a NATS server: checked before it is used, and without its password where it is shown."""

import re
from typing import Final
from urllib.parse import urlsplit

from ...schemas.errors import BusBroken

__all__ = ["DEFAULT_PORT", "parse_url", "redact"]

DEFAULT_PORT: Final = 4222

_CREDENTIALS: Final = re.compile(r"^(\w+://)?.*@")


def parse_url(url: str) -> str:
    """Check `url` and return it with scheme and port.

    Raises:
        BusBroken: it cannot be the URL of a NATS server.
    """
    try:
        if "," in url.rpartition("@")[2]:
            raise ValueError("it names several servers: name one, which tells the others of its cluster")
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


def redact(url: str) -> str:
    """Hide user and password."""
    return _CREDENTIALS.sub(r"\1***@", url)
