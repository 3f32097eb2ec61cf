"""Which requests may come from web pages: where a token is missing, only those of pages that this service has served.

A browser on a machine that reaches the service sends requests for any page that it shows. Headers tell such a request
apart. `Origin` and `Sec-Fetch-Site` say that the page is from another site. `Host` is the name of the page's own site
if that site had its name resolved to this service's address (DNS rebinding).
"""

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

from starlette.datastructures import Headers

from .errors import HttpError

__all__ = ["check_media_type", "check_origin"]

JSON: Final = "application/json"
OWN_SITES: Final = ("same-origin", "none")
"""`Sec-Fetch-Site` of a page that this service has served, and of an address that the user typed."""
DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
AUTHORITY: Final = re.compile(r"(?:\[(?P<v6>[\da-f:.%\w]+)\]|(?P<name>[\w.-]+))(?::(?P<port>\d*))?", re.IGNORECASE)
MAX_SHOWN_CHARS: Final = 200


def check_origin(headers: Headers, allowed_hosts: Collection[str], *, allows_links: bool = False) -> None:
    """Refuse a request that a browser sends for a page of another origin, or under a name that is not this service's.

    Args:
        allowed_hosts: names, in lower case, beside `localhost` and addresses.
        allows_links: a page of another site may link to what is asked for, as it does nothing and shows no secret.

    Raises:
        HttpError: 403, naming the header, its value and what is allowed.
    """
    hosts = headers.getlist("host")
    for host in hosts:
        name, _ = _name_and_port(host)
        if len(hosts) > 1 or not _is_allowed(name, allowed_hosts):
            names = ", ".join(["localhost", *sorted(allowed_hosts)])
            allowed = f"{names}, and addresses; --allowed-host adds names"
            raise _refusal("Host", ", ".join(hosts), allowed, "foreign_host")
    for origin in headers.getlist("origin"):
        if not any(_is_same(origin, host) for host in hosts):
            raise _refusal("Origin", origin, "pages of this service", "cross_origin")
    for site in headers.getlist("sec-fetch-site"):
        if site not in OWN_SITES and not (allows_links and _is_link(headers)):
            raise _refusal("Sec-Fetch-Site", site, " or ".join(OWN_SITES), "cross_origin")


def check_media_type(headers: Headers) -> None:
    """Refuse a body that is not declared as JSON: web pages may send others to any service without asking it first.

    Raises:
        HttpError: 415, naming what is declared.
    """
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    given = headers.getlist("content-type")
    if has_body and (len(given) != 1 or given[0].partition(";")[0].strip().lower() != JSON):
        problem = f"is {', '.join(given)[:MAX_SHOWN_CHARS]!r}" if given else "is missing"
        message = f"Content-Type {problem}; allowed: {JSON}"
        raise HttpError(415, message, code="unsupported_media_type", param="Content-Type")


def _is_link(headers: Headers) -> bool:
    """Return True if a browser opens an address in a tab: the page that has the link reads nothing of the answer."""
    return (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")


def _is_allowed(name: str, allowed_hosts: Collection[str]) -> bool:
    name = name.removesuffix(".")
    if name == "localhost" or name in allowed_hosts:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    # No name was resolved to come here.
    return True


def _is_same(origin: str, host: str) -> bool:
    """Return True if a page of this origin was served under this `Host`; a proxy may have served it over TLS."""
    scheme, _, authority = origin.partition("://")
    default = DEFAULT_PORTS.get(scheme)
    (name, port), (own_name, own_port) = _name_and_port(authority), _name_and_port(host)
    return default is not None and name == own_name != "" and (port or default) == (own_port or default)


def _name_and_port(authority: str) -> tuple[str, str]:
    """Split what `Host` has; without a name, the whole is malformed."""
    found = AUTHORITY.fullmatch(authority)
    if found is None:
        return "", ""
    return (found["v6"] or found["name"]).lower(), found["port"] or ""


def _refusal(header: str, value: str, allowed: str, code: str) -> HttpError:
    return HttpError(403, f"{header} is {value[:MAX_SHOWN_CHARS]!r}; allowed: {allowed}", code=code, param=header)
