"""Access control by bearer token. The comparison takes constant time."""

import hmac

from starlette.requests import Request

from .errors import HttpError

__all__ = ["check_access", "has_access", "user_of"]


def check_access(request: Request, *tokens: str | None) -> None:
    """Check that a request has one of `tokens`. If the first token is None, accept every request.

    Raises:
        HttpError: 401, the token is missing or wrong.
    """
    if has_access(request, *tokens):
        return
    problem = "is wrong" if "authorization" in request.headers else "is missing"
    raise HttpError(
        401,
        f"the bearer token {problem}; allowed: Authorization: Bearer TOKEN",
        code="unauthorized",
        headers={"WWW-Authenticate": "Bearer"},
    )


def has_access(request: Request, *tokens: str | None) -> bool:
    """True if `check_access` accepts this request."""
    return tokens[0] is None or _place_of_token(request, *tokens) is not None


def user_of(request: Request, *tokens: str | None) -> str:
    """Return a key for a request's user: the position of its token in `tokens`, and the client's address."""
    return f"{_place_of_token(request, *tokens)} {request.client.host if request.client else None}"


def _place_of_token(request: Request, *tokens: str | None) -> int | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        for place, token in enumerate(tokens):
            if token is not None and hmac.compare_digest(given.strip().encode(), token.encode()):
                return place
    return None
