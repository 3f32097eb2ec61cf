"""`/`: the page that shows the fleet, and its files.

The files have no secrets, so they need no token. Their data comes from routes that require a token.
"""

import hashlib
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ..errors import HttpError
from ..service import HttpRoute, RouteTable, Service

INDEX: Final = "index.html"
MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
"""Media type by file name extension. Files with other extensions are not served."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The browser loads nothing from other sites and runs no inline script."""
HEADERS: Final = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # A page of another site may link to this one, but gets no reference to its window. With a reference, it could
        # navigate the window without the user's knowledge.
        "Cross-Origin-Opener-Policy": "same-origin",
        # The browser caches a file and revalidates it each time.
        "Cache-Control": "no-cache",
    }
)


class Asset(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> MappingProxyType[str, Asset]:
    """Return all files of the page by name. A requested name is looked up in this table, never in a folder."""
    found = {}
    for file in (files(__name__) / "assets").iterdir():
        media_type = MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            content = file.read_bytes()
            found[file.name] = Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return MappingProxyType(found)


async def page(_service: Service, request: Request) -> Response:
    """Return the page for people. It shows the fleet, its speed, its experts and single requests live."""
    return _answer(request, assets()[INDEX])


async def asset(_service: Service, request: Request) -> Response:
    """Return a file of the page."""
    name = request.path_params["name"]
    found = assets().get(name)
    if found is None:
        raise HttpError(404, f"the page has no file {name[:64]!r}; `/` names its files", code="unknown_route")
    return _answer(request, found)


def _answer(request: Request, found: Asset) -> Response:
    headers = {**HEADERS, "ETag": found.etag}
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if found.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


ROUTES: RouteTable = {
    ("GET", "/"): HttpRoute(page, answer={200: "text/html", 304: None}),
    ("GET", "/assets/{name}"): HttpRoute(asset, answer={200: "*/*", 304: None}),
}
