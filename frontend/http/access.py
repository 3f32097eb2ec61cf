"""Access control: bearer tokens, compared in constant time, and the origin of requests to a service without a token.

A browser that can reach the service sends requests for any page that it shows. Headers identify these requests.
`Origin` and `Sec-Fetch-Site` show that the page is from another site. `Host` is the name of the page's own site if that
name resolves to this service's address (DNS rebinding).
"""

import hmac
import re
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request

from .errors import HttpError

API_KEY: Final = "x-api-key"
"""Header in which Anthropic's clients send the token."""


def check_access(request: Request, *tokens: str | None) -> None:
    """Check that a request has one of `tokens`. If the first token is None, accept every request.

    Raises:
        HttpError: 401, the token is missing or wrong.
    """
    if has_access(request, *tokens):
        return
    problem = "is wrong" if {"authorization", API_KEY} & set(request.headers) else "is missing"
    raise HttpError(
        401,
        f"the bearer token {problem}; allowed: Authorization: Bearer TOKEN, or {API_KEY}: TOKEN",
        code="unauthorized",
        headers={"WWW-Authenticate": "Bearer"},
    )


def has_access(request: Request, *tokens: str | None) -> bool:
    """True if `check_access` accepts this request."""
    return tokens[0] is None or _place_of_token(request, *tokens) is not None


def user_of(request: Request, *tokens: str | None) -> str:
    """Return a key for a request's user: the position of its token in `tokens`, and the client's address."""
    client = request.scope.get("client")
    return f"{_place_of_token(request, *tokens)} {client[0] if client else None}"


def _place_of_token(request: Request, *tokens: str | None) -> int | None:
    for given in given_tokens(request) if tokens.count(None) < len(tokens) else ():
        for place, token in enumerate(tokens):
            if token is not None and hmac.compare_digest(given.encode(), token.encode()):
                return place
    return None


def given_tokens(request: Request) -> list[str]:
    """Return the tokens of a request: OpenAI's clients send a bearer token, Anthropic's the header `x-api-key`."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    found = (bearer if scheme.lower() == "bearer" else None, request.headers.get(API_KEY))
    return [given.strip() for given in found if given is not None]


JSON: Final = "application/json"
IDENTITY: Final = "identity"
OWN_SITES: Final = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` for a page of this service, and for an address that the user typed."""
DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
AUTHORITY: Final = re.compile(r"(?:\[(?P<v6>[\da-f:.%\w]+)\]|(?P<name>[\w.-]+))(?::(?P<port>\d*))?", re.IGNORECASE)
MAX_SHOWN_CHARS: Final = 200


def check_origin(headers: Headers, allowed_hosts: frozenset[str], *, allows_links: bool = False) -> None:
    """Reject a request that a browser sends for a page of another origin, or under a name that is not this service's.

    Args:
        allowed_hosts: lower-case names that are allowed besides `localhost` and addresses.
        allows_links: True if other sites may link to this path, because it changes nothing and shows no secret.

    Raises:
        HttpError: 403, naming the header, its value and the allowed values.
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
    """Reject a body that is not declared as JSON. Browsers let web pages send other types without asking the service.

    A compressed body is rejected too: the service would read its bytes as JSON.

    Raises:
        HttpError: 415, naming the declared type or encoding.
    """
    given = headers.getlist("content-type")
    if given == [JSON] and "content-encoding" not in headers:
        return
    coding = ", ".join(headers.getlist("content-encoding"))[:MAX_SHOWN_CHARS]
    if coding.strip().lower() not in ("", IDENTITY):
        message = f"Content-Encoding is {coding!r}; allowed: {IDENTITY}, that is a body without compression"
        refused = {"Accept-Encoding": IDENTITY}
        raise HttpError(415, message, code="unsupported_encoding", param="Content-Encoding", headers=refused)
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if has_body and (len(given) != 1 or given[0].partition(";")[0].strip().lower() != JSON):
        problem = f"is {', '.join(given)[:MAX_SHOWN_CHARS]!r}" if given else "is missing"
        message = f"Content-Type {problem}; allowed: {JSON}"
        raise HttpError(415, message, code="unsupported_media_type", param="Content-Type")


def _is_link(headers: Headers) -> bool:
    """Return True if a browser opens an address in a tab. The page with the link cannot read the answer."""
    return (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")


@lru_cache(64)
def _is_allowed(name: str, allowed_hosts: frozenset[str]) -> bool:
    name = name.removesuffix(".")
    if name == "localhost" or name in allowed_hosts:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    # An address needs no name resolution.
    return True


def _is_same(origin: str, host: str) -> bool:
    """Return True if a page of this origin was served under this `Host`, also behind a TLS proxy."""
    scheme, _, authority = origin.partition("://")
    default = DEFAULT_PORTS.get(scheme)
    (name, port), (own_name, own_port) = _name_and_port(authority), _name_and_port(host)
    return default is not None and name == own_name != "" and (port or default) == (own_port or default)


def _name_and_port(authority: str) -> tuple[str, str]:
    """Return the name and port of a `Host` value. Both are empty if the value is malformed."""
    found = AUTHORITY.fullmatch(authority)
    if found is None:
        return "", ""
    return (found["v6"] or found["name"]).lower(), found["port"] or ""


def _refusal(header: str, value: str, allowed: str, code: str) -> HttpError:
    return HttpError(403, f"{header} is {value[:MAX_SHOWN_CHARS]!r}; allowed: {allowed}", code=code, param=header)
