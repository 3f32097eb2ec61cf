"""Who calls, and which routes they may call: bearer tokens, compared in constant time."""

import hmac

from starlette.requests import Request

from .errors import HttpError

__all__ = ["check_access", "has_access", "user_of"]


def check_access(request: Request, *tokens: str | None) -> None:
    """Let in who has one of `tokens`; everybody, if the first is None.

    Raises:
        HttpError: 401.
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
    """True if `check_access` lets this request in."""
    return tokens[0] is None or _place_of_token(request, *tokens) is not None


def user_of(request: Request, *tokens: str | None) -> str:
    """Return what tells the user of a request from others: which of `tokens` it has, and its address."""
    return f"{_place_of_token(request, *tokens)} {request.client.host if request.client else None}"


def _place_of_token(request: Request, *tokens: str | None) -> int | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        for place, token in enumerate(tokens):
            if token is not None and hmac.compare_digest(given.strip().encode(), token.encode()):
                return place
    return None
